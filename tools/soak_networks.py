"""Audit generated networks whose robustness is known: 200 that mask or lie, and 50 honest ones.

    python tools/soak_networks.py [OUT]      # eight minutes on one core; finished networks are kept

Every masked network is a plain one, of which nothing survives at the radius of the audit, behind one to three tricks:
none may be called "real". The honest ones are plain or adversarially trained: at most 2 of 50 may be called "masked".
Adversarial images of the plain network show beside each verdict that the masked one is not robust either.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmlda
from mmlda._utils.files import write_whole
from mmlda.data import stratified
from mmlda.results.provenance import measured_on
from mmlda.training.recipes import Adversary, Recipe

OUT = Path(__file__).parents[1] / "benchmarks" / "results" / "soak" / "networks.json"
EPS, IMAGES = 0.2, 100  # nothing of a plain network is left at this radius
AUDIT: dict[str, Any] = {"eps": EPS, "steps": 10, "queries": 300, "passes": 8, "show": False}
PLAIN = [
    (head, backbone, 8, False, seed) for head in ("softmax", "mmlda") for backbone, seed in (("conv", 0), ("mlp", 1))
]


@cache
def images() -> tuple[Tensor, Tensor]:
    test = stratified(mmlda.data.load("digits")[1], IMAGES)
    return test.pixels(), test.labels


@cache
def trained(head: str, backbone: str, width: int, robust: bool, seed: int) -> mmlda.Classifier:
    """A small network, trained as usual or on PGD's examples at 0.15."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body, dim = {
            "conv": lambda: (mmlda.models.conv_net(channels=1, width=width), 2 * width),
            "mlp": lambda: (nn.Sequential(nn.Flatten(), mmlda.models.MLP(inputs=64, hidden=[8 * width])), 8 * width),
            "resnet": lambda: (mmlda.models.resnet(8, channels=1, width=width), 4 * width),
        }[backbone]()
        body.num_features = dim
        kind = mmlda.SoftmaxHead if head == "softmax" else mmlda.MaxMahalanobisHead
        model = mmlda.Classifier(body, kind(num_classes=10, dim=dim))
    adversary = Adversary(attack="pgd", eps=0.15, steps=4, step=0.4, random_start=True, share=1.0) if robust else None
    recipe = Recipe(steps=250, batch_size=64, optimizer="adam", lr=3e-3, adversary=adversary, seed=seed)
    mmlda.fit(model, mmlda.data.load("digits")[0], recipe, show=False)
    return model.eval()


class Step(nn.Module):
    """A network with a function before and a function after it."""

    def __init__(self, net: nn.Module, before: Callable[..., Any] | None = None, after: Any = None) -> None:
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x if self.before is None else self.before(x))
        return z if self.after is None else self.after(z)


class Replace(torch.autograd.Function):
    """The first argument, with the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return None, g[0]


class Bent(torch.autograd.Function):
    """The identity with a false gradient: lie(g, x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lie: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.lie = lie
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        return ctx.lie(g[0], ctx.saved_tensors[0]), None


def column(which: Tensor, x: Tensor) -> Tensor:
    return which.view(-1, *[1] * (x.ndim - 1))


def inside(x: Tensor) -> Tensor:
    """Whether an image is within eps of one of the audit's: bool [N, 1, 1, 1]."""
    near = torch.cdist(x.flatten(1), images()[0].flatten(1).to(x), p=torch.inf).amin(1)
    return column(near <= 1.05 * EPS, x)


def fixed(x: Tensor) -> Tensor:
    return torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x).expand_as(x)


# false gradients in the pixels: (honest gradient, images) -> gradient
LIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zero": lambda g, x: 0 * g,
    "flipped": lambda g, x: -g,
    "fixed": lambda g, x: fixed(g),
    "shuffled": lambda g, x: g.flatten(1)[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))].view_as(g),
    "tiny and fixed": lambda g, x: 1e-9 * fixed(g),
    "fresh noise": lambda g, x: torch.randn_like(g),
    "only weak pixels": lambda g, x: g * (g.abs() < column(g.abs().flatten(1).quantile(0.6, 1), g)),
    "towards grey": lambda g, x: (0.5 - x) * g.abs().amax(),
    "by parity": lambda g, x: g * ((torch.arange(8) % 2) * 2 - 1).to(g),
}


def lying(name: str, near: bool, scale: float = 1.0) -> Callable[[nn.Module], nn.Module]:
    """A false gradient, everywhere or only within eps of the images."""

    def lie(g: Tensor, x: Tensor) -> Tensor:
        false = scale * LIES[name](g, x)
        return torch.where(inside(x), false, g) if near else false

    return lambda net: Step(net, before=lambda x: Bent.apply(x, lie))


class Detour(nn.Module):
    """Another network's logits when autograd is on, or from the k-th call on."""

    def __init__(self, net: nn.Module, when: str) -> None:
        super().__init__()
        self.net, self.when, self.calls = net, when, 0
        self.other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
        nn.init.normal_(self.other[1].weight, generator=torch.Generator().manual_seed(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.net(x)
        turned = {
            "autograd": x.requires_grad,
            "grad enabled": torch.is_grad_enabled(),
            "third call": self.calls % 3 == 0,
            "later": self.calls > 300 and x.requires_grad,
            "large batch": len(x) > 20 and x.requires_grad,
        }[self.when]
        return (
            Replace.apply(z.detach(), self.other(x))
            if turned and self.when != "autograd"
            else (self.other(x).roll(1, 1) if turned else z)
        )


class Remembering(nn.Module):
    """The logits of the nearest image it has seen first, within eps; the gradient is honest."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, None

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        if self.seen is None or self.seen[0].dtype != x.dtype:
            self.seen = (x.detach().flatten(1).clone(), z.detach().clone())
        far, at = torch.cdist(x.detach().flatten(1), self.seen[0], p=torch.inf).min(1)
        return Replace.apply(torch.where((far < 1.05 * EPS)[:, None], self.seen[1][at], z.detach()), z)


def shift(x: Tensor) -> Tensor:
    """Enlarged at random, as random resizing does."""
    size = int(torch.randint(8, 12, ()))
    return F.interpolate(F.interpolate(x, size=size, mode="bilinear"), size=8, mode="bilinear")


def thermometer(x: Tensor, levels: int = 10) -> Tensor:
    ends = (torch.arange(levels, device=x.device).to(x) + 0.5) / levels
    return (x[..., None] > ends).to(x.dtype).mean(-1)


def one_hot(z: Tensor) -> Tensor:
    return F.one_hot(z.argmax(1), z.shape[1]).to(z.dtype)


def waves(net: nn.Module, frequency: float) -> nn.Module:
    class Waves(Step):
        def forward(self, x: Tensor) -> Tensor:
            across = torch.randn(64, 10, generator=torch.Generator().manual_seed(5)).to(x)
            return net(x) + 2 * torch.sin(frequency * x.flatten(1) @ across)

    return Waves(net)


def before(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    return lambda net: Step(net, before=function)


def after(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    return lambda net: Step(net, after=function)


TRICKS: dict[str, dict[str, Callable[[nn.Module], nn.Module]]] = {
    "images": {
        "rounded": before(lambda x: (x * 8).round() / 8),
        "bytes": before(lambda x: (x * 16 + 0.5).byte().to(x.dtype) / 16),
        "thermometer": before(thermometer),
        "NumPy": before(lambda x: torch.from_numpy((x.detach().cpu().numpy() * 10).round() / 10).to(x)),
        "rounded, identity's gradient": before(lambda x: Replace.apply((x.detach() * 8).round() / 8, x)),
        "noise": before(lambda x: x + 0.15 * torch.randn_like(x)),
        "resizing": before(shift),
        "pixel dropout": before(lambda x: F.dropout(x, 0.2, training=True)),
    },
    "gradient": {
        **{f"gradient {name}": lying(name, False) for name in LIES},
        **{f"gradient {name} inside eps": lying(name, True) for name in LIES},
    },
    "logits": {
        "x 1e4": after(lambda z: 1e4 * z),
        "x 1e-6": after(lambda z: 1e-6 * z),
        "+ 1e6": after(lambda z: z + 1e6),
        "probabilities x 40": after(lambda z: (40 * z).softmax(1)),
        "clipped probabilities": after(lambda z: z.softmax(1).clamp(0.01, 0.99)),
        "rounded logits": after(lambda z: z.round()),
        "rounded logits, identity's gradient": after(lambda z: Replace.apply(z.detach().round(), z)),
        "one-hot": after(one_hot),
        "one-hot, softmax's gradient": after(lambda z: Replace.apply(one_hot(z), z.softmax(1))),
        "one-hot, logits' gradient": after(lambda z: Replace.apply(one_hot(z), z)),
        "tanh": after(lambda z: torch.tanh(20 * (z - z.mean(1, keepdim=True)))),
        "detached": after(lambda z: z.detach() + 1e-3 * z.roll(1, 1)),
        "logits' noise": after(lambda z: z + torch.randn_like(z)),
        "waves": lambda net: waves(net, 10.0),
        "quick waves": lambda net: waves(net, 60.0),
    },
    "state": {
        "batch's mean": after(lambda z: z - 0.5 * z.mean(0, keepdim=True)),
        **{
            f"detour: {when}": (lambda net, when=when: Detour(net, when))
            for when in ("autograd", "grad enabled", "third call", "later", "large batch")
        },
        "memory": Remembering,
    },
}


def recipe_of(i: int, seed: int) -> tuple[tuple[Any, ...], list[tuple[str, str]]]:
    """The plain network and the tricks, from the images to the state, of the i-th masked network.

    The first networks have one trick each; the others have two or three of different groups.
    """
    alone = [(group, name) for group, names in TRICKS.items() for name in names]
    draw = random.Random(f"{seed} {i}")
    plain = draw.choice(PLAIN)
    if i < len(alone):
        return plain, [alone[i]]
    groups = sorted(draw.sample(list(TRICKS), draw.choice((2, 2, 3))), key=list(TRICKS).index)
    return plain, [(group, draw.choice(list(TRICKS[group]))) for group in groups]


def masked(i: int, seed: int) -> dict[str, Any]:
    """Audit the i-th masked network."""
    plain, tricks = recipe_of(i, seed)
    base = trained(*plain)

    def tricked() -> nn.Module:
        net: nn.Module = base
        for group, name in tricks:
            net = TRICKS[group][name](net)
        return net

    x, y = images()
    moved = mmlda.attacks.BIM(eps=EPS, steps=20, loss="margin")(base, x, y, show=False).x_adv
    torch.manual_seed(seed)
    with torch.no_grad():
        transferred = float((tricked()(moved).argmax(1) == y).double().mean())
    return {
        "network": list(plain),
        "tricks": [name for _, name in tricks],
        "transferred": transferred,
        **judged(tricked()),
    }


def honest(i: int, seed: int) -> dict[str, Any]:
    """Audit the i-th honest network."""
    draw = random.Random(f"honest {seed} {i}")
    backbone = ("conv", "mlp", "conv", "resnet")[i % 4]
    network = (("softmax", "mmlda")[i // 4 % 2], backbone, draw.choice((4, 8, 12)), i % 5 in (1, 3), seed + i)
    radius = draw.choice((0.05, 0.1, 0.2))
    return {"network": list(network), **judged(trained(*network), eps=radius)}


def judged(net: nn.Module, **changes: Any) -> dict[str, Any]:
    """The audit of a network in figures."""
    begin = time.perf_counter()
    audit = mmlda.audit(net, images(), **{**AUDIT, **changes})
    return {
        "eps": audit.settings.eps,
        "verdict": audit.verdict,
        "failed": [check.name for check in audit.checks if check.passed is False],
        "clean": audit.clean_accuracy,
        "standard": audit.standard_accuracy,
        "worst": audit.worst_accuracy,
        "gradient": audit.check("gradient").measured,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def main(n: int = 200, seed: int = 0, out: Path | str | None = OUT) -> dict[str, Any]:
    """Audit n masked networks and n // 4 honest ones; `out` is written after each and read to resume."""
    torch.set_num_threads(1)
    path = None if out is None else Path(out)
    found: dict[str, Any] = {"seed": seed, "audit": AUDIT, "images": IMAGES, **measured_on("cpu"), "networks": {}}
    if path is not None and path.exists():
        found["networks"] = json.loads(path.read_text())["networks"]
    for kind, number, make in (("masked", n, masked), ("honest", n // 4, honest)):
        for i in range(number):
            name = f"{kind} {i}"
            if name not in found["networks"]:
                found["networks"][name] = make(i, seed)
                print(name, found["networks"][name], flush=True)
            done = found["networks"]
            found["verdicts"] = {
                word: dict(Counter(done[key]["verdict"] for k in range(count) if (key := f"{word} {k}") in done))
                for word, count in (("masked", n), ("honest", n // 4))
            }
            if path is not None:
                write_whole(path, (json.dumps(found, indent=1) + "\n").encode())
    return found


if __name__ == "__main__":
    found = main(out=sys.argv[1] if len(sys.argv) > 1 else OUT)
    print(found["verdicts"])
    sys.exit(found["verdicts"]["masked"].get("real", 0) > 0 or found["verdicts"]["honest"].get("masked", 0) > 2)
