"""The attacks beside their peers: one process, the same model and images.

The budget is the same too, except for the worst case, which is given as it comes beside AutoAttack as it comes
("standard"): ours takes 20 steps of FAB and 1,000 queries of Square where AutoAttack takes 100 and 5,000, and adds a
margin loss. There the robust accuracy is what must not be higher.

    python benchmarks/attacks.py --device cpu --only worst,cw,jsma,scaling --worst-rounds 3 --out ...-cpu.json
    python benchmarks/attacks.py --device cpu --only worst --model cifar10-mmlda-robust --images cifar10.safetensors \\
        --n 32 --eps 0.0313725 --threads 2 --out ...-cpu-robust.json
    python benchmarks/attacks.py --device cpu --only bim --again 23 --out ...-cpu-bim.json
    python benchmarks/attacks.py --device cpu --only bim --attack pgd --alone --again 7 --out ...-cpu-pgd.json
    python benchmarks/attacks.py --device cuda --model cifar10-sr --images cifar10.safetensors --out ...

bim      BIM, or with --attack pgd PGD, which starts at a random point, beside the bare forward and backward passes,
         torchattacks and foolbox; on CUDA at several batch sizes, and with the network compiled
         (`mmlda.attacks.compiled`, the compilation itself not counted)
worst    the worst case beside AutoAttack (pyautoattack): seconds and robust accuracy
cw       Carlini and Wagner beside foolbox        (benchmarks/attacks_cw_jsma.py)
jsma     JSMA beside torchattacks                 (benchmarks/attacks_cw_jsma.py)
scaling  how the cost of a step grows with the batch, the image and the classes

Contenders take turns, in an order that changes from round to round; a ratio is the median over the rounds of
theirs / ours, so more than 1 means that we are faster. BIM and the bare passes take turns in pairs of their own. On the
CPU the networks are small ones on scikit-learn's digits, 8 x 8 and enlarged to 28 x 28. On CUDA it is a Resnet-32 on
images of CIFAR-10's shape: a network that ships or a run (--model), and images `x` and labels `y` from a safetensors
file (--images); without them, random images labelled by the network itself. A peer that is not installed is left out,
and said to be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmlda
from mmlda.attacks import APGD, BIM, FAB, JSMA, PGD, CarliniWagner, Square, WorstCase, compiled, keep_memory
from mmlda.results import code_version

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
import attack_models  # noqa: E402
import attacks_cw_jsma  # noqa: E402

PARTS = ("bim", "worst", "cw", "jsma", "scaling")


def installed(name: str) -> bool:
    found = importlib.util.find_spec(name) is not None
    if not found:
        print(f"  {name} is not installed: left out")
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(
    contenders: dict[str, Callable[[], object]], count: int, device: str, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds of each contender in each of `count` rounds, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-1 if warm else 0, count):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wait(device)
            begin = time.perf_counter()
            contenders[name]()
            wait(device)
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    return times


def pairs(
    first: Callable[[], object], second: Callable[[], object], count: int, seed: int
) -> tuple[list[float], list[float]]:
    """Seconds of two contenders on the CPU, one right after the other, in an order that changes from pair to pair.

    Where the tensors of a step lie in memory is worth several percent either way, and would stay so for a whole
    process: blocks of random sizes are taken up before each pair, so that the median is over as many places.
    """
    times: tuple[list[float], list[float]] = ([], [])
    draw = random.Random(seed)
    for turn in range(-1, count):  # one pair to warm up
        blocks = [torch.empty(draw.randrange(1_000, 600_000)) for _ in range(8)]
        del blocks[::2]  # holes, for what fits
        for who in (0, 1) if turn % 2 else (1, 0):
            begin = time.perf_counter()
            (first, second)[who]()
            if turn >= 0:
                times[who].append(time.perf_counter() - begin)
    return times


def ratios(times: dict[str, list[float]], ours: str = "ours") -> dict[str, float]:
    """Median over the rounds of theirs / ours."""
    return {
        name: statistics.median(theirs / mine for theirs, mine in zip(column, times[ours]))
        for name, column in times.items()
        if name != ours
    }


def cases(args: argparse.Namespace) -> dict[str, tuple[nn.Module, Tensor, Tensor, float]]:
    """Model, images, labels and radius to attack with; several on the CPU, one on CUDA."""
    if args.device == "cpu":
        big = attack_models.network("sr", size=28)
        return {
            "digits, 8 x 8": (attack_models.network("sr"), *attack_models.images(args.n or 512), 0.1),
            "digits, 28 x 28": (big, *attack_models.images(args.n or 128, size=28), 0.1),
        }
    model, x, y = resnet(args)
    return {f"Resnet-32, {args.model or 'random weights'}": (model, x, y, args.eps)}


def resnet(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    if args.model:
        model = mmlda.load(args.model).to(args.device).eval()
    else:
        head = mmlda.SoftmaxHead(num_classes=10, dim=64)
        torch.manual_seed(args.seed)
        model = mmlda.Classifier(mmlda.models.resnet32(), head).to(args.device).eval()
    n = args.n or 1024
    if args.images:
        from safetensors.torch import load_file

        data = load_file(args.images)
        x, y = data["x"][:n].to(args.device), data["y"][:n].to(args.device).long()
        return model, x.float() / 255 if x.dtype == torch.uint8 else x.float(), y
    x = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    with torch.no_grad():
        y = torch.cat([model(part).argmax(1) for part in x.split(256)])
    return model, x, y


def bim_case(
    model: nn.Module,
    fast: tuple[nn.Module, nn.Module] | None,
    x: Tensor,
    y: Tensor,
    eps: float,
    size: int,
    args: argparse.Namespace,
) -> dict:
    """Everyone on `model`; ours, and one peer, also on `fast`, which is `model` compiled, for us and for the peer."""
    steps, a, cuda = args.steps, eps / args.steps, args.device == "cuda"
    start = args.attack == "pgd"  # at random
    attack = (PGD if start else BIM)(eps=eps, steps=steps, step_size=a, batch_size=size)
    batches = list(zip(x.split(size), y.split(size)))

    def bare(xs: Tensor, ys: Tensor) -> None:
        v = xs.clone().requires_grad_(True)
        for _ in range(steps):
            torch.autograd.grad(F.cross_entropy(model(v), ys, reduction="sum"), v)

    each: dict[str, Callable[[Tensor, Tensor], object]] = {}
    if not args.alone and installed("torchattacks"):
        import torchattacks

        for name, net in {"torchattacks": model, **({"torchattacks, compiled": fast[1]} if fast else {})}.items():
            each[name] = torchattacks.PGD(net, eps=eps, alpha=a, steps=steps, random_start=start)
    if not args.alone and installed("foolbox"):
        import foolbox

        there = foolbox.PyTorchModel(model, bounds=(0, 1), device=args.device)
        box = foolbox.attacks.LinfPGD(abs_stepsize=a, steps=steps, random_start=start)
        each["foolbox"] = lambda xs, ys: box(there, xs, ys, epsilons=eps)

    def in_turn(run: Callable[[Tensor, Tensor], object]) -> Callable[[], object]:
        return lambda: [run(xs, ys) for xs, ys in batches]

    contenders: dict[str, Callable[[], object]] = {"ours": lambda: attack(model, x, y)}
    contenders |= {name: in_turn(run) for name, run in each.items()}
    if fast is not None:
        contenders["ours, compiled"] = lambda: attack(fast[0], x, y)
    for run in (partial(attack, model), bare, *each.values(), *([partial(attack, fast[0])] if fast else [])):
        run(*batches[0])  # set up before anyone is timed: kernels to load or to compile
    beside_bare: dict[str, object] = {}
    if not cuda:
        passes = in_turn(bare)
        against = {"over_bare": contenders["ours"]}
        if not args.alone:
            against["bare_over_bare"] = passes  # against themselves: how far chance goes
        for name, mine in against.items():
            found = pairs(mine, passes, args.pairs, args.seed)
            over = [o / b - 1 for o, b in zip(*found)]
            beside_bare[name] = statistics.median(over)
            beside_bare[f"{name}, pairs"] = {"quartiles": statistics.quantiles(over), "seconds": found}
    times = rounds(contenders, args.pairs, args.device, warm=not cuda)
    for p in model.parameters():
        p.grad = None  # foolbox leaves its gradients behind
    row = {
        "images": len(x),
        "batch": size,
        "steps": steps,
        "eps": eps,
        "rounds": args.pairs,
        "seconds": {k: statistics.median(v) for k, v in times.items()},
        "times_faster_than": ratios(times),
    }
    if fast is not None:
        row["compiled_times_faster_than"] = ratios(times, "ours, compiled")
    return row | beside_bare


def bench_bim(args: argparse.Namespace) -> dict:
    """A step is a forward pass, a backward pass and an update; what else there is to it, and to the peers'."""
    out = {}
    for case, (model, x, y, eps) in cases(args).items():
        fast = attacks_cw_jsma.both_compiled(model) if args.device == "cuda" else None
        for size in [len(x)] if args.device == "cpu" else [int(size) for size in args.batches.split(",")]:
            name, n = (case, size) if args.device == "cpu" else (f"{case}, batch {size}", min(len(x), 4 * size))
            n -= n % size if n > size else 0  # whole batches: ours fills up the last one
            out[name] = row = bim_case(model, fast, x[:n], y[:n], eps, size, args)
            print(f"{args.attack}, {name}: {row['images']} images in batches of {row['batch']}, {row['steps']} steps")
            for who, seconds in row["seconds"].items():
                faster = [row[key].get(who, 1.0) for key in row if key.endswith("times_faster_than")]
                print(f"  {who:22s} {seconds:9.4f} s   " + "".join(f"{f:6.2f} x ours " for f in faster))
            for who in ("over_bare", "bare_over_bare"):
                if who in row:
                    print(f"  {who}: {100 * row[who]:+.1f}%")
            sys.stdout.flush()
    return out


def worst_case(model: nn.Module, x: Tensor, y: Tensor, eps: float, args: argparse.Namespace) -> dict:
    size = len(x) if args.device == "cpu" else min(args.worst_batch, len(x))
    found: dict[str, Tensor] = {}

    def ours(name: str, model: nn.Module) -> None:
        result = WorstCase(eps=eps, batch_size=None if args.device == "cpu" else size)(model, x, y)
        found[name], found["clean"] = result.x_adv, result.winner != -2

    contenders: dict[str, Callable[[], object]] = {"ours": partial(ours, "ours", model)}
    if args.device == "cpu" and args.model:
        contenders["ours, compiled"] = partial(ours, "ours, compiled", compiled(model))
    if installed("pyautoattack"):
        import pyautoattack

        def theirs() -> None:
            peer = pyautoattack.AutoAttack(model, norm="Linf", eps=eps, seed=args.seed, device=args.device)
            x_adv = peer.run_standard_evaluation(x, y, batch_size=size)
            found["pyautoattack"] = x_adv[0] if isinstance(x_adv, tuple) else x_adv

        contenders["pyautoattack"] = theirs
    BIM(eps=eps)(model, x[:size], y[:size])  # cuDNN and the like are set up before anyone is timed
    times = rounds(contenders, args.worst_rounds, args.device, warm=False)
    robust = {}
    with torch.no_grad():  # both judged by the same model, in the same batches
        for who in contenders:
            label = torch.cat([model(v).argmax(1) for v in found[who].to(x.device).split(size)])
            robust[who] = 100 * (label == y).double().mean().item()
    return {
        "images": len(x),
        "batch": size,
        "eps": eps,
        "norm": "linf",
        "rounds": args.worst_rounds,
        "seconds": {k: statistics.median(v) for k, v in times.items()},
        "times_faster_than": ratios(times),
        "clean_accuracy": 100 * found["clean"].double().mean().item(),
        "robust_accuracy": robust,
    }


def bench_worst(args: argparse.Namespace) -> dict:
    """Robust accuracy and seconds; networks and radii where something is left to break."""
    nets = cases(args)
    if args.device == "cpu" and args.model:
        nets = {f"Resnet-32, {args.model}": (*resnet(args), args.eps)}
    elif args.device == "cpu":
        x, y = attack_models.images(args.n or 300)
        nets = {}
        for head, trained, eps in (("sr", 0.0, 0.1), ("mm", 0.0, 0.1), ("sr", 0.15, 0.2), ("mm", 0.15, 0.2)):
            name = f"digits, {head}{', adversarially trained' if trained else ''}"
            nets[name] = (attack_models.network(head, trained), x, y, eps)
    out = {}
    for name, case in nets.items():
        out[name] = row = worst_case(*case, args)
        print(f"worst, {name}: {row['images']} images, eps {row['eps']:.4g}, clean {row['clean_accuracy']:.2f}%")
        for who, seconds in row["seconds"].items():
            faster, robust = row["times_faster_than"].get(who, 1.0), row["robust_accuracy"][who]
            print(f"  {who:14s} {seconds:9.2f} s   {faster:6.2f} x ours   robust {robust:.2f}%", flush=True)
    return out


def bench_cw(args: argparse.Namespace) -> dict:
    given = attacks_cw_jsma.load(args)
    return attacks_cw_jsma.bench_cw(args.device, *given, n=args.n, steps=args.cw_steps, paper=args.paper)


def bench_jsma(args: argparse.Namespace) -> dict:
    return attacks_cw_jsma.bench_jsma(args.device, *attacks_cw_jsma.load(args), n=args.jsma_n)


def bench_scaling(args: argparse.Namespace) -> dict:
    """Milliseconds a step of each attack on untrained networks, one size growing at a time."""
    base = {"batch": 64, "size": 16, "classes": 10}
    grow = {"batch": (16, 64, 256, 1024), "size": (8, 16, 32, 64), "classes": (4, 10, 100, 1000)}
    many = {
        "BIM": lambda: BIM(eps=1e-6, steps=20),
        "PGD-l2": lambda: PGD(eps=1e-6, norm="l2", steps=20),
        "APGD": lambda: APGD(eps=1e-6, steps=20),
        "FAB": lambda: FAB(eps=0.0, targets=1, steps=20),
        "Square": lambda: Square(eps=1e-6, queries=20),
        "JSMA": lambda: JSMA(eps=1e-6, steps=20),
        "C&W": lambda: CarliniWagner(search_steps=1, steps=20, abort=False),
    }
    out: dict = {}
    for what, values in grow.items():
        for value in values:
            shape = base | {what: value}
            torch.manual_seed(args.seed)
            model = attack_models.Net("sr", shape["classes"], size=shape["size"], channels=3)
            model = model.to(args.device).eval()
            x = torch.rand(shape["batch"], 3, shape["size"], shape["size"], device=args.device)
            y = model(x).argmax(1)
            attacks = {name: make() for name, make in many.items()}
            runs = {name: partial(attack, model, x, y) for name, attack in attacks.items()}
            times = rounds(runs, 2 if args.device == "cuda" else 3, args.device)
            row = {name: 1000 * statistics.median(column) / 20 for name, column in times.items()}
            out.setdefault(what, []).append(shape | {"milliseconds_a_step": row})
            cells = "  ".join(f"{name} {ms:.3f}" for name, ms in row.items())
            print(f"scaling, {what} {value:5d}: ms a step  {cells}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument(
        "--model", help="a network that ships with mmlda, or the folder of a run; on the CPU, worst only"
    )
    parser.add_argument("--images", help="for --model: a safetensors file with x [N, 3, 32, 32] and y [N]")
    parser.add_argument("--n", type=int, help="images")
    parser.add_argument("--jsma-n", type=int, help="images of JSMA beside its peer, which takes seconds for each")
    parser.add_argument("--batches", default="32,128,1000", help="CUDA: images at a time, BIM; 4 batches of each")
    parser.add_argument("--worst-batch", type=int, default=1024, help="CUDA: images at a time, worst case")
    parser.add_argument("--eps", type=float, default=2 / 255, help="CUDA: the radius")
    parser.add_argument("--attack", default="bim", choices=("bim", "pgd"), help="that the part bim times")
    parser.add_argument("--steps", type=int, default=100, help="of BIM")
    parser.add_argument("--pairs", type=int, default=30, help="rounds of BIM")
    parser.add_argument("--again", type=int, default=0, help="more processes for BIM and the bare passes alone")
    parser.add_argument("--alone", action="store_true", help="BIM without the peers")
    parser.add_argument("--worst-rounds", type=int, default=1)
    parser.add_argument("--cw-steps", type=int, help="of a search beside foolbox")
    parser.add_argument("--paper", action="store_true", help="CUDA: C&W at the paper's budget too, some minutes")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own choice by default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cpu":
        keep_memory()  # for all contenders: they run in one process
    wanted = args.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only {sorted(unknown)}: expected some of {', '.join(PARTS)}")

    if args.again and (args.device != "cpu" or "bim" not in wanted or not args.out):
        parser.error("--again: expected --device cpu, bim among --only, and --out")

    settings = {k: v for k, v in vars(args).items() if k != "out"}
    versions = {"mmlda": mmlda.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for peer in ("torchattacks", "foolbox", "pyautoattack"):
        if importlib.util.find_spec(peer):
            versions[peer] = importlib.metadata.version(peer)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    report: dict = {
        "benchmark": "attacks",
        "versions": versions,
        "device": device,
        "threads": torch.get_num_threads(),
        "commit": code_version(),
        "settings": settings,
    }
    benches = {"bim": bench_bim, "worst": bench_worst, "cw": bench_cw, "jsma": bench_jsma, "scaling": bench_scaling}
    for part, bench in benches.items():
        if part in wanted:
            report[part] = bench(args)
            if args.out:  # after each part: a run cut short has what was done
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=2) + "\n")
    if args.again:
        report["bim again"] = [again(args, args.seed + i) for i in range(1, args.again + 1)]
        report["over_bare, all pairs"] = pooled([report["bim"], *report["bim again"]])
        print("ours over the bare passes, pairs of all processes:", report["over_bare, all pairs"])
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def again(args: argparse.Namespace, seed: int) -> dict:
    """BIM and the bare passes in a process of their own, with another seed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bim.json"
        same = [f"--{key}={getattr(args, key)}" for key in ("device", "attack", "steps", "pairs")]
        same += [f"--threads={args.threads}"] if args.threads else []
        what = ["--only=bim", "--alone", f"--out={out}", f"--seed={seed}"]
        subprocess.run([sys.executable, __file__, *what, *same], check=True)
        return json.loads(out.read_text())["bim"]


def pooled(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Over the pairs of all processes: the median of ours / bare - 1, and a 95% interval of it by the bootstrap.

    The pairs of one process are alike, so processes are drawn, and pairs within each.
    """
    found = {}
    for case in runs[0]:
        over = [[o / b - 1 for o, b in zip(*run[case]["over_bare, pairs"]["seconds"])] for run in runs]
        draws = []
        for i in range(2000):
            draw = random.Random(i)
            some = [value for one in draw.choices(over, k=len(over)) for value in draw.choices(one, k=len(one))]
            draws.append(statistics.median(some))
        low, high = sorted(draws)[50], sorted(draws)[-51]
        median = statistics.median(value for one in over for value in one)
        found[case] = {"processes": len(over), "pairs": sum(map(len, over)), "median": median, "low": low, "high": high}
    return found


if __name__ == "__main__":
    main()
