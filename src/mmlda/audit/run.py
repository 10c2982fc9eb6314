"""audit(): is the robustness real? Attacks that are blind in different ways, compared image by image.

network, images -> profile -> trials -> checks -> verdict
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mmlda._utils.checks import invalid
from mmlda._utils.device import check_model, device_of
from mmlda.attacks.surface import Model, first_answer
from mmlda.audit.profile import examine
from mmlda.audit.record import Audit
from mmlda.audit.text import notes
from mmlda.audit.trials import Settings, run_trials
from mmlda.audit.views import copied, seeded
from mmlda.data import ImageData
from mmlda.data.loaders import sample_for
from mmlda.results import HEADS, head_of, traced


def default_eps(data: ImageData) -> float:
    """The default perturbation of an audit: 0.12 for images of one channel, 0.04 for others; a table has none.

    At these two, the paper's softmax networks keep an accuracy of 3.4% on MNIST and 5.5% on CIFAR-10 under BIM.

    Parameters
    ----------
    data
        The images.

    Returns
    -------
    float
        The L-infinity radius.

    Raises
    ------
    ValueError
        For a table, whose columns have no common scale.

    Examples
    --------
    >>> import mmlda
    >>> default_eps(mmlda.data.load("digits")[1])
    0.12
    """
    if data.is_table:
        raise invalid("eps", "given for a table, as a share of each column's range such as 0.05", None)
    return 0.12 if data.shape[0] == 1 else 0.04


def audit(
    model: Model,
    data: Any,
    *,
    eps: float | None = None,
    surrogate: Model | None = None,
    n: int | None = 200,
    steps: int = 20,
    queries: int = 300,
    passes: int = 16,
    thorough: bool = False,
    batch_size: int = 128,
    name: str = "",
    seed: int = 0,
    device: torch.device | str | None = None,
    show: bool = True,
) -> Audit:
    """Decide whether the accuracy under attack at the L-infinity radius `eps` is robustness.

    The verdict is "real", "none", "masked" or "mixed". The audit attacks a copy of the model: the model, its mode, its
    device and the random generators do not change.

    Parameters
    ----------
    model
        Maps images in [0, 1] to logits or probabilities. `model.features`, if there is one, is attacked too.
    data
        Anything `mmlda.data.as_images` takes: an `ImageData`, a pair (x, y), a `Dataset`, a name, a path. Only the `n`
        images are read of a `DataLoader`.
    eps
        The L-infinity radius; `default_eps(data)` by default. A table needs one.
    surrogate
        Another network, whose adversarial images are tried on this one.
    n
        How many images to attack, a stratified sample; all of them if there are fewer, or if n is None.
    steps
        Gradient steps of each iterative attack.
    queries
        Queries of the Square attack.
    passes
        Passes over a random network, to average its gradients and to classify an image.
    thorough
        Use 5 times the steps and 10 times the queries: minutes instead of seconds.
    batch_size
        Largest number of images per forward pass.
    name
        The network's name in the result.
    seed
        Random seed of the attacks.
    device
        Where to attack; the model's device by default.
    show
        Print progress to stderr.

    Returns
    -------
    Audit
        The verdict and its evidence; printing it shows a table.

    Raises
    ------
    ValueError
        If an argument is out of range, the images have only one class, or the model does not return finite logits.

    Examples
    --------
    >>> import mmlda
    >>> _, test = mmlda.data.load("digits")
    >>> linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> audit(linear, test, eps=0.2, n=20, steps=5, queries=10, show=False).verdict
    'none'
    """
    begin = time.perf_counter()
    part, total = sample_for(model, data, n)
    classes = len(part.labels.unique())
    if classes < 2:
        raise ValueError(f"data must have at least 2 classes among its {len(part)} images, got 1")
    if surrogate is not None:
        check_model(surrogate, "surrogate")
    if thorough:
        steps, queries = 5 * steps, 10 * queries
    eps = default_eps(part) if eps is None else eps
    settings = Settings(eps=eps, steps=steps, queries=queries, passes=passes, batch_size=batch_size, seed=seed)
    place = device_of(model, device if device is not None or isinstance(model, nn.Module) else part.device)
    with seeded(place, seed):
        net = copied(model, place)
        x, y = part.pixels().to(place), part.labels.to(place)
        other = None if surrogate is None else copied(surrogate, place, "surrogate")
        with torch.no_grad():
            first_answer(net, x[:batch_size])
            if other is not None:
                first_answer(other, x[:batch_size], "surrogate")
        unused = copied(model, place)
        subject, profile = examine(net, unused, x, y, eps=eps, passes=passes, batch_size=batch_size, seed=seed)
        trials, reached = run_trials(subject, profile.surface, settings, other, show)
        profile = replace(profile, numbers=profile.numbers | subject.witness.numbers())
    head = head_of(model)
    called = name or HEADS.get(head, "") or getattr(model, "__name__", type(model).__name__)
    about = {"dataset": part.name, "head": head, **traced(net, part, place, called)}
    about["seconds"] = time.perf_counter() - begin
    said = notes(profile, part.name, total, classes)
    return Audit(settings=settings, profile=profile, trials=trials, reached=reached, about=about, notes=said)
