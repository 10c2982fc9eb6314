"""What the heads share: checks, predictions, priors, and buffers of at least float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda._utils.checks import check_choice, check_count, check_priors, invalid
from mmlda.theory.arguments import check_floating, described
from mmlda.theory.distribution import empirical_priors

Priors = Tensor | Sequence[float] | str | None


class Head(nn.Module):
    """Base of both heads: checks, predictions, priors, and buffers of at least float32."""

    num_classes: int
    dim: int
    log_priors: Tensor
    losses: tuple[str, ...]

    @property
    def structured(self) -> bool:
        """Whether the means are those of a code, without a stored matrix."""
        return False

    def loss(self, z: Tensor, y: Tensor, name: str = "ce", reduction: str = "mean") -> Tensor:
        """Loss of features with their classes.

        Parameters
        ----------
        z
            Features `[N, p]`.
        y
            Classes `[N]`, int64.
        name
            One of `losses`.
        reduction
            "mean" (default) and "sum" return a scalar, "none" returns `[N]`.

        Returns
        -------
        Tensor
            A scalar, or losses `[N]`.

        Raises
        ------
        ValueError
            If the loss or the reduction is unknown, or features and classes do not fit the head.
        """
        if name not in self.losses:
            raise invalid("name", f"one of {self.losses} for a {type(self).__name__}", name)
        check_choice("reduction", reduction, ("none", "mean", "sum"))
        self._check_features(z)
        self._check_labels("y", y, len(z))
        if name == "ce" and not self.structured:
            return F.cross_entropy(self(z), y, reduction=reduction)
        losses: Tensor = getattr(self, f"_{name}_loss")(z, y)  # [N]
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

    def predict_proba(self, z: Tensor) -> Tensor:
        """Class probabilities. In float32 they are often exactly 0 or 1, so attacks should use the logits `head(z)`.

        Parameters
        ----------
        z
            Features `[N, p]`.

        Returns
        -------
        Tensor
            Probabilities `[N, L]`.
        """
        return self(z).softmax(1)

    def predict(self, z: Tensor) -> Tensor:
        """Predict the most probable class.

        Parameters
        ----------
        z
            Features `[N, p]`.

        Returns
        -------
        Tensor
            Classes `[N]`, int64.
        """
        return self(z).argmax(1)

    def topk(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest logits, largest first, and their classes.

        Parameters
        ----------
        z
            Features `[N, p]`.
        k
            Number of classes, at most L.

        Returns
        -------
        tuple of Tensor
            Logits `[N, k]`, and classes `[N, k]`, int64.

        Raises
        ------
        ValueError
            If `k` is not from 1 to L.
        """
        k = check_count("k", k, 1)
        if k > self.num_classes:
            raise invalid("k", f"at most the {self.num_classes} classes", k)
        return self._topk(z, k)

    def _topk(self, z: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, classes = self(z).topk(k, dim=1)
        return values, classes

    @property
    def priors(self) -> Tensor:
        """Class priors `[L]`."""
        return self.log_priors.exp()

    def _resolve(self, priors: Priors, labels: Tensor | Sequence[int] | None, old: Priors) -> Tensor:
        """Log priors [L] for `with_priors`, with the dtype and device of the current ones."""
        empirical = isinstance(priors, str) and priors == "empirical"
        if empirical and labels is None:
            raise ValueError("labels must be given where priors = 'empirical', got None")
        if labels is not None and not empirical:
            raise invalid("priors", "'empirical' where labels are given", priors)
        pi = check_priors(priors, self.num_classes) if labels is None else empirical_priors(labels, self.num_classes)
        new = pi.detach().log().to(self.log_priors)
        if old is None:
            return new
        known = check_priors(old, self.num_classes, positive=True, name="old").detach().log().to(new)
        moved = self.log_priors + new - known
        if not true(moved.isfinite().any()):
            raise invalid("priors", "> 0 for a class whose prior in the head is not 0", priors)
        return moved.log_softmax(0)

    def _check_features(self, z: Tensor) -> None:
        """Raise ValueError for bad features.

        Values are checked on the CPU only, where this needs no synchronisation, and only without gradients: in training
        NaN passes, and the loop reports the step at which the loss became NaN.
        """
        check_floating("z", z, "N", self.dim)
        # One sum is the cheapest check of every value. Finite numbers can overflow it, so check again before raising.
        if not z.requires_grad and _eager(z) and true(~z.sum().isfinite()) and true(~z.isfinite().all()):
            raise ValueError(f"z must be finite, got NaN or infinity in {list(z.shape)}")

    def _check_labels(self, name: str, y: Tensor, count: int | None = None) -> None:
        """Raise ValueError unless y are `count` classes, or any number. Values are checked on the CPU only."""
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.dim() != 1 or count not in (None, len(y)):
            raise ValueError(f"{name} must be int64 [{'n' if count is None else count}], got {described(y)}")
        if _eager(y) and len(y):
            outside = (y < 0) | (y >= self.num_classes)
            if true(outside.any()):
                wrong = y[outside][0].item()
                raise ValueError(f"{name} must be classes from 0 to {self.num_classes - 1}, got {wrong}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep buffers at float32 at least in `.to()`, `.half()`, ...; `.double()` recomputes rounded ones.

        Half precision would shift logits by 0.05 at C = 100.
        """
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or new.dtype == old.dtype:
                continue
            if torch.finfo(new.dtype).bits < 32:
                self._buffers[name] = old.to(new.device, torch.float32)
            elif new.dtype == torch.float64:
                self._buffers[name] = self._widened(name, old).to(new.device, torch.float64)
        return self

    def _widened(self, name: str, old: Tensor) -> Tensor:
        return old

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if not self.log_priors.is_meta and not abs(float(self.log_priors.double().logsumexp(0))) < 0.01:  # also NaN
            errors.append(f"{prefix}log_priors must be logarithms of priors, which sum to 1")


def autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # autocast does not know meta


def _eager(x: Tensor) -> bool:
    """Whether reading the values of x needs no synchronisation and causes no graph break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def true(condition: Tensor) -> bool:
    try:
        return bool(condition)
    except RuntimeError:  # vmap and fake tensors have no value to read
        return False
