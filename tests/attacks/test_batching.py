"""The result for an image does not depend on its batch, nor on whether a step is replayed as a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attack_cases import ATTACKS, at_work, double, every_attack
from attack_models import images, network
from torch import Tensor

from mmlda.attacks import APGD, BIM, PGD


@every_attack
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    """In float64: alone, in smaller batches, in another order and under a memory limit."""
    model, (x, y) = double(), images(24)
    x = x.double()
    whole = ATTACKS[name]()(model, x, y)
    at_work(whole, x)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    batched = ATTACKS[name](batch_size=7)(model, x, y)
    shuffled = ATTACKS[name]()(model, x[order], y[order], index=order)
    frugal = ATTACKS[name](memory_limit=300_000)(model, x, y)
    for result, back in ((batched, slice(None)), (shuffled, order.argsort()), (frugal, slice(None))):
        result = result.take(back)
        assert torch.equal(result.success, whole.success) and torch.equal(result.steps, whole.steps)
        torch.testing.assert_close(result.x_adv, whole.x_adv, rtol=0, atol=1e-9)
    alone = ATTACKS[name]()(model, x[5:6], y[5:6], index=torch.tensor([5]))
    torch.testing.assert_close(alone.x_adv, whole.x_adv[5:6], rtol=0, atol=1e-9)


@every_attack
def test_batch_sizes_agree_in_float32(name: str) -> None:
    model, (x, y) = network("sr"), images(400)
    whole, parts = ATTACKS[name]()(model, x, y), ATTACKS[name](batch_size=96)(model, x, y)
    at_work(parts, x)
    assert (whole.success == parts.success).float().mean() >= 0.995


class Buffers:
    """What a CUDA graph does to `Surface.step`, on the CPU: the function captured first is the one that runs, on
    buffers of its own, and every call overwrites the outputs of the one before."""

    def __init__(self) -> None:
        self.graphs: dict[object, tuple[Any, ...]] = {}
        self.replays = 0

    def step(self, surface: Any, key: object, step: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        key = (id(surface), key, *((t.shape, t.dtype) for t in inputs))
        if key not in self.graphs:
            buffers = tuple(t.clone() for t in inputs)
            self.graphs[key] = step, buffers, tuple(t.clone() for t in step(*buffers)), surface
        captured, buffers, outputs, _ = self.graphs[key]
        for mine, given in zip(buffers, inputs):
            mine.copy_(given)
        for mine, computed in zip(outputs, captured(*buffers)):
            mine.copy_(computed)
        self.replays += 1
        return outputs


@every_attack
def test_steps_can_be_replayed_as_cuda_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With buffers that are overwritten, steps captured once, and batches cut to halves, nothing changes."""
    from mmlda.attacks import apgd, fab, gradient, jsma, square, surface, worst

    def halves(alive: Tensor) -> Tensor:
        n, size = int(alive.sum()), len(alive)
        while n and size // 2 >= n:
            size //= 2
        return alive.to(torch.int8).argsort(descending=True, stable=True)[: size if n else 0].sort().values

    model, (x, y) = double(), images(22)
    x = x.double()
    plain = ATTACKS[name](batch_size=11)(model, x, y)
    buffers = Buffers()
    monkeypatch.setattr(surface.Surface, "step", lambda self, *a: buffers.step(self, *a))
    for module in (apgd, fab, gradient, jsma, square, worst):
        monkeypatch.setattr(module, "survivors", halves)
    for module in (apgd, fab):
        monkeypatch.setattr(module, "compact_before", lambda k, *_: k & (k - 1) == 0)
    replayed = ATTACKS[name](batch_size=11)(model, x, y)
    assert buffers.replays > len(buffers.graphs) > 0
    assert torch.equal(replayed.success, plain.success) and torch.equal(replayed.steps, plain.steps)
    assert torch.equal(replayed.prediction, plain.prediction)
    torch.testing.assert_close(replayed.x_adv, plain.x_adv, rtol=0, atol=1e-9)
    torch.testing.assert_close(replayed.l2, plain.l2, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "attack",
    [
        APGD(eps=0.05, steps=12, restarts=4),
        APGD(eps=0.05, steps=12, loss="dlr", target="every"),
        PGD(eps=0.3, norm="l2", steps=4, restarts=5),
        BIM(eps=0.05, steps=5, loss="targeted", target="every"),
    ],
    ids=["apgd", "apgd-every", "pgd-l2", "bim-every"],
)
def test_joined_runs_give_what_one_after_the_other_does(attack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = double(), images(24)
    sizes: list[int] = []

    def counted(v: Tensor) -> Tensor:
        sizes.append(len(v))
        return model(v)

    joined = attack(counted, x.double(), y)
    passes = len(sizes)
    sizes.clear()
    limited = replace(attack, batch_size=12)(counted, x.double(), y)
    assert max(sizes) <= 12  # never more images than the caller allows
    sizes.clear()
    monkeypatch.setattr("mmlda.attacks.surface.ROOM", 1)
    alone = attack(counted, x.double(), y)
    assert 0 < alone.success.sum() < 24 and passes < len(sizes)
    for result in (joined, limited):
        assert torch.equal(result.success, alone.success) and torch.equal(result.steps, alone.steps)
        torch.testing.assert_close(result.x_adv, alone.x_adv, rtol=0, atol=1e-9)
