"""Adversarial images as small PNG files inside the page: the image, the noise, and the adversarial image."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np

from mmlda._utils.checks import damaged
from mmlda.report.entries import Entry, by_data, by_model, fixed, of_kind

MOST = 12  # pictures per panel


@dataclass(frozen=True)
class Picture:
    """One image three times, as data URIs, and the classes in words."""

    image: str
    noise: str
    adversarial: str
    label: str
    prediction: str


@dataclass(frozen=True)
class Panel:
    """The images of an attack on one network, shown together behind one tab."""

    id: str
    title: str
    sentence: str
    pictures: list[Picture]
    count: int
    gain: int  # the noise is stored that much amplified; the page shows it either way
    ids: tuple[int, ...]


def panels(entries: list[Entry]) -> list[Panel]:
    """A panel for each network whose images lie beside its result."""
    made: list[Panel] = []
    found = sorted(of_kind(entries, "fig4"), key=lambda e: (by_data(e.data), by_model(e.model), e.id))
    for entry in found:
        about = entry.result.outcomes
        if about is None or not (entry.folder / str(about.get("file", "")).partition("#")[0]).is_file():
            continue  # the images are missing; the number is shown without them
        pictures, count, gain = _pictures(entry)
        if not pictures:
            continue
        share = entry.value
        sentence = "" if share is None else f"{fixed(share)}% of the noises are semantic (resemble their own image)."
        title = f"{entry.data} · {entry.model}" if entry.model else entry.data
        twins = [e for e in of_kind(entries, "fig4") if (e.data, e.model) == (entry.data, entry.model)]
        title += f", seed {entry.result.seed}" if len(twins) > 1 else ""
        made.append(Panel(f"pictures-{len(made)}", title, sentence, pictures, count, gain, (entry.id,)))
    return made


def _pictures(entry: Entry) -> tuple[list[Picture], int, int]:
    """The pictures of one result, how many there are, and the gain of the noise."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    result = entry.result
    try:
        tensors = load(result.read_outcomes(entry.folder))
    except SafetensorError:
        raise damaged(f"outcomes of {result.name}", "a safetensors file of images", "another file") from None
    if not {"x", "x_adv"} <= tensors.keys():
        return [], 0, 1
    x, moved = tensors["x"], tensors["x_adv"].astype(np.float64)
    if x.shape != moved.shape or x.ndim != 4 or x.shape[1] not in (1, 3):
        what = "x and x_adv of one shape [k, 1 or 3, H, W]"
        raise damaged(f"outcomes of {result.name}", what, f"{x.shape} and {moved.shape}")
    count = len(x)
    x, moved = x[:MOST].astype(np.float64) / (255.0 if x.dtype == np.uint8 else 1.0), moved[:MOST]
    noise = (moved - x) / 2.0
    largest = float(np.abs(noise).max()) if len(noise) else 0.0
    gain = 2 ** max(0, math.floor(math.log2(0.5 / largest))) if 0 < largest <= 0.5 else 1
    gain = min(gain, 64)
    names = result.series.get("classes")
    classes = [str(name) for name in names] if isinstance(names, list) else []

    def word(of: str, k: int) -> str:
        index = int(tensors[of][k]) if of in tensors and len(tensors[of]) > k else None
        return "" if index is None else classes[index] if 0 <= index < len(classes) else str(index)

    pictures = []
    for k in range(len(x)):
        three = (_png(x[k]), _png(0.5 + gain * noise[k]), _png(moved[k]))
        pictures.append(Picture(*three, word("label", k), word("prediction", k)))
    return pictures, count, gain


def _png(image: np.ndarray) -> str:
    """[C, H, W] in [0, 1] as a data URI."""
    from PIL import Image

    levels = np.rint(np.clip(np.nan_to_num(image), 0.0, 1.0) * 255.0).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0)).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
