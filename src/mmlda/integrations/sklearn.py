"""The Max-Mahalanobis network as a scikit-learn classifier.

It is an ordinary estimator: use it in a `Pipeline`, tune C with `GridSearchCV`, save it with joblib.
"""

from __future__ import annotations

import copy
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mmlda._utils.checks import check_count, check_positive, check_priors, invalid
from mmlda._utils.device import device_of
from mmlda._utils.progress import progress
from mmlda.data import as_images
from mmlda.models import Classifier, build
from mmlda.models.heads.max_mahalanobis import simplex_dim

__all__ = ["MaxMahalanobisClassifier"]

EPOCHS, STEPS = 200, 5000  # the default of max_iter: the longer of the two
PATIENCE = 10  # epochs without improvement before training stops
TOLERANCE = 1e-4  # the smallest fall of the loss that counts as an improvement
DTYPES = (np.float64, np.float32)  # the network has the dtype of the table
ROWS = 1000  # rows per forward pass outside training


class MaxMahalanobisClassifier(ClassifierMixin, BaseEstimator):
    """A small network with a Max-Mahalanobis head, trained with Adam on the cross-entropy of its posterior.

    X is a table [N, D] (the backbone is an MLP), or images [N, H, W] or [N, C, H, W], as an array or a list of images,
    bytes or floats in [0, 1] (the backbone is a `mmlda.models.ConvNet`). The inputs are standardised, each column of a
    table and each channel of the images. Training stops after ten epochs without improvement.

    Parameters
    ----------
    C
        Squared norm of the class means.
    dim
        Latent dimension; by default the number of classes minus one, the smallest that holds the optimal means.
        Required for more than 8,192 classes.
    hidden_layer_sizes
        Widths of the MLP's hidden layers, or the width of one. Images do not use it.
    priors
        Class probabilities > 0 in the order of `classes_`, "empirical" for their shares in y, None for equal ones.
    learning_rate
        Adam's step size.
    weight_decay
        Decoupled weight decay.
    batch_size
        Rows per training step.
    max_iter
        Largest number of epochs; by default 200, or as many as make 5,000 training steps if these are more.
    early_stopping
        Hold out a tenth of each class, at least one sample, stop when the loss on these no longer improves, and keep
        the best network. A class with one sample is not held out. Otherwise the training loss decides when to stop.
    random_state
        An integer, a `numpy.random.RandomState` or None.
    device
        Where to train and predict; the CPU by default.
    verbose
        Report progress on standard error.

    Attributes
    ----------
    classes_
        The class labels.
    n_features_in_
        Numbers per row or image.
    feature_names_in_
        Names of the columns, if X has any.
    model_
        The `mmlda.Classifier`. That of a table takes rows which `mmlda.data.table` has scaled to [0, 1].
    n_iter_
        Epochs trained.
    loss_curve_
        Training loss per epoch.
    image_shape_
        (C, H, W), or None for tables.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> MaxMahalanobisClassifier(random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        C: float = 100.0,
        *,
        dim: int | None = None,
        hidden_layer_sizes: Sequence[int] | int = (100,),
        priors: Sequence[float] | str | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        batch_size: int = 64,
        max_iter: int | None = None,
        early_stopping: bool = False,
        random_state: Any = None,
        device: str | None = None,
        verbose: bool = False,
    ):
        self.C = C
        self.dim = dim
        self.hidden_layer_sizes = hidden_layer_sizes
        self.priors = priors
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.early_stopping = early_stopping
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network.

        Parameters
        ----------
        X
            A table `[N, D]`, or images `[N, H, W]` or `[N, C, H, W]`.
        y
            Labels `[N]`, numbers or strings, of at least two classes.

        Returns
        -------
        MaxMahalanobisClassifier
            The estimator itself.

        Raises
        ------
        ValueError
            If the data or a parameter is invalid, or the loss diverges. The estimator then stays as it was.
        """
        fitted = copy.copy(self)
        fitted._fit(X, y)
        self.__dict__ = fitted.__dict__  # only now, so that a failure changes nothing
        return self

    def _fit(self, X: Any, y: Any) -> None:
        batch_size = check_count("batch_size", self.batch_size, 1)
        x, y = self._training_data(X, y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise invalid("y", "labels of at least 2 classes", f"{len(self.classes_)} class")
        if not isinstance(self.early_stopping, bool | np.bool_):
            raise invalid("early_stopping", "True or False", self.early_stopping)
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        device = device_of(torch.relu, self.device)  # the CPU by default
        bounds = None if self.image_shape_ else _bounds(x)
        x, target = _rows(x, bounds).to(device), torch.from_numpy(labels).to(device)
        self.model_ = self._network(x, labels, seed)
        self.model_.bounds, self.model_.classes = bounds, tuple(str(label) for label in self.classes_)
        held_out = None
        if self.early_stopping:
            train, valid = (torch.from_numpy(rows).to(device) for rows in _hold_out(labels, random))
            held_out = x[valid], target[valid]
            x, target = x[train], target[train]
        steps = -(-len(x) // batch_size)  # per epoch
        epochs = max(EPOCHS, -(-STEPS // steps)) if self.max_iter is None else check_count("max_iter", self.max_iter, 1)
        with torch.enable_grad():
            self._train(x, target, held_out, epochs, steps, seed)

    def _train(
        self, x: Tensor, y: Tensor, held_out: tuple[Tensor, Tensor] | None, epochs: int, steps: int, seed: int
    ) -> None:
        model, generator = self.model_, torch.Generator().manual_seed(seed)
        rate, decay = check_positive("learning_rate", self.learning_rate), self.weight_decay
        if not isinstance(decay, numbers.Real) or not 0 <= decay < np.inf:
            raise invalid("weight_decay", "a finite number >= 0", decay)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)
        best, best_weights, since = np.inf, None, 0
        self.loss_curve_: list[float] = []
        with progress(type(self).__name__, epochs, unit="epochs", every=2.0, show=bool(self.verbose)) as report:
            for epoch in range(epochs):
                model.train()
                order = torch.randperm(len(x), generator=generator).to(x.device)
                total = torch.zeros((), device=x.device)
                for rows, labels in zip(x[order].tensor_split(steps), y[order].tensor_split(steps)):
                    loss = F.cross_entropy(model(rows), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += loss.detach() * len(rows)
                model.eval()
                self.loss_curve_.append(total.item() / len(x))
                loss_now = self.loss_curve_[-1]
                if held_out is not None and math.isfinite(loss_now):
                    loss_now = _loss(model, *held_out)
                if not math.isfinite(loss_now):
                    raise invalid("learning_rate", f"low enough for a finite loss in epoch {epoch + 1}", rate)
                better = loss_now < best - TOLERANCE
                since = 0 if better else since + 1
                if better:
                    best = loss_now
                    best_weights = copy.deepcopy(model.state_dict()) if held_out else None
                report(epoch + 1, loss=self.loss_curve_[-1])
                if since >= PATIENCE:
                    break
            else:
                text = f"training was still improving after max_iter = {epochs} epochs"
                warnings.warn(text, ConvergenceWarning, stacklevel=4)
        if best_weights is not None:
            model.load_state_dict(best_weights)
        self.n_iter_ = len(self.loss_curve_)

    def _network(self, x: Tensor, labels: np.ndarray, seed: int) -> Classifier:
        """The untrained network, with the statistics of x as its scaling."""
        priors, L = self.priors, len(self.classes_)
        dim = simplex_dim(L) if self.dim is None else check_count("dim", self.dim, 1 if L == 2 else 2)
        if isinstance(priors, str):
            if priors != "empirical":
                raise invalid("priors", "numbers, 'empirical' or None", priors)
            priors = (np.bincount(labels) / len(labels)).tolist()
        check_priors(priors, L, positive=True)  # a class of y cannot have the prior 0
        across = (0,) if x.dim() == 2 else (0, 2, 3)
        mean, std = x.mean(across), x.std(across, correction=0)
        std = torch.where(std > 10 * torch.finfo(x.dtype).eps * mean.abs(), std, 1.0)  # a constant column stays one
        config = {
            "num_classes": L,
            "dim": dim,
            "C": self.C,
            "priors": priors,
            "mean": [0.0] * len(mean),
            "std": [1.0] * len(std),
        }
        if x.dim() == 2:
            sizes: Any = self.hidden_layer_sizes
            hidden = (sizes,) if np.ndim(sizes) == 0 else tuple(sizes)
            config |= {"backbone": "mlp", "inputs": x.shape[1], "hidden": hidden}
        else:
            config |= {"backbone": "conv_net", "channels": x.shape[1]}
        model = build(config, seed=seed).to(x)
        model.mean.copy_(mean.view_as(model.mean))
        model.std.copy_(std.view_as(model.std))
        return model

    def _training_data(self, X: Any, y: Any) -> tuple[Tensor, np.ndarray]:
        images = _images(X)
        if images is None:
            self.image_shape_ = None
            X, y = validate_data(self, X, y, dtype=DTYPES)
            x = _tensor(X)
        else:
            self.image_shape_ = tuple(images.shape[1:])
            _, y = validate_data(self, images.flatten(1).numpy(), y)
            x = images
        check_classification_targets(y)
        return x, y

    def _logits(self, X: Any) -> Tensor:
        """Logits [N, L] of X, which must look like the data of `fit`."""
        check_is_fitted(self)
        x = _images(X)
        shape = None if x is None else tuple(x.shape[1:])
        if shape != self.image_shape_:
            wanted = "a table [N, D]" if self.image_shape_ is None else f"images of shape {self.image_shape_}"
            raise invalid("X", f"{wanted}, as in fit", np.shape(X))
        if x is None:
            x = _rows(_tensor(validate_data(self, X, dtype=DTYPES, reset=False)), self.model_.bounds)
        return _logits(self.model_, x).cpu()

    def decision_function(self, X: Any) -> np.ndarray:
        """Compute logits.

        Parameters
        ----------
        X
            Data of the shape that `fit` saw.

        Returns
        -------
        ndarray
            Logits `[N, L]`; for two classes their difference `[N]`, which is positive for `classes_[1]`.
        """
        logits = self._logits(X)
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute the probability of each class.

        Parameters
        ----------
        X
            Data of the shape that `fit` saw.

        Returns
        -------
        ndarray
            Probabilities P(y = k | x) `[N, L]`, in the order of `classes_`.
        """
        return self._logits(X).softmax(1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable class.

        Parameters
        ----------
        X
            Data of the shape that `fit` saw.

        Returns
        -------
        ndarray
            Labels `[N]`.
        """
        classes = self._logits(X).argmax(1).numpy()
        return self.classes_[classes]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "model_" in state and device_of(state["model_"]).type != "cpu":  # a pickle must load without a GPU
            state["model_"] = copy.deepcopy(state["model_"]).cpu()
        return state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.non_deterministic = False
        return tags


def _hold_out(labels: np.ndarray, random: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on, and rows to hold out: a tenth of each class, at least one of those with two samples or more."""
    rows = random.permutation(len(labels))
    rows = rows[labels[rows].argsort(kind="stable")]  # by class
    classes = np.split(rows, np.bincount(labels).cumsum()[:-1])
    sizes = [min(-(-len(part) // 10), len(part) - 1) for part in classes]
    if not any(sizes):
        raise ValueError(f"y must have 2 samples of a class for early_stopping, got 1 of each of {len(labels)} classes")
    train = np.concatenate([part[size:] for part, size in zip(classes, sizes)])
    return train, np.concatenate([part[:size] for part, size in zip(classes, sizes)])


def _images(X: Any) -> Tensor | None:
    """X as floats in [0, 1], [N, C, H, W], if it is a batch or a list of images; None for everything else."""
    if isinstance(X, list | tuple) and len(X) and np.ndim(X[0]) in (2, 3):
        if len(shapes := {tuple(np.shape(image)) for image in X}) > 1:
            raise invalid("X", "images of one shape", sorted(shapes))
        X = np.stack([np.asarray(image) for image in X])
    if len(getattr(X, "shape", ())) not in (3, 4) or not len(X):
        return None
    low, high, kind = float(X.min()), float(X.max()), str(X.dtype).removeprefix("torch.")
    if kind != "uint8" and not ("float" in kind and low >= 0 and high <= 1):  # NaN, too
        raise ValueError(f"X must be images of bytes or of floats in [0, 1], got {kind} from {low:g} to {high:g}")
    return as_images((X, np.zeros(len(X), dtype=np.int64))).pixels().cpu()


def _bounds(x: Tensor) -> Tensor:
    """The smallest and the largest number of each column, [2, D] in float64; those of a constant column differ, too."""
    low, high = x.double().aminmax(dim=0)
    width = high - low
    if not bool(width.isfinite().all()):
        column = int(width.isfinite().int().argmin())
        raise invalid("X", "of columns whose range is a finite number", f"{low[column]:g} to {high[column]:g}")
    return torch.stack([low, torch.where(width > 0, high, low + low.abs().clamp(min=1))])


def _rows(x: Tensor, bounds: Tensor | None) -> Tensor:
    """Rows with the range `bounds` as [0, 1]; others beyond it, not clipped. Images stay."""
    return x if bounds is None else ((x.double() - bounds[0]) / (bounds[1] - bounds[0])).to(x.dtype)


def _tensor(X: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(X) if X.flags.writeable else X.copy())


@torch.no_grad()
def _logits(model: Classifier, x: Tensor) -> Tensor:
    dtype, device = model.mean.dtype, model.mean.device
    return torch.cat([model(rows.to(device, dtype)) for rows in x.split(ROWS)])  # [N, L]


def _loss(model: Classifier, x: Tensor, y: Tensor) -> float:
    """Mean cross-entropy; NaN where features overflow, which the head refuses."""
    try:
        return F.cross_entropy(_logits(model, x), y).item()
    except ValueError:
        return math.nan
