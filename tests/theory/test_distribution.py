"""The distribution against SciPy, scikit-learn, torch's own mixtures and simulation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from mmlda.theory import MaxMahalanobisDistribution, empirical_priors
from mmlda.theory.means import generate_opt_means, separated_means

F64 = torch.float64
# (num_classes, dim): the simplex and the pairs; beyond them the means are searched for, which takes a while
SIZES = st.integers(1, 9).flatmap(lambda dim: st.tuples(st.integers(2, min(2 * dim, 12)), st.just(dim)))


def make(num_classes=4, dim=5, C=3.0, priors=None, precision=1.0, **more):
    """A float64 distribution."""
    return MaxMahalanobisDistribution(
        num_classes=num_classes, dim=dim, C=torch.tensor(C, dtype=F64), priors=priors, precision=precision, **more
    )


def random_priors(num_classes, seed, shape=()):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand((*shape, num_classes), generator=generator, dtype=F64) + 0.05
    return weights / weights.sum(-1, keepdim=True)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# -- density and posterior -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    sizes=SIZES,
    C=st.floats(0.01, 300.0),
    precision=st.floats(0.1, 10.0),
    seed=st.integers(0, 1000),
)
def test_log_prob_is_scipys_mixture(sizes, C, precision, seed):
    num_classes, dim = sizes
    from scipy.special import logsumexp
    from scipy.stats import multivariate_normal

    pi = random_priors(num_classes, seed)
    dist = make(num_classes, dim, C, pi, precision)
    mu = separated_means(num_classes, dim, C=C).numpy()
    z = torch.randn(7, dim, generator=generator(seed), dtype=F64) * 3
    log_joint = np.stack(
        [
            np.log(pi[k].item()) + multivariate_normal(mu[k], np.eye(dim) / precision).logpdf(z.numpy())
            for k in range(num_classes)
        ],
        axis=-1,
    ).reshape(7, num_classes)
    expected = logsumexp(log_joint, axis=1)
    np.testing.assert_allclose(dist.log_prob(z).numpy(), expected, rtol=1e-10, atol=1e-9)
    posterior = np.exp(log_joint - expected[:, None])
    np.testing.assert_allclose(dist.posterior(z).numpy(), posterior, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("precision", [1.0, 2.0])
def test_posterior_is_scikit_learns_lda(precision):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    L, p, C = 5, 6, 4.0
    pi = random_priors(L, 1)
    mu = generate_opt_means(C, p, L)
    # 2p points around each mean whose covariance is exactly I / precision, so that LDA estimates our parameters
    step = math.sqrt(p / precision) * torch.eye(p, dtype=F64)
    x = (mu[:, None] + torch.cat([step, -step])).reshape(-1, p).numpy()
    y = np.repeat(np.arange(L), 2 * p)
    lda = LinearDiscriminantAnalysis(solver="lsqr", priors=pi.numpy()).fit(x, y)
    np.testing.assert_allclose(lda.covariance_, np.eye(p) / precision, atol=1e-12)

    z = torch.randn(200, p, generator=generator(), dtype=F64) * 2
    posterior = make(L, p, C, pi, precision).posterior(z).numpy()
    np.testing.assert_allclose(posterior, lda.predict_proba(z.numpy()), rtol=1e-9, atol=1e-12)
    assert posterior.max(1).min() < 0.9  # some points are undecided, or the comparison would say little


def test_float32_log_prob_keeps_its_digits_at_a_large_C():
    """Squares are taken of differences: near its mean a density is right to float32 however far out the mean lies."""
    exact = make(10, 64, 1e8)
    z, _ = exact.sample_labeled((50,), generator())
    z = z.float().double()  # the same points for both
    single = MaxMahalanobisDistribution(num_classes=10, dim=64, C=1e8)
    single.means = exact.means.float()
    exact.means = exact.means.float().double()
    assert single.log_prob(z.float()).dtype == torch.float32
    torch.testing.assert_close(single.log_prob(z.float()).double(), exact.log_prob(z), rtol=1e-5, atol=0)


def test_log_prob_gradient():
    dist = make(4, 3, 2.0, random_priors(4, 0), 1.5)
    z = torch.randn(5, 3, generator=generator(), dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(dist.log_prob, z)
    assert torch.autograd.gradcheck(dist.posterior, z)


def test_density_integrates_to_one():
    dist = make(3, 2, 4.0, [0.5, 0.3, 0.2], 2.0)
    axis = torch.linspace(-9, 9, 361, dtype=F64)
    grid = torch.cartesian_prod(axis, axis)
    assert dist.log_prob(grid).exp().sum().item() * 0.05**2 == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("precision", "C"), [(2.0, 10.0), (1.0, 18.7), (1.0, 18.5), (1.0, 10.0)])
def test_appendix_b1_gap(precision, C):
    """1 - P(y | mu_y) = 1 / (1 + exp(precision L C / (L - 1)) / (L - 1)), and "<= 1e-8 for C > 10" needs precision 2;
    with 1 it takes C > 18.6."""
    L = 10
    dist = make(L, 16, C, precision=precision)
    posterior = dist.posterior(dist.means)  # [L, L]
    gap = (posterior.sum(1) - posterior.diagonal()).mean().item()  # 1 - P without cancellation: the other classes
    others = posterior.masked_fill(torch.eye(L, dtype=torch.bool), 0).sum(1).mean().item()
    assert others == pytest.approx(1 / (1 + math.exp(precision * L * C / (L - 1)) / (L - 1)), rel=1e-9)
    assert gap == pytest.approx(others, abs=1e-14)
    assert (others <= 1e-8) == (precision * C > 18.6)


# -- sampling and moments --------------------------------------------------------------------------------------------


def test_samples_have_the_declared_moments_and_labels():
    n, pi = 200_000, torch.tensor([0.6, 0.3, 0.1], dtype=F64)
    dist = make(3, 4, 5.0, pi, 2.0)
    z, y = dist.sample_labeled((n,), generator(3))
    assert z.shape == (n, 4) and y.shape == (n,) and y.dtype == torch.int64 and z.dtype == F64
    share = torch.bincount(y, minlength=3).double() / n
    assert ((share - pi).abs() < 5 * (pi * (1 - pi) / n).sqrt()).all()
    torch.testing.assert_close(z.mean(0), dist.mean, atol=0.03, rtol=0)
    torch.testing.assert_close(z.var(0), dist.variance, atol=0.05, rtol=0)
    torch.testing.assert_close(z.T.cov(), dist.covariance_matrix, atol=0.05, rtol=0)
    torch.testing.assert_close(dist.covariance_matrix.diagonal(), dist.variance)
    torch.testing.assert_close(dist.stddev, dist.variance.sqrt())
    for k in range(3):
        own = z[y == k]
        torch.testing.assert_close(own.mean(0), dist.means[k], atol=0.03, rtol=0)
        torch.testing.assert_close(own.T.cov(), torch.eye(4, dtype=F64) / 2, atol=0.03, rtol=0)


def test_two_classes_err_at_the_textbook_rate():
    """Bayes' rule on samples of two classes errs with probability Phi(-Delta / 2), Delta = 2 sqrt(C)."""
    n, C = 100_000, 0.7
    dist = make(2, 3, C)
    z, y = dist.sample_labeled((n,), generator(1))
    rate = (dist.posterior(z).argmax(-1) != y).double().mean().item()
    expected = 0.5 * math.erfc(math.sqrt(C) / math.sqrt(2))
    assert abs(rate - expected) < 5 * math.sqrt(expected * (1 - expected) / n)


def test_equal_priors_have_mean_zero():
    torch.testing.assert_close(make(10, 64, 100.0).mean, torch.zeros(64, dtype=F64), atol=1e-12, rtol=0)


def test_a_class_with_prior_zero_is_never_drawn_and_never_likely():
    dist = make(3, 2, 1.0, [0.5, 0.0, 0.5])
    z, y = dist.sample_labeled((2000,), generator())
    assert set(y.tolist()) == {0, 2}
    assert (dist.posterior(z)[:, 1] == 0).all() and dist.log_prob(z).isfinite().all()


def test_sampling_is_repeatable():
    dist = make()
    first, again, other = (dist.sample_labeled((5,), generator(seed)) for seed in (4, 4, 5))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(7)
    a = dist.sample((5,))
    torch.manual_seed(7)
    assert torch.equal(a, dist.sample((5,))) and not a.requires_grad


# -- shapes ----------------------------------------------------------------------------------------------------------


def as_torch_mixture(dist):
    scale = (1 / dist.precision.sqrt())[..., None, None].expand(dist.means.shape)
    return MixtureSameFamily(Categorical(probs=dist.priors), Independent(Normal(dist.means, scale), 1))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (3,), (2, 3)]),
    sample=st.sampled_from([(), (1,), (4,), (2, 5), (0,)]),
    dtype=st.sampled_from([torch.float32, F64]),
    sizes=SIZES,
)
def test_batches_are_torchs_own_mixture(batch, sample, dtype, sizes):
    num_classes, dim = sizes
    pi = random_priors(num_classes, 2, batch).to(dtype)
    C = torch.rand(batch, generator=generator(), dtype=dtype) * 5 + 0.5
    precision = torch.rand(batch[-1:], generator=generator(1), dtype=dtype) + 0.5
    dist = MaxMahalanobisDistribution(num_classes=num_classes, dim=dim, C=C, priors=pi, precision=precision)
    assert dist.batch_shape == batch and dist.event_shape == (dim,)
    z, y = dist.sample_labeled(sample)
    assert z.shape == (*sample, *batch, dim) and y.shape == (*sample, *batch) and z.dtype == dtype
    assert dist.sample(sample).shape == z.shape
    assert dist.posterior(z).shape == (*sample, *batch, num_classes)
    peer = as_torch_mixture(dist)
    if z.numel():  # torch's mixture takes no empty batches
        torch.testing.assert_close(dist.log_prob(z), peer.log_prob(z), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dist.mean, peer.mean)
    torch.testing.assert_close(dist.variance, peer.variance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dist.posterior(z).sum(-1), torch.ones((*sample, *batch), dtype=dtype))


def test_each_member_of_a_batch_is_the_distribution_alone():
    Cs, pis = torch.tensor([1.0, 4.0], dtype=F64), random_priors(3, 0, (2,))
    dist = MaxMahalanobisDistribution(num_classes=3, dim=4, C=Cs, priors=pis, precision=2.0)
    z = torch.randn(6, 2, 4, generator=generator(), dtype=F64)
    for b in range(2):
        alone = make(3, 4, Cs[b].item(), pis[b], 2.0)
        torch.testing.assert_close(dist.log_prob(z)[:, b], alone.log_prob(z[:, b]))
        torch.testing.assert_close(dist.posterior(z)[:, b], alone.posterior(z[:, b]))
        torch.testing.assert_close(dist.covariance_matrix[b], alone.covariance_matrix)
    samples, labels = dist.sample_labeled((20_000,), generator())
    for b in range(2):  # y indexes the means of its own member
        own = samples[labels[:, b] == 1, b]
        torch.testing.assert_close(own.mean(0), dist.means[b, 1], atol=0.06, rtol=0)


def test_expand():
    dist = make(4, 5, 3.0, random_priors(4, 0))
    wide = dist.expand((2, 3))
    assert isinstance(wide, MaxMahalanobisDistribution) and wide.batch_shape == (2, 3)
    z = torch.randn(2, 3, 5, generator=generator(), dtype=F64)
    torch.testing.assert_close(wide.log_prob(z), dist.log_prob(z))
    assert wide.sample((7,)).shape == (7, 2, 3, 5) and wide.mean.shape == (2, 3, 5)
    assert Independent(wide, 1).log_prob(z).shape == (2,)


def test_broadcasts_a_value_without_batch_dimensions():
    dist = make(C=[1.0, 2.0, 3.0])
    z = torch.randn(5, dtype=F64, generator=generator())
    assert dist.log_prob(z).shape == (3,)
    torch.testing.assert_close(dist.log_prob(z), dist.log_prob(z.expand(3, 5)))


def test_dtypes_come_from_the_tensors_and_are_float32_at_least():
    assert MaxMahalanobisDistribution(num_classes=3, dim=2).sample().dtype == torch.float32
    half = MaxMahalanobisDistribution(num_classes=3, dim=2, C=torch.tensor(4.0, dtype=torch.half))
    assert half.sample().dtype == torch.float32
    assert half.log_prob(torch.zeros(2, dtype=torch.half)).dtype == torch.float32
    assert make().sample().dtype == F64
    assert make().log_prob(torch.zeros(5)).dtype == F64


def test_more_classes_than_dimensions_plus_one():
    dist = make(8, 4, 9.0)
    torch.testing.assert_close(dist.means, separated_means(8, 4, C=9.0))
    z, y = dist.sample_labeled((500,), generator())
    assert (dist.posterior(z).argmax(-1) == y).double().mean() > 0.9


def test_repr_names_it():
    assert repr(make(4, 5, 3.0)) == "MaxMahalanobisDistribution(num_classes=4, dim=5, C=3)"
    assert "batch_shape=(2,)" in repr(make(C=[1.0, 2.0]))


# -- bad input -------------------------------------------------------------------------------------------------------

BAD = [
    ({"num_classes": 1}, "num_classes must be an integer >= 2, got 1"),
    ({"num_classes": 2.5}, "num_classes must be an integer >= 2, got 2.5"),
    ({"dim": 0}, "dim must be an integer >= 1, got 0"),
    ({"dim": "5"}, "dim must be an integer >= 1, got '5'"),
    ({"num_classes": 3, "dim": 1}, "num_classes must be at most 2 when dim is 1.*got 3"),
    ({"C": 0.0}, "C must be a finite number > 0, got 0.0"),
    ({"C": -1}, "C must be a finite number > 0, got -1"),
    ({"C": math.nan}, "C must be a finite number > 0, got nan"),
    ({"C": math.inf}, "C must be a finite number > 0, got inf"),
    ({"C": None}, "C must be a finite number > 0, got None"),
    ({"C": torch.tensor([1.0, -2.0])}, "C must be > 0, got tensor"),
    ({"C": torch.tensor(math.inf)}, "C must be finite, got tensor\\(inf\\)"),
    ({"C": torch.tensor([1j])}, "C must be real, got dtype torch.complex64"),
    ({"C": 1e60}, "C must be from .* in torch.float32, got 1e\\+60"),
    ({"precision": 1e-60}, "precision must be from .* in torch.float32, got 1e-60"),
    ({"precision": 0}, "precision must be a finite number > 0, got 0"),
    ({"precision": torch.tensor(math.nan)}, "precision must be finite, got tensor\\(nan\\)"),
    ({"priors": [0.5, 0.5]}, r"priors must have shape \[..., 4\], got \[2\]"),
    ({"priors": torch.tensor(1.0)}, r"priors must have shape \[..., 4\], got \[\]"),
    ({"priors": [0.5, 0.6, -0.1, 0.0]}, "priors must be >= 0, got -0.1"),
    ({"priors": [0.5, math.nan, 0.25, 0.25]}, "priors must be finite, got .*nan"),
    ({"priors": [0.3, 0.3, 0.3, 0.3]}, "priors must sum to 1, got a sum of 1.2"),
    ({"priors": [0.0, 0.0, 0.0, 0.0]}, "priors must sum to 1, got a sum of 0"),
    ({"priors": torch.tensor([[0.25] * 4, [0.5] * 4])}, "priors must sum to 1, got a sum of 2"),
    ({"priors": [math.inf, 0.0, 0.0, 0.0]}, "priors must be finite, got .*inf"),
    ({"priors": "uniform"}, "priors must be a number, an array .* got 'uniform'"),
    ({"priors": [[0.25] * 4, [0.25] * 3]}, r"priors must be a number, an array .* got \[\["),
    ({"priors": torch.ones(4) > 0}, "priors must sum to 1, got a sum of 4"),
    ({"C": torch.ones(3), "precision": torch.ones(2)}, r"batch shapes that broadcast, got \[3\], \[2\] and \[\]"),
]


@pytest.fixture(autouse=True)
def checks():
    """torch.compile, which other tests call, turns the checks of all distributions off, for good."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        MaxMahalanobisDistribution(**{"num_classes": 4, "dim": 5, **change})


def test_arguments_are_keyword_only():
    with pytest.raises(TypeError):
        MaxMahalanobisDistribution(4, 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 4), r"value must be a floating tensor \[..., 5\], got torch.float32 \[3, 4\]"),
        (torch.zeros(3, 1), r"value must be a floating tensor \[..., 5\], got torch.float32 \[3, 1\]"),
        (torch.tensor(1.0), r"value must be a floating tensor \[..., 5\], got torch.float32 \[\]"),
        (torch.zeros(3, 5, dtype=torch.int64), r"value must be a floating tensor \[..., 5\], got torch.int64"),
        ([0.0] * 5, r"value must be a floating tensor \[..., 5\], got list"),
        (torch.full((3, 5), math.nan), r"value must be finite, got NaN or infinity in \[3, 5\]"),
    ],
)
@pytest.mark.parametrize("method", ["log_prob", "posterior"])
def test_bad_values(value, message, method):
    with pytest.raises(ValueError, match=message):
        getattr(make(), method)(value)


def test_values_that_do_not_fit_the_batch():
    with pytest.raises(ValueError, match=r"value must be a floating tensor \[..., 3, 5\], got torch.float32 \[2, 5\]"):
        make(C=[1.0, 2.0, 3.0]).log_prob(torch.zeros(2, 5))


def test_validation_can_be_switched_off():
    dist = make(validate_args=False)
    assert dist.log_prob(torch.full((5,), math.nan)).isnan()
    assert make(priors=torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=F64), validate_args=False).sample().shape == (5,)
    assert dist.expand((2,)).log_prob(torch.full((5,), math.nan)).isnan().all()


# -- empirical priors ------------------------------------------------------------------------------------------------


def test_empirical_priors():
    assert empirical_priors(torch.tensor([2, 2, 0, 2]), 4).tolist() == [0.25, 0.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 4]), "labels must be classes from 0 to 3, got 4"),
        (torch.tensor([0, -1]), "labels must be classes from 0 to 3, got -1"),
        (torch.tensor([0.0]), r"labels must be int64 \[N\], got torch.float32 \[1\]"),
        (torch.tensor([[0]]), r"labels must be int64 \[N\], got torch.int64 \[1, 1\]"),
        (torch.tensor([], dtype=torch.int64), "labels must have at least one label, got none"),
    ],
)
def test_empirical_priors_bad_labels(labels, message):
    with pytest.raises(ValueError, match=message):
        empirical_priors(labels, 4)
