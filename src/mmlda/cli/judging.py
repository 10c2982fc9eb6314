"""Judging networks: attack, evaluate, audit, reproduce, report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from mmlda.cli.options import ATTACKS, Data, Device, Json, Model, Root, app, fits, make_attack, pick, settings
from mmlda.paper import PARTS
from mmlda.results import Result, label


@app.command(epilog="Example: mmlda attack runs/digits --attack pgd --eps 0.1 --data digits --n 200 --out runs/attack")
def attack(
    model: Model,
    name: Annotated[str, typer.Option("--attack", help=", ".join(ATTACKS) + ".", autocompletion=lambda: [*ATTACKS])],
    out: Annotated[Path, typer.Option(help="Folder for the result; an attack that was stopped goes on there.")],
    data: Data = "digits",
    n: Annotated[int | None, typer.Option(help="The first n test images; all by default.")] = None,
    eps: Annotated[float | None, typer.Option(help="The perturbation, for attacks with one; pixels are 0..1.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another setting: --set steps=100.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Images at a time; a finished chunk is not repeated.")] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the network; for long ones on CUDA.")] = False,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Attack a network on test images: accuracy, distances, and a picture."""
    import mmlda
    from mmlda.evaluation.robustness import attack_images

    values = settings(set_ or [], "--set")
    if eps is not None and "eps" in values:
        raise ValueError(f"eps = {eps} and --set eps={values['eps']}: expected one of them")
    chosen = make_attack(name, values | ({} if eps is None else {"eps": eps}))
    place = pick(device)
    net, test = mmlda.load(model, device=place), mmlda.data.load(data, root)[1]
    fits(net, test, place)
    found = attack_images(net, test, chosen, out=out, n=n, chunk=chunk, name=model, device=place, compile=compile_)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    numbers, (low, high) = found.numbers, found.interval or (0.0, 0.0)
    print(f"{found.attack} on {found.n} images of {found.dataset}: accuracy "
          f"{100 * float(numbers['clean_accuracy'] or 0):.2f}% clean, {100 * found.number:.2f}% under attack "
          f"(95% interval {100 * low:.2f} to {100 * high:.2f})")  # fmt: skip
    if numbers["mean_l2"] is not None:
        print(f"broken images moved by L-infinity {numbers['mean_linf']:.4f}, L2 {numbers['mean_l2']:.4f}, "
              f"distortion {numbers['mean_distortion']:.3f} (means)")  # fmt: skip
    if numbers["zero_gradient"]:
        print(f"at {100 * float(numbers['zero_gradient']):.1f}% of the images the gradient was exactly zero: "
              "the attack was blind there, which is not robustness; try --set loss=margin")  # fmt: skip
    print(f"{out / 'result.json'}, {out / 'examples.png'}")


@app.command(epilog="Example: mmlda evaluate runs/digits --attack bim:0.1 --attack cw --n 200 --out runs/evaluation")
def evaluate(
    model: Model,
    names: Annotated[
        list[str] | None,
        typer.Option("--attack", help=f"name or name:eps, as often as you like; names: {', '.join(ATTACKS)}."),
    ] = None,
    data: Data = "digits",
    n: Annotated[int | None, typer.Option(help="The first n test images; all by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; goes on where it stopped.")] = None,
    temperature: Annotated[
        bool, typer.Option(help="Calibrate too: a temperature fitted on the test images after the first n.")
    ] = False,
    chunk: Annotated[int | None, typer.Option(help="Images at a time; a finished chunk is not repeated.")] = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Clean and robust accuracy with 95% intervals, distances, calibration."""
    import mmlda

    attacks = []
    for words in names or []:
        name, colon, eps = words.partition(":")
        values = settings([f"eps={eps}"], "--attack") if colon else {}
        if colon and not isinstance(values["eps"], int | float):
            raise ValueError(f"attack = {words!r}: expected a name, or name:eps with a number")
        attacks.append(make_attack(name, values))
    place = pick(device)
    net, test = mmlda.load(model, device=place), mmlda.data.load(data, root)[1]
    fits(net, test, place)
    rest = None
    if temperature:  # not the training images: a network that knows them all is never too sure of them
        if n is None or not 0 < n < len(test):
            raise ValueError(f"n = {n}: expected less than {len(test)}, as --temperature needs the other test images")
        rest = test.subset(slice(n, None))
    found = mmlda.evaluate(net, test, attacks, n=n, out=out, chunk=chunk, name=model, device=place,
                           temperature=rest)  # fmt: skip
    print(json.dumps([dataclasses.asdict(result) for result in found.results]) if as_json else found)


@app.command(epilog="Example: mmlda audit cifar10-mmlda --data cifar10 --eps 0.04 --surrogate cifar10-sr --out audit")
def audit(
    model: Model,
    data: Data = "digits",
    eps: Annotated[
        float | None, typer.Option(help="The perturbation, on pixels in 0..1; 0.04 in colour, 0.12 in grey by default.")
    ] = None,
    surrogate: Annotated[str | None, typer.Option(help="Another network, for the transfer attack.")] = None,
    n: Annotated[int, typer.Option(help="The first n test images.")] = 200,
    thorough: Annotated[bool, typer.Option(help="More steps and queries; several times slower.")] = False,
    seed: Annotated[int, typer.Option(help="Of the attacks' random choices.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the result and its picture.")] = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Is the robustness real? A verdict in plain words (real, none, masked, mixed) with its evidence."""
    import mmlda
    from mmlda.audit import verdict as masking

    place = pick(device)
    net, test = mmlda.load(model, device=place), mmlda.data.load(data, root)[1]
    fits(net, test, place)
    other = None if surrogate is None else mmlda.load(surrogate, device=place)
    if other is not None:
        fits(other, test, place)
    found = masking.audit(net, test, eps=eps, surrogate=other, n=n, thorough=thorough, name=model, seed=seed,
                          device=place)  # fmt: skip
    if out is not None:
        found = dataclasses.replace(found, name="audit").save(out)
        masking.picture(out / "audit.png", found)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    print("\n".join(masking.lines(found)))
    if out is not None:
        print(f"{out / 'audit.json'}, {out / 'audit.png'}")


REPRODUCED = [*PARTS, "all"]


@app.command(epilog="Example: mmlda reproduce table2 --data cifar10 --shipped --n 500 --out results")
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help=", ".join(REPRODUCED) + ".", autocompletion=lambda: REPRODUCED)
    ] = None,
    data: Annotated[str, typer.Option(help="digits, mnist or cifar10.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder for the results; what is there stays.")] = Path("results"),
    steps: Annotated[int | None, typer.Option(help="Training steps; the paper's by default.")] = None,
    tuning: Annotated[int | None, typer.Option(help="Steps of fine-tuning; the paper's share by default.")] = None,
    n: Annotated[int | None, typer.Option(help="Images to attack; all (1,000 for JSMA, C&W) by default.")] = None,
    seeds: Annotated[str, typer.Option(help="Of the networks: 0 or 0,1,2.")] = "0",
    shipped: Annotated[bool, typer.Option(help="Use the networks that ship instead of training.")] = False,
    at_once: Annotated[int, typer.Option(help="Networks to train at the same time on one device.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Train on a Ray cluster: its address, or local.")] = None,
    verify: Annotated[
        Path | None, typer.Option(help="A result's JSON file: recompute 200 of its images (or --n) and compare.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="With --verify: where the network is.")] = None,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """A table or figure of the paper, every number beside the paper's; or check a number with --verify."""
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
        raise ValueError(f"name is missing: expected one of {', '.join(REPRODUCED)}, or --verify RESULT")
    from mmlda import paper

    try:
        numbers = tuple(int(part) for part in seeds.split(","))
    except ValueError:
        raise ValueError(f"seeds = {seeds!r}: expected numbers with commas between, 0,1,2") from None
    setup = paper.Setup(data=data, out=out, steps=steps, tuning=tuning, n=n, seeds=numbers, shipped=shipped, root=root,
                        device=pick(device), at_once=at_once, ray=ray, show=not as_json)  # fmt: skip
    results = paper.reproduce(name, setup)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
        return
    print("\n".join(table(results)))
    for where, parts in paper.times(setup).items():
        each = ", ".join(f"{part} {seconds / 60:.1f}" for part, seconds in parts.items())
        print(f"minutes on {where}, all sittings: {each}; together {sum(parts.values()) / 60:.1f}")
    print(f"{len(results)} results in {out}; mmlda report {out} -o report.html makes a page of them")


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
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its title.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """One self-contained page from result files: the verdict first, tables beside the paper's, figures, provenance."""
    from mmlda.report import build

    page = build(results, out, title=title).resolve()
    print(json.dumps({"report": str(page), "address": page.as_uri()}) if as_json else page.as_uri())
    if open_:
        import webbrowser

        webbrowser.open(page.as_uri())
