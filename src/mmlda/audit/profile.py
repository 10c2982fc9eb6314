"""The profile of a network before it is attacked: output, randomness, steps without a gradient, and gradients."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from mmlda.attacks.surface import Model
from mmlda.audit.honesty import Witness, apart, settings_matter
from mmlda.audit.views import StraightThrough, View, averaged, derivable, logarithm, seeded, straight, with_gradient

RARE_PASSES = 64  # over two images: 4 audits in 100 miss what happens in one pass of 20
PROBED = 32  # images at which steps without a gradient are looked for
ENDS = 0.01  # sigmoids come this close to 0 and to 1: the same as in the attacks' warning
TINY = 2.0**-24  # of the margin's gradient: the precision of a float32
UNDERFLOW = 104.0  # nats below the top at which float32's softmax is exactly 0

Output = Literal["logits", "probabilities", "sigmoids"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of a network before it is attacked.

    Attributes
    ----------
    n
        Images.
    right
        How many of them are classified correctly.
    constant
        Every image gets the same answer.
    random
        Passes over the same images differ.
    output
        What the network returns.
    steps
        Functions without a gradient between the image and the output, such as "round".
    no_float64
        Why the network has no float64 copy; empty if it has one.
    gaps
        The gaps between the two largest logits, in nats, as a histogram: "edges" and "counts".
    numbers
        What was measured, by name:

        - chance: the share of the commonest class, which a constant answer gets right
        - median_gap
        - gaps_above_104: the share of the images whose gap underflows in float32

        and, if any image is classified correctly, as a share of those:

        - zero_gradient: the float32 gradient of the cross-entropy is exactly 0
        - zero_gradient_float64: so is the one of the float64 copy, if there is one
        - zero_gradient_margin: the gradient of the margin is exactly 0
        - tiny_gradient: softmax has cost the gradient more than the precision of a float32
        - no_gradient: the margin has none in float64 either, with straight-through gradients for the known steps
        - wrong_sign: the share of the pixels at which float32 and float64 disagree on the sign
        - agreement: the cosine of two averaged gradients of a random network

        and, as shares of comparisons (see `honesty`), the last three only if the network is not random:

        - gradient_off: the gradient does not match the values, of so many comparisons:
        - compared
        - answers_changed: an answer differs from the first one, or from that of an unused copy
        - grad_mode: answers with and without autograd differ
        - alone: so do an answer or its gradient in a batch and alone
    """

    n: int
    right: int
    constant: bool
    random: bool
    output: Output
    steps: tuple[str, ...]
    no_float64: str
    gaps: dict[str, list[float]]
    numbers: dict[str, float | None]

    @property
    def probabilities(self) -> bool:
        return self.output == "probabilities"

    @property
    def surface(self) -> str:
        """What the attacks on the network's own output differentiate."""
        return "probabilities" if self.probabilities else "logits"

    def number(self, name: str) -> float:
        """A number; 0 if it was not measured."""
        return self.numbers.get(name) or 0.0

    def count(self, name: str) -> int:
        """How many of the images that are classified correctly a share stands for."""
        return round(self.number(name) * self.right)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network and its images on the device: what the attacks run on.

    `views` are the network as the attacks see it: "own", "logits", "probabilities", "best" (a gradient wherever any
    view has one) and, if the network has them, "float64", "straight-through" and "averaged".
    """

    model: Model
    x: Tensor
    y: Tensor
    judge: Callable[[Tensor, Tensor], Tensor]  # which images are classified correctly: x, y -> bool [N]
    right: Tensor  # bool [n]
    moving: Tensor  # bool [n]: the margin has a gradient
    views: dict[str, View]
    witness: Witness


@torch.no_grad()
def majority(net: Model, batch_size: int, votes: int, x: Tensor, y: Tensor) -> Tensor:
    """Which images are classified correctly, by the majority of `votes` passes: bool [N]."""
    hits = []
    for images, labels in zip(x.split(batch_size), y.split(batch_size)):
        hits.append(torch.stack([net(images).argmax(1) == labels for _ in range(votes)]).sum(0))
    return torch.cat(hits) * 2 > votes


def examine(
    model: Model, unused: Model, x: Tensor, y: Tensor, *, eps: float, passes: int, batch_size: int, seed: int
) -> tuple[Subject, Profile]:
    """Look at a network before any attack; `unused` is a copy of it."""
    z, again = (outputs(model, x, batch_size) for _ in range(2))
    check_outputs(z, y)
    random = differ(z, again) or differs_rarely(model, x[:2])
    output = output_kind(z)
    probabilities = output == "probabilities"
    net = derivable(model, x[:2])
    judge = partial(majority, net, batch_size, passes if random else 1)
    right = judge(x, y)
    wide, no_float64 = float64_copy(model, x, batch_size)
    views, steps = look(net, wide, x, y, probabilities, passes if random else None)
    logits = views["logits"]
    top = outputs(logits.model, logits.images(x), batch_size).double().topk(2, dim=1).values
    gaps = (top[:, 0] - top[:, 1]).cpu()
    numbers, moving = measure(views, x, y, right, gaps if probabilities else None, batch_size)
    numbers["chance"] = float(torch.bincount(y).max()) / len(y)
    numbers["median_gap"] = float(gaps.median())
    numbers["gaps_above_104"] = int((gaps > UNDERFLOW).sum()) / len(y)
    if not random:
        part = slice(batch_size)
        numbers |= settings_matter(logits, net, x[part], y[part], z[part])
    first = None if random else z
    witness = Witness(view=logits, model=model, unused=unused, first=first, eps=eps, batch_size=batch_size, seed=seed)
    subject = Subject(model=model, x=x, y=y, judge=judge, right=right, moving=moving, views=views, witness=witness)
    profile = Profile(
        n=len(y),
        right=int(right.sum()),
        constant=len(z.argmax(1).unique()) == 1,
        random=random,
        output=output,
        steps=steps,
        no_float64=no_float64,
        gaps=histogram(gaps),
        numbers=numbers,
    )
    return subject, profile


@torch.no_grad()
def outputs(model: Model, x: Tensor, batch_size: int) -> Tensor:
    return torch.cat([model(v) for v in x.split(batch_size)])


def check_outputs(z: Tensor, y: Tensor) -> None:
    """Raise unless the network has returned finite logits for these labels."""
    if z.ndim != 2 or len(z) != len(y) or z.shape[1] < 2 or int(y.max()) >= z.shape[1]:
        expected = f"[{len(y)}, classes] for labels up to {int(y.max())}"
        raise ValueError(f"model must return logits {expected}, got shape {list(z.shape)}")
    if not bool(z.isfinite().all()):
        raise ValueError("model must return finite logits, got NaN or infinity on images without an attack")


def differ(one: Tensor, two: Tensor) -> bool:
    """Whether two passes, or two gradients, differ by more than the rounding of float32 kernels."""
    return bool(apart(one, two).any())


def differs_rarely(model: Model, x: Tensor) -> bool:
    """Whether one pass in many differs."""
    with seeded(x.device, 0), torch.no_grad():
        first = model(x)
        return any(differ(first, model(x)) for _ in range(RARE_PASSES - 1))


def output_kind(z: Tensor) -> Output:
    """What the network returns, judged by its values.

    >>> output_kind(torch.tensor([[0.25, 0.75]])), output_kind(torch.tensor([[-1.0, 2.0]]))
    ('probabilities', 'logits')
    """
    low, high = float(z.min()), float(z.max())
    if low >= 0 and bool(((z.double().sum(1) - 1).abs() < 1e-3).all()):
        return "probabilities"
    return "sigmoids" if 0 <= low < ENDS and 1 - ENDS < high <= 1 else "logits"


def float64_copy(model: Model, x: Tensor, batch_size: int) -> tuple[Model | None, str]:
    """A copy of the network that computes in float64, or None and the reason why there is none."""
    try:
        if not isinstance(model, nn.Module):
            raise TypeError("not a module")
        wide = derivable(copy.deepcopy(model).double(), x[:2].double())
        if outputs(wide, x.double(), batch_size).dtype != torch.float64:
            raise TypeError("the output is not float64")
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return None, str(error).splitlines()[0][:80]
    return with_gradient(wide), ""


def look(
    net: Model, wide: Model | None, x: Tensor, y: Tensor, probabilities: bool, passes: int | None
) -> tuple[dict[str, View], tuple[str, ...]]:
    """The views of the network, and its steps without a gradient.

    The gradients of a random network are averaged over `passes`. The logits of a network that returns probabilities
    are the logarithms of its float64 probabilities.
    """

    def logits(view: View, wrap: Callable[[Model], Model] = lambda model: model) -> View:
        model = wrap(view.model)
        return View(logarithm(model) if probabilities else model, view.float64)

    own = View(with_gradient(net))
    exact = own if wide is None else View(wide, float64=True)
    base = exact if probabilities else own
    steps = find_steps(net, lambda without: logits(base, partial(straight, without=without)), x, y)
    best, seen = (logits(view, straight) if steps else logits(view) for view in (exact, base))
    views = {"own": own, "logits": logits(base) if probabilities else own, "best": best}
    views["probabilities"] = own if probabilities else View(lambda v: own.model(v).softmax(1))
    if wide is not None:
        views["float64"] = exact
    if steps:
        views["straight-through"] = seen
    if passes is not None:
        views["averaged"] = View(averaged(seen.model, passes), seen.float64)
    return views, steps


def find_steps(net: Model, view: Callable[[str], View], x: Tensor, y: Tensor) -> tuple[str, ...]:
    """The functions without a gradient between the image and the margin.

    Those are the functions whose straight-through changes the gradient. They are left out one at a time, since of two
    in a row neither alone lets a gradient through. A function in an `assert` changes nothing and does not count.
    """

    def gradient(without: str = "") -> Tensor:
        with seeded(x.device, 0):  # the same random numbers each time
            return view(without).gradient("margin", x[:PROBED], y[:PROBED])

    mode = StraightThrough()
    try:
        with mode, torch.enable_grad():
            net(x[:1].clone().requires_grad_(True))
        whole = gradient() if mode.found else None
        return tuple(word for word in sorted(mode.found) if whole is not None and differ(whole, gradient(word)))
    except (RuntimeError, TypeError, ValueError):  # the network does not run with straight-through gradients
        return ()


def histogram(gaps: Tensor, bins: int = 20) -> dict[str, list[float]]:
    top = max(float(gaps.max()), 1e-12)
    counts = torch.histc(gaps, bins, 0.0, top).int().tolist()
    return {"edges": torch.linspace(0, top, bins + 1).tolist(), "counts": counts}


def measure(
    views: dict[str, View], x: Tensor, y: Tensor, right: Tensor, gaps: Tensor | None, batch_size: int
) -> tuple[dict[str, float | None], Tensor]:
    """The gradients among a profile's numbers, and at which images the margin has one: bool [n].

    `gaps` are those of a network that returns probabilities.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    moving, rows = torch.ones_like(right), right.nonzero().flatten()
    for part in rows.split(batch_size) if len(rows) else ():
        batch = batch_gradients(views, x[part], y[part], None if gaps is None else gaps[part.cpu()])
        moving[part] = ~batch["zero_gradient_margin"]
        for name, values in batch.items():
            found[name].append(values)
    return {name: float(torch.cat(parts).double().mean()) for name, parts in found.items()}, moving


def batch_gradients(views: dict[str, View], x: Tensor, y: Tensor, gaps: Tensor | None) -> dict[str, Tensor]:
    """Those gradients of each image: bool [N], or float [N]."""
    ce, steep = (views["own"].gradient(loss, x, y) for loss in ("ce", "margin"))
    size, scale = ce.abs().amax(1), steep.abs().amax(1)
    cut = scale == 0
    found = {"zero_gradient": size == 0, "tiny_gradient": size <= TINY * scale, "zero_gradient_margin": cut}
    if bool(cut.any()):  # repeat where neither float32 nor softmax explains a zero
        best = views["best"]
        cut = cut & (best.gradient("margin", x, y) == 0).all(1)
        if gaps is not None:  # the logarithm of a probability of 0 has no gradient, whatever comes before the softmax
            cut = cut & (gaps.to(x.device) < -math.log(torch.finfo(best.images(x).dtype).tiny) - 1)
    found["no_gradient"] = cut
    if "float64" in views:
        exact = views["float64"].gradient("ce", x, y)
        found["zero_gradient_float64"] = (exact == 0).all(1)
        found["wrong_sign"] = (ce.sign() != exact.sign()).double().mean(1)
    if "averaged" in views:
        one, two = (views["averaged"].gradient("margin", x, y) for _ in range(2))
        found["agreement"] = torch.cosine_similarity(one, two, dim=1)
    return found
