"""The timings in docs/attacks.md are those that the benchmark's committed files hold."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(name, folder="."):
    return json.loads((ROOT / "benchmarks" / "results" / folder / f"attacks-{name}.json").read_text())


def one_size(part, size):
    return part[f"Resnet-32, cifar10-sr, batch {size}"]


def span(values, unit=" x"):
    return f"{min(values):.1f}{unit} to {max(values):.1f}{unit}"


def bim_and_pgd_on_an_h200():
    sizes = ((32, "128 images in batches of 32"), (128, "512 images in batches of 128"))
    for part in ("bim", "pgd"):
        for size, images in (*sizes, (1000, "1,000 images in one batch")):
            row = one_size(load("h200")[part], size)
            seconds, cells = row["seconds"], []
            for peer in ("torchattacks", "foolbox"):
                plain, fast = row["times_faster_than"][peer], row["compiled_times_faster_than"][peer]
                cells.append(f"{seconds[peer]:.2f} s ({plain:.1f} x, **{fast:.1f} x**)")
            ours = f"{seconds['ours']:.3f} s | {seconds['ours, compiled']:.3f} s"
            yield f"| {part.upper()}, {row['steps']} steps, {images} | {ours} | {cells[0]} | {cells[1]} |"


def bim_on_other_machines():
    runs = load("h200")["bim elsewhere"]
    rows = [one_size(run, 128) for run in runs]
    small = [run[key]["times_faster_than"] for run in runs if (key := "Resnet-32, cifar10-sr, batch 32") in run]
    theirs, ours = ([row["seconds"][who] for row in rows] for who in ("torchattacks", "ours"))
    plain, box = ([row["times_faster_than"][who] for row in rows] for who in ("torchattacks", "foolbox"))
    assert len(rows) == 5 and len(small) == 3
    yield f"torchattacks took {min(theirs):.2f} to {max(theirs):.2f} s and our BIM {min(ours):.2f} to {max(ours):.2f} s"
    yield f"({span(plain)}; foolbox {span(box)})"
    yield f"in batches of 32, in three of them, {span([row['torchattacks'] for row in small])}"
    before = [run for run in runs if "before the package's own" in run["note"]]
    (after,) = (run for run in runs if run not in before)
    fast = [one_size(run, 128)["compiled_times_faster_than"]["torchattacks"] for run in (*before, after)]
    yield f"compiled was {span(fast[:4], '')} times as fast as torchattacks"
    yield f"in the four runs before the package's own programs, and {fast[4]:.1f} times"


def peers_on_a_compiled_network():
    found = load("h200")
    rows = [one_size(found["bim"], size) for size in (32, 128, 1000)]
    took = ["{:.2f}".format(row["seconds"]["torchattacks, compiled"]) for row in rows]
    yield f"took {took[0]}, {took[1]} and {took[2]} s in batches of 32, 128 and 1,000"
    for key, who in (("times_faster_than", "our BIM as it comes"), ("compiled_times_faster_than", "ours compiled")):
        faster = ["{:.1f} x".format(row[key]["torchattacks, compiled"]) for row in rows]
        yield f"{faster[0]}, {faster[1]} and {faster[2]} {who}"
    runs = [run["foolbox, compiled"] for run in (found["cw"], found["cw_short"], *found["cw elsewhere"])]
    assert len(runs) == 5
    yield f"{span([run['times_ours'] for run in runs])} ours as it comes"
    yield f"{span([run['times_ours_compiled'] for run in runs])} ours compiled"


def cw_on_an_h200():
    for part, steps in (("cw_short", "300"), ("cw", "1,000")):
        row = load("h200")[part]
        ours, fast, peer = row["ours"], row["ours, compiled"], row["foolbox"]
        ratios = f"{peer['times_ours']:.1f} x, **{peer['times_ours_compiled']:.1f} x**"
        yield f"| C&W, 9 x {steps}, {row['images']} images | {ours['seconds']:.2f} s | {fast['seconds']:.2f} s |"
        yield f"| {peer['seconds']:.1f} s ({ratios}) |"
        assert ours["success"] == peer["success"] == 1 and peer["ours_mean_l2_common"] < peer["mean_l2_common"]
    elsewhere = {steps: [] for steps in (300, 1000)}
    for run in load("h200")["cw elsewhere"]:
        elsewhere[run["steps"]].append(f"{run['foolbox']['times_ours']:.1f}")
    (short,), (one, other) = elsewhere.values()
    yield f"C&W at 9 x 1,000 was {one} and {other} x as fast as foolbox's in two others"
    yield f"at 9 x 300 {short} x in another"


def worst_case_and_jsma_on_an_h200():
    found = load("h200")
    (row,) = found["worst"].values()
    took, left, faster = row["seconds"], row["robust_accuracy"], row["times_faster_than"]["pyautoattack"]
    assert left["ours"] <= left["pyautoattack"]
    yield f"took {took['ours']:.1f} s and left {left['ours']:.1f}%"
    yield f"took {took['pyautoattack']:.1f} s and left {left['pyautoattack']:.1f}%: {faster:.1f} x"
    row = found["jsma"]
    many = row["1,000 images, pairs"]
    yield f"JSMA (pairs) was {row['torchattacks']['times_ours']:.0f} x as fast"
    yield f"1,000 images in one go took {many['seconds']:.1f} s and {many['reserved_gib']:.1f} GiB"


def bim_and_pgd_on_a_cpu():
    found, pgd = load("cpu-bim"), load("cpu-pgd")
    for case, images, word in (("8 x 8", 512, "95% interval "), ("28 x 28", 128, "")):
        name = f"digits, {case}"
        row, over = found["bim"][name], found["over_bare, all pairs"][name]
        took = row["seconds"]
        peers = f"{took['torchattacks']:.3f} torchattacks, {took['foolbox']:.3f} foolbox"
        runs = [run[name]["over_bare, pairs"]["seconds"] for run in (found["bim"], *found["bim again"])]
        medians = [100 * statistics.median(o / b - 1 for o, b in zip(*run)) for run in runs]
        median, low, high = (100 * over[key] for key in ("median", "low", "high"))
        assert median == pytest.approx(100 * statistics.median(o / b - 1 for run in runs for o, b in zip(*run)))
        yield (f"| BIM, {row['steps']} steps, {images} digits ({case}) | {took['ours']:.3f} s | {peers} | "
               f"{median:.1f}% ({word}{low:.1f} to {high:.1f})")  # fmt: skip
        yield f"from {min(medians):.1f} to {max(medians):.1f}% ({case}"
        if case == "8 x 8":
            yield f"{over['pairs']} interleaved pairs, {row['rounds']} in each of {over['processes']} processes"
            yield f"{sum(value > 5 for value in medians)} of {len(medians)} are above 5%"
        yield f"{row['times_faster_than']['torchattacks']:.2f} x"
        over = pgd["over_bare, all pairs"][name]
        yield "{:.1f}% ({:.1f} to {:.1f})".format(*(100 * over[key] for key in ("median", "low", "high")))
        yield f"over the bare passes, in {over['processes']} processes"
    themselves = [f"{100 * row['bare_over_bare']:.1f}" for row in found["bim"].values()]
    yield f"the bare passes against themselves came out at {themselves[0]} and {themselves[1]}%"
    earlier = {"cpu-bim-8-processes": "in eight processes", "cpu-bim-40-steps": "in four over 40 steps"}
    for name, processes in earlier.items():
        digits, larger = (100 * over["median"] for over in load(name, "history")["over_bare, all pairs"].values())
        yield f"{digits:.1f} and {larger:.1f}% {processes}"


def the_rest_on_a_cpu():
    found = load("cpu")
    rows = list(found["worst"].values())
    assert all(row["robust_accuracy"]["ours"] <= row["robust_accuracy"]["pyautoattack"] for row in rows)
    ours, theirs = ([row["seconds"][who] for row in rows] for who in ("ours", "pyautoattack"))
    faster = [row["times_faster_than"]["pyautoattack"] for row in rows]
    yield f"| {min(ours):.1f} to {max(ours):.1f} s | {min(theirs):.1f} to {max(theirs):.1f} pyautoattack (standard) |"
    yield f"{min(faster):.1f} to {max(faster):.1f} x, robust accuracy equal or lower"
    row = found["cw"]
    peer, slow = row["foolbox"], row["foolbox, no abort"]["seconds"]
    peers = f"{peer['seconds']:.1f} foolbox ({slow:.1f} without its abort)"
    l2 = f"mean L2 {peer['ours_mean_l2_common']:.4f} and {peer['mean_l2_common']:.4f}"
    yield f"| {row['ours']['seconds']:.1f} s | {peers} | {peer['times_ours']:.1f} x, success 100% for both, {l2} |"
    yield f"it took {row['iterations_an_image']:,.0f} of at most 9,000 iterations an image"
    row = found["jsma"]
    peer, share = row["torchattacks"], 100 * row["ours"]["success"]
    assert row["ours"]["success"] == peer["success"]
    pixels = f"{row['ours']['mean_pixels']:.2f} and {peer['mean_pixels']:.2f} pixels in the mean"
    yield f"| {row['ours']['seconds']:.2f} s | {peer['seconds']:.1f} torchattacks | {peer['times_ours']:.0f} x"
    yield f"success {share:.0f}% for both, {pixels} |"
    for name in ("cpu-one-round", "cpu-noisy"):
        old = load(name, "history")
        faster = [row["times_faster_than"]["pyautoattack"] for row in old["worst"].values()]
        cw, jsma = old["cw"]["foolbox"]["times_ours"], old["jsma"]["torchattacks"]["times_ours"]
        yield f"{span(faster, '')} x, {cw:.1f} x and {jsma:.0f} x (`history/attacks-{name}.json`)"


PARTS = [
    bim_and_pgd_on_an_h200, bim_on_other_machines, peers_on_a_compiled_network, cw_on_an_h200,
    worst_case_and_jsma_on_an_h200, bim_and_pgd_on_a_cpu, the_rest_on_a_cpu,
]  # fmt: skip


@pytest.mark.parametrize("name", ["cpu-bim", "cpu-pgd"])
def test_intervals_come_from_the_pairs(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from attacks import pooled

    found = load(name)
    again = pooled([found["bim"], *found["bim again"]])
    for case, over in found["over_bare, all pairs"].items():
        assert again[case] == pytest.approx(over) and over["low"] < over["median"] < over["high"]
        assert found["settings"]["attack" if name == "cpu-pgd" else "only"] == name.removeprefix("cpu-")


@pytest.mark.parametrize("part", PARTS)
def test_the_timings_of_attacks_are_those_measured(part):
    text = " ".join((ROOT / "docs" / "attacks.md").read_text().split())
    wanted = list(part())
    assert len(wanted) > 1 and not [line for line in wanted if line not in text]
