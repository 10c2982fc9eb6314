"""What is known of a network before it is attacked: its output, randomness, steps without a gradient, and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mmlda.attacks.surface import Model
from mmlda.audit.views import (
    StraightThrough,
    View,
    averaged,
    derivable,
    logarithm,
    straight,
    undisturbed,
    with_gradient,
)

__all__ = ["Gaps", "Gradients", "Output", "Profile", "Subject", "Views", "examine"]

RANDOM = 1e-3  # two passes differ by more than this share of the spread of an image's logits
RARE_PASSES = 64  # over two images: 4 audits in 100 miss what happens in one pass of 20
PROBED = 32  # images at which steps without a gradient are looked for
ENDS = 0.01  # sigmoids come this close to 0 and to 1: the same as in the attacks' warning
TINY = 2.0**-24  # of the margin's gradient: the precision of a float32
UNDERFLOW = 104.0  # nats below the top at which float32's softmax is exactly 0

Output = Literal["logits", "probabilities", "percent", "sigmoids"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Input gradients at the `of` images that are classified correctly, as counts of images.

    Args:
        zero: the float32 gradient of the cross-entropy is exactly 0.
        zero_float64: so is the one of the float64 copy; None without a copy.
        zero_margin: the gradient of the margin is exactly 0.
        tiny: softmax has cost the gradient more than the precision of a float32.
        cut: the margin has no gradient in float64 either, with straight-through gradients for the known steps.
        wrong_sign: share of the pixels at which float32 and float64 disagree on the sign.
        agreement: mean cosine of two averaged gradients of a random network.
    """

    of: int
    zero: int = 0
    zero_float64: int | None = None
    zero_margin: int = 0
    tiny: int = 0
    cut: int = 0
    wrong_sign: float | None = None
    agreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Gaps between the two largest logits, in nats: the median, how many underflow, and a histogram."""

    median: float
    above: int
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is known of a network before it is attacked.

    Args:
        n: images.
        chance: the share of the commonest class, which a constant answer gets right.
        constant: every image gets the same answer.
        random: passes over the same images differ.
        output: what the network returns.
        steps: functions without a gradient between the image and the output, such as "round".
        no_float64: why the network has no float64 copy; empty if it has one.
    """

    n: int
    chance: float
    constant: bool
    random: bool
    output: Output
    steps: tuple[str, ...]
    no_float64: str
    gradients: Gradients
    gaps: Gaps

    @property
    def probabilities(self) -> bool:
        return self.output in ("probabilities", "percent")

    @property
    def surface(self) -> str:
        """What the attacks on the network's own output differentiate."""
        return "probabilities" if self.probabilities else "logits"


@dataclass(frozen=True, kw_only=True)
class Views:
    """The network as the attacks see it. `best` has a gradient wherever any view has one."""

    own: View
    logits: View
    probabilities: View
    best: View
    float64: View | None
    straight: View | None
    averaged: View | None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network and its images on the device: what the attacks run on."""

    model: Model
    net: Model  # the same with a gradient of 0 where torch has none
    x: Tensor
    y: Tensor
    batch_size: int
    votes: int
    right: Tensor  # bool [n]
    moving: Tensor  # bool [n]: the margin has a gradient
    views: Views

    def judge(self, x: Tensor, rows: Tensor) -> Tensor:
        """Which of the images at `rows`, moved to `x`, are still classified correctly: bool."""
        return judge(self.net, x, self.y[rows], self.batch_size, self.votes)


def judge(net: Model, x: Tensor, y: Tensor, batch_size: int, votes: int) -> Tensor:
    """Which images are classified correctly, by the majority of `votes` passes: bool [n]."""
    hits = []
    with torch.no_grad():
        for images, labels in zip(x.split(batch_size), y.split(batch_size)):
            hits.append(torch.stack([net(images).argmax(1) == labels for _ in range(votes)]).sum(0))
    return torch.cat(hits) * 2 > votes


def examine(model: Model, x: Tensor, y: Tensor, *, passes: int, batch_size: int) -> tuple[Subject, Profile]:
    """Look at a network before any attack."""
    z, again = (outputs(model, x, batch_size) for _ in range(2))
    check_outputs(z, y)
    random = differ(z, again) or differs_rarely(model, x[:2])
    output = output_kind(z)
    probabilities = output in ("probabilities", "percent")
    net, votes = derivable(model, x[:2]), passes if random else 1
    right = judge(net, x, y, batch_size, votes)
    wide, no_float64 = float64_copy(model, x, batch_size)
    views, steps = look(net, wide, x, y, probabilities, passes if random else None)
    gaps = logit_gaps(views.logits, x, batch_size)
    gradients, moving = measure(views, x, y, right, gaps if probabilities else None, batch_size)
    subject = Subject(
        model=model, net=net, x=x, y=y, batch_size=batch_size, votes=votes, right=right, moving=moving, views=views
    )
    profile = Profile(
        n=len(y),
        chance=float(torch.bincount(y).max()) / len(y),
        constant=len(z.argmax(1).unique()) == 1,
        random=random,
        output=output,
        steps=steps,
        no_float64=no_float64,
        gradients=gradients,
        gaps=summary(gaps),
    )
    return subject, profile


def outputs(model: Model, x: Tensor, batch_size: int) -> Tensor:
    with torch.no_grad():
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
    far = (one - two).abs().amax(1)
    return bool((far > RANDOM * torch.maximum(one.amax(1) - one.amin(1), two.amax(1) - two.amin(1))).any())


def differs_rarely(model: Model, x: Tensor) -> bool:
    """Whether one pass in many differs."""
    with undisturbed(x.device, 0), torch.no_grad():
        first = model(x)
        return any(differ(first, model(x)) for _ in range(RARE_PASSES - 1))


def output_kind(z: Tensor) -> Output:
    """What the network returns, judged by its values.

    >>> output_kind(torch.tensor([[0.25, 0.75]])), output_kind(torch.tensor([[-1.0, 2.0]]))
    ('probabilities', 'logits')
    """
    total, low, high = z.double().sum(1), float(z.min()), float(z.max())
    if low >= 0 and bool(((total - 100).abs() < 0.1).all()):
        return "percent"
    if low >= 0 and bool(((total - 1).abs() < 1e-3).all()):
        return "probabilities"
    return "sigmoids" if 0 <= low < ENDS and 1 - ENDS < high <= 1 else "logits"


def float64_copy(model: Model, x: Tensor, batch_size: int) -> tuple[Model | None, str]:
    """A copy of the network that computes in float64, or None and the reason why there is none."""
    try:
        if not isinstance(model, nn.Module):
            raise TypeError("not a module")
        wide = derivable(copy.deepcopy(model).double(), x[:2].double())
        with torch.no_grad():
            kinds = {wide(v.double()).dtype for v in x.split(batch_size)}
        if kinds != {torch.float64}:
            raise TypeError("the output is not float64")
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return None, str(error).splitlines()[0][:80]
    return with_gradient(wide), ""


def look(
    net: Model, wide: Model | None, x: Tensor, y: Tensor, probabilities: bool, passes: int | None
) -> tuple[Views, tuple[str, ...]]:
    """The views of the network, and its steps without a gradient.

    The gradients of a random network are averaged over `passes`. The logits of a network that returns probabilities
    are the logarithms of its float64 probabilities.
    """

    def as_logits(model: Model) -> Model:
        return logarithm(model) if probabilities else model

    own, exact = with_gradient(net), wide or with_gradient(net)
    double = probabilities and wide is not None
    base = wide if wide is not None and double else net
    steps = find_steps(net, lambda without: View(as_logits(straight(base, without)), double), x, y)
    seen = as_logits(straight(base) if steps else with_gradient(base))
    views = Views(
        own=View(own),
        logits=View(logarithm(exact) if probabilities else own, double),
        probabilities=View(own if probabilities else lambda v: own(v).softmax(1)),
        best=View(as_logits(straight(exact) if steps else exact), wide is not None),
        float64=None if wide is None else View(wide, True),
        straight=View(seen, double) if steps else None,
        averaged=None if passes is None else View(averaged(seen, passes), double),
    )
    return views, steps


def find_steps(net: Model, view: Callable[[str], View], x: Tensor, y: Tensor) -> tuple[str, ...]:
    """The functions without a gradient between the image and the margin.

    Those are the functions whose straight-through changes the gradient. They are left out one at a time, since of two
    in a row neither alone lets a gradient through. A function in an `assert` changes nothing and does not count.
    """

    def gradient(without: str = "") -> Tensor:
        with undisturbed(x.device, 0):  # the same random numbers each time
            return view(without).gradient("margin", x[:PROBED], y[:PROBED])

    mode = StraightThrough()
    try:
        with mode, torch.enable_grad():
            net(x[:1].clone().requires_grad_(True))
        whole = gradient() if mode.found else None
        return tuple(word for word in sorted(mode.found) if whole is not None and differ(whole, gradient(word)))
    except (RuntimeError, TypeError, ValueError):  # the network does not run with straight-through gradients
        return ()


def logit_gaps(logits: View, x: Tensor, batch_size: int) -> Tensor:
    """The gap between the two largest logits of each image [n], on the CPU."""
    with torch.no_grad():
        z = torch.cat([logits.model(logits.images(v)) for v in x.split(batch_size)])
    top = z.double().topk(2, dim=1).values
    return (top[:, 0] - top[:, 1]).cpu()


def summary(gaps: Tensor, bins: int = 20) -> Gaps:
    top = max(float(gaps.max()), 1e-12)
    return Gaps(
        median=float(gaps.median()),
        above=int((gaps > UNDERFLOW).sum()),
        edges=tuple(torch.linspace(0, top, bins + 1).tolist()),
        counts=tuple(torch.histc(gaps, bins, 0.0, top).int().tolist()),
    )


def measure(
    views: Views, x: Tensor, y: Tensor, right: Tensor, gaps: Tensor | None, batch_size: int
) -> tuple[Gradients, Tensor]:
    """Gradients at the images that are classified correctly, and at which images the margin has one: bool [n].

    `gaps` are those of a network that returns probabilities.
    """
    rows = right.nonzero().flatten()
    parts = rows.split(batch_size) if len(rows) else ()
    batches = [batch_gradients(views, x[part], y[part], None if gaps is None else gaps[part.cpu()]) for part in parts]
    found = {name: torch.cat([batch[name] for batch in batches]) for name in (batches[0] if batches else {})}

    def mean(name: str) -> float | None:
        return float(found[name].mean()) if name in found else None

    counts = {name: int(values.sum()) for name, values in found.items() if values.dtype == torch.bool}
    moving = torch.ones_like(right)
    if "zero_margin" in found:
        moving[rows] = ~found["zero_margin"]
    return Gradients(of=len(rows), wrong_sign=mean("wrong_sign"), agreement=mean("agreement"), **counts), moving


def batch_gradients(views: Views, x: Tensor, y: Tensor, gaps: Tensor | None) -> dict[str, Tensor]:
    """The fields of `Gradients` for each image: bool [N], or float64 [N]."""
    ce, steep = (views.own.gradient(loss, x, y) for loss in ("ce", "margin"))
    size, scale = ce.abs().amax(1), steep.abs().amax(1)
    found = {"zero": size == 0, "tiny": size <= TINY * scale, "zero_margin": scale == 0}
    cut = found["zero_margin"]
    if bool(cut.any()):  # ask again where float32 and softmax are no excuse
        cut = cut & (views.best.gradient("margin", x, y) == 0).all(1)
        if (
            gaps is not None
        ):  # the logarithm of a probability of 0 has no gradient, whatever there is before the softmax
            dtype = torch.float64 if views.best.float64 else x.dtype
            cut = cut & (gaps.to(x.device) < -math.log(torch.finfo(dtype).tiny) - 1)
    found["cut"] = cut
    if views.float64 is not None:
        exact = views.float64.gradient("ce", x, y)
        found["zero_float64"] = (exact == 0).all(1)
        found["wrong_sign"] = (ce.sign() != exact.sign()).double().mean(1)
    if views.averaged is not None:
        one, two = (views.averaged.gradient("margin", x, y) for _ in range(2))
        found["agreement"] = torch.cosine_similarity(one, two, dim=1).double()
    return found
