"""Means against the paper's pseudo-code, published optimal codes, and bounds."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlda.theory import robustness_bound
from mmlda.theory.bounds import cosine_bound, welch_bound
from mmlda.theory.means import generate_opt_means, max_cosine, separated_means
from mmlda.theory.optimiser import optimise

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# Tammes' problem: the largest smallest angle, in degrees, between N points on the sphere.
TAMMES = {7: 77.8695421, 8: 74.8584922, 9: 70.5287794, 10: 66.1468220, 12: 63.4349488, 13: 57.1367031, 15: 53.6578501}


def algorithm_1(C, p, L):
    """The paper's pseudo-code, line by line; entry (L, L) is skipped, since it is zero (or out of range)."""
    mu = [[0.0] * p for _ in range(L)]
    mu[0][0] = 1.0
    for i in range(1, L):
        for j in range(i):
            inner = sum(a * b for a, b in zip(mu[i], mu[j]))
            mu[i][j] = -(1 + inner * (L - 1)) / (mu[j][j] * (L - 1))
        if i < L - 1:
            mu[i][i] = math.sqrt(1 - sum(a * a for a in mu[i]))
    return torch.tensor([[math.sqrt(C) * a for a in row] for row in mu], dtype=torch.float64)


def gram_error(mu, C, L):
    mu = mu.double()
    target = torch.full((L, L), C / (1 - L), dtype=torch.float64).fill_diagonal_(C)
    return (mu @ mu.T - target).abs().max().item() / C


# ---- Algorithm 1


@pytest.mark.parametrize(("L", "p"), [(2, 1), (2, 5), (3, 2), (4, 3), (10, 9), (10, 64), (30, 29), (40, 60)])
@pytest.mark.parametrize("C", [1.0, 100.0, 0.01])
def test_equals_the_pseudo_code(L, p, C):
    torch.testing.assert_close(generate_opt_means(C, p, L), algorithm_1(C, p, L), rtol=1e-11, atol=1e-12 * math.sqrt(C))


@pytest.mark.parametrize("L", [2, 3, 7, 100, 999, 1000, 2000])
@pytest.mark.parametrize("extra", [0, 1, None])
def test_gram_matrix_of_the_optimum(L, extra):
    p = 4096 if extra is None else L - 1 + extra
    for C in (1.0, 100.0):
        mu = generate_opt_means(C, p, L)
        assert gram_error(mu, C, L) < 1e-12
        assert mu.sum(0).abs().max().item() < 1e-12 * math.sqrt(C)


@pytest.mark.long
def test_gram_matrix_for_many_numbers_of_classes():
    # Rows below the diagonal are equal, so entry (i, j > i) of the Gram matrix is that of (i, i + 1): its diagonal and
    # the one beside it are all of it.
    for L in (*range(2, 100), *range(100, 2001, 19)):
        mu = generate_opt_means(100.0, L - 1, L)
        assert torch.equal(mu.tril(-1), mu[-1].expand(L, -1).tril(-1))
        assert ((mu * mu).sum(1) - 100.0).abs().max() < 1e-10
        assert ((mu[1:] * mu[:-1]).sum(1) - 100.0 / (1 - L)).abs().max() < 1e-10
        assert mu.sum(0).abs().max() < 1e-11


@settings(deadline=None)
@given(data=st.data(), p=st.integers(1, 80), log_C=st.floats(-3, 3), dtype=st.sampled_from(DTYPES))
def test_any_size_and_dtype(data, p, log_C, dtype):
    L = data.draw(st.integers(2, p + 1))
    C = 10**log_C
    mu = generate_opt_means(C, p, L, dtype=dtype)
    assert mu.shape == (L, p) and mu.dtype == dtype
    assert torch.isfinite(mu).all()
    assert gram_error(mu, C, L) < 4 * torch.finfo(dtype).eps + 1e-12
    assert mu[L - 1, L - 1 :].abs().sum() == 0  # entry (L, L), where there is one


def test_low_precision_is_a_rounding_of_float64():
    mu = generate_opt_means(100.0, 64, 10)
    for dtype in DTYPES:
        assert torch.equal(generate_opt_means(100.0, 64, 10, dtype=dtype), mu.to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu_the_means_are_the_same():
    for L, p in [(10, 64), (9, 5), (8, 3)]:
        mu = separated_means(L, p, device="cuda", dtype=torch.float32)
        assert mu.is_cuda and torch.equal(mu.cpu(), separated_means(L, p, dtype=torch.float32))
        assert max_cosine(mu) == pytest.approx(max_cosine(mu.cpu()), abs=1e-7)


def test_cosines_of_any_scale():
    for scale in (1e-200, 1e200):
        assert max_cosine(scale * np.array([[3.0, 4.0], [4.0, 3.0]])) == pytest.approx(0.96, abs=1e-15)


# ---- Any number of classes


def test_simplex_where_it_fits():
    assert torch.equal(separated_means(10, 64, C=4.0), generate_opt_means(4.0, 64, 10))
    assert torch.equal(separated_means(65, 64, C=4.0), generate_opt_means(4.0, 64, 65))


@settings(deadline=None)
@given(data=st.data(), p=st.integers(2, 40), dtype=st.sampled_from(DTYPES))
def test_pairs_have_cosine_exactly_zero(data, p, dtype):
    L = data.draw(st.integers(p + 2, 2 * p)) if p > 2 else 4
    mu = separated_means(L, p, C=2.25, dtype=dtype)
    assert mu.dtype == dtype and mu.shape == (L, p)
    assert max_cosine(mu) == 0.0 == cosine_bound(L, p)
    assert mu.sum(0).abs().max() <= 1.5 * torch.finfo(dtype).eps
    norms = (mu.double() ** 2).sum(1)
    torch.testing.assert_close(norms, torch.full_like(norms, 2.25), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_pairs_are_plus_and_minus_the_axes():
    mu = separated_means(100, 64, C=9.0)
    assert ((mu != 0).sum(1) == 1).all() and (mu.abs().sum(1) == 3.0).all()
    assert torch.equal(mu[0::2], -mu[1::2])


def test_better_than_the_successors_optimiser():
    # The successor paper reports 0.10 for its optimised centres where 0 is possible.
    assert max_cosine(separated_means(100, 64)) == 0.0 < 0.10


@pytest.mark.parametrize("L", [5, 6, 10, 101])
def test_regular_polygon_in_the_plane(L):
    assert max_cosine(separated_means(L, 2)) == pytest.approx(math.cos(2 * math.pi / L), abs=1e-12)


def test_the_optimiser_itself_finds_the_decagon():
    assert max_cosine(optimise(10, 2, 0, cosine_bound(10, 2))) == pytest.approx(math.cos(math.radians(36)), abs=1e-9)


@pytest.mark.parametrize(("L", "p", "cosine"), [(12, 3, 5**-0.5), (10, 4, 1 / 6), (27, 6, 0.25), (56, 7, 1 / 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_known_optima(L, p, cosine, seed):
    assert max_cosine(separated_means(L, p, seed=seed)) == pytest.approx(cosine, abs=1e-8)


@pytest.mark.parametrize(("L", "seed"), [(7, 0), (8, 0), (9, 0), (10, 0), (15, 0), (15, 2)])
def test_tammes(L, seed):
    assert max_cosine(separated_means(L, 3, seed=seed)) == pytest.approx(math.cos(math.radians(TAMMES[L])), abs=1e-8)


@pytest.mark.long
def test_harder_known_optima():
    for L, p, cosine in [(24, 4, 0.5), (120, 4, math.cos(math.radians(36))), (240, 8, 0.5)]:
        assert max_cosine(separated_means(L, p)) == pytest.approx(cosine, abs=1e-8)
    for L, degrees in TAMMES.items():
        reached = max_cosine(separated_means(L, 3))
        assert reached == pytest.approx(math.cos(math.radians(degrees)), abs=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(("L", "p", "good"), [(100, 20, 0.1525), (100, 32, 0.0775)])
def test_larger_sizes_stay_between_the_bound_and_what_was_reached(L, p, good):
    assert cosine_bound(L, p) <= max_cosine(separated_means(L, p)) <= good


@settings(max_examples=4, deadline=None)
@given(p=st.integers(3, 4), extra=st.integers(1, 4), seed=st.integers(0, 1000), C=st.floats(0.01, 1e4))
def test_optimised_means_keep_their_norm_and_the_bound(p, extra, seed, C):
    L = 2 * p + extra
    mu = separated_means(L, p, C=C, seed=seed)
    torch.testing.assert_close((mu**2).sum(1), torch.full((L,), C, dtype=torch.float64), rtol=1e-12, atol=0)
    assert cosine_bound(L, p) - 1e-9 <= max_cosine(mu) < 0.8


def test_deterministic_from_its_seed():
    torch.manual_seed(0)
    first = separated_means(9, 4, seed=3)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, separated_means(9, 4, seed=3))
    assert not torch.equal(first, separated_means(9, 4, seed=4))
    torch.manual_seed(0)
    assert torch.equal(state, torch.random.get_rng_state())  # nothing drawn from the global generator


# ---- Bounds


@pytest.mark.parametrize(
    ("L", "p", "cosine"),  # sharp codes: the bound is attained
    [
        (5, 2, math.cos(2 * math.pi / 5)),
        (12, 3, 5**-0.5),
        (27, 6, 0.25),
        (56, 7, 1 / 3),
        (240, 8, 0.5),
        (16, 5, 0.2),
        (275, 22, 1 / 6),
        (552, 23, 0.2),
        (4600, 23, 1 / 3),
        (196560, 24, 0.5),
    ],
)
def test_bound_is_attained_by_the_sharp_codes(L, p, cosine):
    assert cosine_bound(L, p) == pytest.approx(cosine, abs=1e-10)


def test_bound_holds_for_published_optima_and_grows_with_the_number_of_classes():
    for N, degrees in TAMMES.items():
        assert cosine_bound(N, 3) <= math.cos(math.radians(degrees)) + 1e-8
    for p in (3, 5, 16, 64, 4096):
        sizes = sorted({*range(2, min(400, 4 * p)), 2 * p + 1, 8 * p, 10**5})
        bounds = [cosine_bound(L, p) for L in sizes]
        assert all(a <= b for a, b in itertools.pairwise(bounds)) and bounds[-1] < 1


@settings(deadline=None)
@given(st.integers(2, 30), st.integers(2, 8), st.integers(0, 10**6))
def test_bounds_hold_for_random_directions(L, p, seed):
    mu = np.random.default_rng(seed).standard_normal((L, p))
    cosines = mu @ mu.T / np.outer(np.linalg.norm(mu, axis=1), np.linalg.norm(mu, axis=1))
    off = cosines[~np.eye(L, dtype=bool)]
    assert max_cosine(mu) == pytest.approx(off.max(), abs=1e-12)
    assert off.max() >= cosine_bound(L, p) - 1e-12
    assert np.abs(off).max() >= welch_bound(L, p) - 1e-12


def test_welch_is_about_lines_not_directions():
    assert max_cosine(separated_means(100, 64)) < welch_bound(100, 64) == pytest.approx(0.0754, abs=1e-4)


def test_cosine_and_robustness_bounds_agree_on_the_simplex():
    for L in (2, 3, 10):
        assert robustness_bound(L, 1.0) == pytest.approx(math.sqrt((1 - cosine_bound(L, 64)) / 2), rel=1e-14)


# ---- Bad input


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: generate_opt_means(1.0, 5, 1), "L", "1"),
        (lambda: generate_opt_means(1.0, 5, 2.0), "L", "2.0"),
        (lambda: generate_opt_means(1.0, 0, 2), "p", "0"),
        (lambda: generate_opt_means(1.0, 5, 7), "L", "7"),
        (lambda: generate_opt_means(0.0, 5, 3), "C", "0.0"),
        (lambda: generate_opt_means(-1.0, 5, 3), "C", "-1.0"),
        (lambda: generate_opt_means(math.nan, 5, 3), "C", "nan"),
        (lambda: generate_opt_means(math.inf, 5, 3), "C", "inf"),
        (lambda: generate_opt_means("big", 5, 3), "C", "big"),
        (lambda: generate_opt_means("1", 5, 3), "C", "'1'"),
        (lambda: generate_opt_means(10**400, 5, 3), "C", "10000"),
        (lambda: generate_opt_means(1e12, 5, 3, dtype=torch.float16), r"sqrt\(C\)", "float16"),
        (lambda: generate_opt_means(1.0, 5, 3, dtype=torch.int64), "dtype", "int64"),
        (lambda: separated_means(1, 5), "num_classes", "1"),
        (lambda: separated_means(3, 0), "dim", "0"),
        (lambda: separated_means(3, 1), "num_classes", "3"),
        (lambda: separated_means(3, 5, C=-2.0), "C", "-2.0"),
        (lambda: separated_means(30, 5, seed=-1), "seed", "-1"),
        (lambda: max_cosine(torch.ones(3)), "means", r"\[3\]"),
        (lambda: max_cosine(torch.tensor([[1.0], [math.nan]])), "means", "finite"),
        (lambda: max_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]])), "means", "norm > 0, got 0 for class 1"),
        (lambda: max_cosine("wide"), "means", "wide"),
        (lambda: max_cosine([[1.0], [1.0, 2.0]]), "means", r"2\.0"),
        (lambda: cosine_bound(1, 3), "num_classes", "1"),
        (lambda: welch_bound(3, 0), "dim", "0"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(ValueError, match=rf"^{name} .*{value}"):
        call()
