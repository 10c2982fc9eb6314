"""Commands that measure networks: evaluate, attack, audit, reproduce, pack, report."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmlda._utils.text import eps_text
from mmlda.cli.options import (
    Chunk,
    Device,
    Function,
    Json,
    Model,
    N,
    OwnData,
    Priors,
    Root,
    Weights,
    attack_option,
    browse,
    command,
    numbers,
    option,
    parse_attack,
    parse_eps,
    pick,
    prepare,
    show,
    writable,
)

if TYPE_CHECKING:
    from mmlda.results import Result


@command("mmlda evaluate mnist-mmlda --attack fgsm:0.1 --attack pgd:0.1 --n 100")
def evaluate(
    model: Model = None,
    specs: Annotated[list[str] | None, attack_option] = None,
    function: Function = None,
    weights: Weights = None,
    data: OwnData = None,
    n: N = None,
    root: Root = None,
    temperature: Annotated[
        bool,
        option(
            "Computation",
            "--temperature",
            help="Also scale the logits by a temperature fitted on the other test images.",
        ),
    ] = False,
    priors: Priors = None,
    chunk: Chunk = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        option(
            "Output", callback=writable, metavar="DIR", help="Save the results; a stopped evaluation resumes there."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on clean images and under attacks.

    Prints a table with 95% intervals, distances and calibration.
    """
    import mmlda

    attacks = [parse_attack(spec) for spec in specs or []]
    if temperature and n is None:
        what = "given with --temperature (such as --n 100: the temperature is fitted on the other test images)"
        raise ValueError(f"n must be {what}, got none")
    place = pick(device)
    subject = prepare(model, function, weights, data, root, place)
    found = mmlda.evaluate(
        subject.net,
        subject.test,
        attacks,
        n=n,
        out=out,
        chunk=chunk,
        temperature=temperature or None,
        priors=priors,
        name=subject.name,
        device=place,
    )
    show(found.results, f"{subject.heading(n)}\n{found}", as_json)


@command("mmlda attack runs/digits --attack pgd:8/255,steps=50 --n 200 --out runs/attack")
def attack(
    model: Model = None,
    *,
    specs: Annotated[list[str], attack_option],
    function: Function = None,
    weights: Weights = None,
    data: OwnData = None,
    n: N = None,
    root: Root = None,
    chunk: Chunk = None,
    compile_: Annotated[
        bool, option("Computation", "--compile", help="Attack a faster copy of the network; for long attacks.")
    ] = False,
    device: Device = None,
    out: Annotated[
        Path,
        option(
            "Output", callback=writable, metavar="DIR", help="Folder for the results; a stopped attack resumes there."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Attack a network and save the adversarial images.

    Prints the accuracy under attack and the distances. Several attacks get one folder each inside --out.
    """
    from mmlda.attacks import AttackWarning
    from mmlda.evaluation import attack_images

    chosen = {spec: parse_attack(spec) for spec in specs}
    place = pick(device)
    subject = prepare(model, function, weights, data, root, place)
    if not as_json:
        print(subject.heading(n))
    results = []
    for spec, one in chosen.items():
        folder = out if len(chosen) == 1 else out / re.sub(r"[^\w.=]+", "-", spec)
        how: dict[str, Any] = {"n": n, "chunk": chunk, "name": subject.name, "device": place, "compile": compile_}
        with warnings.catch_warnings(action="ignore", category=AttackWarning):  # the summary shows them
            result = attack_images(subject.net, subject.test, one, out=folder, **how)
        results.append(result)
        if not as_json:
            print("\n".join(_summary(result, folder)))
    if as_json:
        show(results[0] if len(results) == 1 else results, None, as_json)


def _summary(result: Result, folder: Path) -> list[str]:
    from mmlda.evaluation.robustness import unreliable

    numbers, (low, high) = result.numbers, result.interval or (0.0, 0.0)
    clean, interval = 100 * float(numbers["clean_accuracy"] or 0), f"{100 * low:.2f} to {100 * high:.2f}"
    accuracy = f"accuracy {clean:.2f}% clean, {100 * result.number:.2f}% under attack (95% interval {interval})"
    lines = [f"{result.attack}{'' if result.eps is None else f' {eps_text(result.eps)}'}: {accuracy}"]
    if numbers["mean_l2"] is not None:
        near = f"L-infinity {numbers['mean_linf']:.4f}, L2 {numbers['mean_l2']:.4f}"
        lines.append(f"mean distance of broken images: {near}, distortion {numbers['mean_distortion']:.3f}")
    if why := unreliable(result):
        lines.append(f"warning: {why}")
    return [*lines, f"{folder / 'result.json'}, {folder / 'examples.png'}"]


@command("mmlda audit cifar10-mmlda --eps 8/255 --surrogate cifar10-sr --out audit")
def audit(
    model: Model = None,
    eps: Annotated[
        str | None,
        option(
            "Attacks",
            metavar="EPS",
            help="Largest change of a pixel in [0, 1], such as 8/255 (default: 0.04 for colour, 0.12 for grey).",
        ),
    ] = None,
    surrogate: Annotated[
        str | None, option("Attacks", metavar="MODEL", help="Also try adversarial images made for this network.")
    ] = None,
    thorough: Annotated[
        bool, option("Attacks", "--thorough", help="Use 5 times the steps and 10 times the queries; much slower.")
    ] = False,
    seed: Annotated[int, option("Attacks", metavar="N", help="Random seed of the attacks.")] = 0,
    function: Function = None,
    weights: Weights = None,
    data: OwnData = None,
    n: Annotated[int, option("Data", metavar="N", help="Use a stratified sample of N test images.")] = 200,
    root: Root = None,
    priors: Priors = None,
    device: Device = None,
    out: Annotated[
        Path | None, option("Output", callback=writable, metavar="DIR", help="Save the result and its figure.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether a network's robustness is real.

    Prints a verdict (real, none, masked or mixed) with its evidence.
    """
    import mmlda
    from mmlda.evaluation.accuracy import check_fits
    from mmlda.evaluation.priors import exchange_priors

    radius, place = None if eps is None else parse_eps(eps), pick(device)
    net, name, test, _ = subject = prepare(model, function, weights, data, root, place)
    other = None if surrogate is None else mmlda.load(surrogate, device=place)
    if other is not None:
        check_fits(other, test)
    if priors is not None:
        net, test = exchange_priors(net, test, priors)
    judged = mmlda.audit(
        net, test, eps=radius, surrogate=other, n=n, thorough=thorough, name=name, seed=seed, device=place
    )
    judged = dataclasses.replace(judged, about={**judged.about, "priors": priors})
    found = judged.to_result() if out is None else judged.save(out)
    heading = subject.heading(n) + (f", {priors} priors" if priors else "")
    show(found, f"{heading}\n{judged}", as_json)
    if out is not None and not as_json:
        print(f"{out / 'audit.json'}, {out / 'audit.png'}")


REPRODUCED = "table1 table2 table3 fig2 fig3 fig4 fig5 theory suspects robust all".split()  # mmlda.paper.PARTS, and all


@command("mmlda reproduce table2 --data cifar10 --shipped --n 500 --out results")
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"{', '.join(REPRODUCED)}.", autocompletion=lambda: REPRODUCED),
    ] = None,
    data: Annotated[str, option("Data", metavar="NAME", help="digits, mnist or cifar10.")] = "digits",
    n: Annotated[
        int | None, option("Data", metavar="N", help="Attack N images (default: all; 1,000 for JSMA and C&W).")
    ] = None,
    root: Root = None,
    shipped: Annotated[
        bool, option("Training", "--shipped", help="Use the networks that ship instead of training.")
    ] = False,
    steps: Annotated[int | None, option("Training", metavar="N", help="Training steps (default: the paper's).")] = None,
    tuning: Annotated[
        int | None, option("Training", metavar="N", help="Fine-tuning steps (default: the paper's share of --steps).")
    ] = None,
    seeds: Annotated[str, option("Training", metavar="LIST", help="Random seeds, comma-separated.")] = "0",
    at_once: Annotated[
        int, option("Computation", metavar="N", help="Networks to train at the same time on one device.")
    ] = 1,
    ray: Annotated[
        str | None, option("Computation", metavar="ADDRESS", help="Train on a Ray cluster: its address, or local.")
    ] = None,
    device: Device = None,
    verify: Annotated[
        Path | None,
        option(
            "Verification",
            metavar="RESULT",
            help="Recompute --n images of a result, NAME.json or TABLE.jsonl#NAME, and compare.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        option("Verification", metavar="MODEL", help="Network of that result, if it is not found beside the file."),
    ] = None,
    out: Annotated[
        Path, option("Output", callback=writable, metavar="DIR", help="Folder for the results; finished ones are kept.")
    ] = Path("results"),
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper, or verify a result.

    Trains the networks, attacks them, and prints each number beside the paper's. With --verify, recomputes part of
    one result and compares.
    """
    if verify is not None:
        from mmlda.paper.verification import verify as check

        found = check(verify, n=n, network=network, root=root, device=pick(device))
        told = {"agrees": found.agrees, "result": str(verify), "claimed": found.result.value}
        told |= {"n": found.n, "limit": found.limit}
        show(dataclasses.asdict(found) | told, found, as_json)
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
    show(results, "\n".join(table(results)), as_json)
    if as_json:
        return
    print(f"{len(results)} results in {out}; turn them into a page with mmlda report {out} -o report.html")


def table(results: list[Result]) -> list[str]:
    """Results as lines: ours, the interval, the paper's; claims with their verdict."""
    from mmlda.results import label

    lines = []
    for result in results:
        if result.kind in ("claim", "theory"):
            verdict = {True: "holds", False: "does not hold", None: "not decided"}[result.holds]
            if result.claim == "suspects":
                verdict = "asked"  # our own question, not a claim of the paper
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


@command("mmlda pack results")
def pack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with result files.")],
    replace: Annotated[
        bool, option("Output", "--replace", help="Replace packed results that have a different value.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack result files into one file per table.

    Writes DIR/DATASET/TABLE.jsonl with one result per line, and the outcomes to TABLE.safetensors.
    """
    from mmlda.results import pack as pack_results

    packed, differing = pack_results(folder, replace=replace)
    left = "differs from the packed result of this name and was left; replace it with --replace"
    lines = [f"{len(packed)} results packed", *(f"{name} {left}" for name in differing)]
    show({"packed": packed, "differing": differing}, "\n".join(lines), as_json)
    if differing:
        raise typer.Exit(1)


@command("mmlda report results -o report.html")
def report(
    results: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with results, searched recursively.")],
    title: Annotated[str | None, option("Output", metavar="TEXT", help="Title of the page.")] = None,
    out: Annotated[
        Path, option("Output", "--out", "-o", callback=writable, metavar="FILE", help="The HTML file to write.")
    ] = Path("report.html"),
    open_: Annotated[bool, option("Output", "--open", help="Open the page in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Turn result files into one HTML page.

    The page is self-contained: verdicts, tables, figures and the provenance of every number, and the paper's numbers
    beside those that reproduce them.
    """
    from mmlda.report import build

    page = build(results, out, title=title).resolve()
    show({"report": page, "address": page.as_uri()}, page.as_uri(), as_json)
    if open_:
        browse(page)
