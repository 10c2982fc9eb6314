"""The losses of a head against plain loops and densities."""

import math

import pytest
import torch
from head_cases import F64, PRIORS, features, make
from torch import nn

from mmlda.models.heads import MaxMahalanobisHead
from mmlda.theory.distribution import MaxMahalanobisDistribution


@pytest.mark.parametrize("precision", [1.0, 2.0])
def test_cross_entropy_is_equation_5(precision):
    dist = MaxMahalanobisDistribution(
        num_classes=5, dim=8, C=torch.tensor(4.0, dtype=F64), priors=PRIORS, precision=precision
    )
    head = make(C=4.0, priors=PRIORS, precision=precision).double()
    z, y = dist.sample_labeled((30,), torch.Generator().manual_seed(0))
    expected = -dist.posterior(z)[torch.arange(30), y].log()
    torch.testing.assert_close(head.loss(z, y, reduction="none"), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(head.loss(z, y), expected.mean(), rtol=1e-6, atol=1e-7)


def test_centre_loss_is_the_negative_log_density_of_z_and_y():
    """centre = ce - log P(z): what Appendix B.1 truncates is put back, constant included."""
    dist = MaxMahalanobisDistribution(
        num_classes=5, dim=8, C=torch.tensor(4.0, dtype=F64), priors=PRIORS, precision=2.0
    )
    head = make(C=4.0, priors=PRIORS, precision=2.0).double()
    z, y = dist.sample_labeled((30,), torch.Generator().manual_seed(0))
    centre = head.loss(z, y, "centre", "none")
    torch.testing.assert_close(centre, head.loss(z, y, "ce", "none") - dist.log_prob(z), rtol=1e-6, atol=1e-6)
    for n in range(30):
        gaussian = torch.distributions.MultivariateNormal(dist.means[y[n]], torch.eye(8, dtype=F64) / 2)
        expected = -gaussian.log_prob(z[n]).item() - math.log(PRIORS[y[n]])
        assert centre[n].item() == pytest.approx(expected, rel=1e-6)


def test_soft_target_by_a_plain_loop():
    head = make(C=0.8, priors=PRIORS, precision=2.0).double()  # a small C, so that the target is far from one-hot
    z, y = features(10, dtype=F64, scale=1.0), torch.arange(10) % 5

    def posterior(v):
        weights = [math.exp(2 * float(v @ mu)) * pi for mu, pi in zip(head.means, PRIORS)]
        return [w / sum(weights) for w in weights]

    loss = head.loss(z, y, "soft", "none")
    for n in range(10):
        target, found = posterior(head.means[y[n]]), posterior(z[n])
        assert max(target) < 0.97
        assert loss[n].item() == pytest.approx(-sum(t * math.log(f) for t, f in zip(target, found)), rel=1e-6)
    assert (loss - head.loss(z, y, "ce", "none")).abs().max() > 0.05


def test_soft_is_smallest_on_the_mean_and_becomes_ce_at_a_large_C():
    head = make(C=0.8).double()
    y = torch.arange(5)
    z = head.means.clone().requires_grad_()
    head.loss(z, y, "soft", "sum").backward()
    assert z.grad.abs().max() < 1e-12  # the soft target is met exactly on the mean
    z = head.means.clone().requires_grad_()
    head.loss(z, y, "ce", "sum").backward()
    assert z.grad.abs().max() > 1e-2  # the one-hot label pushes on, past the mean

    wide, z, y = make(C=100.0).double(), features(10, dtype=F64), torch.arange(10) % 5
    torch.testing.assert_close(wide.loss(z, y, "soft", "none"), wide.loss(z, y, "ce", "none"), rtol=1e-9, atol=1e-9)


def test_centre_loss_pulls_features_to_their_mean_and_cross_entropy_does_not():
    head, y = make(C=9.0), torch.arange(5)
    ends = {}
    for name in ("ce", "centre"):
        z = nn.Parameter(features(5, scale=1.0))
        optimizer = torch.optim.SGD([z], lr=0.3)
        for _ in range(300):
            optimizer.zero_grad()
            head.loss(z, y, name, "sum").backward()
            optimizer.step()
        ends[name] = (z - head.means).norm(dim=1)
        assert torch.equal(head.predict(z), y)
    assert ends["centre"].max() < 1e-3
    assert ends["ce"].min() > 0.3


def test_centre_loss_gradient_does_not_vanish_where_cross_entropy_does():
    head = make()
    z = (head.means + 0.5).requires_grad_()
    y = torch.arange(5)
    head.loss(z, y, "ce", "sum").backward()
    assert (z.grad == 0).all()  # at C = 100 the float32 posterior is exactly 1
    z.grad = None
    head.loss(z, y, "centre", "sum").backward()
    torch.testing.assert_close(z.grad, torch.full((5, 8), 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
def test_reductions_and_gradients(name):
    head = make(C=3.0, priors=PRIORS, precision=2.0).double()
    z, y = features(7, dtype=F64, scale=1.0).requires_grad_(), torch.arange(7) % 5
    each = head.loss(z, y, name, "none")
    assert each.shape == (7,)
    torch.testing.assert_close(head.loss(z, y, name, "sum"), each.sum())
    torch.testing.assert_close(head.loss(z, y, name, "mean"), each.mean())
    torch.testing.assert_close(head.loss(z, y, name), each.mean())
    assert torch.autograd.gradcheck(lambda z: head.loss(z, y, name), z)


@pytest.mark.parametrize("name", MaxMahalanobisHead.losses)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_losses_are_float32_at_least_and_gradients_keep_the_dtype(name, dtype):
    z = features(7, dtype=dtype, scale=1.0).requires_grad_()
    loss = make(C=3.0).loss(z, torch.arange(7) % 5, name)
    assert loss.dtype == (F64 if dtype == F64 else torch.float32)
    loss.backward()
    assert z.grad.dtype == dtype and z.grad.abs().max() > 0
