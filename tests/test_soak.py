"""Mutated files of every format: a short version of `make soak`, and whether it would notice a broken promise."""

import dataclasses

import pytest
import soak_files
import soak_kills


@pytest.mark.long
@pytest.mark.parametrize("name", soak_files.FORMATS)
def test_mutants_are_refused_or_read_as_promised(name):
    found = soak_files.soak(name, 200, seed=1)
    assert not found["failures"]
    assert found["refused"] + found["same"] + found["valid"] == found["mutants"]
    assert found["refused"] > 0 and found["peak_MiB"] < 1024


def test_a_broken_promise_is_noticed(monkeypatch):
    def lax(folder):  # takes what it gets
        return [path.read_bytes() for path in sorted(folder.iterdir())]

    def wrong(folder):
        return {path.read_bytes(): None for path in folder.iterdir()}[whole[0]]

    def greedy(folder):
        return bytearray(2 << 30) if lax(folder) != whole else whole

    whole = []
    network = soak_files.FORMATS["network"]
    for read, words in ((lax, "read as something else"), (wrong, "KeyError"), (greedy, "MemoryError")):
        changed = dataclasses.replace(network, read=read, write=lambda folder: whole.append(written(network, folder)))
        whole.clear()
        monkeypatch.setitem(soak_files.FORMATS, "network", changed)
        failures = soak_files.trial("network", 0, range(5))[1]
        assert failures and all(words in failure for failure in failures)


def written(kind, folder):
    kind.write(folder)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("name", list(soak_kills.SCENARIOS))
def test_killed_work_ends_as_if_nothing_had_happened(name):
    counts = soak_kills.disturb(name, 4, seed=1)
    assert counts["kills"] >= 4 and counts["different"] == 0


@pytest.mark.long
def test_kills_notice_work_that_ends_differently(monkeypatch):
    """A scenario that counts its starts in its folder is different once it was killed."""

    def forgetful(out):
        out.mkdir(exist_ok=True)
        starts = out / "starts"
        starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
        for n in range(50):
            (out / f"{n}").write_text("")
        return starts.read_text()

    monkeypatch.setitem(soak_kills.SCENARIOS, "forgetful", forgetful)
    assert soak_kills.disturb("forgetful", 3, seed=0)["different"] > 0
