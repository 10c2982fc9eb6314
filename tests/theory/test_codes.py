"""Structured means: every cosine counted, against brute force and the theory."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlda.theory import optimiser
from mmlda.theory.bounds import cosine_bound, welch_bound
from mmlda.theory.codes import (
    _POLYNOMIALS,
    BinaryCode,
    ChirpCode,
    _cosine,
    _field,
    _forms,
    _levels,
    _signs,
    _times,
    binary_code,
    capacity,
    chirp_code,
    hadamard,
)
from mmlda.theory.means import _code, _random_cosine, arrange_means, max_cosine, separated_means, settled_code


def shift_and_reduce(k, a, b):
    """Product in GF(2^k), bit by bit."""
    product = 0
    for bit in range(k):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(2 * k, k - 1, -1):
        if product >> bit & 1:
            product ^= _POLYNOMIALS[k] << (bit - k)
    return product


@pytest.mark.parametrize("k", sorted(_POLYNOMIALS))
def test_the_powers_are_the_field(k):
    powers, _, trace = _field(k)
    assert sorted(powers[: 2**k - 1].tolist()) == list(range(1, 2**k))  # the polynomial is primitive
    assert np.count_nonzero(trace) == 2 ** (k - 1) and set(trace.tolist()) == {0, 1}


@given(st.sampled_from([1, 3, 5, 9, 13]), st.data())
def test_products_in_the_field(k, data):
    a, b = (data.draw(st.integers(0, 2**k - 1)) for _ in range(2))
    assert _times(k, np.array([a]), np.array([b]))[0] == shift_and_reduce(k, a, b)
    trace = _field(k)[2]
    assert trace[a ^ b] == trace[a] ^ trace[b] and trace[shift_and_reduce(k, a, a)] == trace[a]


def transforms(m, level, first, count):
    """|inner products| * p of the bases `first` with all rows of `count` bases: [first, count, p], exact integers."""
    signs = _signs(m, level, count).astype(np.float32)
    return np.stack([np.abs(signs * signs[i] @ hadamard(1 << m).astype(np.float32)) for i in first])


@pytest.mark.parametrize("m", [2, 4, 6, 8, 10])
def test_kerdock_bases_are_mutually_unbiased(m):
    count = _forms(m, 0)
    first = range(count) if m <= 6 else [0, 1, count // 2, count - 1]
    found = transforms(m, 0, first, count)
    for i, cosines in zip(first, found):
        others = np.delete(cosines, i, 0)
        assert (others == 2 ** (m // 2)).all()  # |cosine| = 1 / sqrt(p), every one
        assert sorted(cosines[i].tolist()) == [0] * (2**m - 1) + [2**m]  # an orthonormal basis


@pytest.mark.parametrize("m", [3, 5, 7, 9])
def test_golds_bases(m):
    count, p = _forms(m, 0), 2**m
    first = range(count) if m <= 5 else [0, 1, count - 1]
    for i, cosines in zip(first, transforms(m, 0, first, count)):
        others = np.delete(cosines, i, 0)
        assert set(np.unique(others).tolist()) == {0, 2 ** ((m + 1) // 2)}
        assert (others > 0).sum(1).tolist() == [p // 2] * (count - 1)  # Parseval: half of them


@pytest.mark.parametrize(("m", "level"), [(4, 1), (5, 1), (6, 1), (6, 2), (7, 1)])
def test_higher_levels_double_the_cosine(m, level):
    count = min(_forms(m, level), 4096)
    largest = max(np.delete(cosines, i, 0).max() for i, cosines in zip((0, 33), transforms(m, level, (0, 33), count)))
    assert largest == 2**m * BinaryCode(2, m, level).max_cosine


@pytest.mark.parametrize(
    ("m", "counts"),  # of the cosines of one mean with all others, in units of 1 / sqrt(p) or sqrt(2 / p)
    [
        (2, {-2: 1, -1: 8, 0: 6, 1: 8}),
        (4, {-4: 1, -1: 128, 0: 30, 1: 128}),
        (6, {-8: 1, -1: 2048, 0: 126, 1: 2048}),
        (8, {-16: 1, -1: 32768, 0: 510, 1: 32768}),
    ],
)
def test_cosines_of_a_whole_kerdock_code(m, counts):
    mu = BinaryCode(capacity(m), m).means()
    assert mu.shape == (2**m * (2**m + 2), 2**m)
    for k in (0, 3, len(mu) - 1):  # the last is of the standard basis
        cosines = np.delete(mu @ mu[k], k) * 2 ** (m // 2)
        values, number = np.unique(cosines, return_counts=True)
        assert dict(zip(values.tolist(), number.tolist())) == counts


def test_brute_force_over_every_pair():
    for m, level in [(2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (4, 1)]:
        mu = torch.from_numpy(BinaryCode(capacity(m, level), m, level).means())
        assert max_cosine(mu) == pytest.approx(BinaryCode(2, m, level).max_cosine, abs=1e-12)


@pytest.mark.parametrize("d", [3, 5, 7, 13])
def test_every_pair_of_chirps(d):
    code = ChirpCode(4 * d * (d + 1), d)
    mu = torch.from_numpy(code.means())
    assert mu.shape == (code.num_classes, 2 * d) and max_cosine(mu) == pytest.approx(1 / math.sqrt(d), abs=1e-12)
    assert torch.allclose(mu.square().sum(1), torch.ones(len(mu), dtype=torch.float64), atol=1e-12)


def test_chirps_where_they_beat_the_powers_of_two():
    found = arrange_means(3000, 200)
    assert found.construction == "chirps" and found.max_cosine == pytest.approx(97**-0.5)
    assert max_cosine(found.means) == pytest.approx(97**-0.5, abs=1e-12)
    assert chirp_code(4 * 97 * 98 + 1, 200) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.data())
def test_punctured_codes_report_their_exact_cosine(m, data):
    p = data.draw(st.integers(2 ** (m - 1) + 1, 2**m - 1))
    level = data.draw(st.integers(0, _levels(m) - 1))
    L = data.draw(st.integers(2 * p + 1, min(_forms(m, level) << m + 1, 2500)))
    code = BinaryCode(L, m, level, 2**m - p)
    mu = code.means(3.0)
    assert mu.shape == (L, p) and not code.standard
    np.testing.assert_allclose((mu**2).sum(1), 9.0, rtol=1e-12)
    assert max_cosine(torch.from_numpy(mu)) == pytest.approx(code.max_cosine, abs=1e-12)


@pytest.mark.parametrize(
    ("L", "p", "name", "cosine", "padded"),  # padded: the best code in at most p dimensions, 1 if there is none
    [
        (3000, 255, "punctured Kerdock", 17 / 255, 127**-0.5),
        (3000, 250, "punctured Kerdock", 22 / 250, 113**-0.5),
        (3000, 240, "chirps", 113**-0.5, 113**-0.5),
        (3000, 62, "punctured Kerdock", 10 / 62, 31**-0.5),
        (2601, 51, "punctured Kerdock", 15 / 51, 0.5),
        (100_000, 63, "punctured Delsarte-Goethals", 17 / 63, 1.0),
        (100_000, 1000, "punctured Kerdock", 56 / 1000, 0.0625),
        (1_000_000, 1000, "punctured Kerdock", 56 / 1000, 0.125),  # the bound
    ],
)
def test_puncturing_where_it_helps(L, p, name, cosine, padded):
    code = _code(L, p)
    assert code.name == name and code.max_cosine == pytest.approx(cosine) and cosine <= padded


def test_dropping_a_coordinate_never_costs_more_than_the_padded_code():
    for p in range(33, 301, 7):
        for L in np.geomspace(2 * p + 1, p * p, 5).astype(int).tolist():
            padded = [
                _cosine(m, level)
                for m in range(2, p.bit_length())
                for level in range(_levels(m))
                if capacity(m, level) >= L
            ]
            assert binary_code(L, p).max_cosine <= min(padded)


def test_the_optimiser_is_asked_where_it_beats_a_punctured_code():
    assert settled_code(1908, 30) is None  # it reaches 0.324, punctured Gold 0.333
    assert settled_code(5000, 31) is None  # it reaches 0.391, punctured Delsarte-Goethals 0.548
    assert settled_code(2000, 63).max_cosine == pytest.approx(9 / 63) and settled_code(12_000, 31) is not None


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 40), st.integers(0, 3000), st.floats(0.01, 1e4))
def test_any_part_of_a_code_keeps_norm_and_cosine(p, extra, C):
    L = 2 * p + 1 + extra
    code = binary_code(L, p)
    if code is None:
        return
    mu = code.means(math.sqrt(C))
    assert mu.shape == (L, code.size - code.dropped) and mu.shape[1] <= p
    np.testing.assert_allclose((mu**2).sum(1), C, rtol=1e-12)
    assert max_cosine(torch.from_numpy(mu)) <= code.max_cosine + 1e-12
    assert cosine_bound(L, p) <= code.max_cosine + 1e-12
    assert np.allclose(mu[: L // 2 * 2 : 2], -mu[1::2])  # pairs: an even number of means sums to zero
    larger = binary_code(L + 1, mu.shape[1])
    same = larger is not None and replace(larger, num_classes=L) == code
    if same and not larger.standard:
        np.testing.assert_array_equal(larger.means(math.sqrt(C))[:L], mu)  # nested


@pytest.mark.parametrize(
    ("L", "p", "name", "cosine"),
    [
        (64, 64, "simplex", -1 / 63),
        (100, 64, "cross-polytope", 0.0),
        (9, 2, "polygon", math.cos(2 * math.pi / 9)),
        (1000, 64, "Kerdock", 0.125),
        (4224, 64, "Kerdock", 0.125),
        (8500, 64, "Delsarte-Goethals", 0.25),
        (5000, 128, "Gold", 0.125),
        (4000, 100, "Kerdock", 0.125),
        (9, 3, "optimised", 1 / 3),
    ],
)
def test_the_construction_is_named(L, p, name, cosine):
    found = arrange_means(L, p, C=9.0)
    assert found.construction == name and found.max_cosine == pytest.approx(cosine, abs=1e-8)
    assert found.bound == cosine_bound(L, p) <= found.max_cosine + 1e-12
    assert max_cosine(found.means) == pytest.approx(cosine, abs=1e-8)
    assert name in str(found) and torch.equal(found.means, separated_means(L, p, C=9.0))


def test_kerdock_meets_the_orthoplex_bound_and_beats_what_the_optimiser_reached():
    assert max_cosine(separated_means(1000, 64)) < 0.1251  # the optimiser: 0.146
    assert welch_bound(4224 // 2, 64) < 0.125  # of lines; beyond p (p + 1) / 2 lines the bound is 1 / sqrt(p)


def test_an_optimiser_that_could_win_is_asked():
    assert settled_code(120, 16) is None  # it reaches 0.229, Kerdock 0.25
    assert settled_code(200, 16) == BinaryCode(200, 4)  # it reaches 0.290
    assert settled_code(100, 8) is None  # it reaches 0.447, Gold 0.5
    assert settled_code(1000, 64) is not None and settled_code(3000, 64) is not None


@pytest.mark.parametrize(
    (
        "L",
        "p",
        "reached",
    ),  # by the optimiser in a minute, at the sizes where the chosen code is farthest from the bound
    [
        (163, 16, 0.2639),
        (200, 17, 0.2719),
        (215, 18, 0.2642),
        (252, 19, 0.2677),
        (276, 20, 0.2636),
        (711, 26, 0.2863),
        (963, 69, 0.1340),
        (1054, 33, 0.2618),
        (1426, 39, 0.2475),
        (1505, 81, 0.1372),
        (1511, 36, 0.2676),
        (1841, 38, 0.2698),
        (1997, 47, 0.2344),
    ],
)
def test_a_code_chosen_without_the_optimiser_beats_it(L, p, reached):
    assert settled_code(L, p).max_cosine < reached


@pytest.mark.parametrize(
    ("L", "p", "reached"),  # by the optimiser in a minute, where the code is poor or many classes share few dimensions
    [
        (1571, 16, 0.4921),
        (1985, 17, 0.4899),
        (4000, 32, 0.3610),
        (3000, 32, 0.340),
        (5000, 48, 0.294),
        (4225, 64, 0.2330),
    ],
)
def test_the_optimiser_is_asked_where_a_code_was_seen_to_lose(L, p, reached):
    assert settled_code(L, p) is None and binary_code(L, p).max_cosine > reached


def test_a_short_budget_is_spent_on_sharp_levels():
    seconds = 100.5 * 120**2 * (16 + 64) / optimiser._WORK
    assert optimiser.evaluations(120, 16, seconds) == 100
    found = optimiser.optimise(120, 16, 0, cosine_bound(120, 16), seconds)
    assert optimiser.largest_cosine(found) < 0.3  # 0.354 with nine levels


def test_the_optimiser_reports_what_it_has_spent():
    spent, seconds = [], 300.5 * 40**2 * (5 + 64) / optimiser._WORK
    optimiser.optimise(40, 5, 0, cosine_bound(40, 5), seconds, spent.append)
    assert spent == sorted(spent) and 0 < spent[0] and spent[-1] == 300


def test_without_time_for_the_optimiser_there_are_codes_alone():
    found = arrange_means(120, 16, seconds=0)
    assert found.construction == "Kerdock" and found.max_cosine == 0.25
    assert settled_code(120, 16, 0.0) == BinaryCode(120, 4)
    with pytest.raises(ValueError, match="dim must be at least 4 for 9 classes, got 3"):
        arrange_means(9, 3, seconds=0)
    for seconds in (-1, math.inf, "1"):
        with pytest.raises(ValueError, match="seconds must be a finite number >= 0"):
            separated_means(120, 16, seconds=seconds)


def test_points_on_a_sphere_start_from_a_spiral_where_time_is_short():
    spiral = optimiser._spiral(2000)
    np.testing.assert_allclose((spiral**2).sum(1), 1.0)
    seconds = 20.5 * 500**2 * (3 + 64) / optimiser._WORK
    found = optimiser.largest_cosine(optimiser.optimise(500, 3, 0, cosine_bound(500, 3), seconds))
    assert cosine_bound(500, 3) < found < 0.9895 < optimiser.largest_cosine(optimiser._spiral(500))


def test_a_code_that_random_directions_beat_is_not_used():
    L, p = 60_000, 25
    assert binary_code(L, p).max_cosine == pytest.approx(0.92)
    with pytest.raises(ValueError, match="dim must be at least"):
        separated_means(L, p)
    directions = np.random.default_rng(0).standard_normal((3000, 25))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    assert optimiser.largest_cosine(directions) == pytest.approx(_random_cosine(3000, 25), abs=0.02)


def test_too_many_classes_for_the_dimension():
    with pytest.raises(ValueError, match=r"^dim must be at least \d+ for 60000 classes, got 16"):
        separated_means(60_000, 16)


@pytest.mark.long
def test_a_million_means_in_1024_dimensions():
    code = binary_code(1_000_000, 1024)
    signs = code.signs().astype(np.float32)
    assert signs.shape == (489, 1024)
    for i in (0, 488):
        cosines = np.abs((signs * signs[i]) @ hadamard(1024).astype(np.float32))
        assert (np.delete(cosines, i, 0) == 32).all()
