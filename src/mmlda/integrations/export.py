"""A network as one file for deployment: ONNX, or PyTorch's own `.pt2`.

The file is run and compared with the network before it appears under its name.
"""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, invalid
from mmlda._utils.files import write_whole
from mmlda.data import ImageData
from mmlda.data import load as load_data
from mmlda.data.datasets import CLASSES
from mmlda.models import MLP, Classifier
from mmlda.zoo import about, load, names, trained_on

__all__ = ["ExportMismatch", "export"]

BATCHES = (1, 3, 17)
TOLERANCE = 1e-4  # of the largest logit
Runner = Callable[[Tensor], tuple[Tensor, Tensor]]


class ExportMismatch(RuntimeError):
    """The exported file does not compute what the network computes."""


class _Outputs(nn.Module):
    """Logits and probabilities of a network."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(x)
        return logits, logits.softmax(1)


def export(
    model: Any, path: str | Path, *, images: ImageData | Tensor | None = None, root: str | Path | None = None
) -> Path:
    """Write a network as ONNX (extra `mmlda[onnx]`) or ``.pt2``, and check the file against it.

    The input, "images" (or "features" for a table), is float32 with any number of rows; the outputs are "logits" and
    "probabilities". The file is compared with the network on random and on real inputs in batches of 1, 3 and 17. If
    they differ by more than 1e-4 of the largest logit, or in a class that is not a tie, no file is left.

    Parameters
    ----------
    model
        A `Classifier`, a fitted `MaxMahalanobisClassifier`, the name of a network that ships, or a run's folder.
    path
        File to write; its suffix selects the format.
    images
        Real inputs to compare on: an `ImageData`, bytes, or floats `[N, C, H, W]` in [0, 1] or `[N, D]` (default: those
        of the dataset of a network given by name if they are on this machine, else scikit-learn's digits, resized).
    root
        Folder of the datasets, as in `mmlda.data.load`.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    ExportMismatch
        If the file does not compute what the network computes.
    ImportError
        If the extra `mmlda[onnx]` is missing.
    ValueError
        If the suffix is another one, or `images` are needed and not given, or do not fit the network.

    Examples
    --------
    >>> import tempfile
    >>> from mmlda.models import build
    >>> model = build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
    >>> export(model, Path(tempfile.mkdtemp()) / "model.pt2").name
    'model.pt2'
    """
    path = Path(path)
    check_choice("suffix of path", path.suffix, (".onnx", ".pt2"))
    network, real = _resolve(model, images, root)
    network = copy.deepcopy(network).cpu().float().eval()
    _check_fits(network, real)
    inputs = [_random(network, real), real]
    program = _program(network, inputs[0][:2])
    content, run = _onnx(program, inputs[0][:2]) if path.suffix == ".onnx" else _pt2(program)
    for kind, x in zip(("random", "real"), inputs):
        for size in BATCHES:
            _compare(network, run, x[:size], kind)
    return write_whole(path, content)


def _check_fits(network: nn.Module, x: Tensor) -> None:
    """Raise a ValueError unless the network takes x."""
    try:
        with torch.no_grad():
            network(x[:2])
    except RuntimeError as error:
        shape = f"{list(x.shape[1:])} ({str(error).splitlines()[0]})"
        raise ValueError(f"images must fit the network, got those of shape {shape}") from None


def _compare(network: nn.Module, run: Runner, x: Tensor, kind: str) -> None:
    """Raise ExportMismatch where the exported network differs from `network` on x."""
    with torch.no_grad():
        logits = network(x)
    found, probabilities = run(x)
    where = f"{len(x)} {kind} inputs"
    if found.shape != logits.shape or probabilities.shape != logits.shape:
        shapes = f"{list(found.shape)} and {list(probabilities.shape)}"
        raise ExportMismatch(f"exported outputs must have shape {list(logits.shape)} on {where}, got {shapes}")
    limit = TOLERANCE * max(logits.abs().max().item(), 1.0)
    error = (found - logits).abs().max().item()
    if not error <= limit:  # written so that NaN fails too
        raise ExportMismatch(f"exported logits must be within {limit:.2g} on {where}, got a difference of {error:.2g}")
    error = (probabilities - logits.softmax(1)).abs().max().item()
    if not error <= max(limit, TOLERANCE):
        raise ExportMismatch(f"exported probabilities must be those of the network on {where}, off by {error:.2g}")
    top = logits.topk(2).values  # [N, 2]
    moved = (found.argmax(1) != logits.argmax(1)) & (top[:, 0] - top[:, 1] > limit)
    if bool(moved.any()):
        raise ExportMismatch(f"exported classes must be those of the network on {where}, {int(moved.sum())} differ")


def _program(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(_Outputs(network).eval(), (example,), dynamic_shapes=({0: batch},))


def _onnx(program: torch.export.ExportedProgram, example: Tensor) -> tuple[bytes, Runner]:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"export to ONNX needs {error.name}: pip install 'mmlda[onnx]'") from None
    name = "features" if example.dim() == 2 else "images"
    logger, level = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx").level
    logger.setLevel(logging.ERROR)  # it warns that torchvision is missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own
            made = torch.onnx.export(
                program,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=[name],
                output_names=["logits", "probabilities"],
            )
    finally:
        logger.setLevel(level)
    if made is None:
        raise ExportMismatch("the ONNX exporter must return a program, got None")
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, probabilities = session.run(["logits", "probabilities"], {name: x.numpy()})
        return torch.from_numpy(logits), torch.from_numpy(probabilities)

    return content, run


def _pt2(program: torch.export.ExportedProgram) -> tuple[bytes, Runner]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    module = torch.export.load(buffer).module()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return module(x)

    return buffer.getvalue(), run


def _resolve(model: Any, images: Any, root: str | Path | None) -> tuple[nn.Module, Tensor]:
    """The network and at least 17 real inputs for it."""
    shape: tuple[int, ...] | None = None
    if isinstance(model, str | Path):
        network, data = load(model), ""
        if str(model) in names():
            card = about(str(model))
            data, shape = card["data"], tuple(card["probe"]["shape"][1:])
        else:
            data = (trained_on(model) or {}).get("name", "")
        if images is None:
            images = _dataset(data, root)
    else:
        network = getattr(model, "model_", model)
        shape = getattr(model, "image_shape_", None)
    if not isinstance(network, nn.Module):
        raise invalid("model", "a Classifier, a fitted estimator, a name or a run's folder", model)
    if isinstance(images, ImageData):
        images = images.pixels(slice(0, max(BATCHES)))
    if images is not None:
        real = torch.as_tensor(images).detach().cpu()
        real = real / 255 if real.dtype == torch.uint8 else real.float()
    elif isinstance(network, Classifier) and isinstance(network.backbone, MLP):
        real = _random_rows(network, network.backbone.inputs, seed=1)
    elif shape is not None:
        real = _digits(shape)
    else:
        raise invalid("images", "given (--data on the command line) for a network whose image size is not known", None)
    if real.dim() not in (2, 4) or not len(real):
        raise invalid("images", "floats [N, C, H, W] or [N, D]", list(real.shape))
    return network, real.repeat(-(-max(BATCHES) // len(real)), *[1] * (real.dim() - 1))


def _dataset(name: str, root: str | Path | None) -> Tensor | None:
    """The first test images of a dataset known by name, if it is on this machine."""
    if name not in CLASSES:
        return None
    try:
        return load_data(name, root)[1].pixels(slice(0, max(BATCHES)))
    except (ValueError, OSError):
        return None


def _digits(shape: tuple[int, ...]) -> Tensor:
    """The first digits, resized to (C, H, W)."""
    digits = load_data("digits")[1].pixels(slice(0, max(BATCHES)))
    return F.interpolate(digits, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1).contiguous()


def _random(network: nn.Module, real: Tensor) -> Tensor:
    """Random inputs of the shape of `real`: images uniform in [0, 1], rows around the network's mean row."""
    if real.dim() == 2 and isinstance(network, Classifier):
        return _random_rows(network, real.shape[1], seed=0)
    return torch.rand(max(BATCHES), *real.shape[1:], generator=torch.Generator().manual_seed(0))


def _random_rows(network: Classifier, width: int, seed: int) -> Tensor:
    rows = torch.randn(max(BATCHES), width, generator=torch.Generator().manual_seed(seed))
    return (rows * network.std.flatten(1).cpu() + network.mean.flatten(1).cpu()).float()
