"""Every function that takes data takes every kind of it, through `as_images`."""

import warnings
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse
import torch
from dataset_files import made_up, save
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import mmlda
from mmlda.data import ImageData, as_images, load


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, n):
        return self.items[n]


class LabelFeature:
    names = ("ant", "bee")


class Columns:
    """As a dataset of Hugging Face's: rows are dictionaries, `features` has the class names."""

    features: ClassVar = {"label": LabelFeature()}

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, n):
        return {"image": self.images[n], "label": self.labels[n]}


def grey(n=6, size=8):
    return [Image.fromarray(np.full((size, size), 40 * k, np.uint8)) for k in range(n)]


def test_image_data_is_a_torch_dataset():
    made = made_up()
    assert isinstance(made, Dataset) and len(made) == 48
    image, label = made[3]
    assert torch.equal(image, made.pixels()[3]) and label == int(made.labels[3]) and isinstance(label, int)
    assert torch.equal(made[-1][0], made.pixels()[-1]) and len(list(made)) == 48
    assert made[np.int64(3)][1] == made[torch.tensor(3)][1] == label
    mask = made.labels == label
    for index in (
        [0, 3],
        torch.tensor([0, 3]),
        np.array([0, 3]),
        slice(0, 4, 3),
        [2],
        mask,
        mask.tolist(),
        mask.numpy(),
    ):
        part = made[index]
        assert isinstance(part, ImageData) and part.classes == made.classes
        assert torch.equal(part.labels, made.subset(index).labels) and len(part) == len(made.labels[index])
    with pytest.raises(IndexError):
        made[48]
    x, y = next(iter(DataLoader(made, batch_size=10)))
    assert torch.equal(x, made.pixels()[:10]) and torch.equal(y, made.labels[:10])


def test_string_labels_become_classes():
    x = torch.rand(4, 1, 8, 8)
    for y in (["cat", "dog", "ant", "cat"], np.array(["cat", "dog", "ant", "cat"])):
        made = as_images((x, y))
        assert made.classes == ("ant", "cat", "dog") and made.labels.tolist() == [1, 2, 0, 1]
    named = as_images((x[:2], ["dog", "dog"]), classes=("cat", "dog"))
    assert named.labels.tolist() == [1, 1] and named.classes == ("cat", "dog")
    assert as_images(Items(list(zip(x, y.tolist())))).classes == ("ant", "cat", "dog")
    assert as_images(DataLoader(Items(list(zip(x, y.tolist()))), batch_size=3)).labels.tolist() == [1, 2, 0, 1]
    with pytest.raises(ValueError, match="labels must be among the classes cat, dog, got 'cow'"):
        as_images((x[:1], ["cow"]), classes=("cat", "dog"))


def test_dictionaries_of_images_and_labels():
    pictures, labels = grey(), [0, 1, 0, 1, 0, 1]
    expected = torch.arange(6).mul(40).view(6, 1, 1, 1).expand(6, 1, 8, 8)
    rows = Columns(pictures, labels)
    for source in (
        rows,
        [rows[n] for n in range(6)],
        Items([rows[n] for n in range(6)]),
        {"train": rows, "test": None},
    ):
        made = as_images(source)
        assert torch.equal(made.images, expected.byte()) and made.labels.tolist() == labels
    assert as_images(rows).classes == ("ant", "bee")
    whole = as_images({"image": expected / 255, "label": np.array(labels)})
    assert torch.equal(whole.images, expected.byte())
    assert as_images({"train": None, "test": rows}, split="test").labels.tolist() == labels
    with pytest.raises(ValueError, match=r"item 0 of data must have the keys \"image\" and \"label\", got \['img2'"):
        as_images([{"img2": pictures[0], "label": 0}])


def test_pil_images():
    made = as_images((grey(3), ["b", "a", "b"]))
    assert made.shape == (1, 8, 8) and made.images[2, 0, 0, 0] == 80 and made.labels.tolist() == [1, 0, 1]
    palette = Image.fromarray(np.full((8, 8, 3), (200, 10, 30), np.uint8)).convert("P", palette=Image.Palette.ADAPTIVE)
    bright = Image.new("1", (8, 8), 1)
    assert as_images([(palette, 0)]).images[0, :, 0, 0].tolist() == [200, 10, 30]  # the colour, not its number
    assert as_images([(bright, 0)]).images.unique().tolist() == [255]
    with pytest.raises(ValueError, match="image 0 must have 8 bits per value, got a PIL image of mode F"):
        as_images([(Image.new("F", (8, 8)), 0)])


def test_channels_last_is_recognised_and_said():
    x, y = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8), np.arange(5)
    with pytest.warns(UserWarning, match=r"\[5, 32, 32, 3\] is read as 5 images of 32 x 32 with 3 channels last"):
        made = as_images((x, y))
    assert made.shape == (3, 32, 32) and torch.equal(made.images, torch.from_numpy(x).permute(0, 3, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_images((x.transpose(0, 3, 1, 2), y)).shape == (3, 32, 32)
        assert as_images([(image, 0) for image in x]).shape == (3, 32, 32)  # PIL's own layout
        assert as_images([(image, 0) for image in x.transpose(0, 3, 1, 2)]).shape == (3, 32, 32)


def test_labels_from_1_are_warned_about_in_training():
    x, y, one = torch.rand(6, 1, 8, 8), torch.tensor([1, 2, 3, 1, 2, 3]), mmlda.Recipe(steps=1)

    def net(classes):
        return mmlda.models.build({"backbone": "conv_net", "width": 4, "num_classes": classes}, seed=0)

    with pytest.warns(UserWarning, match="class 0 of 4 has no images: subtract 1 if the labels begin at 1"):
        mmlda.fit(net(4), (x, y), one, show=False)
    with pytest.raises(ValueError, match=r"the 4 classes of the data, got 3 \(labels begin at 1: subtract 1\)"):
        mmlda.fit(net(3), (x, y), one, show=False)
    with pytest.raises(ValueError, match=r"model must return logits .*\(labels begin at 1: subtract 1\), got \[6, 3\]"):
        mmlda.accuracy(net(3), (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mmlda.fit(net(4), (x, torch.tensor([0, 2, 3, 1, 2, 3])), one, show=False)
        mmlda.fit(net(5), (x, y), one, show=False)  # a part of the classes
        mmlda.fit(net(4), as_images((x, y), classes=("none", "a", "b", "c")), one, show=False)
        mmlda.accuracy(net(4), (x, y))  # a test set may lack a class


@pytest.mark.parametrize(
    "source, words",
    [
        (3, "data must be an ImageData, .* a name or a path, got a int"),
        (torch.rand(3, 1, 8, 8), "data must be .*, got a Tensor without labels"),
        ({"x": 1}, r'data must have the keys "image" and "label", got \[\'x\'\]'),
        ([1, 2, 3], r"item 0 of data must be \(image, label\) or a dictionary .*, got a int"),
        ("no-such-set", "source must be digits, .* or an existing path, got 'no-such-set'"),
        ([("text", 0)], "image 0 must be a tensor, an array or a PIL image, got a str"),
        ((torch.rand(2, 1, 8, 8), [0, None]), "label 1 must be an integer, got None"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(source, words):
    with pytest.raises(ValueError, match=words):
        as_images(source)


def sources(tmp_path):
    """The digits' test set as every kind of data."""
    test = load("digits")[1].subset(slice(40))
    pixels, names = test.pixels(), [test.classes[k] for k in test.labels.tolist()]
    for n, (image, label) in enumerate(zip(test.images[:, 0].numpy(), test.labels.tolist())):
        for part in ("train", "test"):
            save(tmp_path / part / str(label) / f"{n}.png", image)
    return {
        "ImageData": test,
        "pair": (pixels.numpy(), test.labels.numpy()),
        "strings": (pixels, names),
        "Dataset": Items([(image, label) for image, label in test]),
        "dictionaries": [{"image": image, "label": name} for image, name in zip(pixels, names)],
        "PIL": [(Image.fromarray(image), int(label)) for image, label in zip(test.images[:, 0].numpy(), test.labels)],
        "path": str(tmp_path),
    }


def test_every_function_takes_every_kind_of_data(tmp_path):
    recipe, config = mmlda.Recipe(steps=2, batch_size=16), {"backbone": "conv_net", "width": 4}
    seen = set()
    for kind, source in sources(tmp_path).items():
        model = mmlda.models.build({**config, "head": "softmax"}, seed=0)
        run = mmlda.fit(model, source, recipe, show=False)
        found = mmlda.evaluate(model, source, n=20, show=False)
        verdict = mmlda.audit(model, source, n=20, steps=1, queries=1, passes=1, show=False)
        folds = mmlda.cross_validate(source, recipe, [10.0], folds=2, model=config, show=False)
        numbers = (mmlda.accuracy(model, source).n, found.clean.n, verdict.n, len(folds))
        assert numbers == (40, 20, 20, 1), kind
        if kind != "path":  # whose files are in another order
            seen.add((run.loss, found.clean.number, folds[0]["mean"]))
    assert len(seen) == 1  # the same images, whatever they come in
    x = np.zeros((4, 8, 8), np.uint8)
    assert isinstance(as_images((x, [0, 1, 0, 1])), ImageData)


def test_names_give_training_images_to_fit_and_test_images_to_evaluate():
    model = mmlda.models.build({"backbone": "conv_net", "head": "softmax", "width": 4}, seed=0)
    assert mmlda.accuracy(model, "digits").n == 360
    assert mmlda.fit(model, "digits", mmlda.Recipe(steps=1), show=False).step == 1
    train, test = load("digits")
    assert (
        as_images("digits").digest() == train.digest() and as_images("digits", split="test").digest() == test.digest()
    )


# ------------------------------------------------------------------------------------ datasets within datasets


def test_a_table_within_other_datasets_keeps_its_bounds():
    x = np.array([[0.0, -5.0], [10.0, 5.0], [5.0, 0.0], [10.0, -5.0]])
    rows = mmlda.data.table(x, [0, 1, 0, 1], bounds=(-10, 30))
    corners = rows[[0, 1]]
    for source, expected in (
        (Subset(rows, [2, 1]), x[[2, 1]]),
        (DataLoader(rows, batch_size=3), x),
        (DataLoader(Subset(Subset(rows, [3, 2, 0]), [1, 2]), batch_size=2), x[[2, 0]]),
        (ConcatDataset([rows, corners]), x[[0, 1, 2, 3, 0, 1]]),
        (DataLoader(ConcatDataset([Subset(rows, [3]), corners])), x[[3, 0, 1]]),
    ):
        made = as_images(source)
        assert torch.equal(made.bounds, rows.bounds) and made.images.dtype == torch.float32
        assert np.allclose(made.in_units(made.images).numpy(), expected, atol=1e-5)
    bytes_ = mmlda.data.table([[0, 255], [51, 0]], [0, 1], bounds=(0, 255))  # each value is v / 255
    made = as_images(Subset(bytes_, [1, 0]))
    assert made.in_units(made.images).tolist() == pytest.approx(np.array([[51, 0], [0, 255]]), abs=1e-4)
    assert made.digest() == bytes_[[1, 0]].digest()
    assert as_images(Subset(made_up(), [1, 2])).bounds is None

    class Wider(Items):  # no longer the columns of the table
        dataset = rows

    assert as_images(Wider([(torch.rand(3), 0), (torch.rand(3), 1)])).bounds is None


def test_tables_put_together_must_have_the_same_bounds():
    x, y = np.random.default_rng(0).random((6, 2)), [0, 1, 0, 1, 0, 1]
    rows, other = mmlda.data.table(x, y, bounds=(0, 1)), mmlda.data.table(x, y, bounds=(0, 2))
    plain = TensorDataset(torch.rand(6, 2), torch.tensor(y))
    words = "every dataset of a ConcatDataset must have the same table bounds, got"
    for parts, got in (([rows, other], "different ones"), ([rows, plain], "one without"), ([plain, rows], "one with")):
        for source in (ConcatDataset(parts), DataLoader(Subset(ConcatDataset(parts), [0, 7]), batch_size=2)):
            with pytest.raises(ValueError, match=f"{words} {got}"):
                as_images(source)
    assert as_images(ConcatDataset([plain, plain])).bounds is None


def test_datasets_put_together_keep_their_class_names():
    x = torch.rand(4, 1, 8, 8)
    pets = as_images((x, [2, 0, 1, 2]), classes=("ant", "bee", "cat"))
    plain = Items(list(zip(x, [1, 1, 2, 0])))
    numbers, fewer = as_images((x, [0, 1, 2, 1])), as_images((x, [0, 1, 1, 0]))
    for parts, classes, labels in (
        ([pets, pets], pets.classes, [2, 0, 1, 2] * 2),
        ([Subset(pets, [1]), ConcatDataset([pets, pets])], pets.classes, [0, *[2, 0, 1, 2] * 2]),
        ([plain, pets], pets.classes, [1, 1, 2, 0, 2, 0, 1, 2]),  # integers without names are matched by number
        ([numbers, pets], pets.classes, [0, 1, 2, 1, 2, 0, 1, 2]),
        ([fewer, numbers], ("0", "1", "2"), [0, 1, 1, 0, 0, 1, 2, 1]),
        ([fewer, plain], ("0", "1", "2"), [0, 1, 1, 0, 1, 1, 2, 0]),
        ([plain, plain], ("0", "1", "2"), [1, 1, 2, 0] * 2),
    ):
        for source in (ConcatDataset(parts), DataLoader(ConcatDataset(parts), batch_size=3)):
            made = as_images(source)
            assert made.classes == classes and made.labels.tolist() == labels
    features = Columns(list(x), [0, 1, 0, 1])
    assert as_images(ConcatDataset([features, features])).classes == ("ant", "bee")
    for other in (("cat", "ant", "bee"), ("ant", "bee"), ("ant", "bee", "cat", "dog")):
        parts = [pets, as_images((x, [0, 1, 1, 0]), classes=other)]
        words = f"every dataset of a ConcatDataset must have the same classes, ant, bee, cat, got {', '.join(other)}$"
        for source in (ConcatDataset(parts), DataLoader(ConcatDataset(parts))):
            with pytest.raises(ValueError, match=words):
                as_images(source)
        named = as_images(ConcatDataset(parts), classes=("a", "b", "c", "d"))  # the numbers are right, says the caller
        assert named.labels.tolist() == [2, 0, 1, 2, 0, 1, 1, 0]


def test_sparse_tensors_are_refused():
    dense, labels = torch.eye(4), torch.arange(4)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.view(4, 1, 2, 2).to_sparse()):
        with pytest.raises(ValueError, match=r"x must be dense, got a tensor of layout torch.sparse_"):
            as_images((sparse, labels))
    with pytest.raises(ValueError, match=r"y must be integer or string labels \[N\], got"):
        as_images((dense, labels.to_sparse()))


def test_a_sparse_matrix_of_scipy_is_refused_with_the_way_out():
    x, y = scipy.sparse.csr_matrix(np.eye(6)), np.arange(6) % 2
    for convert in (as_images, mmlda.data.load, lambda pair: mmlda.data.table(*pair)):
        with pytest.raises(ValueError, match=r"x must be .*, got a csr_matrix; use x.toarray\(\)$"):
            convert((x, y))
    with pytest.raises(ValueError, match=r"got a csr_matrix without labels$"):
        as_images(x)
    assert as_images((x.toarray(), y)).shape == (6,)
