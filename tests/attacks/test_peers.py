"""Robust accuracy beside foolbox's and AutoAttack's, on digits networks of both heads, clean and adversarially
trained, at radii where the peer leaves 20 to 80%: a 0% on both sides would prove nothing."""

from __future__ import annotations

import pytest
import torch
from attack_models import images, network

from mmlda.attacks import PGD, WorstCase

NETWORKS = [("sr", 0.0, 0.1), ("mm", 0.0, 0.1), ("sr", 0.15, 0.2), ("mm", 0.15, 0.2)]  # head, trained at, eps
LENGTH = {0.1: 0.6, 0.2: 0.7}  # the L2 radius beside each


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("head", "trained", "eps"), NETWORKS)
def test_pgd_beside_foolbox(head: str, trained: float, eps: float, norm: str) -> None:
    import foolbox

    model, (x, y) = network(head, trained), images(600)
    eps = eps if norm == "linf" else LENGTH[eps]
    peer_attack = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[norm]
    peer = peer_attack(abs_stepsize=eps / 8, steps=20, random_start=False)
    _, _, broken = peer(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=eps)
    theirs = 100 * (1 - broken.float().mean().item())
    ours = PGD(eps=eps, norm=norm, step_size=eps / 8, steps=20, random_start=False)(model, x, y)
    assert 20 <= theirs <= 80
    assert 100 * (1 - ours.success.float().mean().item()) <= theirs + 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("head", "trained", "eps"), NETWORKS)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_worst_case_beside_autoattack(head: str, trained: float, eps: float, norm: str) -> None:
    import pyautoattack

    model, (x, y) = network(head, trained), images(600 if norm == "linf" else 300)
    eps = eps if norm == "linf" else LENGTH[eps]
    peer = pyautoattack.AutoAttack(model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=eps, seed=0)
    x_peer = peer.run_standard_evaluation(x, y, batch_size=len(x))
    x_peer = x_peer[0] if isinstance(x_peer, tuple) else x_peer
    with torch.no_grad():
        theirs = 100 * (model(x_peer).argmax(1) == y).float().mean().item()
    ours = 100 * (1 - WorstCase(eps=eps, norm=norm)(model, x, y).success.float().mean().item())
    assert 20 <= theirs <= 80
    assert ours <= theirs + 0.5
