"""The benchmark of long-tailed data, on a few generated images."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from mmlda import ImageData

PATH = Path(__file__).parents[2] / "benchmarks" / "long_tailed.py"


@pytest.fixture
def bench(monkeypatch):
    spec = importlib.util.spec_from_file_location("long_tailed", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "long_tailed", module)  # dataclasses look their module up
    spec.loader.exec_module(module)

    def generated(name, root):
        generator, y = torch.Generator().manual_seed(0), torch.arange(600) % 3
        x = torch.randint(256, (600, 3, 8, 8), generator=generator, dtype=torch.uint8)
        data = ImageData(x, y, ("a", "b", "c"), name=name)
        return data.subset(slice(0, 540)), data.subset(slice(540, 600))

    monkeypatch.setattr(module, "load", generated)
    return module


def run(bench, out, *words):
    bench.main(["--out", str(out), "--device", "cpu", "--steps", "2", *words])
    return json.loads(out.read_text()) if out.exists() else []


def test_methods_are_measured_once_and_kept(bench, tmp_path, capsys):
    out, words = tmp_path / "all.json", ("--only", "cifar10-lt-100", "--seeds", "0", "--together", "32")
    with pytest.raises(SystemExit, match="results of --holdout for cifar10-lt-100 and softmax"):
        run(bench, out, *words)
    held = run(bench, out, "--holdout", *words)
    records = run(bench, out, *words)
    assert records[:32] == held and {record["measured_on"] for record in held} == {"held-out training images"}
    assert sorted(record["method"] for record in records[32:]) == sorted(bench.LONG_TAILED)
    for record in records[32:]:
        assert record["n"] == 60 and record["measured_on"] == "test images" and record["train_steps"] == 2
        assert record["train_images"] == 180 + 18 + 1 and record["few"] is not None
        assert ("adjusted" in record) == (record["method"] == "softmax") and record["commit"] and record["device"]
        assert (record["head_parameters"] == 0) == record["method"].startswith("mmlda")
    changed = out.stat().st_mtime_ns
    run(bench, out, *words)
    assert changed == out.stat().st_mtime_ns
    assert "4 of 4 networks" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="got 2 steps for cifar10-lt-100-softmax"):
        bench.main(["--out", str(out), "--device", "cpu", "--steps", "3", *words])


def test_held_out_images_choose_the_variant(bench, tmp_path):
    out, words = tmp_path / "all.json", ("--only", "cifar100", "--methods", "mmlda-64", "--seeds", "0")
    held = run(bench, out, "--holdout", *words)
    names = {name for name in bench.VARIANTS["mmlda"] if "128" not in name}
    assert {record["variant"] for record in held} == names | set(bench.FIXED)
    assert len({len(bench.variants(method)) for method in bench.METHODS}) == 1  # as many for each
    assert {record["n"] for record in held} == {108}
    assert {record["train_images"] for record in held} == {432}
    for record in held:  # the best is the one that says so
        record["balanced"] = 0.9 if record["variant"] == "adamw-C30" else 0.1
    out.write_text(json.dumps(held))
    assert run(bench, out, "--minutes", "-1", *words) == held
    final = run(bench, out, *words)[-1]
    assert final["variant"] == "adamw-C30" and final["model"]["C"] == 30.0 and final["n"] == 60


def test_networks_with_priors_begin_where_those_without_do(bench):
    train, _ = bench.sets("cifar10-lt-10", 0, False, None)
    for method in ("softmax-priors", "mmlda-priors"):
        unit = bench.Unit("cifar10-lt-10", method, next(iter(bench.variants(method))), 0, 2)
        head = bench.prepare(unit, train).model.head
        assert torch.allclose(head.priors, train.priors.to(head.priors))
        plain = bench.prepare(bench.Unit(unit.task, bench.METHODS[method].head, unit.variant, 0, 2), train).model
        x = train.pixels(slice(4))
        uniform = bench.prepare(unit, train).model.eval().with_priors(None)(x)
        assert torch.allclose(uniform.softmax(1), plain.eval()(x).softmax(1), atol=1e-4)


def test_matched_means_are_chosen_among_more(bench):
    train, _ = bench.sets("cifar100", 0, False, None)
    largest = []
    for variant in ("sgd-1e-3-C4", "sgd-1e-3-C30-4224"):
        head = bench.prepare(bench.Unit("cifar100", "mmlda-64-matched", variant, 0, 2), train).model.head
        units = torch.nn.functional.normalize(head.means, dim=1)
        largest.append(float((units @ units.T - 2 * torch.eye(3)).max()))
    assert largest == pytest.approx([0, -0.125], abs=1e-6)  # of 128 means, and of Kerdock's 4,224
