"""Files appear whole or not at all, and what is read from them is checked."""

import errno
import os

import pytest

from mmlda._utils.checks import DamagedFile
from mmlda._utils.files import read_json, write_whole


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


@pytest.mark.parametrize(
    "text, words",
    [
        ("[" * 100_000, "JSON must have at most 32 levels"),
        ('{"a": ' + "[" * 32 + "1" + "]" * 32 + "}", "JSON must have at most 32 levels"),
        ('{"a": [1e999]}', "JSON must have numbers below 1e300"),
        ('{"a": NaN}', "JSON must have numbers below 1e300"),
        ('{"a": ' + "9" * 400 + "}", "JSON must have numbers below 1e300"),
        ("[1]", "a list"),
        ('{"a": ', "Expecting value"),
        ("\udcff", "invalid start byte"),
    ],
)
def test_json_that_is_damaged_or_hostile_is_one_kind_of_error(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"x.json must be a JSON object, got .*{words}") as error:
        read_json(path)
    assert type(error.value) is DamagedFile
    path.write_text('{"a": ' + "[" * 31 + "1" + "]" * 31 + "}")
    assert "a" in read_json(path)


def test_only_regular_files_of_a_bounded_size_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=r"pipe\.json must be a regular file"):
        read_json(tmp_path / "pipe.json")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room on the disk
    with pytest.raises(ValueError, match=r"huge\.json must be a file of at most 33554432 bytes, got 1099511627776"):
        read_json(tmp_path / "huge.json")
