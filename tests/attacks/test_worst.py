"""APGD, Square, FAB and their worst case: closed forms, what each is for, and what the list does."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from attack_models import images, linear_case, network
from torch import Tensor, nn

from mmlda.attacks import APGD, BIM, FAB, ILCM, PGD, Square, WorstCase
from mmlda.attacks.fab import levelled, to_plane
from mmlda.attacks.gradient import in_ball, limits, project
from mmlda.attacks.square import bump, share, window


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("classes", [2, 5])
def test_fab_finds_the_closed_form_distance(norm: str, classes: int) -> None:
    model, x, y = linear_case(classes)
    result = FAB(norm=norm, steps=50)(model, x, y)
    distance = model.distance(x, y, norm)
    found = result.linf if norm == "linf" else result.l2
    assert result.success.all() and (found >= distance * (1 - 1e-9)).all()
    assert (found / distance).max() < 1.01 and (found / distance).mean() < 1.002
    # Within eps it stops early, and still reports what it is about.
    eps = distance.median().item() * 1.02
    hurried = FAB(norm=norm, eps=eps, steps=50)(model, x, y)
    near = (hurried.linf if norm == "linf" else hurried.l2) <= eps
    assert torch.equal(near, distance * 1.01 <= eps) or (near == (distance <= eps)).double().mean() > 0.95
    assert hurried.steps.sum() < result.steps.sum()


def test_fab_starts_from_what_is_wrong_already() -> None:
    model, x, y = linear_case(3)
    wrong = (y + 1) % 3
    result = FAB(steps=5)(model, x, wrong)
    assert result.success.all() and (result.l2 == 0).all() and torch.equal(result.x_adv, x)
    assert (result.steps == 0).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_projection_onto_a_plane_in_the_range(norm: str) -> None:
    """Against a search for the multiplier; wherever the plane can be reached, it is."""
    rng = np.random.default_rng(0)
    x = rng.random((60, 12))
    x[::3] = x[::3].round()  # pixels with no room on one side
    w = rng.standard_normal((60, 12)) * (rng.random((60, 12)) > 0.2)
    c = rng.standard_normal(60) * 2
    r = to_plane(torch.tensor(x), torch.tensor(w), torch.tensor(c), norm, (0.0, 1.0)).numpy()
    assert (x + r >= -1e-12).all() and (x + r <= 1 + 1e-12).all()
    for i in range(60):
        way = -np.sign(c[i]) * np.sign(w[i])
        room = np.where(way > 0, 1 - x[i], np.where(way < 0, x[i], 0.0))

        def move(scale: float) -> np.ndarray:
            rate = np.ones(12) if norm == "linf" else np.abs(w[i])  # noqa: B023
            return way * np.minimum(scale * rate, room)  # noqa: B023

        low, high = 0.0, 1e9
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if abs(w[i] @ move(middle)) < abs(c[i]) else (low, middle)
        np.testing.assert_allclose(r[i], move(high), atol=1e-8)
        if np.abs(w[i]) @ room > abs(c[i]):
            assert abs(w[i] @ r[i] + c[i]) < 1e-9
    zero = to_plane(torch.rand(2, 5), torch.zeros(2, 5), torch.ones(2), norm, (0.0, 1.0))
    assert (zero == 0).all()


class Rounded(nn.Module):
    """A network behind a rounding of its input: no gradient at all, and easy to break."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x * 20).round() / 20 + 0 * x)


def test_square_needs_no_gradient() -> None:
    model, (x, y) = Rounded(network("sr")).eval(), images(60)
    gradient = PGD(eps=0.2, random_start=False)(model, x, y)
    clean = model(x).argmax(1) != y
    assert gradient.zero_gradient == 1.0 and torch.equal(gradient.success, clean)
    few, many = (Square(eps=0.2, queries=q)(model, x, y) for q in (10, 300))
    assert few.success.float().mean() < many.success.float().mean() and many.success.float().mean() > 0.8
    assert (many.steps <= 300).all() and (many.steps[~many.success] == 300).all()
    wrong = many.steps == 0
    assert torch.equal(wrong, clean)
    l2 = Square(eps=1.5, norm="l2", queries=300)(model, x, y)
    assert l2.success.float().mean() > 0.6 and l2.l2.max() <= 1.5 + 1e-5
    worst = WorstCase(eps=0.2)(model, x, y)
    assert (worst.winner == 4).sum() > 40  # the fifth of the list is Square; some fall to a random start


def test_square_uses_its_whole_budget() -> None:
    """On a model that no query can improve, the point stays in the ball and near its edge."""
    x = torch.rand(4, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(4, dtype=torch.int64)

    def model(v: Tensor) -> Tensor:
        score = (v * torch.linspace(-1, 1, v[0].numel()).view(v.shape[1:])).flatten(1).sum(1)
        return torch.stack([score * 0 + 1000, score], 1)

    for norm, eps in (("linf", 0.05), ("l2", 0.5)):
        result = Square(eps=eps, norm=norm, queries=200)(model, x, y)
        size = result.linf if norm == "linf" else result.l2
        assert not result.success.any() and (size <= eps * (1 + 1e-5)).all() and (size > 0.8 * eps).all()
        gain = (model(result.x_adv) - model(x))[:, 1]
        best = torch.linspace(-1, 1, 189).abs().sum() * eps if norm == "linf" else 8.0 * eps
        assert (gain > 0.2 * best).all()


def test_square_windows() -> None:
    assert [share(q, 10_000, 0.8) for q in (1, 10, 11, 51, 201, 9000)] == [0.8, 0.8, 0.4, 0.2, 0.1, 0.8 / 2**8]
    assert window(0.25, 8, 8, 1) == (4, 4) and window(1e-9, 8, 8, 1) == (1, 1)
    assert window(0.5, 1, 64, 1) == (1, 32) and window(0.5, 64, 1, 1) == (32, 1)
    for h, w in ((5, 5), (3, 7), (1, 4), (4, 1), (1, 1), (2, 2)):
        patch = bump(h, w)
        assert patch.shape == (h, w) and patch.norm() == pytest.approx(1.0)
        assert h * w == 1 or (patch.min() < 0 < patch.max())


def test_square_on_vectors_and_targets() -> None:
    model, x, y = linear_case(3)
    for norm, eps in (("linf", 0.1), ("l2", 0.3)):
        result = Square(eps=eps, norm=norm, queries=300)(model, x, y)
        assert result.success.float().mean() > 0.9 and result.x_adv.shape == x.shape
        target = (y + 1) % 3
        aimed = Square(eps=2 * eps, norm=norm, queries=300)(model, x, y, target=target)
        assert aimed.success.float().mean() > 0.8 and torch.equal(aimed.prediction == target, aimed.success)


def test_apgd_beats_pgd_and_stops_where_it_wins() -> None:
    model, (x, y) = network("mm", 0.15), images(100)
    pgd, apgd = PGD(eps=0.2, steps=100)(model, x, y), APGD(eps=0.2)(model, x, y)
    assert apgd.success.sum() >= pgd.success.sum()
    assert (apgd.steps[~apgd.success] == 101).all() and apgd.steps[apgd.success].float().mean() < 60

    # A sample that holds ends at the best point it has seen: no worse than plain PGD's end.
    def loss(v: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(v), y, reduction="none")

    held = ~apgd.success & ~pgd.success
    assert held.sum() > 20 and (loss(apgd.x_adv) - loss(pgd.x_adv))[held].mean() > 0
    targeted = APGD(eps=0.2, loss="dlr", target="every")(model, x, y)
    dlr = APGD(eps=0.2, loss="dlr")(model, x, y)
    assert targeted.success.sum() > dlr.success.sum()


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_where_dlr_is_undefined(classes: int) -> None:
    model, (x, y) = network("sr", 0.0, classes), images(40, classes)
    with pytest.warns(UserWarning, match=f"undefined with {classes} classes"):
        worst = WorstCase(eps=0.2 if classes == 2 else 0.15)(model, x, y)
    assert 0.1 < worst.success.float().mean() < 1
    if classes == 2:
        with pytest.warns(UserWarning, match='APGD uses "margin" instead'):
            result = APGD(eps=0.3, loss="dlr")(model, x, y)
        assert torch.equal(result.x_adv, APGD(eps=0.3, loss="margin")(model, x, y).x_adv)


def test_the_worst_case_is_the_worst_of_its_list() -> None:
    model, (x, y) = network("mm", 0.15), images(40)
    eps = 0.2
    worst = WorstCase(eps=eps)
    result = worst(model, x, y)
    wrong = model(x).argmax(1) != y
    assert torch.equal(result.winner == -2, wrong) and (result.l2[wrong] == 0).all()
    assert torch.equal(result.success, result.winner != -1)
    left = ~wrong
    for number, attack in enumerate(worst.attack_list()):
        alone = attack(model, x[left], y[left], index=torch.arange(40)[left])
        won = alone.success & (alone.linf <= eps + 1e-6)
        mine = result.winner[left] == number
        assert torch.equal(mine, won)
        where = left.clone()
        where[left] = mine
        torch.testing.assert_close(result.x_adv[where], alone.x_adv[mine])
        left = left & ~where
    assert torch.equal(left, ~result.success) and 0.2 < left.float().mean() < 0.8


def test_the_broken_leave() -> None:
    model, (x, y) = network("sr"), images(100)
    rows = []

    def spy(v: Tensor) -> Tensor:
        rows.append(len(v))
        return model(v)

    result = WorstCase(eps=0.2)(spy, x, y)
    assert result.success.float().mean() > 0.9 and max(rows) == 100
    assert sum(rows) < 0.1 * 100 * len(rows)


def test_a_list_and_losses_of_ones_own() -> None:
    model, (x, y) = network("mm"), images(40)

    def features(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return -(model.body(x) * model.mu[y]).sum(1)

    attacks = WorstCase(eps=0.1, losses=[features]).attack_list()
    assert [type(a) for a in attacks] == [APGD, APGD, APGD, APGD, FAB, Square] and attacks[2].loss is features
    one = WorstCase(eps=0.1, attacks=[BIM(eps=0.1, loss=features)])(model, x, y)
    assert torch.equal(one.success, BIM(eps=0.1, loss=features)(model, x, y).success) and one.success.any()
    # A minimum-norm attack finds a way for every sample; only those within eps count.
    far = WorstCase(eps=0.05, attacks=[FAB()])(model, x, y)
    free = FAB()(model, x, y)
    assert free.success.all() and torch.equal(far.success, free.linf <= 0.05)
    assert 0 < far.success.float().mean() < 1 and far.linf.max() <= 0.05
    with pytest.raises(ValueError, match=r"attacks must be attacks with bounds=\(0.0, 1.0\), got"):
        WorstCase(eps=0.1, attacks=[BIM(eps=0.1, bounds=(-1.0, 1.0))])


def test_settings_that_cannot_be() -> None:
    for make, message in (
        (lambda: APGD(eps=-1), "eps must be .* got -1"),
        (lambda: APGD(eps=0.1, steps=0), "steps must be .* got 0"),
        (lambda: APGD(eps=0.1, targets=0), "targets must be .* got 0"),
        (lambda: APGD(eps=0.1, target="all"), "target must be .* got 'all'"),
        (lambda: APGD(eps=0.1, loss="kl"), "loss must be .* got 'kl'"),
        (lambda: Square(eps=0.1, queries=0), "queries must be .* got 0"),
        (lambda: Square(eps=0.1, p=0.0), "p must be .* got 0.0"),
        (lambda: Square(eps=0.1, norm="l0"), "norm must be .* got 'l0'"),
        (lambda: FAB(norm="l1"), "norm must be .* got 'l1'"),
        (lambda: FAB(eps=-0.1), "eps must be .* got -0.1"),
        (lambda: FAB(steps=0), "steps must be .* got 0"),
        (lambda: WorstCase(eps=float("inf")), "eps must be .* got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("norm", "eps"), [("linf", 2 / 255), ("linf", 8 / 255), ("l2", 0.1)])
def test_half_precision_makes_no_ball_larger(norm: str, eps: float, dtype: torch.dtype) -> None:
    """What is counted is no farther away than where a fixed-budget attack gets to by rounding."""
    model, (x, y) = copy.deepcopy(network("sr")).to(dtype), images(60)
    x = x.to(dtype)
    most = getattr(PGD(eps=eps, norm=norm)(model, x, y), norm).max()
    assert eps * 0.99 < most < eps * 1.05
    attacks = [APGD(eps=eps, norm=norm, steps=20), FAB(norm=norm, targets=3, steps=20)]
    for attack in (FAB(eps=eps, norm=norm, steps=20), WorstCase(eps=eps, norm=norm, attacks=attacks)):
        result = attack(model, x, y)
        # In L2 the pixels' roundings add up in one way here and in another there.
        assert getattr(result, norm)[result.success].max() <= most * (1.005 if norm == "linf" else 1.02)
        with torch.no_grad():
            assert torch.equal(result.prediction, model(result.x_adv).argmax(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 3.0)])
def test_a_projected_point_is_in_the_ball_and_one_beyond_rounding_is_not(
    bounds: tuple[float, float], dtype: torch.dtype
) -> None:
    x = torch.rand(200, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (bounds[0] + (bounds[1] - bounds[0]) * x).to(dtype)
    d = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    ulp = torch.finfo(dtype).eps * (x.abs() + 1)  # more than the distance between two numbers there
    for norm in ("linf", "l2"):
        for eps in (1e-3, 2 / 255, 0.03, 0.1, 0.5):
            v = project(x + d, limits(x, eps, norm, bounds), eps, norm, bounds)
            assert in_ball(x, v, eps, norm, bounds).all()
            out = v + (v - x).sign() * (2 * ulp + 0.1 * eps)
            r = ((out.double() - x.double()).abs() - 0.5 * ulp.double()).clamp_min(0)
            beyond = (r.amax(1) if norm == "linf" else r.norm(dim=1)) > 1.04 * eps
            assert beyond.any() and not in_ball(x, out, eps, norm, bounds)[beyond].any()


def test_an_infinite_slope_is_as_steep_as_the_steepest() -> None:
    inf, nan = torch.inf, torch.nan
    w = torch.tensor([[1.0, inf, -3.0, nan], [1.0, 2.0, 3.0, 4.0], [inf, -inf, 0.0, nan]])
    expected = torch.tensor([[1.0, 3.0, -3.0, 0.0], [1.0, 2.0, 3.0, 4.0], [1.0, -1.0, 0.0, 0.0]])
    assert torch.equal(levelled(w), expected)
    assert levelled(expected) is expected  # nothing to replace


def test_a_worst_case_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="attacks must be a list of one attack or more"):
        WorstCase(eps=0.1, attacks=[])


def test_a_listed_attacks_batch_size_is_kept_to_and_changes_nothing() -> None:
    model, (x, y) = network("sr"), images(30)
    sizes = []

    def seen(v: Tensor) -> Tensor:
        sizes.append(len(v))
        return model(v)

    whole = WorstCase(eps=0.05, attacks=[APGD(eps=0.05, steps=5), Square(eps=0.05, queries=20)])
    parts = WorstCase(eps=0.05, attacks=[APGD(eps=0.05, steps=5, batch_size=4), Square(eps=0.05, queries=20)])
    expected, result = whole(model, x, y), parts(seen, x, y)
    left = int((expected.winner == -1).sum())
    assert 4 < left < 30 and sizes.count(4) > 5
    assert max(sizes[3 : sizes.index(left)]) <= 4  # after the clean images; Square takes all that is left
    assert torch.equal(result.success, expected.success) and torch.equal(result.winner, expected.winner)
    torch.testing.assert_close(result.x_adv, expected.x_adv, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_square_in_l2_does_not_overflow_on_images_up_to_255(dtype: torch.dtype) -> None:
    model, (x, y) = network("sr", size=28), images(40, size=28)
    attack = Square(eps=600.0, norm="l2", queries=200, bounds=(0.0, 255.0))  # whose square does not fit into float16
    result = attack(lambda v: model(v.float() / 255), (255 * x).to(dtype), y)
    exact = attack(lambda v: model(v / 255), 255 * x, y).success
    assert result.x_adv.isfinite().all() and float(result.l2.max()) <= 600 * 1.002
    assert 0.2 < float(exact.double().mean()) < 0.8 and abs(int(result.success.sum() - exact.sum())) <= 2


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.15), ("l2", 0.5)])
def test_fab_within_eps_stops_at_the_same_point_in_any_batch(norm: str, eps: float) -> None:
    """A sample that is done may stay in the batch for a while: it must not go on from there."""
    model, (x, y) = copy.deepcopy(network("sr")).double(), images(40)
    x = x.double()
    whole = FAB(eps=eps, norm=norm, steps=15)(model, x, y)
    alone = FAB(eps=eps, norm=norm, steps=15, batch_size=1)(model, x, y)
    assert 0.05 < float(whole.success.double().mean()) and torch.equal(whole.success, alone.success)
    torch.testing.assert_close(whole.x_adv, alone.x_adv, rtol=0, atol=1e-9)


def test_fab_within_a_radius_breaks_nothing_beyond_it() -> None:
    model, (x, y) = network("sr"), images(60)
    free, bound = FAB()(model, x, y), FAB(eps=0.03)(model, x, y)
    assert free.success.all() and 0.05 < bound.success.float().mean() < 0.95
    assert (bound.linf[bound.success] <= 0.03 * (1 + 1e-5) + 1e-6).all()
    assert bound.linf[~bound.success].isinf().all() and torch.equal(bound.x_adv[~bound.success], x[~bound.success])
    with torch.no_grad():
        assert torch.equal(bound.prediction, model(bound.x_adv).argmax(1))


def test_the_worst_case_counts_what_a_targeted_attack_breaks_on_its_way() -> None:
    model, (x, y) = network("sr"), images(60)
    alone = ILCM(eps=0.25)(model, x, y)
    worst = WorstCase(eps=0.25, attacks=[ILCM(eps=0.25)])(model, x, y)
    assert torch.equal(worst.success, worst.prediction != y)
    assert torch.equal(worst.success, alone.prediction != y) and worst.success.sum() > alone.success.sum()
