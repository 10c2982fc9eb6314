"""Calibration error and temperature against plain loops."""

import pytest
import torch
from torch import nn

from mmlda.evaluation.calibration import calibration_error, fit_temperature


def test_calibration_error_is_a_plain_loop_over_bins():
    generator = torch.Generator().manual_seed(0)
    p = (torch.randn(500, 4, generator=generator, dtype=torch.float64) * 2).softmax(1)
    labels = torch.randint(4, (500,), generator=generator)
    confidence, guess = p.max(1)
    expected = 0.0
    for i in range(10):
        inside = (confidence > i / 10) & (confidence <= (i + 1) / 10)
        if inside.any():
            gap = (guess == labels)[inside].double().mean() - confidence[inside].mean()
            expected += float(gap.abs() * inside.double().mean())
    assert calibration_error(p, labels, bins=10) == pytest.approx(expected, abs=1e-12)


def test_no_temperature_where_there_is_none():
    z, y = 3 * torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    with pytest.raises(ValueError, match="got predictions that are all right"):
        fit_temperature(z, y)
    with pytest.raises(ValueError, match="no better than chance"):
        fit_temperature(-z, y)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 40.0])
def test_the_temperature_is_found(temperature):
    """Labels drawn from softmax(z / T) are best explained by T, and no other temperature is better."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(20_000, 5, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial(z.softmax(1), 1, generator=generator).squeeze(1)
    found = fit_temperature(z * temperature, labels)
    assert found == pytest.approx(temperature, rel=0.03)
    tried = (found, 0.98 * found, 1.02 * found)
    loss = [float(nn.functional.cross_entropy(z * temperature / t, labels)) for t in tried]
    assert loss[0] < min(loss[1:])
