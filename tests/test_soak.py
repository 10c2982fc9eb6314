"""Mutated files of every format: a short version of `make soak`, and whether it would notice a broken promise."""

import dataclasses

import pytest
import soak_files


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
