"""A model is used where it is, or copied; never moved."""

import torch
from torch import nn

from mmlda._utils.device import device_of, eval_mode, on_device


def test_the_device_of_parameters_buffers_functions():
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm2d(2, affine=False, device="meta")) == torch.device("meta")
    assert device_of(lambda x: x) == device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2), "meta") == torch.device("meta")


def test_another_device_gets_a_copy():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).train()
    moved = on_device(model, "meta")
    assert moved is not model and all(t.is_meta for t in moved.state_dict().values()) and moved.training
    assert not any(t.is_meta for t in model.state_dict().values())
    assert on_device(model, None) is model and on_device(model, "cpu") is model
    function = model.forward
    assert on_device(function, "meta") is function


def test_eval_mode_restores_every_submodule():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).train()
    model[1].eval()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, False]
