"""One training step: its batch, its adversarial examples and its loss."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from training_cases import CPU, QUICK, SMALL, train

import mmlda
from mmlda.attacks.replay import compile_quietly
from mmlda.data import ImageData
from mmlda.models import build, kernel_checks, training_pass
from mmlda.training import Adversary, Recipe, fit
from mmlda.training import step as step_module
from mmlda.training.batches import Batches
from mmlda.training.crafting import begin_attack, craft, craft_once
from mmlda.training.recipes import hat
from mmlda.training.step import Step, Tally, make_optimizer


def test_an_epoch_shows_each_image_once_and_the_next_in_another_order(digits):
    batches = Batches(digits[0], QUICK, CPU)
    batches.seek(0)
    first = batches.order.clone()
    assert first.flatten().unique().numel() == first.numel() == len(digits[0]) // 32 * 32
    batches.seek(batches.per_epoch)
    assert not torch.equal(first, batches.order)
    batches.seek(0)
    assert torch.equal(first, batches.order)


def test_one_compiled_program_takes_the_batches_of_data_sets_of_every_length(digits):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in range(400, 1300, 90):  # ten: more than the compiler would take one by one
        batches = Batches(digits[0].subset(slice(length)), dataclasses.replace(QUICK, pad=1, flip=True), CPU)
        batches.seek(3)
        batches.for_any_length()
        take = compile_quietly(batches.take, dynamic=False, backend="aot_eager")
        for one, other in zip(take(0, 1), batches.take(0, 1), strict=True):
            assert one is other is None or torch.equal(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("attack", ["fgsm", "bim", "ilcm"])
def test_crafting_is_the_attack(digits, attack):
    model = build(SMALL, seed=0).eval()
    x, y = digits[0].pixels(slice(20)), digits[0].labels[:20]
    kind = {"fgsm": mmlda.attacks.FGSM, "bim": mmlda.attacks.BIM, "ilcm": mmlda.attacks.ILCM}[attack]
    adversary = Adversary(attack=attack, eps=0.1, steps=1 if attack == "fgsm" else 10)
    got = craft(model.train(), x, y, torch.full((20,), 0.1), x, adversary)
    assert all(p.requires_grad and p.grad is None for p in model.parameters()) and model.training
    expected = kind(eps=0.1)(model.eval(), x, y).x_adv
    assert (got - x).abs().max() > 0.09
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_hybrid_training_draws_a_perturbation_for_each_image(digits):
    recipe = dataclasses.replace(hat("fgsm"), batch_size=32)
    batches = Batches(digits[0], recipe, CPU)
    craft_once(build(SMALL, seed=0), batches)
    moved = (batches.adversarial - digits[0].pixels()).abs().flatten(1).amax(1)
    assert 0.02 - 1e-6 <= moved.min() and moved.max() <= 0.2 + 1e-6
    assert moved.std() > 0.03  # uniform in [0.02, 0.20] has 0.052


def make_step(model, data, recipe):
    batches = Batches(data, recipe, CPU)
    batches.seek(0)
    return Step(model.train(), batches, make_optimizer(model, recipe, CPU), Tally(CPU, 0), amp=True)


def prepared_step(model, data, recipe, monkeypatch):
    """A step whose network is compiled as on CUDA, with another compiler."""

    def compile(what, dynamic):
        return compile_quietly(what, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(step_module, "compile_quietly", compile)
    monkeypatch.setattr(step_module, "start_workers", lambda: None)
    step = make_step(model, data, recipe)
    step.prepare(compile=True)
    return step


def noise(side, n=64):
    pixels = torch.randint(0, 256, (n, 1, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageData(pixels, torch.arange(n) % 10, tuple("0123456789"), "noise")


RESNET = {"backbone": "resnet", "depth": 14, "channels": 1, "head": "mmlda"}


def test_networks_without_kernels_are_compiled(digits, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = prepared_step(build(SMALL, seed=0), digits[0], QUICK, monkeypatch)
    step()
    assert step.net is None and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # images, and network


def own_kernels(monkeypatch, problem=""):
    """Stand-ins for the kernels on the CPU, where there are none; the sizes of the batches they get."""
    seen = []

    def features(net, x):
        seen.append(len(x))
        net.own_pass = False
        z = net(x)
        net.own_pass = True
        return z

    monkeypatch.setattr(kernel_checks, "has_kernels", lambda net, shape: True)
    monkeypatch.setattr(kernel_checks, "problem", lambda net, x: problem)
    monkeypatch.setattr(training_pass, "rehearse", lambda net, x: seen.append(-len(x)))
    monkeypatch.setattr(training_pass, "features", features)
    return seen


AWP = Adversary(attack="fgsm", eps=0.1, steps=1, share=1.0, pairing=0.5, awp=0.01)


@pytest.mark.parametrize(
    ("adversary", "passes", "rehearsed"),
    [
        (None, [16], {-16}),
        (dataclasses.replace(AWP, pairing=0.0), [16, 16], {-16}),
        (AWP, [16, 32], {-16, -32}),
        (dataclasses.replace(AWP, awp=0.0), [32], {-32}),
    ],
)
def test_a_step_in_own_kernels_compiles_nothing(adversary, passes, rehearsed, monkeypatch):
    recipe = Recipe(steps=2, lr=0.01, batch_size=16, flip=True, adversary=adversary)
    model, plain = build(RESNET, seed=0), build(RESNET, seed=0)
    seen, compiled = own_kernels(monkeypatch), []
    monkeypatch.setattr(Step, "_foldable", lambda step: True)
    step = prepared_step(model, noise(8), recipe, monkeypatch)
    monkeypatch.setattr(step_module, "compile_quietly", lambda *args, **options: compiled.append(args))
    assert set(seen) == rehearsed and step.net is model.backbone
    seen.clear()
    step.fold = False  # as on the CPU
    other = make_step(plain, noise(8), recipe)
    for _ in range(2):
        step()
        other()
    assert seen == passes * 2 and not compiled and not model.backbone.own_pass
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    own_kernels(monkeypatch, "3 of 9 results differ")
    with pytest.warns(RuntimeWarning, match="kernels .* are not used: 3 of 9 results differ"):
        step = prepared_step(build(RESNET, seed=0), noise(8), dataclasses.replace(QUICK, batch_size=8), monkeypatch)
    assert step.net is None and step.objective is not None
    step()


def test_a_step_that_fails_leaves_the_network_as_it_was(monkeypatch):
    own_kernels(monkeypatch)
    model = build(RESNET, seed=0)
    step = prepared_step(model, noise(8), dataclasses.replace(QUICK, batch_size=8), monkeypatch)
    monkeypatch.setattr(model.head, "forward", lambda z: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step()
    assert not model.backbone.own_pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_tally_takes_losses_of_every_type(dtype):
    tally = Tally(CPU, 7)
    for loss in (3.0, 1.0, float("nan"), float("inf"), 2.0):
        tally.add(torch.tensor(loss, dtype=dtype), torch.tensor(2), 4)
    loss, accuracy, bad, last = tally.read()
    assert math.isnan(loss) and accuracy == 0.5 and (bad, last) == (10, 1.0)
    tally = Tally(CPU, 0)
    tally.add(torch.tensor(3.0, dtype=dtype), torch.tensor(1), 4)
    tally.add(torch.tensor(1.0, dtype=dtype), torch.tensor(2), 12)
    assert tally.read() == (1.5, 3 / 16, -1, 1.0)
    assert tally.read() == (0.0, 0.0, -1, 1.0)


class Seen(torch.nn.Module):
    """A linear network that keeps the images it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.images = torch.nn.Linear(64, 10), []

    def forward(self, x):
        if self.training:
            self.images.append(x.detach().clone())
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("share, attacked", [(0.05, 2), (0.5, 16), (1.0, 32)])
def test_a_share_of_each_batch_is_attacked(digits, share, attacked):
    net = Seen()
    adversary = Adversary(attack="fgsm", eps=0.1, steps=1, share=share)
    fit(net, digits[0], dataclasses.replace(QUICK, steps=1, milestones=(), adversary=adversary), show=False)
    bytes_ = 255 * net.images[0]
    assert int(((bytes_ - bytes_.round()).abs().flatten(1).amax(1) > 1e-3).sum()) == attacked
    tiny = dataclasses.replace(QUICK, adversary=dataclasses.replace(adversary, share=0.01))
    with pytest.raises(ValueError, match=r"share must be enough for one image of a part of 32, got 0\.01"):
        fit(net, digits[0], tiny, show=False)


def test_accumulating_parts_of_a_batch_is_the_whole_batch_without_batch_norm(digits):
    config = dict(SMALL, batch_norm=False)
    recipe = Recipe(steps=20, lr=0.01, batch_size=64)
    whole, whole_run = train(digits[0], recipe, config)
    for accumulate in (4, 5):  # 5 parts of 64 are not of one size
        parts, run = train(digits[0], dataclasses.replace(recipe, accumulate=accumulate), config)
        assert run.loss == pytest.approx(whole_run.loss, rel=1e-4)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-5)


def first_batch(data, recipe):
    """The images, labels, uniform draws and rows of the first batch."""
    batches = Batches(data, recipe, CPU)
    batches.seek(0)
    x, y, _, uniform, rows = batches.take(0, 1)
    return x, y, uniform, rows


def test_logit_pairing_adds_the_squared_difference_of_the_logits(digits):
    adversary = Adversary(attack="pgd", eps=0.2, steps=3, step=0.5, random_start=True, share=1.0, pairing=0.5)
    recipe = dataclasses.replace(QUICK, steps=1, milestones=(), adversary=adversary)
    model = build(SMALL, seed=0)
    x, y, uniform, rows = first_batch(digits[0], recipe)
    eps, start = begin_attack(x, uniform, rows, torch.zeros((), dtype=torch.int64), recipe, adversary)
    x_adv = craft(model.train(), x, y, eps, start, adversary)
    logits = model.train()(torch.cat([x, x_adv]))  # one batch, as batch norm sees both together
    clean, moved = logits[:32], logits[32:]
    ce = -moved.log_softmax(1)[torch.arange(32), y].mean()
    difference = ((clean - moved) ** 2).sum() / clean.numel()
    assert difference > 0.01
    _, run = train(digits[0], recipe)
    assert run.loss == pytest.approx((ce + 0.5 * difference).item(), rel=1e-4)
    assert run.accuracy == float((moved.argmax(1) == y).float().mean())  # under attack


def test_pairing_draws_clean_and_adversarial_logits_together(digits):
    adversary = Adversary(attack="fgsm", eps=0.2, steps=1, share=1.0)
    distances = []
    for pairing in (0.0, 5.0):
        recipe = Recipe(steps=60, optimizer="adam", lr=3e-3, batch_size=64)
        recipe = dataclasses.replace(recipe, adversary=dataclasses.replace(adversary, pairing=pairing))
        model = build(SMALL, seed=0)
        fit(model, digits[0], recipe, show=False)
        x, y = digits[0].pixels(slice(200)), digits[0].labels[:200]
        moved = mmlda.attacks.FGSM(eps=0.2)(model, x, y).x_adv
        distances.append(F.mse_loss(model(moved), model(x)).item())
    assert distances[1] < 0.7 * distances[0]


@pytest.mark.parametrize("pairing", (0.0, 0.5))
def test_awp_takes_the_gradient_where_the_weights_do_worst(digits, pairing):
    adversary = Adversary(attack="pgd", eps=0.2, steps=2, step=0.5, share=1.0, pairing=pairing, awp=0.05)
    recipe = dataclasses.replace(QUICK, steps=1, optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
    recipe = dataclasses.replace(recipe, milestones=(), adversary=adversary)
    ours, theirs = build(SMALL, seed=0), build(SMALL, seed=0).train()
    run = fit(ours, digits[0], recipe, show=False)
    x, y, uniform, rows = first_batch(digits[0], recipe)
    eps, start = begin_attack(x, uniform, rows, torch.zeros((), dtype=torch.int64), recipe, adversary)
    x_adv = craft(theirs, x, y, eps, start, adversary)
    before = copy.deepcopy(theirs.state_dict())
    F.cross_entropy(theirs(x_adv), y).backward()
    slopes = {name: p.grad for name, p in theirs.named_parameters()}
    theirs.load_state_dict(before)
    theirs.zero_grad()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if p.dim() > 1:  # not biases and batch norm
                p += 0.05 * p.norm() * slopes[name] / slopes[name].norm()
    clean, moved = theirs(torch.cat([x, x_adv])).chunk(2) if pairing else (None, theirs(x_adv))
    loss = F.cross_entropy(moved, y)
    if pairing:
        loss = loss + pairing * F.mse_loss(moved, clean)
    loss.backward()
    assert run.loss == pytest.approx(loss.item(), rel=1e-4)
    for (name, p), own in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(own, before[name] - 0.1 * p.grad, rtol=1e-4, atol=1e-6, msg=name)
    for name, statistic in theirs.named_buffers():  # of batch norm: one update, with the moved weights
        torch.testing.assert_close(ours.get_buffer(name), statistic, rtol=1e-4, atol=1e-6, msg=name)
