"""Whether a Resnet can train in the package's own kernels, and whether they compute what it does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlda.models.backbones import ResNet, _Block, _Norm
from mmlda.models.training_pass import features, layers_of

SHARED = 144 << 10  # bytes that the largest of training_pass.TILINGS takes


def has_kernels(net: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether there are kernels for this network, on this device, with images of this shape [C, H, W].

    They are for a post-activation `ResNet` of width 16 with ReLU, as this package makes it, and for three channels or
    fewer.
    """
    if not isinstance(net, ResNet) or len(shape) != 3 or shape[0] > 3:
        return False
    if not all(type(block) is _Block for block in net.blocks):
        return False
    convs, norms = layers_of(net)
    return (
        net.config["width"] == 16
        and not net.preactivation
        and net.activation is F.relu_
        and all(conv.bias is None and conv.padding == conv.dilation == (1, 1) for conv in convs)
        and all(type(norm) is _Norm and norm.affine and norm.track_running_stats for norm in norms)
        and not any(_hooked(module) for module in net.modules())
        and net.conv.weight.is_cuda
        and net.conv.weight.dtype == torch.float32
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(net.conv.weight.device) >= (8, 0)  # products of bfloat16
        and _shared_memory(net.conv.weight.device) >= SHARED
    )


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have; 0 before torch 2.7, which does not say."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def problem(net: Any, x: Tensor, kind: torch.dtype = torch.bfloat16) -> str:
    """What is wrong with `features` for images like x, "" if it computes what the network does; waits for the device.

    Features, gradients and running statistics may be hardly farther from those in float32 than autocast's are. The
    kernels depend on Triton's compiler, which is at work on every kind of device and in every release anew.
    """
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    before, was = [buffer.clone() for buffer in buffers], net.training
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    v = torch.randn(len(x), net.num_features, generator=torch.Generator(x.device).manual_seed(0), device=x.device)

    def outcome(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch._foreach_copy_(buffers, before)
        with torch.enable_grad():
            z = run(x).float()
            gradients = torch.autograd.grad((z * v).sum(), parameters) if parameters else ()
        return [z.detach(), *gradients, *(buffer.clone() for buffer in buffers)]

    def mixed(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, kind):
            return net(x)

    try:
        net.train()
        with torch.autocast(x.device.type, enabled=False):
            exact = outcome(net)
        close = [_close(*three) for three in zip(outcome(lambda x: features(net, x, kind)), outcome(mixed), exact)]
        wrong = len(close) - int(torch.stack(close).sum())
        return f"{wrong} of {len(close)} results differ from the network's" if wrong else ""
    except Exception as error:  # of Triton: not enough shared memory, for example
        return f"{type(error).__name__}: {error}"
    finally:
        net.train(was)
        torch._foreach_copy_(buffers, before)


def _close(own: Tensor, mixed: Tensor, exact: Tensor) -> Tensor:
    """Whether `own` is right if `mixed` is; the rounding of a short vector differs more from one to the other."""
    factor, free = (1.5, 0.01) if exact.dim() > 1 else (4.0, 0.05)
    return (own - exact).norm() <= factor * (mixed - exact).norm() + free * exact.norm()
