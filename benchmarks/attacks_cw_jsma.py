"""Carlini and Wagner beside foolbox, JSMA beside torchattacks: one process, the same model, images and budget.

    python benchmarks/attacks.py --only cw,jsma --out ...
    python benchmarks/attacks.py --only cw,jsma --paper --device cuda --model cifar10-sr --images cifar10.safetensors

On the CPU the network is a small one on scikit-learn's digits enlarged to 28 x 28. On CUDA it is a Resnet-32, and
there are two more measurements, ours alone: 1,000 images at the paper's budget of 9 x 10,000 iterations (the network
compiled, compilation included), and 1,000 images in one call of JSMA within 4 GiB of reserved memory. Only images that
the network gets right are used. Distortions are means over the images that both have broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mmlda
from mmlda.attacks import JSMA, CarliniWagner, compiled

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import attack_models

GIB = 2**30


def timed(run: Callable[[], Any], device: str) -> tuple[float, Any]:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    out = run()
    wait()
    return time.perf_counter() - begin, out


def contest(contenders: dict[str, Callable[[], Any]], rounds: int, device: str) -> tuple[dict, dict]:
    """Seconds of each contender in each round, taking turns, and what each returned last."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    results = {}
    names = list(contenders)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, results[name] = timed(contenders[name], device)
            times[name].append(seconds)
    return times, results


def subject(
    device: str, model: nn.Module | None, x: Tensor | None, y: Tensor | None, n: int
) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and n images that it gets right; where none are given, the digits or a random Resnet-32."""
    if model is None and device == "cpu":
        model = attack_models.network("sr", size=28)
        x, y = attack_models.images(600, size=28)
    elif model is None:
        torch.manual_seed(0)
        head = mmlda.SoftmaxHead(num_classes=10, dim=64)
        model = mmlda.Classifier(mmlda.models.resnet32(), head).to(device).eval()
    if x is None:
        x = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        label = torch.cat([model(part).argmax(1) for part in x.split(256)])
    right = torch.ones_like(label, dtype=torch.bool) if y is None else label == y
    return model, x[right][:n].contiguous(), label[right][:n]


def both_compiled(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """`model` compiled for our attacks, and once more for a peer."""
    return compiled(model), compiled(model)


def bench_cw(
    device: str,
    model: nn.Module | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    n: int | None = None,
    steps: int | None = None,
    search_steps: int = 9,
    rounds: int = 1,
    paper: bool = False,
) -> dict:
    """`n` images beside foolbox at search_steps x steps; on CUDA also ours alone at 9 x 10,000 (`paper`)."""
    cuda = device == "cuda"
    n, steps = n or (1000 if cuda else 60), steps or (200 if cuda else 1000)
    model, x, y = subject(device, model, x, y, n)
    ours = CarliniWagner(search_steps=search_steps, steps=steps)
    fast, for_them = both_compiled(model) if cuda else (None, None)  # the compilation itself is not counted
    contenders: dict[str, Callable[[], Any]] = {"ours": lambda: ours(model, x, y)}
    if cuda:
        contenders["ours, compiled"] = lambda: ours(fast, x, y)
    if importlib.util.find_spec("foolbox"):
        import foolbox

        def theirs(abort: bool, network: nn.Module = model) -> Tensor:
            attack = foolbox.attacks.L2CarliniWagnerAttack(
                binary_search_steps=search_steps, steps=steps, abort_early=abort
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrapped = foolbox.PyTorchModel(network, bounds=(0, 1), device=device)
                _, x_adv, success = attack(wrapped, x, y, epsilons=None)
            for p in model.parameters():
                p.grad = None  # foolbox leaves its gradients behind
            return torch.where(success, (x_adv - x).flatten(1).norm(dim=1), torch.inf)

        contenders["foolbox"] = lambda: theirs(True)
        if cuda:
            contenders["foolbox, compiled"] = lambda: theirs(True, for_them)
        else:
            contenders["foolbox, no abort"] = lambda: theirs(False)
    else:
        print("  foolbox is not installed: left out")
    for network in (model, fast, for_them) if cuda else (model,):  # set up before anyone is timed
        CarliniWagner(search_steps=1, steps=10)(network, x, y)
    times, results = contest(contenders, rounds, device)
    mine = results["ours"]
    l2 = {name: r.l2 if name.startswith("ours") else r for name, r in results.items()}
    out: dict = {
        "images": len(x),
        "search_steps": search_steps,
        "steps": steps,
        "rounds": rounds,
        "iterations_an_image": mine.steps.double().mean().item(),
    }
    print(f"cw: {len(x)} images of {tuple(x.shape[1:])}, {search_steps} x {steps} iterations")
    for name, column in times.items():
        common = l2[name].isfinite() & l2["ours"].isfinite()
        out[name] = {
            "seconds": statistics.median(column),
            "times_ours": statistics.median(t / o for t, o in zip(column, times["ours"])),
            "success": l2[name].isfinite().double().mean().item(),
            "mean_l2_common": l2[name][common].double().mean().item(),
            "ours_mean_l2_common": l2["ours"][common].double().mean().item(),
        }
        row = out[name]
        if cuda:
            pairs = zip(column, times["ours, compiled"])
            row["times_ours_compiled"] = statistics.median(t / o for t, o in pairs)
        print(
            f"  {name:18s} {row['seconds']:8.2f} s  {row['times_ours']:6.2f} x ours"
            + (f" ({row['times_ours_compiled']:.2f} x compiled)" if cuda else "")
            + f"  success {row['success']:.4f}"
            f"  mean L2 {row['mean_l2_common']:.4f}, ours on the same {row['ours_mean_l2_common']:.4f}"
        )
    if cuda and paper:
        torch.cuda.reset_peak_memory_stats()
        seconds, result = timed(lambda: CarliniWagner()(compiled(model), x, y), device)
        hit = result.success
        out["paper_budget"] = {
            "images": len(x),
            "search_steps": 9,
            "steps": 10_000,
            "seconds": seconds,
            "success": hit.double().mean().item(),
            "mean_l2": result.l2[hit].double().mean().item(),
            "mean_distortion": result.distortion[hit].double().mean().item(),
            "iterations_an_image": result.steps.double().mean().item(),
            "most_iterations": int(result.steps.max()),
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        }
        print("  the paper's budget, ours:", {k: round(v, 4) for k, v in out["paper_budget"].items()})
    return out


def bench_jsma(
    device: str,
    model: nn.Module | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    n: int | None = None,
    theta: float = 1.0,
    gamma: float = 0.1,
    rounds: int | None = None,
) -> dict:
    """`n` images beside torchattacks: pairs, the same theta, gamma and targets; on CUDA also 1,000 of ours."""
    cuda = device == "cuda"
    n, rounds = n or (8 if cuda else 60), rounds or (1 if cuda else 3)
    model, many, labels = subject(device, model, x, y, 1000 if cuda else n)
    x, y = many[:n], labels[:n]
    D = x[0].numel()
    # torchattacks takes ceil(gamma D / 2) pairs, we take at most gamma D pixels: a share where the two agree.
    gamma = 2 * round(gamma * D / 2) / D * (1 - 1e-9)
    target = (y + 1) % 10  # torchattacks' own choice
    settings: dict[str, Any] = {"eps": theta, "pairs": True, "max_share": gamma, "steps": D}
    contenders: dict[str, Callable[[], Any]] = {"ours": lambda: JSMA(**settings)(model, x, y, target=target).x_adv}
    if importlib.util.find_spec("torchattacks"):
        import torchattacks

        peer = torchattacks.JSMA(model, theta=theta, gamma=gamma)
        contenders["torchattacks"] = lambda: peer(x, y)
    else:
        print("  torchattacks is not installed: left out")
    JSMA(**{**settings, "steps": 4})(model, x, y, target=target)  # cuDNN and the like, before anyone is timed
    times, results = contest(contenders, rounds, device)
    out: dict = {"images": n, "theta": theta, "gamma": gamma, "pairs": True, "surface": "logits", "rounds": rounds}
    print(f"jsma: {n} images of {tuple(x.shape[1:])}, pairs, theta {theta}, gamma {gamma:.4f}")
    for name, column in times.items():
        x_adv = results[name].detach()
        with torch.no_grad():
            success = (model(x_adv).argmax(1) == target).double().mean().item()
        changed = (x_adv != x).flatten(1).sum(1).double()
        out[name] = {
            "seconds": statistics.median(column),
            "times_ours": statistics.median(t / o for t, o in zip(column, times["ours"])),
            "success": success,
            "mean_pixels": changed.mean().item(),
            "most_pixels": int(changed.max()),
        }
        row = out[name]
        print(
            f"  {name:14s} {row['seconds']:9.3f} s  {row['times_ours']:7.1f} x ours  success {success:.3f}"
            f"  pixels {row['mean_pixels']:.1f}, at most {row['most_pixels']}"
        )
    if cuda:
        target = (labels + 1) % 10
        for pairs in (False, True):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            # The limit is on activations. Capturing a graph reserves about as much again, and all of it counts.
            settings = {"eps": theta, "pairs": pairs, "max_share": gamma, "memory_limit": int(1.4 * GIB)}
            seconds, result = timed(lambda: JSMA(**settings)(model, many, labels, target=target), device)  # noqa: B023
            row = {
                "images": len(many),
                "seconds": seconds,
                "success": result.success.double().mean().item(),
                "mean_steps": result.steps.double().mean().item(),
                "peak_gib": torch.cuda.max_memory_allocated() / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            }
            out["1,000 images, " + ("pairs" if pairs else "one pixel")] = row
            print(f"  {'pairs' if pairs else 'one pixel'}, ours:", {k: round(v, 3) for k, v in row.items()})
    return out


def load(args: argparse.Namespace) -> tuple[nn.Module | None, Tensor | None, Tensor | None]:
    model = mmlda.load(args.model).to(args.device).eval() if args.model else None
    if not args.images:
        return model, None, None
    from safetensors.torch import load_file

    data = load_file(args.images)
    x, y = data["x"].to(args.device), data["y"].to(args.device).long()
    return model, x.float() / 255 if x.dtype == torch.uint8 else x.float(), y
