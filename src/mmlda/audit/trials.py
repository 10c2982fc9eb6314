"""The attacks of an audit, and who is still right after each."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmlda._utils.progress import progress
from mmlda.attacks import APGD, BIM, FGSM, PGD, Attack, Square, WorstCase
from mmlda.attacks.surface import Model, Surface
from mmlda.audit.views import (
    StraightThrough,
    averaged,
    derivable,
    feature_loss,
    logarithm,
    straight,
    undisturbed,
    with_gradient,
)

__all__ = ["Attacked", "Case", "run_all"]

RANDOM = 1e-3  # two passes differ by more than this share of the spread of an image's logits
RARELY = 64  # passes over two images: what one pass in twenty does is missed by 4 audits in a hundred
PROBED = 32  # images at which a step without a gradient is looked for
ENDS = 0.01  # how near to 0 and 1 the outputs of sigmoids come: what the attacks warn of
TINY = 2.0**-24  # of the margin's gradient: what softmax may cost before a float32 has no bits left


def differ(one: Tensor, two: Tensor) -> bool:
    """Whether two passes, or two gradients, differ by more than kernels whose order of summation varies."""
    far = (one - two).abs().amax(1)
    return bool((far > RANDOM * torch.maximum(one.amax(1) - one.amin(1), two.amax(1) - two.amin(1))).any())


@dataclass
class Attacked:
    """Who was still right after an attack: bool [n]. The standard attacks are those a paper would report."""

    name: str
    surface: str
    eps: float
    left: Tensor
    kind: str  # "standard", "white", "black", "transfer", "curve" or "unbounded"


@dataclass
class Case:
    """A network and images under audit, and what has been found out about them."""

    net: Model
    x: Tensor
    y: Tensor
    eps: float
    batch_size: int
    passes: int
    rows: list[Attacked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, float | None] = field(default_factory=dict)
    zeros: int = 0  # right images whose cross-entropy has no gradient at all
    cut: int = 0  # right images whose margin has none in float64 either, with the identity in place of known steps
    moving: Tensor = field(init=False)  # bool [n]: the margin has one
    proven: Tensor = field(init=False)  # bool [n]: a gradient attack with the whole range breaks the image

    def __post_init__(self) -> None:
        with torch.no_grad():
            z, again = (torch.cat([self.net(v) for v in self.x.split(self.batch_size)]) for _ in range(2))
        if z.ndim != 2 or len(z) != len(self.x) or z.shape[1] < 2 or int(self.y.max()) >= z.shape[1]:
            what = f"{tuple(z.shape)} for {len(self.x)} images with labels up to {int(self.y.max())}"
            raise ValueError(f"model returned shape {what}: expected logits [{len(self.x)}, classes]")
        if not bool(z.isfinite().all()):
            raise ValueError("model returned NaN or infinity on the images as given: expected finite logits")
        self.constant = len(z.argmax(1).unique()) == 1  # it may never have looked at the images
        self.random = differ(z, again) or self._sometimes()
        total = z.double().sum(1)
        self.percent = bool((z >= 0).all() & ((total - 100).abs() < 0.1).all())
        self.probabilities = self.percent or bool((z >= 0).all() & ((total - 1).abs() < 1e-3).all())
        low, high = float(z.min()), float(z.max())
        self.sigmoids = not self.probabilities and 0 <= low < ENDS and 1 - ENDS < high <= 1
        self.model, self.net = self.net, derivable(self.net, self.x[:2])
        self.own = with_gradient(self.net)
        self.right = self.judge(self.x)
        self.wide = self._widened(z)
        # the surfaces: what the network returns, its logits, its probabilities
        exact = self.own if self.wide is None else self.wide
        self.logits = logarithm(exact) if self.probabilities else self.own
        self.softmax: Model = self.own if self.probabilities else lambda v: self.own(v).softmax(1)
        base = self.net if self.wide is None or not self.probabilities else self.wide
        self.found = self._steps(base)
        seen = straight(base) if self.found else with_gradient(base)
        seen = logarithm(seen) if self.probabilities else seen
        self.averaged = averaged(seen, self.passes) if self.random else None
        self.straight = seen if self.found else None
        best = straight(exact) if self.found else exact  # what a gradient is to be had from, if from anywhere
        self.best = logarithm(best) if self.probabilities else best
        with torch.no_grad():
            double = self.probabilities and self.wide is not None
            z = torch.cat([self.logits(v.double() if double else v) for v in self.x.split(self.batch_size)])
        top = z.double().topk(2, dim=1).values
        self.gaps = (top[:, 0] - top[:, 1]).cpu()

    def _sometimes(self) -> bool:
        """Whether passes differ now and then. The generators are as before."""
        with undisturbed(self.x.device, 0), torch.no_grad():
            first = self.net(self.x[:2])
            return any(differ(first, self.net(self.x[:2])) for _ in range(RARELY - 1))

    def _steps(self, base: Model) -> list[str]:
        """The functions without a gradient that are on the way from the image to the margin.

        Those are the ones without whose straight-through the gradient is another. One at a time is left out, not put
        in: of two in a row, neither alone lets a gradient through. What an `assert` does to the image changes nothing.
        """
        x, y = self.x[:PROBED], self.y[:PROBED]
        x = x.double() if self.probabilities and self.wide is not None else x

        def gradient(without: str = "") -> Tensor:
            model = logarithm(straight(base, without)) if self.probabilities else straight(base, without)
            with undisturbed(x.device, 0):  # the same random numbers each time
                return Surface(model, y).gradient("margin", x, y)[2].flatten(1)

        mode = StraightThrough()
        try:
            with mode, torch.enable_grad():
                self.net(self.x[:1].clone().requires_grad_(True))
            whole = gradient() if mode.found else None
            return [word for word in sorted(mode.found) if whole is not None and differ(whole, gradient(word))]
        except (RuntimeError, TypeError, ValueError):  # it cannot be run so, and no attack on it could
            return []

    def _widened(self, z: Tensor) -> Model | None:
        """The network in float64, if a copy of it runs there and says the same."""
        try:
            if not isinstance(self.model, nn.Module):
                raise TypeError("not a module")
            wide = derivable(copy.deepcopy(self.model).double(), self.x[:2].double())
            with torch.no_grad():
                again = torch.cat([wide(v.double()) for v in self.x.split(self.batch_size)])
            if again.dtype != torch.float64:
                raise TypeError("the output is not float64")
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            self.notes.append(f"No float64 copy of the network ({str(error).splitlines()[0][:80]}).")
            return None
        return with_gradient(wide)

    def judge(self, v: Tensor, who: Tensor | None = None) -> Tensor:
        """Who is right at `v`: bool. For a random network, by the majority of fresh passes."""
        y, votes = self.y if who is None else self.y[who], self.passes if self.random else 1
        with torch.no_grad():
            hits = torch.cat([sum((self.net(part).argmax(1) == label).int() for _ in range(votes))
                              for part, label in zip(v.split(self.batch_size), y.split(self.batch_size))])  # fmt: skip
        return hits * 2 > votes

    def attack(
        self, attack: Attack, model: Model, *, who: Tensor | None = None, wide: bool = False
    ) -> Tensor:
        """Who of `who` (the right ones, unless told) is still right after the attack: bool [n].

        The attack sees `model`; whether it succeeded is for the network to say.
        """
        who = self.right if who is None else who
        rows, left = who.nonzero().flatten(), who.clone()
        if len(rows):
            x = self.x[rows].double() if wide else self.x[rows]
            moved = attack(model, x, self.y[rows], index=rows).x_adv.to(self.x.dtype)
            left[rows] = self.judge(moved, rows)
        return left

    def add(self, name: str, surface: str, eps: float, left: Tensor, kind: str) -> Tensor:
        self.rows.append(Attacked(name, surface, eps, left.cpu(), kind))
        return left

    def left(self, *kinds: str) -> Tensor:
        """Who is right after every attack of these kinds within eps: bool [n], on the CPU."""
        left = self.right.cpu()
        for row in self.rows:
            if row.kind in kinds and row.eps <= self.eps:
                left = left & row.left
        return left


def run_all(case: Case, steps: int, queries: int, seed: int, surrogate: Model | None, show: bool) -> None:
    """Every attack of the audit on the case, as rows of it."""
    eps = case.eps
    own = "probabilities" if case.probabilities else "logits"
    double = case.probabilities and case.wide is not None  # the logits are then those of the float64 copy
    common: dict[str, Any] = {"seed": seed, "batch_size": case.batch_size}
    ball: dict[str, Any] = {"eps": eps, **common}
    apgd: dict[str, Any] = {"steps": steps, **ball}
    case.add("no attack", own, 0.0, case.right, "clean")
    _gradients(case)
    jobs: list[tuple[str, str, str, Attack, Model, bool]] = [
        ("FGSM, cross-entropy", own, "standard", FGSM(**ball), case.own, False),
        ("BIM, cross-entropy", own, "standard", BIM(**ball), case.own, False),
        (f"BIM, cross-entropy, {2 * steps} steps", own, "standard", BIM(steps=2 * steps, **ball), case.own, False),
        ("PGD, cross-entropy", own, "standard", PGD(**apgd), case.own, False),
    ]
    if case.wide is not None:
        jobs += [("APGD, cross-entropy, float64", own, "white", APGD(**apgd), case.wide, True)]
    aims: list[tuple[str, dict[str, Any]]] = [("margin", {"loss": "margin"}), ("cross-entropy", {})]
    for aim, more in aims:
        kind = "standard" if own == "probabilities" and not more else "white"
        jobs.append((f"APGD, {aim}", "probabilities", kind, APGD(**more, **apgd), case.softmax, False))
    more_losses: list[tuple[str, dict[str, Any]]] = [
        ("DLR", {"loss": "dlr"}), ("targeted", {"loss": "targeted", "target": "every", "targets": 3}),
    ]
    for aim, more in (*aims, *more_losses):
        kind = "standard" if own == "logits" and not more else "white"
        jobs.append((f"APGD, {aim}", "logits", kind, APGD(**more, **apgd), case.logits, double))
    if (loss := feature_loss(case.model, case.x, case.y)) is not None:
        jobs.append(("APGD, feature distance", "features", "white", APGD(loss=loss, **apgd), case.own, False))
    fixed: dict[str, Any] = {"steps": steps, "step_size": 2.5 * eps / steps, **ball}
    if case.straight is not None:
        for aim, more in aims:
            name = f"BIM, {aim}, straight-through"
            jobs.append((name, "logits", "white", BIM(**more, **fixed), case.straight, double))
    if case.averaged is not None:
        for aim, more in aims:
            jobs.append((f"BIM, {aim}, averaged", "logits", "white", BIM(**more, **fixed), case.averaged, double))
    jobs.append((f"Square, {queries} queries", "logits", "black", Square(queries=queries, **ball), case.logits, double))
    radii = [r for r in (eps / 2, eps, 2 * eps, 4 * eps) if r < 1]
    with progress("audit", len(jobs) + len(radii) + 2, unit="attacks", every=10.0, show=show) as report:
        done = 0
        for name, surface, kind, attack, model, wide in jobs:
            left = case.add(name, surface, eps, case.attack(attack, model, wide=wide), kind)
            report(done := done + 1, accuracy=float(left.double().mean()))
        if surrogate is not None:
            left = case.right
            for _, more in aims:
                left = left & case.attack(BIM(**more, **fixed), surrogate, who=left)
            case.add("transfer from the other network", own, eps, left, "transfer")
        report(done := done + 1)
        for radius in radii:
            both = [BIM(eps=radius, **more, **common) for _, more in aims[::-1]]
            left = case.attack(WorstCase(eps=radius, attacks=both, **common), case.own)
            case.add("BIM, cross-entropy and margin", own, radius, left, "curve")
            report(done := done + 1, accuracy=float(left.double().mean()))
        _unbounded(case, own, steps, common, double)
        report(done + 1)


def _unbounded(case: Case, own: str, steps: int, common: dict[str, Any], double: bool) -> None:
    """The whole range, from the image itself: who is left by the network's gradients, then by the best there are."""
    whole: dict[str, Any] = {"eps": 1.0, "steps": steps, "step_size": 2.5 / steps, **common}
    ways = [BIM(**whole), BIM(loss="margin", **whole)]
    every = BIM(loss="targeted", target="every", **whole)
    left = case.right
    for attack in ways:
        left = case.attack(attack, case.own, who=left)
    left = left & (case.attack(every, case.own, who=left & case.moving) | ~case.moving)
    case.add("BIM, cross-entropy and margin", own, 1.0, left, "unbounded")
    for model in (case.logits if case.probabilities else None, case.straight, case.averaged):
        if model is not None:
            left = case.attack(ways[1], model, who=left, wide=double)
    case.numbers["unbounded_best_gradients"] = 100 * float(left.double().mean())
    case.proven = ~left.cpu()


def _gradients(case: Case) -> None:
    """Input gradients of the cross-entropy at the images that are right, in float32 and in float64."""
    rows = case.right.nonzero().flatten()
    names = ("zero_gradient", "zero_gradient_float64", "zero_gradient_margin", "tiny_gradient", "wrong_sign",
             "agreement", "no_gradient")  # fmt: skip
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for part in rows.split(case.batch_size) if len(rows) else ():
        x, y = case.x[part], case.y[part]
        ce, steep = (Surface(case.own, y).gradient(loss, x, y)[2].flatten(1) for loss in ("ce", "margin"))
        size, scale = ce.abs().amax(1), steep.abs().amax(1)
        found["zero_gradient"].append(size == 0)
        found["tiny_gradient"].append(size <= TINY * scale)
        found["zero_gradient_margin"].append(still := scale == 0)
        if bool(still.any()):  # to be asked again, where float32 and softmax are no excuse
            v = x if case.wide is None else x.double()
            best = Surface(case.best, y).gradient("margin", v, y)[2].flatten(1)
            # the logarithm of a probability that is 0 has no gradient, whatever there is before the softmax
            seen = case.gaps[part.cpu()].to(v.device) < -math.log(torch.finfo(v.dtype).tiny) - 1
            still = still & (best == 0).all(1) & (seen | (not case.probabilities))
        found["no_gradient"].append(still)
        if case.wide is not None:
            exact = Surface(case.wide, y).gradient("ce", x.double(), y)[2].flatten(1)
            found["zero_gradient_float64"].append((exact == 0).all(1))
            found["wrong_sign"].append((ce.sign() != exact.sign()).double().mean(1))
        if case.averaged is not None:
            x = x.double() if case.probabilities and case.wide is not None else x
            one, two = (Surface(case.averaged, y).gradient("margin", x, y)[2].flatten(1) for _ in range(2))
            found["agreement"].append(torch.cosine_similarity(one, two, dim=1))
    case.moving = torch.ones_like(case.right)  # whose margin has a gradient
    for name, parts in found.items():
        values = torch.cat(parts) if parts else None
        case.numbers[name] = None if values is None else 100 * float(values.double().mean())
        if name == "zero_gradient_margin" and values is not None:
            case.moving[rows] = ~values
        if name == "zero_gradient" and values is not None:
            case.zeros = int(values.sum())
        if name == "no_gradient" and values is not None:
            case.cut = int(values.sum())
