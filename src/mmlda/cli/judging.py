"""Commands that measure networks: attack, evaluate, audit, reproduce, report."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from mmlda._utils.checks import invalid
from mmlda.cli.options import (
    Chunk,
    Data,
    Device,
    Json,
    Model,
    N,
    Root,
    app,
    attack_option,
    numbers,
    parse_attack,
    pick,
    prepare,
)
from mmlda.paper import PARTS
from mmlda.results import Result, label


@app.command(epilog="Example: mmlda attack runs/digits --attack pgd:0.1,steps=50 --n 200 --out runs/attack")
def attack(
    model: Model,
    specs: Annotated[list[str], attack_option],
    out: Annotated[Path, typer.Option(help="Folder for the result; an attack that was stopped resumes there.")],
    data: Data = "digits",
    n: N = None,
    chunk: Chunk = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network: for long attacks on CUDA.")] = False,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Attack a network and save the adversarial images.

    Prints the accuracy under attack and the distances. Several attacks get one folder each inside --out.
    """
    from mmlda.evaluation import attack_images

    chosen = {spec: parse_attack(spec) for spec in specs}
    place = pick(device)
    net, test = prepare(model, data, root, place)
    results = []
    for spec, one in chosen.items():
        folder = out if len(chosen) == 1 else out / re.sub(r"[^\w.=]+", "-", spec)
        result = attack_images(net, test, one, out=folder, n=n, chunk=chunk, name=model, device=place, compile=compile_)
        results.append(dataclasses.asdict(result))
        if not as_json:
            print("\n".join(_summary(result, folder)))
    if as_json:
        print(json.dumps(results[0] if len(results) == 1 else results))


def _summary(result: Result, folder: Path) -> list[str]:
    numbers, (low, high) = result.numbers, result.interval or (0.0, 0.0)
    clean, images = 100 * float(numbers["clean_accuracy"] or 0), f"{result.n} images of {result.dataset}"
    lines = [
        f"{result.attack} on {images}: accuracy {clean:.2f}% clean, {100 * result.number:.2f}% under attack "
        f"(95% interval {100 * low:.2f} to {100 * high:.2f})"
    ]
    if numbers["mean_l2"] is not None:
        lines.append(
            f"mean distance of broken images: L-infinity {numbers['mean_linf']:.4f}, L2 {numbers['mean_l2']:.4f}, "
            f"distortion {numbers['mean_distortion']:.3f}"
        )
    if numbers["zero_gradient"]:
        share = 100 * float(numbers["zero_gradient"])
        lines.append(
            f"the gradient was exactly zero for {share:.1f}% of the images: the attack cannot move them, which is not "
            "robustness; try loss=margin"
        )
    return [*lines, f"{folder / 'result.json'}, {folder / 'examples.png'}"]


@app.command(epilog="Example: mmlda evaluate runs/digits --attack bim:0.1 --attack cw --n 200 --out runs/evaluation")
def evaluate(
    model: Model,
    specs: Annotated[list[str] | None, attack_option] = None,
    data: Data = "digits",
    n: N = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; a stopped evaluation resumes there.")
    ] = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature", help="Also calibrate with a temperature, fitted on the test images after the first N."
        ),
    ] = False,
    chunk: Chunk = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure clean and robust accuracy.

    Prints a table with 95% intervals, distances and calibration.
    """
    import mmlda

    attacks = [parse_attack(spec) for spec in specs or []]
    place = pick(device)
    net, test = prepare(model, data, root, place)
    rest = None
    if temperature:  # not on training images, on which the network is too confident
        if n is None or not 0 < n < len(test):
            raise invalid("n", f"from 1 to {len(test) - 1}, as --temperature needs the other test images", n)
        rest = test.subset(slice(n, None))
    found = mmlda.evaluate(net, test, attacks, n=n, out=out, chunk=chunk, name=model, device=place, temperature=rest)
    print(json.dumps([dataclasses.asdict(result) for result in found.results]) if as_json else found)


@app.command(epilog="Example: mmlda audit cifar10-mmlda --data cifar10 --eps 0.04 --surrogate cifar10-sr --out audit")
def audit(
    model: Model,
    data: Data = "digits",
    eps: Annotated[
        float | None, typer.Option(help="Perturbation of pixels in [0, 1] (default: 0.04 for colour, 0.12 for grey).")
    ] = None,
    surrogate: Annotated[
        str | None, typer.Option(help="Another network, whose adversarial images are transferred.")
    ] = None,
    n: Annotated[int, typer.Option(help="Use the first N test images.")] = 200,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Use more steps and queries; several times slower.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of the attacks.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the result and its picture.")] = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Check whether a network's robustness is real.

    Prints a verdict (real, none, masked or mixed) with its evidence.
    """
    import mmlda

    place = pick(device)
    net, test = prepare(model, data, root, place)
    other = None if surrogate is None else prepare(surrogate, data, root, place)[0]
    judged = mmlda.audit(
        net, test, eps=eps, surrogate=other, n=n, thorough=thorough, name=model, seed=seed, device=place
    )
    found = judged.to_result()
    if out is not None:
        found = dataclasses.replace(found, name="audit").save(out)
        judged.plot(out / "audit.png")
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    print(judged)
    if out is not None:
        print(f"{out / 'audit.json'}, {out / 'audit.png'}")


REPRODUCED = [*PARTS, "all"]


@app.command(epilog="Example: mmlda reproduce table2 --data cifar10 --shipped --n 500 --out results")
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help=", ".join(REPRODUCED) + ".", autocompletion=lambda: REPRODUCED)
    ] = None,
    data: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder for the results; finished ones are kept.")] = Path("results"),
    steps: Annotated[int | None, typer.Option(help="Training steps (default: the paper's).")] = None,
    tuning: Annotated[
        int | None, typer.Option(help="Fine-tuning steps (default: the paper's share of the steps).")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Images to attack (default: all; 1,000 for JSMA and C&W).")] = None,
    seeds: Annotated[str, typer.Option(help="Random seeds, comma-separated.")] = "0",
    shipped: Annotated[bool, typer.Option("--shipped", help="Use the networks that ship instead of training.")] = False,
    at_once: Annotated[int, typer.Option(help="Networks to train at the same time on one device.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Train on a Ray cluster: its address, or local.")] = None,
    verify: Annotated[
        Path | None, typer.Option(help="JSON file of a result: recompute 200 of its images (or --n) and compare.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="With --verify: the network's folder or name.")] = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper.

    With --verify, recompute part of one result and compare.
    """
    if verify is not None:
        from mmlda.paper.verification import verify as check

        found = check(verify, n=200 if n is None else n, network=network, root=root, device=pick(device))
        told = {"agrees": found.agrees, "result": str(verify), "claimed": found.result.value}
        fields = dataclasses.asdict(found) | told
        print(json.dumps(fields) if as_json else found)
        if not found.agrees:
            raise typer.Exit(1)
        return
    if name is None:
        raise ValueError(f"name must be one of {', '.join(REPRODUCED)} (or give --verify RESULT), got none")
    from mmlda import paper

    setup = paper.Setup(
        data=data,
        out=out,
        steps=steps,
        tuning=tuning,
        n=n,
        seeds=numbers("seeds", seeds),
        shipped=shipped,
        root=root,
        device=pick(device),
        at_once=at_once,
        ray=ray,
        show=not as_json,
    )
    results = paper.reproduce(name, setup)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
        return
    print("\n".join(table(results)))
    for where, parts in paper.times(setup).items():
        each = ", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in parts.items())
        print(f"minutes on {where}: {each}; together {sum(parts.values()) / 60:.1f}")
    print(f"{len(results)} results in {out}; turn them into a page with mmlda report {out} -o report.html")


def table(results: list[Result]) -> list[str]:
    """Results as lines: ours, the interval, the paper's; claims with their verdict."""
    lines = []
    for result in results:
        if result.kind in ("claim", "theory"):
            verdict = {True: "holds", False: "does not hold", None: "not decided"}[result.holds]
            if result.claim == "suspects":
                verdict = "asked"  # a question of ours, with an answer
            lines.append(f"{verdict.upper()}: {result.what}. The paper: {result.paper}")
        elif isinstance(result.value, str):
            lines.append(f"{result.value.upper()}, {label(result)}: {result.what}")
        else:
            scale = 100 if result.unit == "share" else 1  # percent, where it is printed
            value = "-" if result.value is None else f"{scale * result.value:.2f}"
            low, high = (scale * end for end in result.interval or (0.0, 0.0))
            span = "" if result.interval is None else f" [{low:.2f}, {high:.2f}]"
            paper = f"   paper {scale * result.paper:.4g}" if isinstance(result.paper, int | float) else ""
            lines.append(f"{result.what:76s} {value:>7s}{span}{paper}")
    return lines


@app.command(epilog="Example: mmlda report results -o report.html")
def report(
    results: Annotated[Path, typer.Argument(help="Folder of results.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Turn result files into one HTML page.

    The page is self-contained: verdicts, tables next to the paper's, figures and provenance.
    """
    from mmlda.report import build

    page = build(results, out, title=title).resolve()
    print(json.dumps({"report": str(page), "address": page.as_uri()}) if as_json else page.as_uri())
    if open_:
        import webbrowser

        webbrowser.open(page.as_uri())
