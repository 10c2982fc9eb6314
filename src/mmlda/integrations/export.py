"""A network as one file for deployment: ONNX, or PyTorch's own `.pt2`.

The file is run and compared with the network before it appears under its name.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from mmlda._utils.checks import check_choice, invalid, to_tensor
from mmlda._utils.files import write_whole
from mmlda._utils.training_data import class_names
from mmlda.data import ImageData, as_images
from mmlda.data import load as load_data
from mmlda.data.convert import as_pair, is_arrays
from mmlda.data.datasets import CLASSES
from mmlda.models import MLP, Classifier
from mmlda.zoo import about, load, names, trained_on

__all__ = ["ExportMismatch", "export"]

BATCHES = (1, 3, 17)
MOST = max(BATCHES)
TOLERANCE = 1e-4  # of the largest logit
PROBABILITY = 1e-3  # tolerance of a probability
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


class _InUnits(nn.Module):
    """A network on rows in the units of its table, which are scaled to [0, 1] and, if `clip`, limited to it."""

    low: Tensor
    width: Tensor

    def __init__(self, model: nn.Module, bounds: Tensor, clip: bool):
        super().__init__()
        self.model, self.clip = model, clip
        self.register_buffer("low", bounds[0])  # [D], as is width
        self.register_buffer("width", bounds[1] - bounds[0])

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.low.shape:
            raise ValueError(f"the network's table has {len(self.low)} columns")
        rows = (x - self.low) / self.width  # [N, D]
        return self.model((rows.clamp(0, 1) if self.clip else rows).to(_dtype(self.model)))


def export(model: Any, path: str | Path, *, images: Any = None, root: str | Path | None = None) -> Path:
    """Write a network as ONNX (extra `mmlda[onnx]`) or ``.pt2``, and check the file against it.

    The input, "images" (or "features" for a table), is float32 with any number of rows; the outputs are "logits" and
    "probabilities". Features are in the units of the table: if the network was trained on a `mmlda.data.table`, the
    file scales them to [0, 1] by the network's `bounds` and clips them; an estimator's file does not clip. The file is
    compared with the network, in the network's own dtype, on random and on real inputs in batches of 1, 3 and 17. No
    file is written if a logit differs by more than 1e-4 of the largest one, a probability by more than 1e-3, or a class
    that is not a tie. The metadata of an ONNX file has the class names, if known, as JSON under "classes"; dates are
    written as text.

    Parameters
    ----------
    model
        A `Classifier`, a fitted `MaxMahalanobisClassifier`, the name of a network that ships, or a run's folder.
    path
        File to write; its suffix selects the format, and "~" is your home folder.
    images
        Real inputs to compare on: anything that `mmlda.data.as_images` takes, an array of images without labels, or
        an array of rows `[N, D]`, with or without labels, in the units of the network's table. By default those of the
        dataset of a network given by name if they are on this machine, else scikit-learn's digits, resized; none for a
        table.
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
        If the suffix is another one, `path` is a folder, `images` are needed and not given or do not fit the network,
        or the network does not return logits or cannot be exported.

    Examples
    --------
    >>> import tempfile
    >>> from mmlda.models import build
    >>> model = build({"backbone": "mlp", "inputs": 4, "num_classes": 3}, seed=0)
    >>> export(model, Path(tempfile.mkdtemp()) / "model.pt2").name
    'model.pt2'
    """
    path = Path(path).expanduser()
    check_choice("suffix of path", path.suffix, (".onnx", ".pt2"))
    if path.is_dir():
        raise invalid("path", "a file", str(path))
    network = load(model) if isinstance(model, str | Path) else getattr(model, "model_", model)
    if not isinstance(network, nn.Module):
        kinds = "a Classifier, a fitted MaxMahalanobisClassifier (search.best_estimator_, pipeline[-1])"
        raise invalid("model", f"{kinds}, a name or a run's folder", model)
    bounds, classes = _bounds(network), _classes(model, network)
    real = own_images(model, root) if images is None else _real(images, root, bounds)
    network = copy.deepcopy(network).cpu().eval().to(_dtype(network))
    if bounds is not None:
        network = _InUnits(network, bounds, clip=not hasattr(model, "model_"))  # an estimator does not clip either
    inputs = _inputs(network, real)
    if isinstance(network, _InUnits) and not network.clip and _dtype(network.model) == torch.float32:
        inputs = {kind: x.float().double() for kind, x in inputs.items()}  # an estimator fitted to a float32 table
    example = inputs["random"][:2].float()
    program = _program(copy.deepcopy(network).float(), example)
    content, run = _onnx(program, example, classes) if path.suffix == ".onnx" else _pt2(program)
    for kind, x in inputs.items():
        for size in BATCHES:
            _compare(network, run, x[:size], kind)
    return write_whole(path, content)


def _dtype(network: nn.Module) -> torch.dtype:
    """The dtype of a network's inputs: float64 for an estimator fitted to a float64 table and for rows in the units of
    a `mmlda.data.table`, else float32."""
    double = isinstance(network, _InUnits) or any(p.dtype == torch.float64 for p in network.parameters())
    return torch.float64 if double else torch.float32


def _bounds(network: nn.Module) -> Tensor | None:
    """The range of each column of the table that the network was trained on, [2, D]; None for other data."""
    bounds = getattr(network, "bounds", None)
    if not isinstance(bounds, Tensor) or bounds.dim() != 2 or len(bounds) != 2:
        return None
    return bounds.detach().cpu().double()


def _classes(model: Any, network: nn.Module) -> Any:
    """The labels of an estimator or the class names of a network, in the order of its outputs; None if unknown."""
    labels = getattr(model, "classes_", None)
    if labels is None:
        return class_names(network)
    labels = np.asarray(labels)
    return (labels.astype(str) if labels.dtype.kind in "mM" else labels).tolist()  # dates as text, as JSON has none


def _check_fits(network: nn.Module, x: Tensor) -> None:
    """Raise a ValueError unless the network takes x and returns logits."""
    try:
        with torch.no_grad():
            logits = network(x[:2])
    except (RuntimeError, ValueError) as error:
        shape = f"{list(x.shape[1:])} ({str(error).splitlines()[0]})"
        raise ValueError(f"images must fit the network, got those of shape {shape}") from None
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ValueError(f"model must return logits [N, L] of at least 2 classes, got {got} for 2 images")
    if bool(logits.isnan().any()):
        raise ValueError("model must return logits without NaN, got NaN")


def _compare(network: nn.Module, run: Runner, x: Tensor, kind: str) -> None:
    """Raise ExportMismatch where the exported network differs from `network` on x."""
    with torch.no_grad():
        logits = network(x)
    found, probabilities = run(x.float())
    where = f"{len(x)} {kind} inputs"
    hint = "; the file computes in float32, so scale the columns of the table first" if x.dtype == torch.float64 else ""
    if found.shape != logits.shape or probabilities.shape != logits.shape:
        shapes = f"{list(found.shape)} and {list(probabilities.shape)}"
        raise ExportMismatch(f"exported outputs must have shape {list(logits.shape)} on {where}, got {shapes}")
    finite = logits.isfinite()  # a class with prior 0 has the logit -inf
    if not torch.equal(found[~finite].to(logits), logits[~finite]):
        raise ExportMismatch(f"exported logits must be infinite where the network's are on {where}, got others")
    limit = TOLERANCE * max(logits.where(finite, 0).abs().max().item(), 1.0)
    error = (found - logits).where(finite, 0).abs().max().item()
    if not error <= limit:  # written so that NaN fails too
        text = f"exported logits must be within {limit:.2g} on {where}, got a difference of {error:.2g}{hint}"
        raise ExportMismatch(text)
    error = (probabilities - logits.softmax(1)).abs().max().item()
    if not error <= PROBABILITY:
        text = f"exported probabilities must be those of the network on {where}, off by {error:.2g}{hint}"
        raise ExportMismatch(text)
    top = logits.topk(2).values  # [N, 2]
    moved = (found.argmax(1) != logits.argmax(1)) & (top[:, 0] - top[:, 1] > limit)
    if bool(moved.any()):
        raise ExportMismatch(f"exported classes must be those of the network on {where}, {int(moved.sum())} differ")


def _program(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    try:
        return torch.export.export(_Outputs(network).eval(), (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # of many kinds, most of them private to torch
        why = _first_line(error)
        raise ValueError(
            f"model must be traceable by torch.export (no loops over the batch or branches on values), got {why}"
        ) from error


def _first_line(error: BaseException) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}"


def _onnx(program: torch.export.ExportedProgram, example: Tensor, classes: Any = None) -> tuple[bytes, Runner]:
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
    except torch.onnx.errors.OnnxExporterError as error:
        why = _first_line(error.__cause__ or error)
        raise ValueError(f"model must consist of operations that ONNX has (.pt2 has all), got {why}") from error
    finally:
        logger.setLevel(level)
    if made is None:
        raise ExportMismatch("the ONNX exporter must return a program, got None")
    proto = made.model_proto
    _name_batch(proto.graph)
    for node in proto.graph.node:
        del node.metadata_props[:]  # stack traces, with the paths of this machine
    if classes is not None:
        proto.metadata_props.add(key="classes", value=json.dumps(classes, default=str))
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, probabilities = session.run(["logits", "probabilities"], {name: x.numpy()})
        return torch.from_numpy(logits), torch.from_numpy(probabilities)

    return content, run


def _name_batch(graph: Any) -> None:
    """Name the batch axis "batch" instead of the symbol that torch.export made up."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if symbol in dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "batch")


def _pt2(program: torch.export.ExportedProgram) -> tuple[bytes, Runner]:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    module = torch.export.load(buffer).module()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return module(x)

    return buffer.getvalue(), run


def own_images(model: Any, root: str | Path | None) -> Tensor | None:
    """Images of the size that a network is known to take: those of its dataset, or digits."""
    name, shape = "", getattr(model, "image_shape_", None)
    if isinstance(model, str | Path):
        name = (trained_on(model) or {}).get("name", "")
        shape = about(str(model))["probe"]["shape"][1:] if str(model) in names() else None
    if name in CLASSES:
        try:
            return load_data(name, root)[1].pixels(slice(MOST))
        except (ValueError, OSError):
            pass  # not on this machine
    return None if shape is None else _digits(shape)


def _real(images: Any, root: str | Path | None, bounds: Tensor | None) -> Tensor:
    """The first of a user's images as floats [N, C, H, W] in [0, 1], or rows [N, D] in their own units.

    `bounds` are those of the network's table, if any: the rows of datasets and loaders are then in [0, 1].
    """
    batched = isinstance(images, DataLoader)
    if isinstance(images, str | Path):
        images = load_data(images, root)[1]
    elif isinstance(images, DataLoader):
        images = as_pair(next(iter(images), None), "a batch of data")
    elif isinstance(images, IterableDataset):
        images = list(itertools.islice(images, MOST))
    elif isinstance(images, Dataset) and not isinstance(images, ImageData):
        images = Subset(images, range(min(MOST, len(images))))  # type: ignore[arg-type]
    x = images[0] if is_arrays(images) else images
    if getattr(x, "ndim", 0) == 2 and len(x):
        rows = to_tensor("images", x[:MOST]).detach().cpu()
        return _in_units(rows, bounds) if batched else rows
    if hasattr(x, "ndim"):
        images = x[:MOST], np.zeros(len(x[:MOST]), dtype=np.int64)
    data = as_images(images, split="test")
    own = bounds if bounds is None or data.bounds is None else data.bounds.cpu()
    return _in_units(data.pixels(slice(MOST)).cpu(), own)


def _in_units(rows: Tensor, bounds: Tensor | None) -> Tensor:
    """Rows in [0, 1] in the units of a table with these bounds; everything else unchanged."""
    if bounds is None or rows.shape[1:] != bounds.shape[1:]:
        return rows
    low, high = bounds
    return low + rows.double() * (high - low)


def _digits(shape: tuple[int, ...]) -> Tensor:
    """The first digits, resized to (C, H, W)."""
    digits = load_data("digits")[1].pixels(slice(MOST))
    return F.interpolate(digits, tuple(shape[1:]), mode="bilinear").expand(-1, shape[0], -1, -1).contiguous()


def _inputs(network: nn.Module, real: Tensor | None) -> dict[str, Tensor]:
    """17 random inputs for the network, and as many real ones if there are any."""
    if real is not None:
        real = real.to(_dtype(network)).repeat(-(-MOST // len(real)), *[1] * (real.dim() - 1))
        _check_fits(network, real)
        return {"random": _random(network, tuple(real.shape[1:])), "real": real}
    if isinstance(network, _InUnits):
        columns = len(network.low)
    elif isinstance(network, Classifier) and isinstance(network.backbone, MLP):
        columns = network.backbone.inputs
    else:
        raise invalid("images", "given (--data on the command line) for a network whose image size is not known", None)
    random = _random(network, (columns,))
    _check_fits(network, random)
    return {"random": random}


def _random(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Random inputs: images uniform in [0, 1], rows of a table within its bounds or around the network's mean row."""
    generator, dtype = torch.Generator().manual_seed(0), _dtype(network)
    if isinstance(network, _InUnits):
        return network.low + torch.rand(MOST, *shape, generator=generator, dtype=dtype) * network.width
    if len(shape) > 1 or not isinstance(network, Classifier):
        return torch.rand(MOST, *shape, generator=generator, dtype=dtype)
    rows = torch.randn(MOST, *shape, generator=generator, dtype=dtype)
    return rows * network.std.flatten(1) + network.mean.flatten(1)
