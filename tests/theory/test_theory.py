"""Distances, robustness, Bayes error and standard form against Monte Carlo, quadrature and finite differences."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from mmlda import theory
from mmlda.theory.means import generate_opt_means

# ---- Theorem 2, Corollary 1


@pytest.mark.parametrize(("priors", "delta"), [((0.5, 0.5), 2.0), ((0.9, 0.1), 1.5), ((0.1, 0.9), 1.0)])
def test_expected_distance_by_monte_carlo(priors, delta):
    rng = np.random.default_rng(1)
    direction = rng.standard_normal(5)
    means = np.stack([direction, -direction]) * delta / (2 * np.linalg.norm(direction))
    alpha, beta = theory.discriminants(means, priors)
    x = means[0] + rng.standard_normal((400_000, 5))
    d = np.abs(beta[0, 1] + x @ alpha[0, 1]) / np.linalg.norm(alpha[0, 1])
    expected = theory.expected_distance(delta, math.log(priors[0] / priors[1]))
    assert abs(d.mean() - expected) < 4 * d.std() / len(d) ** 0.5 < 0.01


def test_theorem_2_as_printed():
    delta = np.linspace(0, 30, 301)
    printed = np.sqrt(2 / np.pi) * np.exp(-(delta**2) / 8) + delta / 2 * (1 - 2 * norm.cdf(-delta / 2))
    np.testing.assert_allclose(theory.expected_distance(delta), printed, rtol=1e-14)
    np.testing.assert_allclose(
        theory.expected_distance_derivative(delta), (1 - 2 * norm.cdf(-delta / 2)) / 2, rtol=1e-13, atol=1e-16
    )


@settings(deadline=None)
@given(delta=st.floats(0.05, 30), zeta=st.floats(-5, 5))
def test_derivative_by_finite_differences(delta, zeta):
    with mpmath.workdps(40):

        def E(d):
            a = d / 2 + mpmath.mpf(zeta) / d
            return mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-a * a / 2) + a * mpmath.erf(a / mpmath.sqrt(2))

        h = mpmath.mpf(10) ** -12
        slope = float((E(mpmath.mpf(delta) + h) - E(mpmath.mpf(delta) - h)) / (2 * h))
    assert theory.expected_distance_derivative(delta, zeta) == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_derivative_is_negative_exactly_where_the_priors_outweigh_the_distance():
    assert theory.expected_distance_derivative(1.0, 1.0) == pytest.approx(-0.4332, abs=1e-4)
    delta, zeta = np.meshgrid(np.linspace(0.1, 6, 60), np.linspace(-4, 4, 81), indexing="ij")
    derivative = theory.expected_distance_derivative(delta, zeta)
    clear = np.abs(np.abs(zeta) - delta**2 / 2) > 1e-9
    np.testing.assert_array_equal((derivative > 0)[clear], (np.abs(zeta) < delta**2 / 2)[clear])


def test_half_delta_is_as_close_as_the_paper_says():
    delta = np.linspace(10, 1e4, 10_000)
    gap = np.abs(theory.expected_distance(delta) / delta - 0.5)
    assert gap.max() < 1.1e-8  # the paper's 1e-7 is true, and loose


def test_distance_without_distance():
    assert theory.expected_distance(0.0) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-15)
    assert theory.expected_distance_derivative(0.0) == 0.0
    assert theory.expected_distance(0.0, 1.0) == theory.expected_distance(0.0, -1.0) == math.inf
    assert theory.expected_distance_derivative(0.0, [1.0, -1.0]).tolist() == [-math.inf, -math.inf]


@settings(deadline=None)
@given(delta=st.floats(0, 1e4), zeta=st.floats(-1e3, 1e3), p=st.sampled_from([1, 5, math.inf]))
def test_no_nan_anywhere(delta, zeta, p):
    assert theory.expected_distance(delta, zeta) >= math.sqrt(2 / math.pi) * (1 - 1e-15)
    assert not math.isnan(theory.expected_distance_derivative(delta, zeta))
    assert 0 <= theory.relative_efficiency(zeta, delta, p) <= 1


@settings(deadline=None)
@given(delta=st.floats(0, 1e308), zeta=st.floats(-1e308, 1e308), p=st.sampled_from([1, 5, math.inf]))
@example(delta=1.0, zeta=1e16, p=1)
@example(delta=1e160, zeta=0.0, p=2)
@example(delta=1e160, zeta=1e308, p=math.inf)
def test_efficiency_is_a_share_at_any_scale(delta, zeta, p):
    assert 0 <= theory.relative_efficiency(zeta, delta, p) <= 1


@pytest.mark.parametrize("delta", [1e6, 1e8, 1e100, 1e150])
def test_efficiency_where_one_class_begins_to_win_everywhere(delta):
    # the boundary is at the mean of the rarer class, of which half is lost
    assert theory.relative_efficiency(delta**2 / 2, delta, math.inf) == pytest.approx(0.5, rel=1e-5)


def test_no_overflow_warning_and_finite_at_ten_thousand():
    delta = np.geomspace(1e-4, 1e4, 50)
    for zeta in (-5.0, 0.0, 5.0):
        assert np.isfinite(theory.expected_distance(delta, zeta)).all()
        assert np.isfinite(theory.expected_distance_derivative(delta, zeta)).all()
        assert np.isfinite(theory.relative_efficiency(zeta, delta, 2)).all()
    assert theory.expected_distance(1e4) == 5000.0


# ---- Kinds

ELEMENTWISE = [
    theory.expected_distance,
    theory.expected_distance_derivative,
    lambda delta, zeta: theory.relative_efficiency(zeta, delta, 3),
    lambda delta, zeta: (
        theory.robustness_bound(np.round(delta) + 2, abs(zeta) + 1)
        if not isinstance(delta, torch.Tensor)
        else theory.robustness_bound(delta.round() + 2, zeta.abs() + 1)
    ),
]


@pytest.mark.parametrize("function", ELEMENTWISE)
def test_the_same_kind_comes_back_elementwise(function):
    delta, zeta = np.array([[0.5], [1.0], [4.0]]), np.array([-1.0, 0.25])
    array = function(delta, zeta)
    assert isinstance(array, np.ndarray) and array.shape == (3, 2) and array.dtype == np.float64
    tensor = function(torch.tensor(delta, dtype=torch.float32), torch.tensor(zeta, dtype=torch.float32))
    assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64
    np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-14)
    for i in range(3):
        for j in range(2):
            scalar = function(float(delta[i, 0]), float(zeta[j]))
            assert type(scalar) is float and scalar == pytest.approx(array[i, j], rel=1e-14)


def test_gradients_flow():
    delta = torch.tensor([0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    zeta = torch.tensor([0.0, 0.3, -2.0])
    theory.expected_distance(delta, zeta).sum().backward()
    torch.testing.assert_close(delta.grad, theory.expected_distance_derivative(delta, zeta).detach())
    delta.grad = None
    theory.relative_efficiency(0.0, delta, 2).sum().backward()
    x, h = np.array([0.5, 3.0]), 1e-5
    slope = (theory.relative_efficiency(0.0, x + h, 2) - theory.relative_efficiency(0.0, x - h, 2)) / (2 * h)
    np.testing.assert_allclose(delta.grad, [0.0, *slope], rtol=1e-6, atol=1e-12)
    mu = generate_opt_means(4.0, 3, 3).requires_grad_()
    theory.robustness(mu).backward()
    assert torch.isfinite(mu.grad).all() and mu.grad.abs().max() > 0


def test_another_default_device_does_not_matter():
    mu = np.random.default_rng(0).standard_normal((4, 3))
    expected = theory.robustness(mu), theory.bayes_error(mu), theory.bayes_error(np.eye(3))
    with torch.device("meta"):
        assert expected == (theory.robustness(mu), theory.bayes_error(mu), theory.bayes_error(np.eye(3)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu_it_stays_there():
    mu, priors = generate_opt_means(9.0, 12, 10), torch.linspace(1, 2, 10, dtype=torch.float64)
    priors /= priors.sum()
    calls = [
        lambda d: theory.relative_efficiency(0.5, torch.linspace(0, 9, 5, device=d), 3),
        lambda d: theory.expected_distance(torch.linspace(0, 9, 5, device=d), -0.5),
        lambda d: theory.robustness(mu.to(d), priors),
        lambda d: theory.bayes_error(mu.to(d)),
        lambda d: theory.bayes_error(mu.to(d), priors),
        lambda d: theory.standard_form(mu.to(d), torch.eye(12, device=d) * 4),
        lambda d: theory.discriminants(mu.to(d), priors.to(d))[1],
    ]
    for call in calls:
        here, there = call("cpu"), call("cuda")
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-12)


def test_empty_and_large_grids():
    assert theory.relative_efficiency(0.0, np.zeros((0, 3)), 1).shape == (0, 3)
    delta = np.linspace(0, 10, 5000)
    whole = theory.relative_efficiency(1.0, delta, 2)
    np.testing.assert_allclose(whole[::999], [theory.relative_efficiency(1.0, d, 2) for d in delta[::999]])


# ---- Robustness


@pytest.mark.parametrize(("L", "p", "C"), [(2, 1, 1.0), (3, 2, 0.25), (10, 64, 100.0), (65, 64, 10.0)])
def test_theorem_3_equality_for_the_generated_means(L, p, C):
    means = generate_opt_means(C, p, L)
    bound = theory.robustness_bound(L, C)
    assert bound == pytest.approx(math.sqrt(L * C / (2 * (L - 1))), rel=1e-15)
    assert theory.approximate_robustness(means).item() == pytest.approx(bound, rel=1e-13)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 10**6))
def test_theorem_3_bound_for_any_centred_means(L, p, seed):
    mu = np.random.default_rng(seed).standard_normal((L, p))
    mu -= mu.mean(0)
    C = (mu**2).sum(1).max()
    assert theory.approximate_robustness(mu) <= theory.robustness_bound(L, C) * (1 + 1e-12)


def test_robustness_is_the_least_ordered_pair():
    mu = np.random.default_rng(2).standard_normal((4, 3)) * 2
    priors = np.array([0.7, 0.1, 0.15, 0.05])
    pairs = [
        theory.expected_distance(float(np.linalg.norm(mu[i] - mu[j])), math.log(priors[i] / priors[j]))
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    assert theory.robustness(mu, priors) == pytest.approx(min(pairs), rel=1e-14)
    assert theory.robustness(mu, priors) != pytest.approx(theory.robustness(mu), rel=1e-3)
    assert theory.approximate_robustness(mu) == pytest.approx(
        min(np.linalg.norm(mu[i] - mu[j]) for i in range(4) for j in range(i)) / 2, rel=1e-14
    )


def test_soft_target_gap_is_the_posterior_at_a_mean():
    for L, C, precision in [(10, 1.0, 1.0), (3, 2.0, 2.0), (2, 0.5, 1.0)]:
        mu = generate_opt_means(C, L - 1, L)
        posterior = torch.softmax(-precision * torch.cdist(mu[:1], mu)[0] ** 2 / 2, 0)
        assert theory.soft_target_gap(L, C, precision) == pytest.approx(1 - posterior[0].item(), rel=1e-12)


def test_soft_target_gap_in_appendix_b1():
    assert theory.soft_target_gap(10, 10.0, precision=2.0) < 1e-8
    assert theory.soft_target_gap(10, 10.0) > 1e-4  # not with N(z; mu, I)
    assert theory.soft_target_gap(10, 18.6) < 1e-8 < theory.soft_target_gap(10, 18.5)


# ---- Bayes error


@pytest.mark.parametrize("priors", [(0.5, 0.5), (0.9, 0.1), (0.02, 0.98)])
def test_two_class_bayes_error_by_quadrature(priors):
    means = np.array([[0.3, 1.0], [-0.5, 0.2]])
    delta = np.linalg.norm(means[0] - means[1])
    t = np.linspace(-12, 12 + delta, 400_001)
    least = np.minimum(priors[0] * norm.pdf(t), priors[1] * norm.pdf(t, delta))
    assert theory.bayes_error(means, priors) == pytest.approx(np.trapezoid(least, t), rel=1e-8)


@pytest.mark.parametrize(("L", "C"), [(3, 1.0), (5, 4.0), (10, 9.0)])
def test_simplex_bayes_error_against_scipy_orthants(L, C):
    """P(correct) is an orthant probability of the L - 1 correlated scores."""
    mu = generate_opt_means(C, L - 1, L)
    A = (mu[0] - mu[1:]).numpy()  # class 0 wins where A x > (|mu_0|^2 - |mu_k|^2) / 2 = 0
    correct = multivariate_normal(A @ -mu[0].numpy(), A @ A.T, allow_singular=True).cdf(np.zeros(L - 1))
    assert theory.bayes_error(mu).item() == pytest.approx(1 - correct, rel=2e-3)


def test_simplex_bayes_error_in_the_tail():
    # At C = 100 the error is all from pairs: the union bound is exact to a few parts in a thousand.
    mu = generate_opt_means(100.0, 64, 10)
    delta = 2 * theory.approximate_robustness(mu).item()
    union = 9 * norm.cdf(-delta / 2)
    assert 0.99 * union < theory.bayes_error(mu).item() < union
    assert theory.bayes_error(generate_opt_means(1e8, 64, 10)).item() == 0.0


def test_float32_simplex_is_still_a_simplex():
    mu = generate_opt_means(9.0, 64, 10)
    exact = theory.bayes_error(mu).item()
    assert theory.bayes_error(mu.float()).item() == pytest.approx(exact, rel=1e-5)
    assert theory.bayes_error(mu.float().numpy()) == pytest.approx(exact, rel=1e-5)


def test_sampled_bayes_error_covers_the_exact_one():
    cases = [(generate_opt_means(C, 12, L), None) for L, C in [(3, 1.0), (10, 9.0), (10, 100.0)]]
    cases += [(torch.tensor([[1.0, 0.0], [-1.0, 0.5]]), torch.tensor([0.8, 0.2]))]
    for means, priors in cases:
        exact = theory.bayes_error(means, priors)
        error, standard_error = theory.bayes_error_estimate(means, priors, seed=3)
        assert abs(error - exact) < 4 * standard_error
        assert 0 < standard_error < 0.02 * exact


def test_sampled_bayes_error_of_a_general_mixture():
    rng = np.random.default_rng(5)
    mu, priors = rng.standard_normal((6, 3)) * 1.5, np.array([0.4, 0.2, 0.2, 0.1, 0.1, 0.0])
    y = rng.choice(6, 400_000, p=priors)
    x = mu[y] + rng.standard_normal((len(y), 3))
    with np.errstate(divide="ignore"):
        wrong = (x @ mu.T - (mu**2).sum(1) / 2 + np.log(priors)).argmax(1) != y
    error, standard_error = theory.bayes_error_estimate(mu, priors)
    assert abs(error - wrong.mean()) < 4 * math.hypot(standard_error, wrong.std() / len(y) ** 0.5)
    assert theory.bayes_error(mu, priors) == error  # deterministic, and the same number
    assert theory.bayes_error(mu, priors, seed=1) != error


def test_bayes_error_when_one_class_has_all_the_mass():
    assert theory.bayes_error([[0.0], [1.0]], [1.0, 0.0]) == 0.0
    assert theory.bayes_error(np.eye(3), [1.0, 0.0, 0.0]) == 0.0
    assert theory.bayes_error([[1.0], [1.0]], [0.3, 0.7]) == pytest.approx(0.3, rel=1e-14)


# ---- Standard form


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_standard_form_keeps_mahalanobis_distances(L, p, seed):
    rng = np.random.default_rng(seed)
    means, root = rng.standard_normal((L, p)) + 3, rng.standard_normal((p, p)) + 2 * np.eye(p)
    covariance = root @ root.T + 0.1 * np.eye(p)
    standard = theory.standard_form(means, covariance)
    np.testing.assert_allclose(standard.sum(0), 0, atol=1e-9)
    for i in range(L):
        for j in range(i):
            gap = means[i] - means[j]
            expected = math.sqrt(gap @ np.linalg.solve(covariance, gap))
            assert np.linalg.norm(standard[i] - standard[j]) == pytest.approx(expected, rel=1e-8)


def test_whitened_data_has_unit_covariance():
    rng = np.random.default_rng(0)
    means, covariance = np.array([[2.0, 1.0], [4.0, 5.0]]), np.array([[4.0, 1.5], [1.5, 1.0]])
    y = rng.integers(2, size=200_000)
    x = means[y] + rng.multivariate_normal([0, 0], covariance, len(y))
    white = theory.whiten(x, means, covariance)
    within = white - theory.standard_form(means, covariance)[y]
    np.testing.assert_allclose(np.cov(within.T), np.eye(2), atol=0.02)
    np.testing.assert_allclose(within.mean(0), 0, atol=0.02)


def test_discriminants_decide_like_the_posterior():
    rng = np.random.default_rng(4)
    mu, priors = rng.standard_normal((4, 3)), np.array([0.4, 0.3, 0.2, 0.1])
    alpha, beta = theory.discriminants(mu, priors)
    assert alpha.shape == (4, 4, 3) and beta.shape == (4, 4)
    x = rng.standard_normal(3)
    log_joint = [math.log(w) + multivariate_normal(m, np.eye(3)).logpdf(x) for w, m in zip(priors, mu)]
    np.testing.assert_allclose(beta + alpha @ x, np.subtract.outer(log_joint, log_joint), atol=1e-12)


# ---- Bad input

TWO = [[1.0], [-1.0]]


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: theory.relative_efficiency(0.0, 1.0, 0), "p", "0"),
        (lambda: theory.relative_efficiency(0.0, 1.0, 1.5), "p", "1.5"),
        (lambda: theory.relative_efficiency(0.0, 1.0, np.array([1, 2])), "p", "array"),
        (lambda: theory.relative_efficiency(0.0, 1.0, -math.inf), "p", "-inf"),
        (lambda: theory.expected_distance([1.0, 2.0], [0.0] * 3), "delta and zeta", r"\[2\] and \[3\]"),
        (lambda: theory.robustness_bound([2, 3], [1.0] * 3), "num_classes and C", r"\[2\] and \[3\]"),
        (lambda: theory.relative_efficiency(0.0, -1.0, 1), "delta", "-1.0"),
        (lambda: theory.relative_efficiency(math.nan, 1.0, 1), "zeta", "nan"),
        (lambda: theory.expected_distance(-2.0), "delta", "-2.0"),
        (lambda: theory.expected_distance(math.nan), "delta", "nan"),
        (lambda: theory.expected_distance("far"), "delta", "far"),
        (lambda: theory.expected_distance(torch.tensor([1.0, math.inf])), "delta", "inf"),
        (lambda: theory.expected_distance_derivative(1.0, math.inf), "zeta", "inf"),
        (lambda: theory.robustness([1.0, 2.0]), "means", r"\[2\]"),
        (lambda: theory.robustness([[1.0, 2.0]]), "means", r"\[1, 2\]"),
        (lambda: theory.robustness([[1.0], [math.nan]]), "means", "nan"),
        (lambda: theory.robustness(TWO, [0.5, 0.25, 0.25]), "priors", r"\[3\]"),
        (lambda: theory.robustness(TWO, [0.5, 0.6]), "priors", "1.1"),
        (lambda: theory.robustness(TWO, [1.5, -0.5]), "priors", "-0.5"),
        (lambda: theory.robustness(TWO, [1.0, 0.0]), "priors", "0.0"),
        (lambda: theory.bayes_error(TWO, [math.nan, 0.5]), "priors", "nan"),
        (lambda: theory.bayes_error_estimate(TWO, samples=1), "samples", "1"),
        (lambda: theory.approximate_robustness(np.zeros((2, 0))), "means", r"\[2, 0\]"),
        (lambda: theory.robustness_bound(1, 1.0), "num_classes", "1"),
        (lambda: theory.robustness_bound(2.5, 1.0), "num_classes", "2.5"),
        (lambda: theory.robustness_bound(2, 0.0), "C", "0.0"),
        (lambda: theory.robustness_bound(2, math.inf), "C", "inf"),
        (lambda: theory.soft_target_gap(2, 1.0, precision=0.0), "precision", "0.0"),
        (lambda: theory.standard_form(TWO, [[1.0, 0.0], [0.0, 1.0]]), "covariance", r"\[2, 2\]"),
        (lambda: theory.standard_form(TWO, [[-1.0]]), "covariance", "-1.0"),
        (lambda: theory.standard_form(np.eye(2), [[1.0, 0.5], [0.0, 1.0]]), "covariance", "symmetric"),
        (lambda: theory.whiten([[1.0, 2.0]], TWO, [[1.0]]), "x", r"\[1, 2\]"),
        (lambda: theory.discriminants(TWO, [0.0, 1.0]), "priors", "0.0"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(ValueError, match=rf"^{name} .*{value}"):
        call()
