"""Files appear whole or not at all."""

import errno

import pytest

from mmlda._utils.files import write_whole


def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"old")

    def full(temporary):
        temporary.write_bytes(b"half of the n")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '.*weights\.safetensors'"):
        write_whole(path, full)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == [path.name]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
