"""The example with a folder of JPEGs, as far as it needs neither torchvision nor timm."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import mmlda


@pytest.fixture
def example():
    path = Path(__file__).parents[2] / "examples" / "imagefolder_timm.py"
    spec = importlib.util.spec_from_file_location("imagefolder_timm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_classes_can_be_told_apart(example, tmp_path):
    example.generate(tmp_path, classes=10, images=10, size=32)
    assert {len(list(folder.iterdir())) for folder in (tmp_path / "train").iterdir()} == {8}
    assert Image.open(tmp_path / "val" / "class03" / "4.jpg").size == (32, 32)
    train, val = mmlda.data.load(tmp_path)
    assert len(train) == 80 and len(val) == 20 and train.shape == (3, 32, 32)
    model = mmlda.models.build({"backbone": "conv_net", "channels": 3, "width": 8}, seed=0)
    mmlda.fit(model, train, mmlda.Recipe(steps=60, optimizer="adam", lr=3e-3, batch_size=40), show=False)
    assert mmlda.accuracy(model, val).accuracy > 0.5


def test_arguments_and_missing_packages(example, tmp_path, monkeypatch):
    args = example.parse([str(tmp_path), "--size", "224", "--model", "resnet50"])
    assert (args.folder, args.size, args.model, args.generate) == (tmp_path, 224, "resnet50", False)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match="needs torchvision and timm"):
        example.main([str(tmp_path)])


def test_pixels_are_scaled_in_the_network(example):
    scaled = example.Normalize((0.5, 0.25, 0.0), (0.5, 0.25, 1.0))(torch.ones(1, 3, 2, 2))
    assert scaled[0, :, 0, 0].tolist() == [1.0, 3.0, 1.0]
