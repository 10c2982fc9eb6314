"""Resnet-32's 3x3 convolutions: cuDNN's kernels and ours, side by side, on CUDA.

    python benchmarks/convolutions.py --out convolutions.json                   # bfloat16: a step of training
    python benchmarks/convolutions.py --dtype float32 --out convolutions.json   # TF32: a step of an attack

For each layer of the network on CIFAR-10, and for the forward pass, the input gradient and the weight gradient: the
time of cuDNN (benchmark mode, channels_last, weights already in that type), of ours as the package runs it (float32
weights, rounded inside), and of every way to cut ours up that is worth trying (`--no-sweep` leaves these out). Times
are medians over replays of a CUDA graph of many calls, so that no launch waits for Python. The data stay in the L2
cache for both sides, as they do in a training step. An attack has no weight gradients.

The best cuts found belong in the tables of `mmlda.models.triton_conv`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmlda
from mmlda.models import triton_conv
from mmlda.models.triton_conv import Gather, Split

# how many in the network, inputs, outputs, stride, height = width of the input
LAYERS = [(10, 16, 16, 1, 32), (1, 16, 32, 2, 32), (9, 32, 32, 1, 16), (1, 32, 64, 2, 16), (9, 64, 64, 1, 8)]
PASSES = ("forward", "input_grad", "weight_grad")
CALLS = 20  # in a graph


def cuts(kind: type, text: str) -> list:
    """A Gather or a Split for each "pixels/taps/tiles or splits/warps/stages" in the text."""
    return [kind(*map(int, cut.split("/"))) for cut in text.split()]


GATHERS = {  # by the channels read; taps = 8 with one tile reads through the L1 cache, more stages through L2 alone
    16: cuts(
        Gather,
        "64/8/1/4/1 128/8/1/4/1 128/8/1/8/1 256/8/1/8/1 64/8/4/4/1 128/8/2/4/1 128/8/4/4/2 128/3/1/4/1 128/1/1/4/4",
    ),
    32: cuts(
        Gather, "64/8/1/4/1 64/8/1/8/1 128/8/1/4/1 128/8/1/8/1 64/8/2/4/1 64/8/2/4/2 64/3/1/4/1 64/3/1/4/3 64/1/1/4/4"
    ),
    64: cuts(
        Gather,
        "64/8/1/4/1 64/8/1/8/1 64/3/1/4/1 64/3/1/8/1 64/3/1/8/2 64/1/1/4/1 64/1/1/4/4 64/1/1/8/4 32/1/1/4/4 64/1/1/4/6",
    ),
}
WIDE = {  # more, for float32, whose tiles take twice the memory
    16: cuts(Gather, "128/1/1/4/3 128/1/1/8/3 256/1/1/8/3 128/3/1/8/1 64/3/1/4/1 64/8/2/4/1 128/8/4/8/1"),
    32: cuts(Gather, "32/8/1/4/1 128/1/1/4/3 128/1/1/8/3 64/1/1/4/3 64/3/1/8/1 128/3/1/8/1 64/3/1/4/2 128/1/1/4/1"),
    64: cuts(Gather, "32/3/1/4/1 32/3/1/4/2 64/1/1/4/3 128/1/1/8/3 64/1/1/8/3 32/1/1/4/3 64/3/1/4/2 32/1/1/4/1"),
}
SCATTERS = [Gather(64, 1, 1, 4, 1), Gather(64, 1, 1, 8, 1), Gather(128, 1, 1, 4, 1), Gather(128, 1, 1, 8, 1)]
SPLITS = {  # by the channels of x
    16: cuts(
        Split,
        "128/8/264/4/1 128/8/512/4/1 64/8/264/4/1 64/8/512/4/1 128/8/264/8/1 "
        "128/8/132/4/3 64/8/264/4/3 128/3/176/4/1 128/3/88/4/3",
    ),
    32: cuts(
        Split,
        "64/8/132/4/1 64/8/132/8/1 64/8/64/8/2 64/3/64/4/1 "
        "64/3/128/4/1 64/3/64/4/3 128/3/64/8/1 64/1/32/4/3 64/1/64/4/1",
    ),
    64: cuts(
        Split,
        "64/1/16/4/1 64/1/16/4/3 64/1/32/4/1 64/1/32/4/3 64/1/64/4/1 128/1/16/4/2 64/3/32/8/1 64/3/44/8/2 64/3/44/4/1",
    ),
}


class Case:
    """One layer's tensors on the device, and its passes as functions without arguments."""

    def __init__(self, inputs: int, outputs: int, stride: int, size: int, batch: int, kind: torch.dtype):
        g = torch.Generator("cuda").manual_seed(0)
        self.shape, self.stride = (inputs, outputs, stride, size), stride
        form = torch.channels_last
        self.x = torch.randn(batch, inputs, size, size, device="cuda", generator=g)
        self.x = self.x.to(kind).contiguous(memory_format=form)
        self.weight = torch.randn(outputs, inputs, 3, 3, device="cuda", generator=g).div_(3 * inputs**0.5)
        self.weight = self.weight.contiguous(memory_format=form)
        self.half = self.weight.to(kind)
        side = (size - 1) // stride + 1
        self.dy = torch.randn(batch, outputs, side, side, device="cuda", generator=g)
        self.dy = self.dy.to(kind).contiguous(memory_format=form)

    def cudnn(self, which: str) -> Callable[[], Tensor]:
        x, weight, dy, stride = self.x, self.half, self.dy, self.stride
        if which == "forward":
            return lambda: F.conv2d(x, weight, stride=stride, padding=1)
        mask = [which == "input_grad", which == "weight_grad", False]
        backward = torch.ops.aten.convolution_backward
        args = (dy, x, weight, None, [stride, stride], [1, 1], [1, 1], False, [0, 0], 1, mask)
        return lambda: backward(*args)[mask.index(True)]

    def ours(self, which: str, config: Any = None, weight: Tensor | None = None) -> Callable[[], Tensor]:
        x, dy, stride, size = self.x, self.dy, self.stride, self.shape[3]
        w = self.weight if weight is None else weight
        if which == "forward":
            return lambda: triton_conv.forward(x, w, stride, config)
        if which == "input_grad":
            return lambda: triton_conv.input_grad(dy, w, stride, size, size, config)
        return lambda: triton_conv.weight_grad(x, dy, w, stride, config)

    def configs(self, which: str) -> list[Any]:
        inputs, outputs, stride, _ = self.shape
        if which == "weight_grad":
            return SPLITS[inputs]
        if which == "input_grad" and stride == 2:
            return SCATTERS
        read = outputs if which == "input_grad" else inputs
        return GATHERS[read] + (WIDE[read] if self.x.dtype == torch.float32 else [])

    def default(self, which: str) -> Any:
        inputs, outputs, stride, _ = self.shape
        if which == "weight_grad":
            return triton_conv.split_config(inputs, outputs, stride)
        read, written = (outputs, inputs) if which == "input_grad" else (inputs, outputs)
        return triton_conv.gather_config(read, written, stride, self.x.dtype)


def microseconds(call: Callable[[], Any], calls: int = CALLS, replays: int = 7) -> float:
    """Median time of a call within a CUDA graph of `calls` of them."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def prepare(job: tuple[tuple[int, ...], str, list[Any], int, torch.dtype]) -> dict[str, str]:
    """Compile and run some configurations in a process of its own; what went wrong, by configuration.

    The compiled programs come back through Triton's cache on disk, and a program that breaks the device breaks only
    this process.
    """
    layer, which, configs, batch, kind = job
    _, inputs, outputs, stride, size = layer
    case = Case(inputs, outputs, stride, size, batch, kind)
    want = case.cudnn(which)().double()
    errors = {}
    for config in configs:
        try:
            got = case.ours(which, config)().double()
            worst = float((got - want).norm() / want.norm())
            if not worst < 1e-2:
                errors[str(config)] = f"wrong: relative error {worst:.3g}"
        except Exception as error:  # one that does not compile or fit is a result, not the end
            errors[str(config)] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
    return errors


def label(layer: tuple[int, ...]) -> str:
    _, inputs, outputs, stride, size = layer
    return f"{inputs}->{outputs} {size}x{size}{' stride 2' if stride == 2 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--no-sweep", action="store_true", help="only cuDNN and the tables' configurations")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", help="a JSON file for the results")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/convolutions.py: needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()

    kind = getattr(torch, args.dtype)
    passes = PASSES if kind == torch.bfloat16 else PASSES[:2]
    cases = {layer: Case(*layer[1:], args.batch, kind) for layer in LAYERS}
    plans = {
        (layer, which): list(dict.fromkeys([case.default(which), *([] if args.no_sweep else case.configs(which))]))
        for layer, case in cases.items()
        for which in passes
    }
    jobs = []
    for (layer, which), configs in plans.items():
        jobs += [(layer, which, configs[i : i + 4], args.batch, kind) for i in range(0, len(configs), 4)]
    failed: dict[tuple[Any, str], dict[str, str]] = {plan: {} for plan in plans}
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(prepare, job) for job in jobs]
        for job, future in zip(jobs, futures):
            try:
                failed[job[:2]] |= future.result()
            except Exception as error:
                failed[job[:2]] |= {str(config): f"its process: {error!r}" for config in job[2]}
    print(f"compiled {sum(map(len, plans.values()))} configurations in {time.perf_counter() - began:.0f} s")

    one = torch.zeros(1, device="cuda")
    x = cases[LAYERS[0]].x
    floor = {"add to one number": microseconds(lambda: one.add_(1)), "copy 16 x 32 x 32": microseconds(x.clone)}
    print("floors, us: " + ", ".join(f"{name} {value:.2f}" for name, value in floor.items()))

    rows: list[dict[str, Any]] = []
    for (layer, which), configs in plans.items():
        case, errors = cases[layer], failed[layer, which]
        row: dict[str, Any] = {"layer": label(layer), "count": layer[0], "pass": which}
        row["cudnn_us"] = microseconds(case.cudnn(which))
        row["configs"] = {}
        for config in configs:
            if str(config) in errors:
                continue
            try:
                row["configs"][str(config)] = microseconds(case.ours(which, config))
            except Exception as error:
                errors[str(config)] = repr(error)[:200]
        default = configs[0]
        row["ours_us"] = row["configs"].get(str(default), float("nan"))
        row["failed"] = errors
        print(f"\n{label(layer)} {which}: cuDNN {row['cudnn_us']:.2f}, ours {row['ours_us']:.2f} us {tuple(default)}")
        if row["configs"]:
            best = min(configs, key=lambda config: row["configs"].get(str(config), float("inf")))
            row["best"], row["best_us"] = str(best), row["configs"][str(best)]
            extra = {}
            if which == "weight_grad":
                parts = triton_conv.correlate(case.x, case.dy, case.stride, best)
                extra["its summing of parts"] = microseconds(lambda: triton_conv.sum_parts(parts, case.weight))  # noqa: B023
            else:
                plain = case.weight.contiguous()
                extra[f"with {args.dtype} weights"] = microseconds(case.ours(which, best, case.half))
                extra["with contiguous float32 weights"] = microseconds(case.ours(which, best, plain))
            row["extra"] = extra
            if not args.no_sweep:
                for config in configs:
                    if str(config) in row["configs"]:
                        mark = " <- best" if config == best else ""
                        print(f"    {row['configs'][str(config)]:7.2f}  {tuple(config)}{mark}")
            print("    " + ", ".join(f"{name} {value:.2f} us" for name, value in extra.items()))
        for config, reason in errors.items():
            print(f"    failed  {config}: {reason}")
        rows.append(row)

    # The first convolution, 3 -> 16, is cuDNN's in both; in training it has no input gradient.
    first = Case(3, 16, 1, 32, args.batch, kind)
    first_us = sum(microseconds(first.cudnn(which)) for which in ("forward", passes[-1]))
    totals = {}
    for key in ("cudnn_us", "ours_us", "best_us"):
        totals[key] = sum(row["count"] * row.get(key, float("nan")) for row in rows) + first_us
    print(f"\nall convolutions of a Resnet-32 step, batch {args.batch}, {first_us:.1f} us of them 3->16 by cuDNN:")
    print(
        f"  cuDNN {totals['cudnn_us']:.0f} us, ours {totals['ours_us']:.0f} us, best cuts {totals['best_us']:.0f} us;"
        f" cuDNN / ours = {totals['cudnn_us'] / totals['ours_us']:.2f}"
    )
    for which in passes:
        part = [
            sum(r["count"] * r.get(key, float("nan")) for r in rows if r["pass"] == which)
            for key in ("cudnn_us", "ours_us", "best_us")
        ]
        print(f"  {which}: cuDNN {part[0]:.0f}, ours {part[1]:.0f}, best cuts {part[2]:.0f} us")
    print(f"took {time.perf_counter() - began:.0f} s")
    if args.out:
        import triton

        settings = {
            "device": torch.cuda.get_device_name(),
            "mmlda": mmlda.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "seed": 0,
            "batch": args.batch,
            "dtype": args.dtype,
            "calls_in_a_graph": CALLS,
        }
        with open(args.out, "w") as file:
            json.dump(
                {"settings": settings, "floor_us": floor, "first_us": first_us, "totals": totals, "rows": rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
