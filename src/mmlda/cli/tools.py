"""Commands for theory, means and datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmlda.cli.options import DATASETS, Json, Root, app, command, option, show

data_app = typer.Typer(help="List, fetch and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Plot = Annotated[Path | None, option("Output", metavar="FILE", help="Also draw a figure: a .png, .svg or .pdf file.")]
FETCHED = [name for name in DATASETS if name not in ("digits", "cifar100-coarse")]
Dataset = Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(FETCHED)}.", autocompletion=lambda: FETCHED)]


@command("mmlda theory --classes 10 --C 100 --plot theory.png")
def theory(
    classes: Annotated[int, option("Options", metavar="N", help="L, the number of classes.")] = 10,
    C: Annotated[float, option("Options", "--C", metavar="NUMBER", help="Squared norm of the means.")] = 100.0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Evaluate the paper's theorems for L classes.

    Prints distances, robustness and its bound, and the Bayes error at C.
    """
    import mmlda

    values = mmlda.theory.evaluate_theorems(classes, C)
    if plot is not None:
        from mmlda.theory.pictures import theory_curves

        theory_curves(plot, classes, C)
    lines = [f"{name.replace('_', ' '):24s} {value:.6g}" for name, value in values.items()]
    show(values, "\n".join([*lines, *([str(plot)] if plot else [])]), as_json)


@command("mmlda means --classes 100 --dim 64 --plot means.png")
def means(
    classes: Annotated[int, option("Options", metavar="N", help="L, the number of classes.")] = 10,
    dim: Annotated[int, option("Options", metavar="N", help="p, the latent dimension.")] = 64,
    C: Annotated[float, option("Options", "--C", metavar="NUMBER", help="Squared norm of the means.")] = 100.0,
    seed: Annotated[int, option("Options", metavar="N", help="Random seed of the optimiser, used if L > 2p.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Show how well L means separate in p dimensions.

    Prints the construction, their largest cosine and a lower bound on it.
    """
    import mmlda

    found = mmlda.theory.arrange_means(num_classes=classes, dim=dim, C=C, seed=seed)
    mu = found.means
    values = {"kind": found.construction, "max_cosine": found.max_cosine, "bound": found.bound}
    if plot is not None:
        from mmlda.theory.pictures import means_picture

        means_picture(plot, mu)
    show({**values, "means": mu.tolist()} if as_json else values, f"{found}\n{plot}" if plot else found, as_json)


@command("mmlda data list --root ~/datasets", "list", data_app)
def data_list(root: Root = None, as_json: Json = False) -> None:
    """List the datasets known by name, and where they are."""
    from mmlda.data import fetch

    entries = fetch.available(root)
    lines = []
    for entry in entries:
        where = "comes with the package" if entry.embedded else entry.path
        lines.append(f"{entry.name:14s} {where or f'not found: get it with mmlda data fetch {entry.name}'}")
    show(entries, "\n".join(lines), as_json)


@command("mmlda data fetch cifar10", "fetch", data_app)
def data_fetch(
    name: Dataset,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Download a dataset and check its content.

    Files that are already there are not downloaded again.
    """
    from mmlda._utils.progress import progress
    from mmlda.data import fetch

    size = sum(entry.download for entry in fetch.available(root) if entry.name == name)
    with progress(f"fetching {name}", size // 10**6, unit="MB", every=5.0) as report:
        path = fetch.fetch(name, root, progress=lambda done, total: report(done // 10**6))
    show({"name": name, "path": path}, path, as_json)


@command("mmlda data check mnist", "check", data_app)
def data_check(
    name: Dataset,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Check that a dataset is, image for image, the published one."""
    from mmlda.data import fetch

    found = fetch.check(name, root)
    show(found, f"{name}: {'as published' if found.ok else found.problem}", as_json)
    if not found.ok:
        raise typer.Exit(1)
