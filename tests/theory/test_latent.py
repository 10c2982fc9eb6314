"""latent_fit: what it measures of samples of the distribution, and of features that are not."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from mmlda.theory import LatentFit, MaxMahalanobisDistribution, latent_fit

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def sample():
    dist = MaxMahalanobisDistribution(num_classes=5, dim=8, C=torch.tensor(25.0, dtype=F64), precision=2.0)
    return (dist, *dist.sample_labeled((20_000,), generator()))


def measured(fit):
    """Each measurement with what a sample of the distribution would give."""
    values = dataclasses.asdict(fit)
    return {name: (value, values[f"{name}_expected"]) for name, value in values.items() if f"{name}_expected" in values}


def test_of_samples_is_as_expected(sample):
    dist, z, y = sample
    fit = latent_fit(z, y, dist.means, 2.0)
    assert fit.samples == 20_000 and fit.squared_distance_expected == 4.0
    found = measured(fit)
    assert set(found) == {"squared_distance", "mean_offset", "mean_cosine", "variance", "covariance_error"}
    for name in ("squared_distance", "variance", "mean_cosine"):
        assert found[name][0] == pytest.approx(found[name][1], rel=0.02), name
    for name in ("mean_offset", "covariance_error"):  # noise alone, of the predicted size
        assert found[name][0] == pytest.approx(found[name][1], rel=0.5), name


def test_expectations_hold_for_small_samples_on_average():
    dist = MaxMahalanobisDistribution(num_classes=3, dim=6, C=torch.tensor(9.0, dtype=F64))
    fits = [latent_fit(*dist.sample_labeled((60,), generator(seed)), dist.means) for seed in range(200)]
    for name, (_, expected) in measured(fits[0]).items():
        mean = sum(getattr(fit, name) for fit in fits) / len(fits)
        assert mean == pytest.approx(expected, rel=0.08), name


def test_sees_shifted_scaled_and_collapsed_features(sample):
    dist, z, y = sample
    p, C, L = 8, 25.0, 5
    shift = torch.zeros(p, dtype=F64)
    shift[3] = 1.5
    shifted = latent_fit(z + shift, y, dist.means, 2.0)
    assert shifted.mean_offset == pytest.approx(1.5, rel=0.02)
    assert shifted.squared_distance == pytest.approx(p / 2 + 1.5**2, rel=0.02)
    assert shifted.covariance_error < 0.05  # the covariance does not move

    scaled = latent_fit(3 * z, y, dist.means, 2.0)
    assert scaled.variance == pytest.approx(9 / 2, rel=0.02)
    assert scaled.mean_offset == pytest.approx(2 * math.sqrt(C), rel=0.02)
    assert scaled.mean_cosine > 0.999  # the directions do not move
    assert scaled.covariance_error == pytest.approx(8, rel=0.02)  # 9 I - I

    collapsed = latent_fit(dist.means[y], y, dist.means, 2.0)
    assert collapsed.squared_distance == pytest.approx(0, abs=1e-12)
    assert collapsed.variance == pytest.approx(0, abs=1e-12)
    assert collapsed.covariance_error == pytest.approx(1, abs=1e-9)  # 0 - I

    swapped = latent_fit(z, (y + 1) % L, dist.means, 2.0)
    assert swapped.mean_cosine == pytest.approx(-1 / (L - 1), abs=0.02)
    assert swapped.squared_distance == pytest.approx(p / 2 + 2 * C * L / (L - 1), rel=0.02)


def test_by_a_plain_loop():
    C, priors = torch.tensor(4.0, dtype=F64), [0.7, 0.3, 0.0]
    dist = MaxMahalanobisDistribution(num_classes=3, dim=2, C=C, priors=priors, precision=1.5)
    z, y = dist.sample_labeled((11,), generator())
    z = z * 1.3 + 0.2
    fit = latent_fit(z.float(), y, dist.means, 1.5)
    z, mu = z.float().double().numpy(), dist.means.numpy()
    classes = sorted(set(y.tolist()))
    centre = {k: z[y.numpy() == k].mean(0) for k in classes}
    S = sum(np.outer(z[n] - centre[int(y[n])], z[n] - centre[int(y[n])]) for n in range(11)) / (11 - len(classes))
    assert fit.squared_distance == pytest.approx(np.mean([((z[n] - mu[int(y[n])]) ** 2).sum() for n in range(11)]))
    assert fit.mean_offset == pytest.approx(np.sqrt(np.mean([((centre[k] - mu[k]) ** 2).sum() for k in classes])))
    assert fit.variance == pytest.approx(np.trace(S) / 2)
    assert fit.covariance_error == pytest.approx(np.linalg.norm(1.5 * S - np.eye(2)) / np.sqrt(2))


def test_is_plain_frozen_and_readable(sample):
    dist, z, y = sample
    fit = latent_fit(z.requires_grad_(), y, dist.means, 2.0)
    assert isinstance(fit, LatentFit) and all(type(v) in (int, float) for v in dataclasses.astuple(fit))
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit.samples = 3
    lines = str(fit).splitlines()
    assert len(lines) == 6 and "20000 features" in lines[0] and "measured" in lines[0] and "expected" in lines[0]
    assert lines[1].split()[-1] == "4" and "||z - mu_y||^2" in lines[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(6, 3)}, r"z must be a floating tensor \[N, 2\], got torch.float32 \[6, 3\]"),
        ({"z": torch.zeros(6, 2, dtype=torch.int32)}, "z must be a floating tensor .*got torch.int32"),
        ({"z": torch.full((6, 2), math.nan)}, r"z must be finite, got NaN or infinity in \[6, 2\]"),
        ({"z": torch.zeros(3, 2), "y": torch.tensor([0, 1, 2])}, "z must have more features than classes, got 3 of 3"),
        ({"y": torch.zeros(5, dtype=torch.int64)}, r"y must have shape \[6\].*got \[5\]"),
        ({"y": torch.full((6,), 3)}, "y must be classes from 0 to 2, got 3"),
        ({"y": torch.zeros(6)}, r"y must be int64 \[N\], got torch.float32"),
        ({"z": [[0.0, 0.0]] * 6}, "z must be a floating tensor .*got list"),
        ({"y": None}, r"y must be int64 \[N\], got None"),
        ({"means": [[0.0, 0.0]]}, "means must be a floating tensor .*got list"),
        ({"means": torch.full((3, 2), math.nan)}, r"means must be finite, got NaN or infinity in \[3, 2\]"),
        ({"means": torch.zeros(2)}, r"means must be a floating tensor \[L, p\], got torch.float32 \[2\]"),
        ({"precision": -1.0}, "precision must be a finite number > 0, got -1.0"),
    ],
)
def test_bad_input(change, message):
    good = {"z": torch.zeros(6, 2), "y": torch.zeros(6, dtype=torch.int64), "means": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=message):
        latent_fit(**{**good, **change})
