"""Images and labels as two tensors; a user's tensors, arrays and datasets as that, bit for bit."""

import numpy as np
import pytest
import torch
from dataset_files import made_up, rng, same
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from mmlda.data import load, split
from mmlda.data.convert import as_images
from mmlda.data.images import ImageData


def test_image_data():
    made = made_up()
    assert len(made) == 48 and made.num_classes == 4 and made.shape == (2, 3, 4)
    assert made.counts.tolist() == [30, 5, 12, 1]
    assert made.priors.dtype == torch.float64 and made.priors.tolist() == [30 / 48, 5 / 48, 12 / 48, 1 / 48]
    some = made.subset([3, 1])
    assert torch.equal(some.images, made.images[[3, 1]]) and torch.equal(some.labels, made.labels[[3, 1]])
    assert len(made.subset(made.labels == 2)) == 12 and len(made.subset(slice(7))) == 7
    assert some.classes == made.classes and some.name == "made-up"  # a class may be empty and still be one


def test_pixels():
    made = made_up()
    expected = made.images.numpy().astype(np.float32) / np.float32(255)
    assert (made.pixels().numpy() == expected).all()
    assert (made.pixels([5, 2]).numpy() == expected[[5, 2]]).all()
    assert made.pixels(slice(2), torch.float64).dtype == torch.float64
    assert made.pixels(torch.tensor([0]), torch.bfloat16).dtype == torch.bfloat16
    assert made.images.dtype == torch.uint8  # the stored bytes are untouched


def test_pixels_of_floats_are_not_the_storage():
    x = torch.rand(3, 1, 2, 2)
    made = as_images((x.clone(), torch.tensor([0, 1, 0])))
    assert torch.equal(made.pixels(), x)


def test_digest_is_of_the_content():
    made = made_up()
    assert made.digest() == made_up().digest() != made_up(seed=1).digest()
    assert made.digest() == ImageData(made.images.clone(), made.labels, made.classes, "other name").digest()
    for part in ("images", "labels"):
        changed = {"images": made.images.clone(), "labels": made.labels.clone()}
        changed[part].view(-1)[5] ^= 1
        assert ImageData(**changed, classes=made.classes).digest() != made.digest()
    strided = ImageData(made.images.contiguous(memory_format=torch.channels_last), made.labels, made.classes)
    assert strided.digest() == made.digest()


@pytest.mark.parametrize(
    "images, labels, words",
    [
        (torch.zeros(2, 3, 4), torch.zeros(2).long(), r"images must be .*, got torch.float32 \[2, 3, 4\]"),
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2).long(), "images must be .*, got torch.float64"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(3).long(), r"labels must be int64 \[2\], got torch.int64 \[3\]"),
        (torch.zeros(2, 1, 4, 4), torch.zeros(2).int(), "labels must be .*, got torch.int32"),
        (torch.zeros(2, 1, 4, 4), torch.tensor([0, 3]), "labels must be classes from 0 to 2, got 0 to 3"),
        (torch.zeros(2, 1, 4, 4), torch.tensor([-1, 0]), "labels must be .*, got -1"),
        (torch.zeros(0, 1, 4, 4), torch.zeros(0).long(), "images must be at least one image"),
    ],
)
def test_image_data_refuses(images, labels, words):
    with pytest.raises(ValueError, match=words):
        ImageData(images, labels, ("a", "b", "c"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_that_are_bytes_become_bytes(dtype):
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    made = as_images((x.to(dtype) / 255, torch.tensor([0])))
    assert torch.equal(made.images, x)


def test_tensors_with_a_gradient_are_taken_as_values():
    x = torch.rand(10, 1, 4, 4, requires_grad=True)
    train, test = load((x, torch.arange(10) % 2))
    assert not train.images.requires_grad and len(train) + len(test) == 10


def test_floats_that_are_not_keep_their_precision():
    x = torch.rand(4, 1, 3, 3)
    made = as_images((x, torch.arange(4)))
    assert made.images.dtype == torch.float32 and torch.equal(made.images, x) and torch.equal(made.pixels(), x)
    train, test = load((x.repeat(5, 1, 1, 1), torch.arange(20) % 4))
    assert train.images.dtype == test.images.dtype == torch.float32


@pytest.mark.parametrize(
    "x, y, words",
    [
        (torch.full((2, 1, 2, 2), 1.5), torch.zeros(2).long(), r"x must be in \[0, 1\], got values from 1.5 to 1.5"),
        (torch.full((2, 1, 2, 2), -0.1), torch.zeros(2).long(), "x must be .*, got values from -0.1"),
        (torch.full((2, 1, 2, 2), torch.nan), torch.zeros(2).long(), "x must be .*, got values from nan"),
        (torch.zeros(2, 1, 2, 2).long(), torch.zeros(2).long(), "x must be .*, got torch.int64"),
        (torch.zeros(2, 1, 2, 2), torch.zeros(2), "y must be .*, got torch.float32"),
        (torch.zeros(2, 1, 2, 2), torch.zeros(2, 1).long(), r"y must be .*, got torch.int64 \[2, 1\]"),
        (torch.zeros(2, 4, 1, 1, 1), torch.zeros(2).long(), r"images must be .*, got torch.uint8 \[2, 4, 1, 1, 1\]"),
    ],
)
def test_tensors_refused(x, y, words):
    with pytest.raises(ValueError, match=words):
        as_images((x, y))


class Items(Dataset):
    def __init__(self, items, classes=None):
        self.items = items
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, n):
        return self.items[n]


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_datasets():
    x, y = rng.integers(0, 256, (10, 6, 5, 3), np.uint8), rng.integers(0, 3, 10)
    y[0] = 2
    expected = x.transpose(0, 3, 1, 2)
    tensors = torch.from_numpy(expected.copy())
    for images in (map(Image.fromarray, x), list(x), tensors, tensors / 255):
        items = list(zip(images, y))
        assert same(as_images(Items(items)), expected, y)
        assert same(as_images(Stream(items)), expected, y)
    assert same(as_images(TensorDataset(tensors, torch.from_numpy(y))), expected, y)
    named = Items(list(zip(tensors, torch.from_numpy(y))), ["ant", "bee", "cow"])
    assert as_images(named).classes == ("ant", "bee", "cow")
    part = as_images(Subset(named, [4, 2]))
    assert same(part, expected[[4, 2]], y[[4, 2]]) and part.classes == ("ant", "bee", "cow")
    a, b = load((named, Subset(named, [1, 2, 3])))
    assert len(a) == 10 and len(b) == 3
    assert sum(map(len, load(named))) == 10


def test_datasets_refused():
    with pytest.raises(ValueError, match=r"image 1 must be torch.uint8 \[1, 2, 2\].*, got torch.uint8 \[1, 3, 3\]"):
        as_images(Items([(torch.zeros(1, n, n, dtype=torch.uint8), 0) for n in (2, 3)]))
    with pytest.raises(ValueError, match="empty dataset"):
        as_images(Items([]))
    image = torch.zeros(1, 2, 2)
    for label in (0.9, float("nan"), float("inf"), torch.tensor(0.5), torch.tensor([0, 1]), "ant", None):
        with pytest.raises(ValueError, match=r"^label 1 must be an integer, got "):
            as_images(Items([(image, 0), (image, label)]))
    assert as_images(Items([(image, 0.0), (image, torch.tensor(2.0))])).labels.tolist() == [0, 2]
    with pytest.raises(ValueError, match="data must leave images to train and to test on, got 1 images"):
        load(Items([(image, 0)]))
    with pytest.raises(ValueError, match="part = 1"):
        split(as_images(Items([(image, 0)] * 5)), 1)
    item = (torch.zeros(1, 2, 2), 0)
    assert load((Items([item], ["ant", "bee"]), Items([item], ["bee", "ant"])))[1].labels.tolist() == [1]


def test_a_loader_is_read_once_and_keeps_the_names_of_its_dataset():
    made = made_up((7, 6, 4))
    items = Items([(x, int(y)) for x, y in zip(made.images, made.labels)], ["ant", "bee", "cow"])
    read = as_images(DataLoader(Subset(items, range(10)), batch_size=4))
    assert same(read, made.images[:10], made.labels[:10]) and read.classes == ("ant", "bee", "cow")
    with pytest.raises(ValueError, match="empty DataLoader"):
        as_images(DataLoader(Items([]), batch_size=4))


def test_image_data_is_taken_as_it_is():
    made = made_up()
    assert as_images(made) is made
    renamed = as_images(made, name="other")
    assert renamed.name == "other" and renamed.images is made.images
