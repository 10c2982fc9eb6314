"""Making networks: demo, models, train."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from pathlib import Path
from typing import Annotated, Any

import typer

from mmlda.cli.options import Data, Device, Json, Root, app, checked, fits, pick, settings, typed


@app.command(epilog="Example: mmlda demo --open")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the results.")] = Path("demo"),
    open_: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    as_json: Json = False,
) -> None:
    """The embedded digits: train softmax and MM-LDA, attack, audit, and write report.html; under two minutes."""
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
    """The networks that ship with the package."""
    from mmlda import zoo

    cards = {name: zoo.about(name) for name in zoo.names()}
    if as_json:
        print(json.dumps(cards))
        return
    for name, card in cards.items():
        foe = card["recipe"]["adversary"]
        trained = f", trained on {foe['attack'].upper()} at {foe['eps']:.3g}" if foe else ""
        print(f"{name:18s} test accuracy {100 * card['accuracy']:.2f}% on {card['data']}, {card['recipe']['steps']} "
              f"steps, seed {card['recipe']['seed']}, {card['versions']['device']}{trained}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- training


@app.command(epilog="Example: mmlda train --data digits --head mmlda --out runs/digits")
def train(
    data: Data = "digits",
    head: Annotated[str | None, typer.Option(help="mmlda (the default) or softmax; with --start, as it is.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the network; goes on where it stopped.")] = Path(
        "runs/network"
    ),
    recipe: Annotated[str | None, typer.Option(help="A name; by default the paper's for the data and head.")] = None,
    start: Annotated[str | None, typer.Option(help="A network to start from (fine-tuning): a name or a run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Another number of steps, the schedule in proportion.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the data and the augmentation.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: --set lr=0.01.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Change the network: --model depth=20.")] = None,
    root: Root = None,
    device: Device = None,
    eager: Annotated[bool, typer.Option(help="Neither compile nor capture the step on CUDA.")] = False,
    deterministic: Annotated[bool, typer.Option(help="The same bits for the same seed on CUDA; slower.")] = False,
    amp: Annotated[bool | None, typer.Option(help="bfloat16 with a float32 loss; on CUDA by default.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard's event files.")] = False,
    as_json: Json = False,
) -> None:
    """Train a network, or go on with one. Under torchrun, over several processes."""
    import torch
    import torch.distributed as dist

    import mmlda
    from mmlda.training.recipes import RECIPES, Adversary, Recipe, network

    place = pick(device)
    if "WORLD_SIZE" in os.environ:
        if place == "cuda":
            place = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if place.startswith("cuda") else "gloo")
    net = None if start is None else mmlda.load(start)
    if net is not None:
        own = "softmax" if isinstance(net.head, mmlda.SoftmaxHead) else "mmlda"
        if head not in (None, own):
            raise ValueError(f"head = {head!r}: expected {own!r}, the head of --start {start}, or no --head")
        if model:
            raise ValueError(f"model = {' '.join(model)}: expected none with --start, whose network is as it is")
        head = own
    head = head or "mmlda"
    known = data if f"{data}-sr" in RECIPES else "mnist"
    name = recipe or f"{known}-{'mmlda' if head == 'mmlda' else 'sr'}"
    if name not in RECIPES:
        raise ValueError(f"recipe = {name!r}: expected one of {', '.join(RECIPES)}")
    chosen = RECIPES[name] if steps is None else RECIPES[name].scaled(steps)
    changes = settings(set_ or [], "--set")
    if isinstance(changes.get("adversary"), dict):
        changes["adversary"] = Adversary(**checked(Adversary, changes["adversary"], "the adversary"))
    changes = checked(Recipe, changes, "the recipe")
    chosen = dataclasses.replace(chosen, **{"seed": seed, **changes})
    train_set, test_set = mmlda.data.load(data, root)
    if net is None:
        size = {"num_classes": train_set.num_classes, "channels": train_set.shape[0]}
        config = {**network(head, data), **size, **_network_settings(model or [])}
        try:
            net = mmlda.models.build(config, seed=chosen.seed)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"model = {' '.join(model or [])}: {str(error).splitlines()[0]}") from None
    fits(net.to(place).eval(), train_set, place, spare=True)
    options: dict[str, Any] = {"eager": eager, "deterministic": deterministic, "amp": amp, "tensorboard": tensorboard}
    run = mmlda.fit(net, train_set, chosen, out=out, device=place, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = mmlda.accuracy(net, test_set, device=place)
        if as_json:
            print(json.dumps({"out": str(out), "steps": run.step, "loss": run.loss, "seconds": run.seconds,
                              **dataclasses.asdict(result)}))  # fmt: skip
        else:
            print(f"test error {result.error:.2%} on {result.n} images after {run.step} steps ({run.seconds:.0f} s)")
            print(f"the network is in {out}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still needs its answers
        dist.destroy_process_group()


def _network_settings(pairs: list[str]) -> dict[str, Any]:
    """What --model says, each value of the type that the network's parts name for it where that is a plain one."""
    from mmlda import MaxMahalanobisHead
    from mmlda.models import ConvNet, ResNet

    hints: dict[str, Any] = {}
    for kind in (ConvNet, ResNet, MaxMahalanobisHead):
        hints |= typing.get_type_hints(kind.__init__)
    values = settings(pairs, "--model")
    typed({key: hint for key, hint in hints.items() if hint in (int, float, bool)}, values)
    return values
