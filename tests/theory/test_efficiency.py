"""Theorem 1: the relative efficiency against mpmath, fitted classifiers and Efron's published table."""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch

from mmlda import theory

EFRON = {0: 1.000, 0.5: 1.000, 1: 0.995, 1.5: 0.968, 2: 0.899, 2.5: 0.786, 3: 0.641, 3.5: 0.486, 4: 0.343}


@pytest.mark.parametrize("p", [1, 2, 64, math.inf])
def test_efrons_table_at_equal_priors(p):
    efficiency = theory.relative_efficiency(0.0, np.array(list(EFRON)), p)
    assert np.abs(efficiency - np.array(list(EFRON.values()))).max() <= 0.0005


@functools.cache
def _integrals(zeta, delta):
    """The paper's A_0, A_1, A_2 with (2 pi)^(-1/2) in the density, to 30 digits."""
    with mpmath.workdps(30):
        z, d = mpmath.mpf(zeta), mpmath.mpf(delta)
        pi_1 = 1 / (1 + mpmath.exp(-z))
        knee = -z / d
        edges = sorted({-16, 16, mpmath.mpf(0), -d / 2, d / 2} | ({knee} if abs(knee) < 16 else set()))

        def integrand(i):
            return lambda x: (
                mpmath.exp(-d * d / 8)
                * x**i
                * mpmath.npdf(x)
                / ((1 - pi_1) * mpmath.exp(-d * x / 2) + pi_1 * mpmath.exp(d * x / 2))
            )

        return pi_1, [mpmath.quad(integrand(i), edges) for i in range(3)]


def _efficiency_by_mpmath(zeta, delta, p, sign=1):
    """Theorem 1 as the paper prints it; `sign` -1 reads zeta as log(pi_0 / pi_1) in its vectors."""
    with mpmath.workdps(30):
        pi_1, (A0, A1, A2) = _integrals(zeta, delta)
        z, d, pi_0 = sign * mpmath.mpf(zeta), mpmath.mpf(delta), 1 - pi_1
        row = mpmath.matrix([[1, z / d]])
        skew = (pi_0 - pi_1) * d / 2
        Q1 = (row * mpmath.matrix([[1 + d * d / 4, skew], [skew, 1 + 2 * pi_0 * pi_1 * d * d]]) * row.T)[0]
        Q2 = 1 + pi_0 * pi_1 * d * d
        Q3 = (row * mpmath.matrix([[A2, A1], [A1, A0]]) * row.T)[0] / (A0 * A2 - A1**2)
        Q4 = 1 / A0
        return float(Q2 / Q4 if p == math.inf else (Q1 + (p - 1) * Q2) / (Q3 + (p - 1) * Q4))


@pytest.mark.parametrize("delta", [1e-6, 0.05, 1.0, 3.99, 4.01, 7.0, 10.0])
@pytest.mark.parametrize("zeta", [-5.0, 0.0, 0.3, 5.0])
def test_efficiency_agrees_with_mpmath(delta, zeta):
    for p in (1, 7, math.inf):
        expected = _efficiency_by_mpmath(zeta, delta, p)
        assert theory.relative_efficiency(zeta, delta, p) == pytest.approx(expected, rel=1e-10, abs=0)


@pytest.mark.long
def test_efficiency_agrees_with_mpmath_on_random_points():
    rng = np.random.default_rng(0)
    for _ in range(40):
        delta, zeta = 10 * rng.random() ** 2 + 1e-9, rng.uniform(-5, 5)
        p = [1, 2, 64, 10**6, math.inf][rng.integers(5)]
        expected = _efficiency_by_mpmath(zeta, delta, p)
        assert theory.relative_efficiency(zeta, delta, p) == pytest.approx(expected, rel=1e-8, abs=0)


@pytest.mark.parametrize("p", [1, 3, math.inf])
def test_efficiency_at_delta_zero_is_one_and_the_limit(p):
    zeta = np.linspace(-5, 5, 11)
    np.testing.assert_allclose(theory.relative_efficiency(zeta, 0.0, p), 1.0, rtol=1e-13)
    np.testing.assert_allclose(theory.relative_efficiency(zeta, 1e-200, p), 1.0, rtol=1e-13)
    np.testing.assert_allclose(theory.relative_efficiency(zeta, 1e-5, p), 1.0, rtol=1e-9)


def test_larger_prior_ratio_need_not_lower_the_efficiency():
    zeta = math.log(0.75 / 0.25)
    efficiency = [theory.relative_efficiency(zeta, 3.0, p) for p in (1, 2, 64)]
    assert [round(e, 3) for e in efficiency] == [0.682, 0.637, 0.591]
    # Swapping the classes changes nothing.
    assert theory.relative_efficiency(-zeta, 3.0, 1) == pytest.approx(efficiency[0], rel=1e-13)


def _excess_errors(delta, pi_1, p, size, repeats, seed):
    """Excess error over Bayes of LDA and of logistic regression, each fitted to `repeats` samples of `size`."""
    rng = torch.Generator().manual_seed(seed)
    y = (torch.rand(repeats, size, generator=rng, dtype=torch.float64) < pi_1).double()
    x = torch.randn(repeats, size, p, generator=rng, dtype=torch.float64)
    x[..., 0] += delta * (y - 0.5)
    n1 = y.sum(1)
    # LDA: plug-in means, pooled covariance, empirical priors.
    mean_1 = torch.einsum("rn,rnp->rp", y, x) / n1[:, None]
    mean_0 = torch.einsum("rn,rnp->rp", 1 - y, x) / (size - n1)[:, None]
    centred = x - torch.where(y[..., None] > 0, mean_1[:, None], mean_0[:, None])
    covariance = torch.einsum("rnp,rnq->rpq", centred, centred) / size
    w = torch.linalg.solve(covariance, mean_1 - mean_0)
    b = torch.log(n1 / (size - n1)) - (w * (mean_1 + mean_0)).sum(1) / 2
    lda = torch.cat([b[:, None], w], 1)
    # Logistic regression: Newton from the truth.
    one_x = torch.cat([torch.ones_like(x[..., :1]), x], 2)
    theta = torch.zeros(repeats, p + 1, dtype=torch.float64)
    theta[:, 0], theta[:, 1] = math.log(pi_1 / (1 - pi_1)), delta
    for _ in range(8):
        q = torch.sigmoid(torch.einsum("rnp,rp->rn", one_x, theta))
        gradient = torch.einsum("rnp,rn->rp", one_x, y - q)
        hessian = torch.einsum("rnp,rn,rnq->rpq", one_x, q * (1 - q), one_x)
        theta = theta + torch.linalg.solve(hessian, gradient)
    assert gradient.abs().max() < 1e-6

    def error(rule):  # exact, for the true distribution
        norm = torch.linalg.vector_norm(rule[:, 1:], dim=1)
        at = lambda side: torch.special.ndtr((rule[:, 0] + side * delta / 2 * rule[:, 1]) / norm)  # noqa: E731
        return (1 - pi_1) * at(-1) + pi_1 * (1 - at(+1))

    best = torch.tensor([[math.log(pi_1 / (1 - pi_1)), delta] + [0.0] * (p - 1)], dtype=torch.float64)
    return error(lda) - error(best), error(theta) - error(best)


@pytest.mark.long
@pytest.mark.parametrize(("delta", "pi_1", "p", "repeats"), [(2.0, 0.9, 1, 24000), (2.5, 0.9, 8, 4000)])
def test_efficiency_agrees_with_fitted_classifiers(delta, pi_1, p, repeats):
    block = 400 // p
    parts = [_excess_errors(delta, pi_1, p, 2000, block, seed) for seed in range(repeats // block)]
    lda, lr = (torch.cat(part) for part in zip(*parts))
    measured = (lda.mean() / lr.mean()).item()
    standard_error = ((lda - measured * lr).std() / len(lr) ** 0.5 / lr.mean()).item()
    zeta = math.log(pi_1 / (1 - pi_1))
    tolerance = 4 * standard_error + 0.01  # the second term: the samples are finite, the theorem is a limit
    assert abs(measured - theory.relative_efficiency(zeta, delta, p)) < tolerance
    # The measurement tells it from 1 and from its value at equal priors; and from zeta with the other sign at p = 1,
    # where it matters most.
    others = [1.0, theory.relative_efficiency(0.0, delta, p)]
    if p == 1:
        others.append(_efficiency_by_mpmath(zeta, delta, p, sign=-1))
    for other in others:
        assert abs(measured - other) > 2 * tolerance
