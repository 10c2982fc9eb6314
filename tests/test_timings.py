"""The timings in docs/attacks.md are those that the benchmark's committed files hold."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(name, folder="."):
    return json.loads((ROOT / "benchmarks" / "results" / folder / f"attacks-{name}.json").read_text())


def bim_on_an_h200():
    for size, images in (
        (32, "128 images in batches of 32"), (128, "512 images in batches of 128"), (1000, "1,000 images in one batch")
    ):  # fmt: skip
        row = load("h200")["bim"][f"Resnet-32, cifar10-sr, batch {size}"]
        seconds, cells = row["seconds"], []
        for peer in ("torchattacks", "foolbox"):
            plain, fast = row["times_faster_than"][peer], row["compiled_times_faster_than"][peer]
            cells.append(f"{seconds[peer]:.2f} s ({plain:.1f} x, **{fast:.1f} x**)")
        ours = f"{seconds['ours']:.3f} s | {seconds['ours, compiled']:.3f} s"
        yield f"| BIM, {row['steps']} steps, {images} | {ours} | {cells[0]} | {cells[1]} |"


def bim_on_other_machines():
    rows = [run["Resnet-32, cifar10-sr, batch 128"] for run in load("h200")["bim elsewhere"]]
    small = [run[key] for run in load("h200")["bim elsewhere"] if (key := "Resnet-32, cifar10-sr, batch 32") in run]
    assert len(rows) == 5 and len(small) == 3
    theirs = [row["seconds"]["torchattacks"] for row in rows]
    plain = [row["times_faster_than"]["torchattacks"] for row in rows]
    fast = [row["compiled_times_faster_than"]["torchattacks"] for row in rows]
    yield f"torchattacks took {min(theirs):.2f} to {max(theirs):.2f} s and ours"
    yield f"({min(plain):.1f} x to {max(plain):.1f} x)"
    yield f"ours was {min(fast):.1f} to {max(fast):.1f} times as fast in batches of 128"
    small = [row["times_faster_than"]["torchattacks"] for row in small]
    yield f"in batches of 32 on three of them {min(small):.1f} x to {max(small):.1f} x ours"


def peers_on_a_compiled_network():
    found = load("h200")
    rows = [found["bim"][f"Resnet-32, cifar10-sr, batch {size}"] for size in (32, 128, 1000)]
    took = ["{:.2f}".format(row["seconds"]["torchattacks, compiled"]) for row in rows]
    faster = ["{:.1f} x".format(row["compiled_times_faster_than"]["torchattacks, compiled"]) for row in rows]
    yield f"{took[0]}, {took[1]} and {took[2]} s, that is {faster[0]}, {faster[1]} and {faster[2]} ours"
    short, long = (found[part]["foolbox, compiled"] for part in ("cw_short", "cw"))
    yield f"foolbox's C&W {short['seconds']:.1f} and {long['seconds']:.1f} s"
    yield f"{short['times_ours_compiled']:.1f} x and {long['times_ours_compiled']:.1f} x ours"


def cw_on_an_h200():
    for part, steps in (("cw_short", "300"), ("cw", "1,000")):
        row = load("h200")[part]
        ours, fast, peer = row["ours"], row["ours, compiled"], row["foolbox"]
        ratios = f"{peer['times_ours']:.1f} x, **{peer['times_ours_compiled']:.1f} x**"
        yield f"| C&W, 9 x {steps}, {row['images']} images | {ours['seconds']:.2f} s | {fast['seconds']:.2f} s |"
        yield f"| {peer['seconds']:.1f} s ({ratios}) |"
        assert ours["success"] == peer["success"] == 1 and peer["ours_mean_l2_common"] < peer["mean_l2_common"]
    (elsewhere,) = (run["foolbox"] for run in load("h200")["cw elsewhere"])
    yield f"foolbox took {elsewhere['seconds']:.1f} s, it was {elsewhere['times_ours']:.1f} x as fast"


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


def bim_on_a_cpu():
    found = load("cpu-bim")
    for case, images, word in (("8 x 8", 512, "95% interval "), ("28 x 28", 128, "")):
        row, over = found["bim"][f"digits, {case}"], found["over_bare, all pairs"][f"digits, {case}"]
        took = row["seconds"]
        peers = f"{took['torchattacks']:.3f} torchattacks, {took['foolbox']:.3f} foolbox"
        median, low, high = (100 * over[key] for key in ("median", "low", "high"))
        yield (f"| BIM, {row['steps']} steps, {images} digits ({case}) | {took['ours']:.3f} s | {peers} | "
               f"{median:.1f}% ({word}{low:.1f} to {high:.1f})")  # fmt: skip
        medians = [100 * run[f"digits, {case}"]["over_bare"] for run in (found["bim"], *found["bim again"])]
        yield f"from {min(medians):.1f} to {max(medians):.1f}% ({case}"
        if case == "8 x 8":
            yield f"{over['pairs']} interleaved pairs, {row['rounds']} in each of {over['processes']} processes"
            yield f"{sum(value > 5 for value in medians)} of {len(medians)} are above 5%"
    themselves = [f"{100 * row['bare_over_bare']:.1f}" for row in found["bim"].values()]
    yield f"the bare passes come out at {themselves[0]} and {themselves[1]}%"
    for name, processes in (("cpu-bim-8-processes", "eight processes"), ("cpu-bim-40-steps", "four over 40 steps")):
        digits, larger = (100 * over["median"] for over in load(name, "history")["over_bare, all pairs"].values())
        yield f"{digits:.1f} and {larger:.1f}% (`history/attacks-{name}.json`)"
        yield processes


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
    row = found["jsma"]
    peer = row["torchattacks"]
    yield f"| {row['ours']['seconds']:.2f} s | {peer['seconds']:.1f} torchattacks | {peer['times_ours']:.0f} x"
    assert row["ours"]["success"] == peer["success"]
    for who in (row["ours"], peer):
        yield f"{who['mean_pixels']:.1f} pixels in the mean for both"
    old = load("cpu-one-round", "history")
    faster = [row["times_faster_than"]["pyautoattack"] for row in old["worst"].values()]
    yield f"had {min(faster):.1f} to {max(faster):.1f} x for the worst case"
    cw, jsma = old["cw"]["foolbox"]["times_ours"], old["jsma"]["torchattacks"]["times_ours"]
    yield f"{cw:.1f} x for C&W and {jsma:.0f} x for JSMA"


PARTS = [
    bim_on_an_h200, bim_on_other_machines, peers_on_a_compiled_network, cw_on_an_h200, worst_case_and_jsma_on_an_h200,
    bim_on_a_cpu, the_rest_on_a_cpu,
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_the_timings_of_attacks_are_those_measured(part):
    text = " ".join((ROOT / "docs" / "attacks.md").read_text().split())
    wanted = list(part())
    assert len(wanted) > 1 and not [line for line in wanted if line not in text]
