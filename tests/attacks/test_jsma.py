"""JSMA against brute force: the whole Jacobian and plain loops over pixels and pairs."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from attack_models import images, network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmlda.attacks import JSMA, jsma
from mmlda.attacks.jsma import _try_all_pairs, best_pair, best_pixel
from mmlda.attacks.surface import Surface, finite


def brute_force(model: nn.Module, x: Tensor, target: int, attack: JSMA) -> list[Tensor]:
    """The images after 0, 1, 2, ... steps on one image x [...], from the definition."""
    lo, hi = attack.bounds
    D, up, width = x.numel(), attack.eps > 0, 2 if attack.pairs else 1
    reuse = not attack.pairs if attack.reuse is None else attack.reuse
    most = int(attack.max_share * D + 1e-6)
    path, used = [x], set()

    def surface(v: Tensor) -> Tensor:
        z = model(v[None])[0]
        return z if attack.surface == "logits" else z.softmax(0)

    for _ in range(attack.steps):
        x = path[-1]
        if int(model(x[None]).argmax()) == target:
            break
        J = torch.autograd.functional.jacobian(surface, x).flatten(1)  # [L, D]
        a = J[target].tolist()
        b = [sum(J[k, p].item() for k in range(len(J)) if k != target) for p in range(D)]
        flat = x.flatten().tolist()
        free = [p for p in range(D) if (flat[p] < hi if up else flat[p] > lo)]
        if not reuse:
            free = [p for p in free if p not in used]
        if len(used) + width > most:
            free = [p for p in free if p in used]
        best, choice = -1.0, None
        for pixels in itertools.combinations(free, width):
            alpha, beta = sum(a[p] for p in pixels), sum(b[p] for p in pixels)
            right = (alpha > 0 and beta < 0) if up else (alpha < 0 and beta > 0)
            if right and abs(alpha * beta) > best:
                best, choice = abs(alpha * beta), pixels
        if choice is None:
            break
        used |= set(choice)
        new = x.flatten().clone()
        for p in choice:
            new[p] = min(max(float(new[p]) + attack.eps, lo), hi)
        path.append(new.view_as(x))
    return path


CASES: list[dict[str, Any]] = [
    {"eps": 0.3},
    {"eps": 0.3, "surface": "softmax"},
    {"eps": -0.4},
    {"eps": 0.15, "max_share": 0.05},  # 3 pixels, chosen again and again
    {"eps": 1.0, "reuse": False},
    {"eps": 0.5, "pairs": True},
    {"eps": 1.0, "pairs": True, "surface": "softmax"},
    {"eps": -0.5, "pairs": True, "max_share": 0.15},
    {"eps": 0.2, "pairs": True, "reuse": True, "max_share": 0.08},  # 5 pixels: two pairs and one to spare
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("head", ["sr", "mm"])
def test_every_step_is_brute_forces(case: dict[str, Any], head: str) -> None:
    model, (x, y) = copy.deepcopy(network(head)).double(), images(3)
    x, target = x.double(), (y + 3) % 10
    n = 6 if case.get("pairs") else 12
    paths = [brute_force(model, x[i], int(target[i]), JSMA(steps=n, **case)) for i in range(3)]
    assert max(map(len, paths)) > 3
    for k in range(1, n + 1):
        result = JSMA(steps=k, **case)(model, x, y, target=target)
        for i, path in enumerate(paths):
            torch.testing.assert_close(result.x_adv[i], path[min(k, len(path) - 1)], rtol=0, atol=1e-12)
            assert result.steps[i] == min(k, len(path) - 1)
        reached = model(result.x_adv).argmax(1) == target
        assert torch.equal(result.success, reached)


def best_by_loops(u: list[float], v: list[float], width: int) -> tuple[int, ...] | None:
    best, choice = -1.0, None
    for pixels in itertools.combinations(range(len(u)), width):
        s_u, s_v = sum(u[p] for p in pixels), sum(v[p] for p in pixels)
        if s_u > 0 and s_v > 0 and s_u * s_v > best:
            best, choice = s_u * s_v, pixels
    return choice


def check(u: Tensor, v: Tensor) -> None:
    for width, function in ((1, best_pixel), (2, best_pair)):
        pixels, valid = function(u, v)
        for i in range(len(u)):
            expected = best_by_loops(list(u[i].numpy()), list(v[i].numpy()), width)  # in the same dtype
            assert bool(valid[i]) == (expected is not None)
            if expected is not None:
                assert tuple(pixels[i].tolist()) == expected


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 40))
def test_the_choice_among_ties(data: st.DataObject, D: int) -> None:
    """Small integers: many pairs are equal, many are invalid, some pixels are out of the search."""
    whole = st.lists(st.integers(-3, 3), min_size=D, max_size=D)
    u, v = (torch.tensor([data.draw(whole)], dtype=torch.float64) for _ in range(2))
    out = torch.tensor([data.draw(st.lists(st.booleans(), min_size=D, max_size=D))])
    check(u.masked_fill(out, -torch.inf), v.masked_fill(out, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [1 << 22, 300])
def test_the_choice_where_pruning_is_easy_and_where_it_is_not(
    dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsma, "_TILE", tile)
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 12, 80, generator=g, dtype=torch.float64)
    angle = torch.linspace(0.01, 1.56, 80, dtype=torch.float64).expand(12, -1)
    clouds = {
        "independent": (u, v),
        "one sign against the other": (u, -u + 0.1 * v),
        "the same": (u, u),
        "on a circle": (angle.cos(), angle.sin()),  # nothing dominates anything
        "on a line": (angle, 2 - angle),  # everything is equally good but for rounding
        "equal": (torch.ones_like(u), torch.ones_like(u)),
        "of all sizes": (u * 10 ** (5 * v), v * 10 ** (5 * u)),
        "valid only in pairs": (u.abs() * (-1) ** torch.arange(80), v.abs() * (-1) ** torch.arange(1, 81)),
        "nothing valid": (-u.abs(), v),
    }
    for u, v in clouds.values():
        check(u.to(dtype), v.to(dtype))


class Watch(TorchDispatchMode):
    """Counts the operations by name and remembers the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.numel())
        return out


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_the_choice_among_pairs_where_slopes_are_not_finite(value: float) -> None:
    """Cleaned as the attack cleans them, one such pixel of every sample neither hides the others nor overflows."""
    generator = torch.Generator().manual_seed(0)
    u, v = torch.rand(200, 40, generator=generator), torch.randn(200, 40, generator=generator)
    odd = u.clone()
    odd[:, 39] = value
    for u_k, v_k in ((odd, v), (v, odd)):
        u_k, v_k = finite(u_k), finite(v_k)
        F, expected = _try_all_pairs(u_k, v_k)
        pair, valid = best_pair(u_k, v_k)
        assert F.isfinite().all() and valid.all() and torch.equal(pair, expected)


@pytest.mark.parametrize("surface", ["logits", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slopes_are_finite(surface: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.25, 0.0, 0.25]], dtype=dtype)
    weight = torch.tensor([[1.0, -1.0], [1000.0, -1000.0], [-1.0, 1.0], [0.0, 0.0]], dtype=dtype)
    off = torch.tensor([-2000.0, 0.0], dtype=dtype)  # so that the softmax of the target is not 1
    model = Surface(lambda v: v.sqrt() @ weight + off, torch.tensor([1]))
    _, a, b = JSMA(eps=0.5, surface=surface)._slopes(model, x, torch.tensor([0]))
    assert a.dtype == torch.float32 and a.isfinite().all() and b.isfinite().all()
    assert a[0, 0] > a[0, 1] >= 0 > a[0, 2] and b[0, 0] < b[0, 1] <= 0 < b[0, 2]  # infinite is more than steep


def test_two_products_a_step_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many classes: two backward passes a step. One pixel at a time nothing is larger than the images."""
    monkeypatch.setattr(jsma, "_TILE", 2**16)
    n, L, steps = 6, 50, 4
    g = torch.Generator().manual_seed(0)
    w = torch.randn(L, 4, 3, 3, generator=g)

    def model(x: Tensor) -> Tensor:
        return nn.functional.conv2d(x.view(-1, 4, 16, 16), w).square().mean((2, 3)) * 100  # [N, L]

    x, y = torch.rand(n, 4, 16, 16, generator=g), torch.zeros(n, dtype=torch.int64)
    for surface, products in (("logits", 2), ("softmax", 1)):
        for pairs in (False, True):
            attack = JSMA(eps=1e-3, pairs=pairs, surface=surface, steps=steps)
            with Watch() as watch:
                result = attack(model, x, y)
            assert (result.steps == steps).all()
            assert watch.calls["convolution_backward"] == products * steps
            # The network's own activations; pairs are tried in tiles, not n * D * D = 6 million at once.
            assert watch.largest <= max(n * L * 14 * 14, 2**16 if pairs else 0)


def test_it_reaches_the_target_and_stops_there() -> None:
    model, (x, y) = network("sr"), images(40)
    with torch.no_grad():
        z = model(x)
    for target, to in (("least-likely", z.scatter(1, y[:, None], torch.inf).argmin(1)), ("random", None)):
        result = JSMA(eps=0.5, target=target)(model, x, y)
        assert result.target is not None and (result.target != y).all()
        if to is not None:
            assert torch.equal(result.target, to)
        assert result.success.float().mean() > 0.6
        # One step fewer, and no sample is there yet.
        for i in result.success.nonzero()[:5, 0].tolist():
            k = int(result.steps[i])
            assert k > 0
            if k > 1:
                short = JSMA(eps=0.5, target=target, steps=k - 1)(model, x, y)
                assert not short.success[i]


def test_the_share_of_pixels_and_the_step() -> None:
    model, (x, y) = network("sr"), images(40)
    result = JSMA(eps=0.125, max_share=0.05)(model, x, y)
    delta = (result.x_adv - x).flatten(1)
    assert ((delta != 0).sum(1) <= 3).all() and (delta >= 0).all()  # 5% of 64
    assert (result.linf > 0.126).any()  # a pixel is chosen again
    once = JSMA(eps=0.125, reuse=False)(model, x, y)
    assert once.linf.max() <= 0.125 and (once.steps > 3).any()


def test_already_there() -> None:
    model, (x, y) = network("sr"), images(20)
    with torch.no_grad():
        label = model(x).argmax(1)
    result = JSMA(eps=1.0)(model, x, y, target=label)
    assert result.success.all() and (result.steps == 0).all() and torch.equal(result.x_adv, x)


@pytest.mark.parametrize("surface", ["logits", "softmax"])
def test_a_saturated_network(surface: str) -> None:
    """Gaps of thousands of nats: softmax is 0 and 1 in float32 and its gradient 0, but the choice is the same."""
    model, (x, y) = network("sr"), images(20)
    with torch.no_grad():
        gap = (1000 * model(x)).topk(2).values.diff().abs().median()
        target = (y + 1) % 10
        there = model(x).argmax(1) == target
    assert gap > 1000
    result = JSMA(eps=1.0, surface=surface)(lambda v: 1000 * model(v), x, y, target=target)
    assert result.success[~there].float().mean() > 0.7
    assert result.zero_at_start is not None and not result.zero_at_start[~there].any()


def test_no_gradient_is_reported() -> None:
    x, y = torch.rand(4, 6), torch.zeros(4, dtype=torch.int64)

    def flat(v: Tensor) -> Tensor:
        return 0 * v[:, :3] + torch.tensor([1.0, 0.0, -1.0])

    result = JSMA(eps=1.0)(flat, x, y)
    assert result.zero_gradient == 1.0 and not result.success.any()
    assert torch.equal(result.x_adv, x) and (result.steps == 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", 0.0),
        ("eps", float("nan")),
        ("surface", "probabilities"),
        ("target", "every"),
        ("steps", 0),
        ("max_share", 0.0),
        ("max_share", 1.5),
    ],
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        JSMA(**{"eps": 1.0, name: value})  # type: ignore[arg-type]
