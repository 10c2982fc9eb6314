"""One file from the web: whole or not there, whatever the server and the disk do."""

import errno
import hashlib

import pytest
from web import BODY, file_size_limit, known

from mmlda.data.download import FetchError, download


def whole(path, body=BODY):
    return path.read_bytes() == body and sorted(p.name for p in path.parent.iterdir()) == [path.name]


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_download(server, tmp_path, algorithm):
    seen = []
    dest = tmp_path / "new folder" / "file"
    download([server.address + "file"], dest, known("file", BODY, algorithm), lambda *at: seen.append(at))
    assert whole(dest) and len(server.log) == 1
    done = [d for d, _ in seen]
    assert done == sorted(done) and len(done) > 1 and seen[-1] == (len(BODY), len(BODY))
    download([server.address + "file"], dest, known("file", BODY, algorithm))
    assert len(server.log) == 1  # it was there


def test_cut_connections_go_on_where_they_were_cut(server, tmp_path):
    server.faults["file"] = [100_000, 300_000, 1]
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")
    assert server.ranges("file") == [None, "bytes=100000-", "bytes=400000-", "bytes=400001-"]


def test_a_later_call_goes_on(server, tmp_path):
    server.faults["file"] = [250_000, 0]
    with pytest.raises(FetchError, match=r"file: .*(cut after 250000 of 700001|closed|reset)"):
        download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["file.part"]
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file") and server.ranges("file")[-1] == "bytes=250000-"


def test_a_cut_goes_on_at_the_next_mirror(server, tmp_path):
    server.files["b/file"] = BODY
    server.faults["file"] = [250_000, "500"]
    download([server.address + "file", server.address + "b/file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file") and server.ranges("b/file") == ["bytes=250000-"]


def test_servers_without_ranges(server, tmp_path):
    server.faults["file"] = [250_000, "no range"]
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")
    (tmp_path / "file").unlink()
    server.files["b/file"] = BODY
    server.faults["file"] = [250_000, "wrong range"]
    download([server.address + "file", server.address + "b/file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")


def test_mirrors_in_turn(server, tmp_path):
    server.files |= {"wrong/file": BODY[:-1] + b"?", "short/file": BODY[:-5], "long/file": BODY + b"more"}
    server.faults["broken/file"] = ["500"]
    mirrors = ("missing", "broken", "wrong", "short", "long")
    urls = [f"{server.address}{mirror}/file" for mirror in mirrors]
    download(["http://127.0.0.1:9/file", *urls, server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")
    order = [path.split("/")[0] for path, _ in server.log]
    assert [m for n, m in enumerate(order) if m not in order[:n]] == [*mirrors, "file"]


@pytest.mark.parametrize("served", [BODY[:-1] + b"?", b"?" + BODY[1:], BODY[:-5], BODY + b"more", b""])
def test_what_is_wrong_is_never_there(server, tmp_path, served):
    server.files["file"] = served
    with pytest.raises(FetchError, match=f"{server.address}file: "):
        download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert not (tmp_path / "file").exists()
    server.files["file"] = BODY
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")


def test_wrong_hash_says_so(server, tmp_path):
    server.files["file"] = BODY[::-1]
    with pytest.raises(FetchError, match=f"must have sha256:.*, got sha256:{hashlib.sha256(BODY[::-1]).hexdigest()}"):
        download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stale", [b"garbage" * 1000, bytes(len(BODY)), bytes(len(BODY) + 7)])
def test_stale_parts_are_dropped(server, tmp_path, stale):
    (tmp_path / "file.part").write_bytes(stale)
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")


def test_wrong_file_in_place_is_replaced(server, tmp_path):
    (tmp_path / "file").write_bytes(b"something else")
    download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert whole(tmp_path / "file")


def test_no_room_for_a_file(server, tmp_path):
    with file_size_limit(300_000), pytest.raises(OSError, match=r"no space for .*file \(700001 bytes\)") as error:
        download([server.address + "file"], tmp_path / "file", known("file", BODY))
    assert error.value.errno == errno.EFBIG and list(tmp_path.iterdir()) == []


def test_full_disk(server, small_disk):
    with pytest.raises(OSError, match="no space for") as error:
        download([server.address + "file"], small_disk / "file", known("file", BODY))
    assert error.value.errno == errno.ENOSPC and list(small_disk.iterdir()) == []
