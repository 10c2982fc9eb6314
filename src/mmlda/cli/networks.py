"""Commands that make networks: demo, export, models, train."""

from __future__ import annotations

import dataclasses
import math
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

import mmlda.zoo as zoo
from mmlda._utils.settings import checked, settings, typed
from mmlda._utils.text import eps_text
from mmlda.cli.options import (
    DATASETS,
    Device,
    Json,
    Priors,
    Root,
    browse,
    command,
    data_option,
    network_argument,
    option,
    pick,
    show,
    writable,
)


@command("mmlda train --data digits --head mmlda --out runs/digits")
def train(
    data: Annotated[
        str | None, data_option(help=f"{', '.join(DATASETS)} or a folder (default: that of the run, else digits).")
    ] = None,
    n: Annotated[
        int | None, option("Data", metavar="N", help="Train on a stratified sample of N images, for a quick try.")
    ] = None,
    validation: Annotated[
        int | None, option("Data", metavar="N", help="Hold out N training images and report the accuracy on them.")
    ] = None,
    keep_best: Annotated[
        bool, option("Data", "--keep-best", help="Keep the network with the best validation accuracy.")
    ] = False,
    patience: Annotated[
        int | None, option("Data", metavar="N", help="Stop after N validations without improvement.")
    ] = None,
    root: Root = None,
    priors: Annotated[
        str | None,
        option("Network", metavar="NAME", help="Class priors of the head: uniform, or empirical (the training set's)."),
    ] = None,
    head: Annotated[
        str | None, option("Network", metavar="NAME", help="mmlda or softmax (default: that of --start, else mmlda).")
    ] = None,
    model: Annotated[
        list[str] | None,
        option("Network", metavar="KEY=VALUE", help="Change a setting, such as depth=20; repeat for several."),
    ] = None,
    start: Annotated[
        str | None, option("Network", metavar="MODEL", help="Fine-tune this network: a name, or the folder of a run.")
    ] = None,
    recipe: Annotated[
        str | None,
        option("Recipe", metavar="NAME", help="A recipe, such as mnist-sr (default: the paper's for data and head)."),
    ] = None,
    steps: Annotated[
        int | None, option("Recipe", metavar="N", help="Training steps; an existing run can be extended.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        option("Recipe", "--set", metavar="KEY=VALUE", help="Change a setting, such as lr=0.01; repeat for several."),
    ] = None,
    seed: Annotated[
        int | None,
        option("Recipe", metavar="N", help="Random seed of weights, data order and augmentation (default: 0)."),
    ] = None,
    device: Device = None,
    amp: Annotated[
        bool | None, option("Computation", help="Use bfloat16 with a float32 loss (default: only on CUDA).")
    ] = None,
    eager: Annotated[
        bool, option("Computation", "--eager", help="On CUDA, do not compile and capture the training step.")
    ] = False,
    deterministic: Annotated[
        bool, option("Computation", "--deterministic", help="On CUDA, make runs reproducible bit by bit; slower.")
    ] = False,
    out: Annotated[
        Path, option("Output", callback=writable, metavar="DIR", help="Folder of the run; an existing run is resumed.")
    ] = Path("runs/network"),
    tensorboard: Annotated[bool, option("Output", "--tensorboard", help="Also write TensorBoard event files.")] = False,
    as_json: Json = False,
) -> None:
    """Train a network, or resume training it.

    To resume a run, pass its folder as --out. With --start, fine-tune an existing network. Under torchrun, train on
    several GPUs.
    """
    import mmlda
    from mmlda.training.recipes import Adversary, Recipe
    from mmlda.training.run import train as train_network

    changes = settings(set_ or [], "--set")
    if isinstance(changes.get("adversary"), dict):
        changes["adversary"] = Adversary(**checked(Adversary, changes["adversary"], "the adversary"))
    run, result = train_network(
        data,
        head=head,
        recipe=recipe,
        start=None if start is None else mmlda.load(start),
        steps=steps,
        seed=seed,
        n=n,
        validation=validation,
        keep_best=keep_best,
        patience=patience,
        priors=priors,
        changes=checked(Recipe, changes, "the recipe"),
        model=_network_settings(model or []),
        out=out,
        root=root,
        device=pick(device),
        eager=eager,
        deterministic=deterministic,
        amp=amp,
        tensorboard=tensorboard,
    )
    if result is None:  # another process prints
        return
    about = {"out": out, "steps": run.step, "loss": run.loss, "seconds": run.seconds}
    error = f"test error {100 * result.error:.2f}% on {result.n} images"
    if run.validation is not None:
        held = run.validation
        about["validation"] = {"accuracy": held.best, "step": held.best_step, "images": len(held.data)}
        error += f", best validation accuracy {100 * held.best:.2f}% at step {held.best_step},"
    text = f"{error} after {run.step} steps ({run.seconds:.0f} s)\nthe network is in {out}"
    shares = [None if math.isnan(share) else share for share in result.per_class]  # of a class without images
    show({**about, **dataclasses.asdict(result), "per_class": shares}, text, as_json)


@command("mmlda demo --open")
def demo(
    out: Annotated[
        Path, option("Output", callback=writable, metavar="DIR", help="Folder for the report and the results.")
    ] = Path("demo"),
    open_: Annotated[bool, option("Output", "--open", help="Open the report in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Train, attack and audit two networks in a minute.

    Compares softmax and MM-LDA on scikit-learn's digits and writes report.html.
    """
    from mmlda.paper import demo as module

    page, found = module.demo(out, show=not as_json)
    show(found, "\n".join(["", *module.lines(found), "", f"report: {page.resolve().as_uri()}"]), as_json)
    if open_:
        browse(page)


@command("mmlda models")
def models(as_json: Json = False) -> None:
    """List the networks that ship with the package."""
    cards = {name: zoo.about(name) for name in zoo.names()}
    lines = []
    for name, card in cards.items():
        foe = card["recipe"]["adversary"]
        trained = f", trained on {foe['attack'].upper()} at {eps_text(foe['eps'], 3)}" if foe else ""
        recipe = f"{card['recipe']['steps']} steps, seed {card['recipe']['seed']}, {card['versions']['device']}"
        lines.append(f"{name:20s} test accuracy {100 * card['accuracy']:.2f}% on {card['data']}, {recipe}{trained}")
    show(cards, "\n".join(lines), as_json)


@command("mmlda export cifar10-mmlda model.onnx")
def export(
    model: Annotated[str, network_argument],
    out: Annotated[
        Path, typer.Argument(callback=writable, metavar="FILE", help="File to write: .onnx, or .pt2 for torch.export.")
    ],
    data: Annotated[
        str | None,
        data_option(help="Compare on the test images of this dataset or folder (default: of what it was trained on)."),
    ] = None,
    root: Root = None,
    priors: Priors = None,
    as_json: Json = False,
) -> None:
    """Export a network to ONNX or torch.export, and check the file.

    If the file does not compute what the network computes, it is not kept.
    """
    from mmlda.integrations.export import export as export_network

    if priors is None:
        path = export_network(model, out, images=data, root=root)
    else:
        network, images = _with_priors(model, priors, data, root)
        path = export_network(network, out, images=images, root=root)
    show({"path": str(path), "bytes": path.stat().st_size}, str(path), as_json)


def _with_priors(model: str, priors: str, data: str | None, root: str | None) -> tuple[Any, Any]:
    """A network with other priors, and inputs to compare its file on. Only empirical priors need a test set."""
    from mmlda.evaluation.accuracy import own_test_set
    from mmlda.evaluation.priors import exchange_priors
    from mmlda.integrations.export import own_images

    network = zoo.load(model)
    test = own_test_set(network, data, zoo.trained_on(model), root) if priors == "empirical" else data
    network, images = exchange_priors(network, test, priors)
    return network, own_images(model, root) if images is None else images


def _network_settings(pairs: list[str]) -> dict[str, Any]:
    """The values of --model, checked against the types of the network's settings where these are plain."""
    from mmlda import MaxMahalanobisHead
    from mmlda.models import ConvNet, ResNet

    values = settings(pairs, "--model")
    for kind in (ConvNet, ResNet, MaxMahalanobisHead):
        hints = typing.get_type_hints(kind.__init__)
        typed({key: hint for key, hint in hints.items() if hint in (int, float, bool)}, values)
    return values
