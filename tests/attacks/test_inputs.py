"""Images and labels of every kind: accepted forms, and errors for the others."""

from __future__ import annotations

import copy

import pytest
import torch
from attack_cases import ATTACKS, BALLS, MINIMUM_NORM, at_work, double, every_attack
from attack_models import images, network
from torch import Tensor


@every_attack
def test_pixels_at_the_ends_of_the_range(name: str) -> None:
    model, (x, y) = network("sr"), images(60)
    x = x.round()  # nothing but 0 and 1
    with torch.no_grad():
        right = model(x).argmax(1) == y
    result = ATTACKS[name]()(model, x, y)
    assert result.x_adv.isfinite().all() and result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert right.sum() > 20 and result.success[right].float().mean() > 0.3


@every_attack
def test_rounding_errors_outside_the_range_are_accepted(name: str) -> None:
    model, (x, y) = network("sr"), images(30)
    out = torch.where(x == 0, -1e-7, torch.where(x == 1, 1 + 1e-6, x))
    assert out.min() < 0 and out.max() > 1
    result, plain = ATTACKS[name]()(model, out, y), ATTACKS[name]()(model, x, y)
    at_work(result, x)
    assert result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert torch.equal(result.success, plain.success)
    for wrong in (x + 0.01, x - 0.01, x * torch.nan):
        with pytest.raises(ValueError, match=r"x must be in the range bounds=\(0.0, 1.0\), got values"):
            ATTACKS[name]()(model, wrong, y)


@every_attack
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, (x, y) = copy.deepcopy(network("sr")).to(dtype), images(30)
    x = x.to(dtype)
    result, single = ATTACKS[name]()(model, x, y), ATTACKS[name]()(network("sr"), x.float(), y)
    at_work(result, x)
    assert result.x_adv.dtype == dtype and result.x_adv.min() >= 0 and result.x_adv.max() <= 1
    assert result.l2.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert result.success.float().mean() >= single.success.float().mean() - 0.15
    if name not in MINIMUM_NORM:
        norm, eps = BALLS[name]
        size = result.linf if norm == "linf" else result.l2
        # x +- eps is rounded to the dtype, pixel by pixel.
        assert (size <= eps * (1 + 1e-6) + 8 * torch.finfo(dtype).eps).all()


@every_attack
def test_channels_last(name: str) -> None:
    """Three channels, as two memory formats of the same images."""
    gray, (x, y) = double(), images(16)
    x = x.double().expand(-1, 3, -1, -1).contiguous()

    def model(v: Tensor) -> Tensor:
        return gray(v.mean(1, keepdim=True))

    plain = ATTACKS[name]()(model, x, y)
    last = ATTACKS[name]()(model, x.contiguous(memory_format=torch.channels_last), y)
    at_work(last, x)
    assert torch.equal(last.success, plain.success)
    torch.testing.assert_close(last.x_adv, plain.x_adv, rtol=0, atol=1e-7)


@every_attack
def test_another_image_range(name: str) -> None:
    model, (x, y) = double(), images(30)
    x = x.double()
    plain = ATTACKS[name]()(model, x, y)
    wide = ATTACKS[name](width=4.0, bounds=(-1.0, 3.0))(lambda v: model((v + 1) / 4), 4 * x - 1, y)
    assert plain.success.float().mean() > 0.3
    assert (wide.success == plain.success).float().mean() >= 0.95
    assert wide.x_adv.min() >= -1 and wide.x_adv.max() <= 3
    same = plain.success & wide.success
    torch.testing.assert_close(wide.distortion[same].median(), plain.distortion[same].median(), rtol=1e-3, atol=0)


@every_attack
def test_labels_of_the_wrong_range_or_type_are_refused(name: str) -> None:
    model, (x, y) = network("sr"), images(10)
    for wrong in (10, -1):
        bad = y.clone()
        bad[4] = wrong
        with pytest.raises(ValueError, match=r"y must be classes 0 to 9 of the model, got labels"):
            ATTACKS[name]()(model, x, bad)
    with pytest.raises(ValueError, match=r"target must be classes 0 to 9 of the model, got labels"):
        ATTACKS[name]()(model, x, y, target=torch.full_like(y, 12))
    with pytest.raises(ValueError, match=r"y must be an integer tensor \[10\], got a"):
        ATTACKS[name]()(model, x, y.float())
    with pytest.raises(ValueError, match=r"y must be an integer tensor \[10\], got a"):
        ATTACKS[name]()(model, x, y[:-1])
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        ATTACKS[name]()(model, (x * 255).byte(), y)
