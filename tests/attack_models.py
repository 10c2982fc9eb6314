"""Small networks on scikit-learn's digits, trained in seconds by a plain loop, for attacks to be tried on.

A network has a softmax head ("sr") or fixed, maximally separated class means ("mm": logits -||z - mu_k||^2 / 2,
all negative), and is trained on clean images or on PGD's. Nothing here uses the attacks under test.
"""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test images [N, 1, 8, 8] in [0, 1] and labels: 1,197 and 600."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1197], y[:1197], x[1197:], y[1197:]


class Net(nn.Module):
    """Two convolutions, a latent layer, a head."""

    def __init__(
        self, head: str, classes: int = 10, dim: int = 16, C: float = 10.0, size: int = 8, channels: int = 1
    ) -> None:
        super().__init__()
        dim = max(dim, classes) if head == "mm" else dim
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * ((size + 1) // 2) ** 2, dim),
        )
        self.head = nn.Linear(dim, classes) if head == "sr" else None
        eye = torch.eye(classes, dim)
        mu = eye - eye.mean(0)  # a simplex: equal norms, equal angles
        self.register_buffer("mu", mu * (C**0.5 / mu.norm(dim=1, keepdim=True)))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.head is not None:
            return self.head(z)
        return -((z[:, None] - self.mu) ** 2).sum(2) / 2  # [N, L]


def train(model: Net, x: Tensor, y: Tensor, *, epochs: int, eps: float = 0.0, centre: float = 0.05) -> Net:
    """Adam on cross-entropy, on images moved by 5 steps of PGD where eps > 0; with "mm" the centre loss too."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            images, labels = x[batch], y[batch]
            if eps:
                v = (images + eps * (2 * torch.rand_like(images) - 1)).clamp(0, 1)
                for _ in range(5):
                    v.requires_grad_(True)
                    (g,) = torch.autograd.grad(F.cross_entropy(model(v), labels), v)
                    v = (v.detach() + eps / 2 * g.sign()).clamp(images - eps, images + eps).clamp(0, 1)
                images = v
            z = model(images)
            loss = F.cross_entropy(z, labels)
            if model.head is None:
                # Cross-entropy alone lets ||z|| grow to hundreds, where -||z - mu||^2 / 2 is rounding noise.
                loss = loss - centre * z.gather(1, labels[:, None]).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


@functools.cache
def network(head: str, eps: float = 0.0, classes: int = 10, size: int = 8) -> Net:
    """A trained network; `classes` < 10 keeps the digits below it, another `size` enlarges them."""
    x, y, _, _ = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        keep = y < classes
        model = Net(head, classes, size=size)
        epochs = 4 if size > 8 else 20 if eps == 0 else 25
        return train(model, enlarged(x[keep], size), y[keep], epochs=epochs, eps=eps)


def enlarged(x: Tensor, size: int) -> Tensor:
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False).clamp(0, 1)


def images(n: int, classes: int = 10, size: int = 8) -> tuple[Tensor, Tensor]:
    """The first `n` test images of the first `classes` digits."""
    _, _, x, y = digits()
    keep = y < classes
    return enlarged(x[keep][:n].clone(), size), y[keep][:n].clone()


class Linear(nn.Module):
    """Z = W (x - 1/2) + b, for which the distance to every boundary is known."""

    def __init__(self, classes: int, dim: int, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.W = nn.Parameter(torch.randn(classes, dim, generator=g, dtype=torch.float64))
        self.b = nn.Parameter(0.1 * torch.randn(classes, generator=g, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - 0.5) @ self.W.T + self.b

    def distance(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        """min_k (Z_y - Z_k) / ||w_y - w_k||_*, where * is dual to the norm: [N]."""
        z = self(x).detach()
        gap = z.gather(1, y[:, None]) - z  # [N, L]
        w = (self.W[y][:, None] - self.W).detach()  # [N, L, D]
        dual = w.abs().sum(2) if norm == "linf" else w.norm(dim=2)
        return torch.where(dual > 0, gap / dual.clamp_min(1e-30), torch.inf).amin(1)


def linear_case(classes: int, dim: int = 20, n: int = 40) -> tuple[Linear, Tensor, Tensor]:
    """Images near the middle of the range, so that it does not bind."""
    model = Linear(classes, dim).eval()
    x = 0.5 + 0.04 * torch.randn(n, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model, x, model(x).argmax(1)


class Behind(nn.Module):
    """A network behind something."""

    def __init__(self, inner, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


def classifier():
    """A small `Classifier` trained on the digits, a copy for each caller."""
    return copy.deepcopy(_classifier())


@functools.cache
def _classifier():
    import mmlda

    model = mmlda.models.build({"backbone": "conv_net", "width": 8, "head": "softmax"}, seed=0)
    mmlda.fit(model, mmlda.data.load("digits")[0], mmlda.Recipe(steps=150, optimizer="adam", lr=5e-3), show=False)
    return model
