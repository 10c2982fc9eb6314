"""The adapters against the real foolbox and pyautoattack."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from attack_models import images, network
from torch import Tensor

from mmlda.attacks import PGD, WorstCase
from mmlda.attacks.adapters import from_foolbox, to_autoattack, to_foolbox

foolbox = pytest.importorskip("foolbox")


def test_foolbox_attacks_run_on_our_models() -> None:
    model, (x, y) = copy.deepcopy(network("mm")), images(40)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    attack = foolbox.attacks.LinfPGD(steps=10, random_start=False, abs_stepsize=0.05)
    _, x_adv, success = attack(to_foolbox(model), x, y, epsilons=0.2)
    _, plain, _ = attack(foolbox.PyTorchModel(copy.deepcopy(model), bounds=(0, 1)), x, y, epsilons=0.2)
    assert torch.equal(x_adv, plain)  # the same attack as on the model itself
    assert success.float().mean() > 0.3 and (x_adv - x).abs().max() > 0.1
    assert all((p.grad == 0.5).all() for p in model.parameters())  # but the model is left alone


def test_functions_and_ranges() -> None:
    model, (x, y) = network("sr"), images(20)

    def scaled(v: Tensor) -> Tensor:
        return model((v + 1) / 2)

    wrapped = to_foolbox(scaled, bounds=(-1.0, 1.0))
    assert wrapped.bounds == (-1.0, 1.0)
    _, x_adv, success = foolbox.attacks.LinfFastGradientAttack()(wrapped, 2 * x - 1, y, epsilons=0.5)
    assert success.float().mean() > 0.3 and x_adv.min() >= -1 and x_adv.max() <= 1


@pytest.mark.parametrize("eps", [None, 0.3])
def test_where_a_peer_makes_nan_it_has_found_nothing(eps: float | None) -> None:
    """NewtonFool divides by the gradient of a probability, which is 0 where the network is sure of itself."""
    model, (x, _) = network("sr"), images(40)
    y, peer = model(x).argmax(1), foolbox.attacks.NewtonFoolAttack()
    _, theirs, _ = peer(to_foolbox(model), x, y, epsilons=eps)
    lost = theirs.isnan().flatten(1).any(1)
    assert 0 < lost.sum() < 40
    result = from_foolbox(peer, eps)(model, x, y)
    assert torch.equal(result.x_adv[lost], x[lost]) and not result.success[lost].any()
    assert torch.equal(result.prediction[lost], y[lost]) and result.success[~lost].float().mean() > 0.5
    assert (result.l2[lost] == (torch.inf if eps is None else 0)).all()


def test_a_function_over_a_module_leaves_its_parameters_alone() -> None:
    """foolbox calls backward(), which reaches every parameter behind a function too."""
    model, (x, y) = copy.deepcopy(network("sr")), images(20)
    attack = foolbox.attacks.LinfPGD(steps=5, random_start=False, abs_stepsize=0.05)
    _, x_adv, _ = attack(to_foolbox(lambda v: model(v)), x, y, epsilons=0.2)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    _, plain, _ = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, y, epsilons=0.2)
    assert torch.equal(x_adv, plain) and (x_adv - x).abs().max() > 0.1
    assert all(p.grad is not None for p in model.parameters())  # what would have happened
    wrapped = to_autoattack(lambda v: model(v))
    v = x.clone().requires_grad_(True)
    z = wrapped(v)
    rows = [torch.autograd.grad(z[:, k].sum(), v, retain_graph=True)[0] for k in (0, 3)]  # more than one, as FAB does
    w = x.clone().requires_grad_(True)
    for k, row in zip((0, 3), rows):
        assert torch.equal(torch.autograd.grad(model(w)[:, k].sum(), w)[0], row)
    assert not wrapped(x).requires_grad


@pytest.mark.parametrize("aimed", [False, True])
def test_a_foolbox_attack_as_one_of_ours(aimed: bool) -> None:
    model, (x, y) = network("sr"), images(40)
    target = (y + 1) % 10 if aimed else None
    attack = from_foolbox(foolbox.attacks.LinfPGD(steps=10), eps=0.25, seed=3)
    state, theirs = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    result = attack(model, x, y, target=target)
    assert torch.equal(state, torch.get_rng_state())
    assert np.array_equal(theirs, np.random.get_state()[1])  # noqa: NPY002
    label = model(result.x_adv).argmax(1)
    assert torch.equal(result.prediction, label)
    assert torch.equal(result.success, label == target if aimed else label != y)
    assert result.success.float().mean() > (0.05 if aimed else 0.6)
    assert result.linf.max() <= 0.25 + 1e-6 and (result.steps == 10).all()
    again = attack(model, x, y, target=target)
    assert torch.equal(result.x_adv, again.x_adv)  # the seed decides
    assert not torch.equal(from_foolbox(attack.peer, 0.25, seed=4)(model, x, y, target=target).x_adv, again.x_adv)


def test_a_minimising_foolbox_attack() -> None:
    model, (x, y) = network("sr"), images(20)
    result = from_foolbox(foolbox.attacks.L2DeepFoolAttack(steps=20))(model, x, y)
    assert result.success.float().mean() > 0.8
    assert torch.equal(result.l2.isfinite(), result.success)
    assert (result.l2[result.success] < 4).all()
    nothing = from_foolbox(foolbox.attacks.L2DeepFoolAttack(steps=20))(lambda v: 0 * v.flatten(1)[:, :10], x, y * 0)
    assert not nothing.success.any() and nothing.l2.isinf().all() and torch.equal(nothing.x_adv, x)


def test_a_minimising_foolbox_attack_that_fails_has_the_images_label() -> None:
    peer = foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=1, steps=3, stepsize=0.3, initial_const=0.1)
    model, (x, y) = network("sr"), images(24)
    result = from_foolbox(peer)(model, x, y, target=(y + 1) % 10)
    assert 0 < result.success.float().mean() < 1
    assert torch.equal(model(result.x_adv).argmax(1), result.prediction)


def test_guarded_like_ours() -> None:
    model, (x, y) = copy.deepcopy(network("sr")).train(), images(10)
    attack = from_foolbox(foolbox.attacks.LinfFastGradientAttack(), eps=0.1)
    with pytest.warns(UserWarning, match="train mode"):
        attack(model, x, y)
    assert model.training
    with pytest.raises(ValueError, match="y must be classes 0 to"):
        attack(model.eval(), x, y + 20)
    worst = WorstCase(eps=0.25, attacks=(PGD(eps=0.25, steps=2), from_foolbox(foolbox.attacks.LinfPGD(), eps=0.25)))
    result = worst(model, x, y)
    assert result.success.float().mean() > 0.6


def test_autoattack_runs_on_our_models() -> None:
    peer = pytest.importorskip("pyautoattack")
    model, (x, y) = network("sr"), images(24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bounds in ((0.0, 1.0), (-1.0, 3.0)):
            lo, hi = bounds
            ours = to_autoattack(lambda v: model((v - lo) / (hi - lo)), bounds=bounds)  # noqa: B023
            torch.testing.assert_close(ours(x), model(x))
            attack = peer.AutoAttack(ours, eps=0.15, version="custom", attacks=["apgd-ce"], seed=0)
            attack.apgd.n_restarts, attack.apgd.n_iter = 1, 10
            x_adv = attack.run_standard_evaluation(x, y, batch_size=24)
            x_adv = x_adv if isinstance(x_adv, Tensor) else x_adv[0]
            assert (x_adv - x).abs().max() <= 0.15 + 1e-6
            accuracy = (model(x_adv).argmax(1) == y).float().mean()
            assert accuracy < (model(x).argmax(1) == y).float().mean() - 0.3


def test_neither_is_imported_with_us() -> None:
    code = "import sys, mmlda.attacks.adapters; assert not {'foolbox', 'pyautoattack'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
