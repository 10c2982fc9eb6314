"""Loading from every source bit for bit; splits, biased sets and augmentation against plain loops."""

import gzip
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import cifar_bin, cifar_py, idx_bytes, images_and_labels, made_up, same, save, tar_bytes, write_idx

from mmlda import data
from mmlda.data import ImageData, as_images, augment, biased, bp1, bp2, draw_augmentation, folds, holdout, load, subsets

SHARED = Path(os.environ.get("MMLDA_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
rng = np.random.default_rng(1)


def rows(part):
    """The images and labels as a multiset: for comparing sets whatever their order."""
    return Counter((x.numpy().tobytes(), int(y)) for x, y in zip(part.images, part.labels))


# ---------------------------------------------------------------------------------------------------- loading


def test_digits():
    from sklearn.datasets import load_digits

    train, test = load("digits")
    assert (len(train), len(test)) == (1437, 360) and train.shape == (1, 8, 8)
    x, y = load_digits(return_X_y=True)
    whole = Counter(
        (bytes(int(v * 255 / 16 + 0.5) for v in image), int(label)) for image, label in zip(x.astype(int).tolist(), y)
    )
    assert rows(train) + rows(test) == whole
    share = test.counts / (train.counts + test.counts)
    assert ((share - 0.2).abs() < 0.005).all()
    assert train.images.max() == 255 and train.classes == tuple("0123456789")


def test_digits_split_is_fixed():
    """Measured once: no generator's state, no version of scikit-learn or NumPy may change it."""
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    train, test = load("digits")
    assert train.digest() == "ac2c9cff5587c4bb318294c5d0724493048959b4f855fe60d739489437fb4fdb"
    assert test.digest() == "875bb2cc98079f6846ef07d718b5b8827ac77b3883bacd6f64fa534f026bc9de"


def test_split_follows_from_the_images_alone():
    made = made_up((40, 25, 7))
    train, test = data.split(made)
    assert len(test) == 15 and test.counts.tolist() == [8, 5, 2] and rows(train) + rows(test) == rows(made)
    shuffled = made.subset(torch.randperm(len(made), generator=torch.Generator().manual_seed(3)))
    assert rows(data.split(shuffled)[1]) == rows(test)


@pytest.mark.parametrize(
    "name, place",
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
@pytest.mark.parametrize("pack, tail", [(bytes, ""), (gzip.compress, ".gz")])
def test_load_idx_by_name(tmp_path, name, place, pack, tail):
    train, test = images_and_labels(20, (28, 28)), images_and_labels(8, (28, 28))
    write_idx(tmp_path / place, train, test, pack=pack, tail=tail)
    a, b = load(name, root=tmp_path)
    assert same(a, train[0][:, None], train[1]) and same(b, test[0][:, None], test[1])
    assert len(a.classes) == 10 and a.name == name and a.classes[-1] == ("9" if name == "mnist" else "Ankle boot")


def test_root_from_the_environment(tmp_path, monkeypatch):
    train, test = images_and_labels(5, (28, 28)), images_and_labels(5, (28, 28))
    write_idx(tmp_path / "mnist", train, test)
    monkeypatch.setenv("MMLDA_DATA", str(tmp_path))
    assert same(load("mnist")[1], test[0][:, None], test[1])
    monkeypatch.delenv("MMLDA_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.data_root() == tmp_path / ".cache" / "mmlda"


def test_folder_of_idx_files(tmp_path):
    train, test = images_and_labels(9, (3, 6, 5)), images_and_labels(4, (3, 6, 5))
    write_idx(tmp_path, train, test, end=".idx3-ubyte", names=("mine-train", "mine-test"))  # four dimensions
    (tmp_path / "mine-train-images.idx3-ubyte.gz").write_bytes(b"the plain file is read")
    (tmp_path / "mine-train-images.idx3-ubyte.part").write_bytes(b"not a name of ours")
    a, b = load(tmp_path)
    assert same(a, *train) and same(b, *test)
    L = 1 + max(train[1].max(), test[1].max())
    assert a.classes == b.classes == tuple(map(str, range(L)))


def test_folder_of_idx_files_that_is_not_whole(tmp_path):
    train, test = images_and_labels(9, (6, 5)), images_and_labels(4, (6, 5))
    write_idx(tmp_path, train, test)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(test[1][:-1]))
    with pytest.raises(ValueError, match=r"t10k-images.*must be images that match"):
        load(tmp_path)
    labels.unlink()
    with pytest.raises(ValueError, match=str(labels)):
        load(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError, match="one IDX image file for t10k or test, got 0"):
        load(tmp_path)
    write_idx(tmp_path, train, (rng.integers(0, 9, (4, 7, 7), np.uint8), test[1]))
    with pytest.raises(ValueError, match=r"\(1, 6, 5\).*\(1, 7, 7\)"):
        load(tmp_path)


@pytest.mark.parametrize("place", [".", "cifar10", "cifar-10"])
@pytest.mark.parametrize("version", ["bin", "py"])
@pytest.mark.parametrize("packed", [False, True])
def test_load_cifar10(tmp_path, place, version, packed):
    batches = [images_and_labels(4) for _ in range(6)]
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    end, write = (".bin", cifar_bin) if version == "bin" else ("", cifar_py)
    folder = f"cifar-10-batches-{version}"
    files = [(f"{folder}/{name}{end}", write(*batch)) for name, batch in zip(names, batches)]
    files = [*files[::-1], (f"{folder}/readme.html", b"<p>"), (f"{folder}/batches.meta", b"not read")]
    root = tmp_path / place
    if packed:
        root.mkdir(exist_ok=True)
        path = root / f"cifar-10-{'binary' if version == 'bin' else 'python'}.tar.gz"
        path.write_bytes(tar_bytes(files))
    else:
        path = root / folder
        path.mkdir(parents=True)
        for name, content in files:
            (root / name).write_bytes(content)
    x, y = (np.concatenate([batch[i] for batch in batches[:5]]) for i in range(2))
    for a, b in (load("cifar10", root=tmp_path), load(path)):
        assert same(a, x, y) and same(b, *batches[5])
        assert a.classes[0] == "airplane" and a.classes[9] == "truck" and a.name == "cifar10"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_missing_says_how_to_get_it(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*`mmlda data fetch {name}`"):
        load(name, root=tmp_path)


def test_load_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"source must be digits, .* or an existing path, got 'cifar11'"):
        load("cifar11")
    with pytest.raises(ValueError, match="folders of images by class, got none"):
        load(tmp_path)
    with pytest.raises(ValueError, match='data must have the keys "image" and "label", got'):
        load({})


def write_pictures(folder, classes, n, shape=(6, 5, 3)):
    made = {}
    for k, name in enumerate(classes):
        for i in range(n + k):
            made[name, i] = rng.integers(0, 256, shape, np.uint8)
            save(folder / name / f"{i:02d}.png", made[name, i])
    x = np.stack(list(made.values()))
    return (x.transpose(0, 3, 1, 2) if len(shape) == 3 else x[:, None]), [classes.index(c) for c, _ in made]


@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_of_images(tmp_path, held):
    train = write_pictures(tmp_path / "train", ["ant", "bee", "cow"], 4)
    test = write_pictures(tmp_path / held, ["ant", "cow"], 2)  # no bee in the test set
    a, b = load(tmp_path)
    assert same(a, *train) and same(b, test[0], [2 * y for y in test[1]])
    assert a.classes == b.classes == ("ant", "bee", "cow")
    write_pictures(tmp_path / held, ["dog"], 1)
    with pytest.raises(ValueError, match="must be a folder of the classes in train, got also dog"):
        load(tmp_path)


def test_one_level_of_images_is_split(tmp_path):
    x, y = write_pictures(tmp_path, ["ant", "bee"], 20, (6, 5))
    a, b = load(str(tmp_path))
    assert b.counts.tolist() == [4, 5] and len(a) == 41 - 9 and a.shape == (1, 6, 5)
    assert rows(a) + rows(b) == rows(as_images((x, np.array(y))))


def test_tensors():
    x, y = torch.randint(0, 256, (50, 3, 4, 4), dtype=torch.uint8), torch.arange(50) % 5
    a, b = load(((x, y), (x[:10, :], y[:10] % 2)))
    assert torch.equal(a.images, x) and torch.equal(b.labels, y[:10] % 2) and a.classes == b.classes == tuple("01234")
    a, b = load((x, y))
    assert b.counts.tolist() == [2] * 5 and rows(a) + rows(b) == rows(as_images((x, y)))
    assert as_images((x[:, 0], y.int())).shape == (1, 4, 4)
    assert same(as_images((x.numpy(), y.numpy())), x, y)
    assert load((as_images((x, y)), as_images((x, y))))[1].num_classes == 5


# ---------------------------------------------------------------------------------------------------- subsets


def test_uniform_is_numpys():
    """The stream that is frozen, turned into doubles as NumPy's own generator does it today."""
    assert (subsets._uniform(1000, 7) == np.random.default_rng(7).random(1000)).all()


@pytest.mark.parametrize("n", [1, 7, 24, 47])
def test_holdout(n):
    made = made_up()
    rest, held = holdout(made, n, seed=3)
    assert len(held) == n and rows(rest) + rows(held) == rows(made)
    share = n * made.counts / len(made)
    assert ((held.counts - share).abs() < 1).all()
    assert holdout(made, n, seed=3)[1].digest() == held.digest()
    if 1 < n < 47:
        assert rows(holdout(made, n, seed=4)[1]) != rows(held)


def test_holdout_keeps_the_order():
    made = made_up((50, 50))
    rest, held = holdout(made, 20)
    position = {x.numpy().tobytes(): n for n, x in enumerate(made.images)}
    for part in (rest, held):
        at = [position[x.numpy().tobytes()] for x in part.images]
        assert at == sorted(at)


@pytest.mark.parametrize("k", [2, 5, 48])
def test_folds(k):
    made = made_up()
    parts = folds(made, k, seed=1)
    assert len(parts) == k
    assert sum((rows(val) for _, val in parts), Counter()) == rows(made)
    for train, val in parts:
        assert rows(train) + rows(val) == rows(made)
        assert abs(len(val) - len(made) / k) < 1
        assert ((val.counts - made.counts / k).abs() < 1).all()
    assert [v.digest() for _, v in folds(made, k, seed=1)] == [v.digest() for _, v in parts]
    assert rows(folds(made, k, seed=2)[0][1]) != rows(parts[0][1])


def test_subsets_refuse():
    made = made_up()
    for n in (0, 48, -1):
        with pytest.raises(ValueError, match=f"n must be an integer from 1 to 47, got {n}"):
            holdout(made, n)
    for k in (1, 49):
        with pytest.raises(ValueError, match=f"k must be an integer from 2 to 48, got {k}"):
            folds(made, k)
    for alpha in ([0.5] * 3, [0.5, 0.5, 0.5, 1.1], [0.5, -0.1, 0.5, 0.5], [0.5, float("nan"), 0.5, 0.5], 0.5):
        with pytest.raises(ValueError, match="alpha must be 4 probabilities, got"):
            biased(made, alpha)
    with pytest.raises(ValueError, match="alpha must be large enough to keep one of the 48 images"):
        biased(made, [0.0] * 4)


def test_biased_keeps_each_class_with_its_probability():
    y = torch.arange(10).repeat(5000)
    made = ImageData(torch.zeros(50000, 1, 1, 1, dtype=torch.uint8), y, tuple("0123456789"))
    alpha = bp1(seed=2)[3]
    for seed in range(3):
        counts = biased(made, alpha, seed).counts.double()
        sigma = (5000 * alpha * (1 - alpha)).sqrt()
        assert ((counts - 5000 * alpha).abs() <= 4.5 * sigma).all()  # alpha = 1 keeps every image
    part = biased(made, alpha.tolist(), 0)
    assert torch.equal(part.priors, part.counts.double() / len(part))
    assert (part.priors - alpha / alpha.sum()).abs().max() < 0.005


def test_biased_is_a_plain_draw_per_image():
    made = made_up((40, 30, 20))
    alpha = [0.9, 0.1, 0.5]
    u = np.random.default_rng(11).random(len(made))
    keep = [n for n in range(len(made)) if u[n] < alpha[int(made.labels[n])]]
    part = biased(made, np.array(alpha), seed=11)
    assert part.digest() == made.subset(keep).digest() and part.classes == made.classes
    assert biased(made, alpha, 12).digest() != part.digest()
    more = biased(made, [0.95, 0.4, 0.5], seed=11)
    assert rows(part) <= rows(more)


def test_bias_probabilities():
    steps = torch.arange(1, 11, dtype=torch.float64) / 10
    for seed in range(3):
        alphas = bp1(seed)
        assert alphas.shape == (10, 10) and alphas.dtype == torch.float64
        assert torch.equal(alphas.sort(dim=1).values, steps.expand(10, 10))
        assert len({tuple(a.tolist()) for a in alphas}) == 10
    assert torch.equal(bp1(1), bp1(1)) and not torch.equal(bp1(1), bp1(2))
    expected = [[1.0 if i == j else 0.2 for j in range(10)] for i in range(10)]
    assert bp2().tolist() == expected and bp2().dtype == torch.float64


def test_seeds_mean_the_same_images_for_ever():
    """Measured once; a change here would change every result made with a seed."""
    train, _ = load("digits")
    assert biased(train, bp1(0)[0], 0).digest()[:16] == "71218b24414e2f69"
    assert holdout(train, 100, 0)[1].digest()[:16] == "89e2c6b622d67aed"
    assert folds(train, 5, 0)[4][1].digest()[:16] == "1eacc5bf333a026d"


# ----------------------------------------------------------------------------------------------- augmentation


def augment_by_loop(x, dy, dx, flip, pad):
    N, _, H, W = x.shape
    out = torch.zeros_like(x)
    for n in range(N):
        for i in range(H):
            for j in range(W):
                r, c = i + int(dy[n]) - pad, (W - 1 - j if flip is not None and flip[n] else j) + int(dx[n]) - pad
                if 0 <= r < H and 0 <= c < W:
                    out[n, :, i, j] = x[n, :, r, c]
    return out


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("C, H, W, pad", [(3, 8, 8, 4), (1, 7, 5, 2), (2, 3, 4, 4), (3, 6, 6, 0)])
def test_augment_is_the_loop(layout, dtype, C, H, W, pad):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 256, (40, C, H, W), generator=g).to(dtype).contiguous(memory_format=layout)
    dy, dx, flip = draw_augmentation(40, pad=pad, generator=g)
    assert flip.any() and not flip.all()
    for f in (flip, None):
        out = augment(x, dy, dx, f, pad=pad)
        assert out.dtype == dtype and torch.equal(out, augment_by_loop(x, dy, dx, f, pad))
        assert out.is_contiguous(memory_format=layout)


def test_augment_is_pad_crop_flip():
    """The other way to say it, with PyTorch's own padding, on one image at a time."""
    x = torch.rand(16, 3, 32, 32)
    dy, dx, flip = draw_augmentation(16, generator=torch.Generator().manual_seed(1))
    out = augment(x, dy, dx, flip)
    for n in range(16):
        crop = torch.nn.functional.pad(x[n], (4, 4, 4, 4))[:, dy[n] : dy[n] + 32, dx[n] : dx[n] + 32]
        assert torch.equal(out[n], crop.flip(2) if flip[n] else crop)


def test_draws():
    dy, dx, flip = draw_augmentation(100, 900, pad=3, generator=torch.Generator().manual_seed(0))
    assert dy.shape == dx.shape == flip.shape == (100, 900) and flip.dtype == torch.bool
    for draws in (dy, dx):
        counts = torch.bincount(draws.flatten(), minlength=7).double()
        assert len(counts) == 7 and ((counts - 90000 / 7).abs() < 5 * (90000 / 7 * 6 / 7) ** 0.5).all()
    assert abs(int(flip.sum()) - 45000) < 5 * 150
    assert abs(np.corrcoef(dy.flatten(), dx.flatten())[0, 1]) < 0.02
    again = draw_augmentation(100, 900, pad=3, generator=torch.Generator().manual_seed(0))
    assert all(map(torch.equal, (dy, dx, flip), again))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_augment_in_a_cuda_graph(layout):
    x = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8).contiguous(memory_format=layout)
    draws = draw_augmentation(3, 128, generator=torch.Generator().manual_seed(0))
    static = [d[0].cuda() for d in draws]
    on_device = x.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        augment(on_device, *static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = augment(on_device, *static)
    for step in range(3):
        for tensor, d in zip(static, draws):
            tensor.copy_(d[step])
        graph.replay()
        assert torch.equal(out.cpu(), augment(x, *(d[step] for d in draws)))
    made = as_images((x, torch.arange(128) % 10)).to("cuda")
    assert made.digest() == made.to("cpu").digest() and made.device.type == "cuda"
    assert biased(made, bp2()[0], 0).digest() == biased(made.to("cpu"), bp2()[0], 0).digest()
    assert made.pixels([3, 4]).device.type == "cuda"


# ---------------------------------------------------------------------------------------------- the real sets


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    if not (SHARED / "unpack.py").is_file():
        pytest.skip(f"{SHARED} is not here (MMLDA_SHARED_DATA names another place)")
    root = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, SHARED / "unpack.py", root], check=True)
    return root


REAL = {
    "mnist": (
        ([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], [0.1307], [0.3081]),
        ([980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009], [0.1325], [0.3105]),
    ),
    "cifar10": (
        ([5000] * 10, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ([1000] * 10, [0.4942, 0.4851, 0.4504], [0.2467, 0.2429, 0.2616]),
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_sets(real, name):
    """Counts, means and standard deviations as they are published everywhere."""
    for part, (counts, mean, std) in zip(load(name, root=real), REAL[name]):
        assert part.counts.tolist() == counts
        values = torch.arange(256, dtype=torch.float64) / 255
        for c, channel in enumerate(part.images.unbind(1)):
            share = torch.bincount(channel.flatten().long(), minlength=256).double() / channel.numel()
            m = float(share @ values)
            assert abs(m - mean[c]) < 5e-5 and abs(float(share @ (values - m) ** 2) ** 0.5 - std[c]) < 5e-5


@pytest.mark.parametrize("name", REAL)
def test_real_sets_check(real, name):
    from mmlda.data import fetch

    assert fetch.check(name, real) == fetch.Check(name, data.find(name, real), True)
