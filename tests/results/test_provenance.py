"""Provenance: hashes of weights and images, the device, the versions."""

import hashlib

import torch
from safetensors.torch import save
from torch import nn

from mmlda.data import ImageData
from mmlda.results import device_name, traced, weights_digest


def test_the_digest_of_weights_is_that_of_their_safetensors_file():
    net = nn.Linear(3, 2)
    weights = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    assert weights_digest(net.state_dict()) == hashlib.sha256(save(weights)).hexdigest()
    before = weights_digest(net.state_dict())
    net.bias.data[0] += 1
    assert weights_digest(net.state_dict()) != before


def test_a_measurement_is_traced_to_network_data_and_device():
    net, data = (
        nn.Linear(3, 2),
        ImageData(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1, 0]), ("a", "b")),
    )
    about = traced(net, data, "cpu", "mine")
    assert (about["network"], about["network_sha256"]) == ("mine", weights_digest(net.state_dict()))
    assert about["data"] == {"name": data.name, "images": 4, "sha256": data.digest()}
    assert about["device"] == device_name("cpu") and "device" not in about["versions"]
    assert about["versions"]["torch"] == torch.__version__
    assert traced(lambda x: x, data, "cpu")["network_sha256"] == ""  # a function has no weights
