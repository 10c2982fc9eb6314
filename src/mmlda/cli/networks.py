"""Commands that make networks: demo, models, train."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from mmlda.cli.options import Data, Device, Json, Root, app, checked, pick, settings, typed


@app.command(epilog="Example: mmlda train --data digits --head mmlda --out runs/digits")
def train(
    data: Data = "digits",
    head: Annotated[str | None, typer.Option(help="mmlda or softmax (default: that of --start, else mmlda).")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints and the network; an existing run is resumed.")
    ] = Path("runs/network"),
    recipe: Annotated[
        str | None, typer.Option(help="Name of a recipe (default: the paper's for data and head).")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Fine-tune this network: a name or the folder of a run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps; the schedule changes in proportion.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of weights, data order and augmentation.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: --set lr=0.01.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Change the network: --model depth=20.")
    ] = None,
    root: Root = None,
    device: Device = None,
    eager: Annotated[bool, typer.Option("--eager", help="On CUDA, neither compile nor capture the step.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On CUDA, get the same bits for the same seed; slower.")
    ] = False,
    amp: Annotated[bool | None, typer.Option(help="Use bfloat16 with a float32 loss (default: on CUDA).")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")] = False,
    as_json: Json = False,
) -> None:
    """Train a network, or resume its training.

    With --start, fine-tune an existing network. Under torchrun, train on several GPUs.
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
    if as_json:
        about = {"out": str(out), "steps": run.step, "loss": run.loss, "seconds": run.seconds}
        print(json.dumps({**about, **dataclasses.asdict(result)}))
    else:
        error = f"test error {100 * result.error:.2f}% on {result.n} images"
        print(f"{error} after {run.step} steps ({run.seconds:.0f} s)")
        print(f"the network is in {out}")


@app.command(epilog="Example: mmlda demo --open")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the results.")] = Path("demo"),
    open_: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """Train, attack and audit two networks in two minutes.

    Compares softmax and MM-LDA on the digits and writes report.html.
    """
    from mmlda.paper import demo as module

    page, found = module.demo(out, show=not as_json)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in found]))
    else:
        print("\n" + "\n".join(module.lines(found)))
        print(f"\nreport: {page.resolve().as_uri()}")
    if open_:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


@app.command(epilog="Example: mmlda models")
def models(as_json: Json = False) -> None:
    """List the networks that ship with the package."""
    from mmlda import zoo

    cards = {name: zoo.about(name) for name in zoo.names()}
    if as_json:
        print(json.dumps(cards))
        return
    for name, card in cards.items():
        foe = card["recipe"]["adversary"]
        trained = f", trained on {foe['attack'].upper()} at {foe['eps']:.3g}" if foe else ""
        recipe = f"{card['recipe']['steps']} steps, seed {card['recipe']['seed']}, {card['versions']['device']}"
        print(f"{name:18s} test accuracy {100 * card['accuracy']:.2f}% on {card['data']}, {recipe}{trained}")


def _network_settings(pairs: list[str]) -> dict[str, Any]:
    """The values of --model, checked against the types of the network's settings where these are plain."""
    from mmlda import MaxMahalanobisHead
    from mmlda.models import ConvNet, ResNet

    hints: dict[str, Any] = {}
    for kind in (ConvNet, ResNet, MaxMahalanobisHead):
        hints |= typing.get_type_hints(kind.__init__)
    values = settings(pairs, "--model")
    typed({key: hint for key, hint in hints.items() if hint in (int, float, bool)}, values)
    return values
