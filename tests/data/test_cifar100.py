"""CIFAR-100: both versions, fine and coarse labels, fetched and checked like CIFAR-10. The files are made up."""

import numpy as np
import pytest
import torch
from dataset_files import cifar100_bin, cifar100_py, same, tar_bytes
from web import known

from mmlda import data
from mmlda.data import fetch, load

# Measured on the published files: the coarse class of fine class 0, 1, 2, ...
COARSE = [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7]
rng = np.random.default_rng(7)


def batch(n):
    fine = rng.integers(0, 25, n).astype(np.uint8)
    coarse = np.array(COARSE, np.uint8)[fine]
    return rng.integers(0, 256, (n, 3, 32, 32), np.uint8), fine, coarse


@pytest.mark.parametrize("place", [".", "cifar100", "cifar-100"])
@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("packed", [False, True])
def test_load(tmp_path, place, version, packed):
    train, test = batch(9), batch(5)
    end, write = (".bin", cifar100_bin) if version == "binary" else ("", cifar100_py)
    folder = f"cifar-100-{version}"
    files = [(f"{folder}/test{end}", write(*test)), (f"{folder}/train{end}", write(*train)), (f"{folder}/meta", b"-")]
    root = tmp_path / place
    root.mkdir(exist_ok=True)
    if packed:
        path = root / f"{folder}.tar.gz"
        path.write_bytes(tar_bytes(files))
    else:
        path = root / folder
        path.mkdir()
        for name, content in files:
            (root / name).write_bytes(content)
    for a, b in (load("cifar100", root=tmp_path), load(path)):
        assert same(a, *train[:2]) and same(b, *test[:2])
        assert a.name == "cifar100" and a.num_classes == 100 and a.classes[0] == "apple" and a.classes[99] == "worm"
    a, b = load("cifar100-coarse", root=tmp_path)
    assert same(a, train[0], train[2]) and same(b, test[0], test[2])
    assert a.num_classes == 20 and a.classes[0] == "aquatic_mammals" and a.name == "cifar100-coarse"


def test_two_cifars_beside_each_other(tmp_path):
    (tmp_path / "cifar-100-binary").mkdir()
    for name in ("train", "test"):
        (tmp_path / "cifar-100-binary" / f"{name}.bin").write_bytes(cifar100_bin(*batch(3)))
    assert data.find("cifar10", tmp_path) is None and data.find("cifar100", tmp_path) == tmp_path / "cifar-100-binary"
    for name in ("cifar100", "cifar100-coarse"):
        with pytest.raises(FileNotFoundError, match="`mmlda data fetch cifar100`"):
            load(name, root=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content, words",
    [
        (cifar100_bin(*batch(3))[:-1], "train.bin must be a multiple of 3074 bytes, got 9221"),
        (bytes([20, 0]) + bytes(3072), r"train.bin must be CIFAR-100, with labels 0 to 19, got 20"),
        (bytes([0, 100]) + bytes(3072), "train.bin must be CIFAR-100, with labels 0 to 99, got 100"),
    ],
)
def test_damaged_files(tmp_path, content, words):
    (tmp_path / "test.bin").write_bytes(cifar100_bin(*batch(2)))
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)
    (tmp_path / "test.bin").unlink()
    with pytest.raises(ValueError, match=r"must be a whole CIFAR-100, got one without test\.bin"):
        load(tmp_path)


def test_fetch_and_check(server, tmp_path, monkeypatch):
    train, test = batch(6), batch(4)
    names = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")
    archive = tar_bytes([(name, cifar100_bin(*part)) for name, part in zip(names, (train, test))])
    server.files["cifar-100-binary.tar.gz"] = archive
    source = fetch.Web((server.address,), (known("cifar-100-binary.tar.gz", archive),))
    made = [
        data.ImageData(*map(torch.from_numpy, (x, y.astype(np.int64))), data.CLASSES["cifar100"])
        for x, y, _ in (train, test)
    ]
    monkeypatch.setitem(fetch.CONTENT, "cifar100", fetch.content("cifar100", *made))
    assert fetch.fetch("cifar100", tmp_path, [source]) == tmp_path / "cifar100" / "cifar-100-binary"
    assert fetch.check("cifar100", tmp_path).ok and fetch.check("cifar100-coarse", tmp_path).ok
    (tmp_path / "cifar100" / "cifar-100-binary" / "test.bin").write_bytes(cifar100_bin(*batch(4)))
    assert fetch.check("cifar100", tmp_path).problem == "the published cifar100 has other test records"
    assert fetch.SOURCES["cifar100"][0].files[0].name == "cifar-100-binary.tar.gz"
