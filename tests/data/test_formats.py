"""The readers, bit for bit against files written here, and against files that lie."""

import gzip
import os
import pickle
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest
from dataset_files import cifar_bin, cifar_py, idx_bytes, images_and_labels, rng, save, tar_bytes

from mmlda.data import formats

# -------------------------------------------------------------------------------------------------------- IDX


@pytest.mark.parametrize("shape", [(7,), (5, 4, 3), (2, 3, 4, 5), (0, 4, 4)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx(tmp_path, shape, pack):
    values = rng.integers(0, 256, shape, np.uint8)
    path = tmp_path / "values"  # what it is is in its bytes, not in its name
    path.write_bytes(pack(idx_bytes(values)))
    read = formats.read_idx(path)
    assert read.dtype == np.uint8 and read.shape == shape and (read == values).all()


def damaged(values):
    whole = idx_bytes(values)
    yield "truncated", whole[:-1]
    yield "truncated", whole[:9]
    yield "must be an IDX file", b""
    yield "must be an IDX file", b"\0\0\x08"
    yield "must be an IDX file", b"\x01" + whole[1:]
    yield "must be an IDX file", whole[:2] + b"\x0d" + whole[3:]  # floats
    yield "must be an IDX file", whole[:3] + b"\x00" + whole[4:]
    yield "must be an IDX file", whole[:3] + b"\xff" + whole[4:]
    yield "after its last value", whole + b"\0"
    yield "false header", b"\0\0\x08\x03" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1)
    yield "false header", b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("case", range(11))
def test_idx_that_lies(tmp_path, pack, case):
    words, content = list(damaged(rng.integers(0, 256, (5, 4, 3), np.uint8)))[case]
    path = tmp_path / "images"
    path.write_bytes(pack(content))
    with pytest.raises(ValueError, match=words) as error:
        formats.read_idx(path)
    assert str(path) in str(error.value)


def test_idx_in_a_cut_or_altered_gzip(tmp_path):
    packed = gzip.compress(idx_bytes(rng.integers(0, 256, (50, 8, 8), np.uint8)))
    path = tmp_path / "images.gz"
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 1
    for content in (packed[:-9], packed[: len(packed) // 2], bytes(flipped), packed + b"garbage"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            formats.read_idx(path)


def test_idx_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LIMIT", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((2, 1024, 1024), np.uint8))))
    with pytest.raises(ValueError, match=r"got .* 2097152 bytes"):
        formats.read_idx(path)
    # A small promise and much behind it: only one byte more than promised is read.
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((2, 2, 2), np.uint8)) + bytes(10 << 20)))
    with pytest.raises(ValueError, match="after its last value"):
        formats.read_idx(path)


def test_a_small_gzip_can_not_fill_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "bomb.gz"
    monkeypatch.setattr(formats, "SMALL", 1 << 20)
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((1 << 21,), np.uint8))))
    with pytest.raises(ValueError, match=r"at most 1048576 bytes \(MMLDA_DATA_LIMIT\), got .* 2097152 bytes"):
        formats.read_idx(path)
    monkeypatch.setenv("MMLDA_DATA_LIMIT", str(1 << 21))
    assert formats.read_idx(path).shape == (1 << 21,)
    monkeypatch.setenv("MMLDA_DATA_LIMIT", "2 GB")
    with pytest.raises(ValueError, match="MMLDA_DATA_LIMIT must be an integer >= 1, got '2 GB'"):
        formats.read_idx(path)


@pytest.mark.parametrize("read", [formats.read_idx, lambda path: list(formats.tar_files(path)), formats.read_cifar])
def test_pipes_are_not_opened(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe must be a regular file"):
        read(tmp_path / "pipe")


# -------------------------------------------------------------------------------------------------------- tar


def test_tar_files(tmp_path):
    members = [("a/b.bin", b"one"), ("./c", b""), ("d" * 150, b"two" * 1000)]
    for mode in ("w", "w:gz"):
        path = tmp_path / "x"
        path.write_bytes(tar_bytes(members, mode))
        assert list(formats.tar_files(path)) == [("a/b.bin", b"one"), ("c", b""), ("d" * 150, b"two" * 1000)]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/etc/out", "..\\out", "C:\\out", "a/..", "..", "C:out"])
def test_tar_members_stay_in_the_folder(tmp_path, name):
    path = tmp_path / "x.tar.gz"
    path.write_bytes(tar_bytes([(name, b"x")]))
    with pytest.raises(ValueError, match="must be inside the folder"):
        list(formats.tar_files(path))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_tar_members_are_files(tmp_path, kind):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(ValueError, match="must be a regular file"):
        list(formats.tar_files(path))


def test_tar_bomb_and_cut_tar(tmp_path):
    path = tmp_path / "x.tar.gz"
    whole = tar_bytes([("zeros", bytes(10 << 20)), ("more", rng.bytes(10000))])
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="at most the 1048576 bytes allowed"):
        list(formats.tar_files(path, limit=1 << 20))
    path.write_bytes(tar_bytes([(str(i), bytes(1 << 19)) for i in range(4)]))  # small members, too many of them
    with pytest.raises(ValueError, match=r"unpacks to at most|bytes allowed"):
        list(formats.tar_files(path, limit=1 << 20))
    for cut in (whole[:-3000], whole[:100], b"no tar at all", b""):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=str(path)):
            list(formats.tar_files(path))


@pytest.mark.parametrize("headers", [3000 * [b"11 path=ab\n"], [b"9" * 400 + b" a=b\n"], [b"22 GNU.sparse.map=1,a\n"]])
def test_tar_headers_that_tarfile_stumbles_over(tmp_path, headers):
    content = b""
    for text in headers:
        header = tarfile.TarInfo("header")
        header.type, header.size = tarfile.XHDTYPE, len(text)
        content += header.tobuf() + text.ljust(512, b"\0")
    path = tmp_path / "x.tar"
    path.write_bytes(content + tarfile.TarInfo("a").tobuf() + bytes(1024))
    with pytest.raises(ValueError, match=f"{path} must be a whole tar archive"):
        list(formats.tar_files(path))


def test_every_flipped_bit_of_a_gzipped_tar_is_noticed(tmp_path):
    members = [(f"{name}.bin", cifar_bin(*images_and_labels(1))) for name in (*formats.CIFAR_TRAIN, "test_batch")]
    whole, path = tar_bytes(members), tmp_path / "cifar.tar.gz"
    path.write_bytes(whole)
    splits, refused = formats.read_cifar(path)[1], 0
    for at in range(10, len(whole), 97):  # behind gzip's header, which says when and where it was made
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            again = formats.read_cifar(path)[1]
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # one of the bits without a meaning that deflate has
            assert all((a == b).all() for old, new in zip(splits, again) for a, b in zip(old, new))
    assert refused > 0.95 * len(whole) // 97


# --------------------------------------------------------------------------------------------------- CIFAR-10


def test_cifar_records():
    images, labels = images_and_labels(6)
    x, y = formats.cifar_records(cifar_bin(images, labels), "batch")
    assert (x == images).all() and (y == labels).all()
    for content in (b"", cifar_bin(images, labels)[:-1], cifar_bin(images, labels) + b"\0"):
        with pytest.raises(ValueError, match=r"some/batch.*3073"):
            formats.cifar_records(content, "some/batch")
    with pytest.raises(ValueError, match="labels 0 to 9, got 10"):
        formats.cifar_records(bytes([10]) + bytes(3072), "batch")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_cifar_pickle(protocol):
    images, labels = images_and_labels(6)
    x, y = formats.cifar_pickle(cifar_py(images, labels, protocol), "batch")
    assert (x == images).all() and (y == labels).all()


def test_cifar_pickle_as_python_2_wrote_it():
    """Opcode for opcode what Python 2's cPickle with NumPy 1 makes of {'data': ..., 'labels': [...]}."""
    images, labels = images_and_labels(2)
    raw = images.tobytes()
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tbU\x06labelsq\x08]"
        b"(K" + bytes([labels[0]]) + b"K" + bytes([labels[1]]) + b"eu."
    )
    x, y = formats.cifar_pickle(content, "batch")
    assert (x == images).all() and (y == labels).all()


class Evil:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_can_not_act(tmp_path, protocol):
    proof = tmp_path / "proof"
    for evil in (
        Evil(os.system, f"touch {proof}"),
        Evil(eval, f"open({str(proof)!r}, 'w')"),
        Evil(open, str(proof), "w"),
        Evil(getattr, "text", "upper"),
        Evil(np.memmap, str(proof), "u1", "w+", 0, (4,)),
        Evil(np.fromfile, "/etc/passwd"),
    ):
        content = pickle.dumps({b"data": evil, b"labels": [0]}, protocol=protocol)
        with pytest.raises(ValueError, match=r"batch must be a CIFAR-10 batch, got .* a call of"):
            formats.cifar_pickle(content, "batch")
        assert not proof.exists()


PUT = struct.Struct("<I").pack
BOMBS = {
    "object pointers": b"\x80\x02cnumpy\nndarray\n(K\x01\x85U\x01OU\x08AAAAAAAAtR.",
    "object dtype": b"\x80\x02cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.",
    "memo": b"\x80\x02]r" + PUT(2**32 - 1) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "copies": b"\x80\x02(c_codecs\nencode\nq\x00X\x00\x10\x00\x00"
    + b"x" * 4096
    + b"U\x06latin1\x86q\x01R"
    + b"h\x00h\x01R" * 1000
    + b"l.",
    "names": b"\x80\x04(X" + PUT(10**6) + b"x" * 10**6 + b"\x94" + b"h\x00h\x00\x93" * 100 + b"l.",
    "nested": b"\x80\x02}" + b")" + b"\x85" * 60_000 + b"K\x00s.",
    "attributes": b"\x80\x02cnumpy\ndtype\nN}U\x01xK\x01s\x86b.",
    "persistent": b"\x80\x02U\x01xQ.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickles_can_not_take_memory_or_make_objects(name):
    tracemalloc.start()
    with pytest.raises(ValueError, match="batch must be a CIFAR-10 batch"):
        formats.cifar_pickle(BOMBS[name], "batch")
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_pickles_can_not_make_object_pointers_of_their_bytes():
    for name, what in (("object pointers", "ndarray"), ("object dtype", "dtype")):
        with pytest.raises(ValueError, match=f"got a call of numpy.{what}"):
            formats.cifar_pickle(BOMBS[name], "batch")


def test_pickles_that_are_no_batch():
    images, labels = images_and_labels(2)
    flat = images.reshape(2, -1)
    codec = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x06\x00\x00\x00rot_13\x86R."
    for content in (
        b"",
        b"garbage",
        cifar_py(images, labels)[:-50],
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": flat.astype(np.float32), b"labels": [0, 1]}),
        pickle.dumps({b"data": flat[:, :-1], b"labels": [0, 1]}, protocol=2),
        pickle.dumps({b"data": flat, b"labels": [0]}, protocol=2),
        pickle.dumps({b"data": flat, b"labels": [0, 300]}, protocol=2),
        pickle.dumps({b"data": flat, b"labels": [0, -1]}, protocol=2),
        pickle.dumps({b"data": flat, b"labels": [0, 10]}, protocol=2),
        pickle.dumps({b"data": flat, b"fine_labels": [0, 1]}, protocol=2),  # CIFAR-100
        codec,
    ):
        with pytest.raises(ValueError, match=r"^some/batch "):
            formats.cifar_pickle(content, "some/batch")


def test_cifar_needs_all_its_batches(tmp_path):
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(cifar_bin(*images_and_labels(2)))
    with pytest.raises(ValueError, match=r"got one without test_batch\.bin"):
        formats.read_cifar(tmp_path)


# ----------------------------------------------------------------------------------------------------- images


def test_images_that_do_not_fit(tmp_path):
    save(tmp_path / "a" / "0.png", np.zeros((4, 5), np.uint8))
    odd = tmp_path / "a" / "1.png"
    folders = [tmp_path / "a"]
    save(odd, np.zeros((5, 4), np.uint8))
    with pytest.raises(ValueError, match=f"{odd} must be 5 x 4, .* got 4 x 5"):
        formats.read_images(folders)
    save(odd, np.zeros((4, 5), np.uint16))
    with pytest.raises(ValueError, match=f"{odd} must be an image of 8 bits"):
        formats.read_images(folders)
    odd.write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=f"{odd} must be an image"):
        formats.read_images(folders)
    save(odd, rng.integers(0, 256, (4, 5), np.uint8))
    odd.write_bytes(odd.read_bytes()[:-30])
    with pytest.raises(ValueError, match=f"{odd} must be an image"):
        formats.read_images(folders)


def test_a_pipe_among_the_images_does_not_hang(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "x.png")
    with pytest.raises(ValueError, match=r"x\.png must be a regular file"):
        formats.read_images([tmp_path / "a"])


def test_a_flipped_bit_of_a_png_is_noticed(tmp_path):
    path = tmp_path / "a" / "0.png"
    save(path, rng.integers(0, 256, (16, 16), np.uint8))
    whole = path.read_bytes()
    for at in range(len(whole) - 12):  # the last twelve bytes say that it ends
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"0\.png"):
            formats.read_images([path.parent])


def test_pictures_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    with pytest.raises(ValueError, match=r"must be an image, got .*cannot identify"):  # it would start Ghostscript
        formats.read_images([tmp_path / "a"])


def test_one_huge_image_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "PIXELS", 1000)
    monkeypatch.setattr(formats, "SMALL", 16_000)
    save(tmp_path / "a" / "0.png", np.zeros((40, 40), np.uint8))
    with pytest.raises(ValueError, match=r"at most 1000 pixels .*, got 40 x 40"):
        formats.read_images([tmp_path / "a"])


def test_images_too_many_for_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LIMIT", 1000)
    save(tmp_path / "a" / "0.png", np.zeros((40, 40), np.uint8))
    with pytest.raises(ValueError, match="must be images of 1000 bytes in all"):
        formats.read_images([tmp_path / "a"])


def test_image_modes(tmp_path):
    grey, colour = rng.integers(0, 256, (4, 5), np.uint8), rng.integers(0, 256, (4, 5, 3), np.uint8)
    save(tmp_path / "a" / "0.png", grey)
    save(tmp_path / "b" / "0.bmp", grey)
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / ".hidden.png").write_bytes(b"")
    x, y = formats.read_images([tmp_path / "a", tmp_path / "b"])
    assert x.shape == (2, 1, 4, 5) and (x[:, 0] == grey).all() and y.tolist() == [0, 1]
    save(tmp_path / "b" / "1.png", np.dstack([colour, np.full((4, 5), 7, np.uint8)]))  # with transparency
    x, y = formats.read_images([tmp_path / "a", tmp_path / "b"])
    assert x.shape == (3, 3, 4, 5) and (x[0] == grey).all() and (x[2] == colour.transpose(2, 0, 1)).all()
