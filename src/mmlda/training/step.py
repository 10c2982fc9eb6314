"""One training step on the device: forward, backward and update.

Nothing here waits for the device. On CUDA the whole step is captured as one graph, so what changes
from step to step (the order of the data, the place in it, the learning rate, the sums for the log) lives in
tensors that the graph reads and writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from mmlda._utils.checks import invalid
from mmlda.attacks import frozen, keep_memory, kl_divergence
from mmlda.attacks.checks import warn_caller
from mmlda.attacks.replay import compile_quietly
from mmlda.models import Classifier, SwappedHead, kernel_checks, training_pass
from mmlda.models.folded import agrees, foldable
from mmlda.models.kernels import compiled_ahead
from mmlda.models.swap import structured_end
from mmlda.training.batches import Batches, share
from mmlda.training.crafting import begin_attack, craft, moved_weights
from mmlda.training.recipes import Recipe

WARMUP = 3  # real steps, run one by one before the capture, so that cuDNN and the compiler have settled


class Tally:
    """Sums for the log, and the first step whose loss was not finite, all on the device until they are read."""

    NEVER = torch.iinfo(torch.int64).max

    def __init__(self, device: torch.device, step: int, last: float = math.nan):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, images
        self.step = torch.full((), step, dtype=torch.int64, device=device)
        self.bad = torch.full((), self.NEVER, dtype=torch.int64, device=device)
        self.last = torch.full((), last, device=device)  # the last finite loss

    def add(self, loss: Tensor, correct: Tensor, images: int) -> None:
        """Note a step's mean loss and how many images were right; few launches."""
        loss = loss.to(self.last.dtype)
        self.step.add_(1)
        bad = torch.where(loss - loss == 0, self.NEVER, self.step)
        torch.minimum(self.bad, bad, out=self.bad)
        torch.where(self.bad == self.NEVER, loss, self.last, out=self.last)
        self.sums[0].add_(loss, alpha=images)
        self.sums[1].add_(correct)
        self.sums[2].add_(images)

    def read(self) -> tuple[float, float, int, float]:
        """(mean loss, accuracy, first bad step or -1, last finite loss) since the last reading, over all processes.

        Waits for the device.
        """
        sums, bad, last = self.sums.clone(), self.bad.clone(), self.last.clone()
        if share()[1] > 1:
            dist.all_reduce(sums)
            dist.all_reduce(bad, op=dist.ReduceOp.MIN)
        self.sums.zero_()
        loss, correct, images = sums.tolist()
        first = -1 if int(bad) == self.NEVER else int(bad)
        return loss / max(images, 1), correct / max(images, 1), first, float(last)


class Average:
    """A running average of a network's weights and of batch norm's statistics, on the device.

    After step t (from 0) the average moves towards the network by 1 - min(decay, (1 + t) / (10 + t)), so that the
    random start is soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        floats = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        # The log prior of a class without images is -inf, which has no average.
        self.current = {name: tensor for name, tensor in floats.items() if bool(tensor.isfinite().all())}
        self.tensors = {name: tensor.clone() for name, tensor in self.current.items()}

    def update(self, step: Tensor) -> None:
        """Move towards the current network; `step` is the number of the step, a tensor on the device."""
        rate = 1 - ((1 + step) / (10 + step)).clamp(max=self.decay)
        averages = list(self.tensors.values())
        moves = torch._foreach_sub(list(self.current.values()), averages)
        torch._foreach_mul_(moves, rate.to(moves[0].dtype))
        torch._foreach_add_(averages, moves)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore a saved average."""
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def store(self) -> None:
        """Make the average the network's weights."""
        for name, tensor in self.current.items():
            tensor.copy_(self.tensors[name])


class Objective(nn.Module):
    """The loss of a batch as a module, so that it can be compiled or wrapped for several processes."""

    def __init__(self, model: nn.Module, recipe: Recipe, swapped: SwappedHead | None = None):
        super().__init__()
        self.model, self.loss = model, recipe.loss
        adversary = recipe.adversary
        self.beta, self.pairing = (adversary.beta, adversary.pairing) if adversary is not None else (0.0, 0.0)
        self.distill = recipe.distill
        own = isinstance(model, Classifier) and getattr(model.head, "structured", False)
        self.streamed, self.swapped = own or swapped is not None, (swapped,)  # a tuple: its weights are the model's
        together = (adversary is not None and adversary.paired) or bool(self.distill)
        log_priors = getattr(getattr(model, "head", None), "log_priors", None)
        if together and isinstance(log_priors, Tensor) and bool(log_priors.isinf().any()):
            raise ValueError("priors must be > 0 for TRADES, logit pairing and distillation, got 0")
        if self.loss != "ce" and not hasattr(model, "features"):
            raise invalid("loss", "'ce' for a model without features(x) and a head", self.loss)

    def forward(
        self, x: Tensor, y: Tensor, x_adv: Tensor | None = None, taught: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(mean loss, number right) of the batch; `taught` are the teacher's probabilities [n, L].

        TRADES and logit pairing see clean and adversarial images side by side, in one batch.
        """
        model: Any = self.model
        swapped: Any
        if self.loss != "ce":
            z = model.features(x)
            return model.head.loss(z, y, self.loss), _count_right(model.head(z), y)
        if self.streamed and x_adv is None and taught is None:
            (swapped,) = self.swapped
            z, head = (model.features(x), model.head) if swapped is None else (swapped.features(model, x), swapped.head)
            losses, hits = head.loss_and_hits(z, y)  # no [n, L] logits
            return losses.mean(), hits.sum()
        labels = y
        if taught is not None:
            labels = self.distill * taught + (1 - self.distill) * F.one_hot(y, taught.shape[1])
        if x_adv is None:
            logits = model(x).float()
            return F.cross_entropy(logits, labels), _count_right(logits, y)
        clean, moved = model(torch.cat([x, x_adv])).float().chunk(2)
        logits = moved if self.pairing else clean
        loss = F.cross_entropy(logits, labels)
        if self.pairing:
            loss = loss + self.pairing * F.mse_loss(moved, clean)
        else:
            loss = loss + self.beta * kl_divergence(moved, clean).mean()
        return loss, _count_right(logits, y)


def streamed_head(model: nn.Module, batches: Batches) -> SwappedHead | None:
    """The end of a network of `swap_head`, if it has a structured head and nothing follows it."""
    end = structured_end(model)
    return end if end is not None and end.is_last(model, batches.take(0, batches.size)[0]) else None


def _count_right(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.detach().argmax(1) == y).sum()


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> Optimizer:
    """The recipe's optimizer, its rate a tensor on CUDA, so that a captured step follows it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"model must have a parameter to train, got {type(model).__name__} without any")
    rate = torch.tensor(recipe.lr, device=device) if device.type == "cuda" else recipe.lr
    common: dict[str, Any] = {"lr": rate, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=recipe.momentum, **common)
    kind = torch.optim.AdamW if recipe.decoupled else torch.optim.Adam
    return kind(parameters, betas=recipe.betas, capturable=device.type == "cuda", **common)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Step:
    """One training step: called, it launches the next one and never waits for the device.

    `amp` runs the network in bfloat16 where that is safe; the loss is float32 always.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        optimizer: Optimizer,
        tally: Tally,
        average: Average | None = None,
        teacher: nn.Module | None = None,
        *,
        amp: bool = False,
    ):
        self.batches, self.optimizer, self.tally, self.average, self.amp = batches, optimizer, tally, average, amp
        self.recipe, self.adversary = batches.recipe, batches.recipe.adversary
        self.rank, self.world = share()
        self.parts = self.world * self.recipe.accumulate
        if batches.size < self.parts:
            raise invalid("batch_size", f"at least {self.parts}, one image per part", batches.size)
        if self.adversary is not None and not round(batches.size // self.parts * self.adversary.share):
            least = f"enough for one image of a part of {batches.size // self.parts}"
            raise invalid("share", least, self.adversary.share)
        self.objective: Callable[..., tuple[Tensor, Tensor]] = Objective(
            model, self.recipe, streamed_head(model, batches)
        )
        self.take, self.attacked, self.teacher, self.fold = batches.take, model, teacher, False
        self.net: Any = None  # a Resnet that trains in the package's own kernels
        if self.world > 1:
            devices = [batches.device.index] if batches.device.type == "cuda" else None
            self.objective = nn.parallel.DistributedDataParallel(self.objective, device_ids=devices)

    def prepare(self, *, compile: bool) -> None:
        """Choose the programs of a captured step: the package's own kernels where it has some, else compiled ones."""
        net: Any = self.attacked.backbone if isinstance(self.attacked, Classifier) else None
        own = self.amp and net is not None and kernel_checks.has_kernels(net, self.batches.shape)
        with compiled_ahead(lambda: self._rehearse(net)) if own else nullcontext():
            self.fold = compile and self._foldable()
        if own:
            problem = kernel_checks.problem(net, self._images(self._sizes()[0]))
            self.net = None if problem else net
            if problem:
                warn_caller(f"the kernels for this network fail here and are not used: {problem}", RuntimeWarning)
        if not compile:
            return
        self.batches.for_any_length()
        if self.net is None:
            start_workers()
            self.take = compile_quietly(self.take, dynamic=False)
            self.objective = compile_quietly(self.objective, dynamic=False)
        if self.adversary is not None and not self.fold:
            self.attacked = compile_quietly(self.attacked, dynamic=False)
        if self.teacher is not None:
            self.teacher = compile_quietly(self.teacher, dynamic=False)

    def _sizes(self) -> list[int]:
        """How many images pass through the network at once, in training mode."""
        n = -(-self.batches.size // self.parts)
        if self.adversary is None or not self.adversary.paired:
            return [n]
        return [2 * n, n] if self.adversary.awp else [2 * n]  # the attack on weights sees one half alone

    def _images(self, n: int) -> Tensor:
        """Random numbers of the shape of n images."""
        generator = torch.Generator(self.batches.device).manual_seed(0)
        x = torch.randn((n, *self.batches.shape), generator=generator, device=self.batches.device)
        return x.contiguous(memory_format=torch.channels_last)

    def _rehearse(self, net: Any) -> None:
        """Launch the kernels of a pass through the network."""
        for n in self._sizes():
            training_pass.rehearse(net, self._images(n))

    def _foldable(self) -> bool:
        """Whether images can be crafted on a folded network; waits for the device."""
        if self.adversary is None or not self.amp or not foldable(self.attacked, self.batches.shape):
            return False
        with frozen(self.attacked):
            return agrees(self.attacked, self._images(16).sigmoid())  # type: ignore[arg-type]

    def __call__(self) -> None:
        parts = [self._part(part) for part in range(self.recipe.accumulate)]
        losses, correct, counts = zip(*parts)
        images = sum(counts)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.tally.step)
        if len(parts) == 1:
            loss, right = losses[0], correct[0]
        else:
            loss, right = torch.stack([part * n for part, n in zip(losses, counts)]).sum() / images, sum(correct)
        self.tally.add(loss, right, images)
        self.batches.advance()

    def _part(self, part: int) -> tuple[Tensor, Tensor, int]:
        """Forward and backward of one part of the batch: (mean loss, number right, images)."""
        x, y, crafted, uniform, rows = self.take(self.rank + self.world * part, self.parts)
        inputs = self._attacked(x, y, crafted, uniform, rows)
        taught = self._taught(x)
        held = self.world > 1 and part < self.recipe.accumulate - 1
        with self.objective.no_sync() if held else nullcontext(), self._weights_attacked(inputs):  # type: ignore[attr-defined]
            with self._mixed(), self._own_kernels():
                loss, right = self.objective(*inputs, taught=taught)
            weight = len(x) * self.world / self.batches.size  # parts may differ by an image
            (loss if weight == 1 else loss * weight).backward()
        return loss.detach(), right, len(x)

    def _taught(self, x: Tensor) -> Tensor | None:
        """The teacher's probabilities for the clean images."""
        if self.teacher is None:
            return None
        with torch.no_grad(), self._mixed():
            return self.teacher(x).float().softmax(1)

    def _attacked(
        self, x: Tensor, y: Tensor, crafted: Tensor | None, uniform: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """What the objective takes: images and labels, the last of the images attacked, or each beside its attack."""
        adversary = self.adversary
        if adversary is None:
            return x, y
        n = round(len(x) * adversary.share)
        if crafted is not None:
            return torch.cat([x[:-n], crafted[-n:]]), y
        eps, start = begin_attack(x[-n:], uniform[-n:], rows[-n:], self.tally.step, self.recipe, adversary)
        with self._mixed():
            moved = craft(self.attacked, x[-n:], y[-n:], eps, start, adversary, fold=self.fold)
        return (x, y, moved) if adversary.paired else (torch.cat([x[:-n], moved]), y)

    def _weights_attacked(self, inputs: tuple[Tensor, ...]) -> AbstractContextManager[None]:
        """The network with weights, of two dimensions or more, at which the attacked images fare worse."""
        if self.adversary is None or not self.adversary.awp:
            return nullcontext()
        objective: Any = self.objective.module if self.world > 1 else self.objective  # type: ignore[attr-defined]
        weights = [weight for weight in objective.parameters() if weight.requires_grad and weight.dim() > 1]
        norms = [module for module in objective.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        statistics = [buffer for norm in norms for buffer in norm.buffers()]
        kept = [buffer.clone() for buffer in statistics]
        images = inputs[2] if self.adversary.paired else inputs[0]
        with self._mixed(), self._own_kernels():
            loss, _ = objective(images, inputs[1])
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        if statistics:  # they must see the batch once
            torch._foreach_copy_(statistics, kept)
        return moved_weights(weights, gradients, self.adversary.awp)

    def _own_kernels(self) -> AbstractContextManager[None]:
        return nullcontext() if self.net is None else training_pass.own_pass(self.net)

    def _mixed(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.batches.device.type, torch.bfloat16) if self.amp else nullcontext()


def start_workers() -> None:
    """Start the processes in which torch.compile compiles kernels; until they are up it compiles one after another."""
    with suppress(Exception):  # not a public interface
        from torch._inductor.async_compile import AsyncCompile

        getattr(AsyncCompile, "wakeup", AsyncCompile.warm_pool)()


def make_launch(step: Step, *, eager: bool = False, deterministic: bool = False) -> Callable[[], None]:
    """A function that launches the next step: on CUDA a captured one, unless `eager` is set."""
    cuda = step.batches.device.type == "cuda"
    if not cuda:
        keep_memory()
    capture = cuda and not eager and step.world == 1
    if capture:
        step.prepare(compile=not deterministic)

    def plain() -> None:
        with _kernels(deterministic, cuda):
            step()

    return _captured(plain, deterministic) if capture else plain


def _captured(step: Callable[[], None], deterministic: bool) -> Callable[[], None]:
    """The step as one CUDA graph, after some steps that run one by one."""
    count, graph = 0, torch.cuda.CUDAGraph()

    def launch() -> None:
        nonlocal count
        count += 1
        if count <= WARMUP:
            step()
            return
        if count == WARMUP + 1:
            here = torch.cuda.current_stream()
            stream = None if here == torch.cuda.default_stream() else here  # a capture needs another than the default
            recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with _kernels(deterministic, True), recording:
                step()  # recorded, not run
        graph.replay()

    return launch


@contextmanager
def _kernels(deterministic: bool, cuda: bool) -> Iterator[None]:
    """Select cuDNN's fastest kernels, or deterministic ones; restores the setting afterwards."""
    if not cuda:
        yield
        return
    cudnn, before = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    flags = cudnn.benchmark, cudnn.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = flags
        torch.use_deterministic_algorithms(before)
