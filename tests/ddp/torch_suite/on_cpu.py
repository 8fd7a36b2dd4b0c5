"""Answers calls that ask for a GPU with the CPU, so that torch's tests run where there is none."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CPU = torch.device("cpu")
_TAKES_DEVICE_FIRST = {torch.device, torch.Tensor.to, torch._C._nn._parse_to}


@contextlib.contextmanager
def cuda_is_cpu(world_size: int) -> Iterator[None]:
    """Within, each of `world_size` ranks seems to have a GPU, which is the CPU."""
    forward = nn.SyncBatchNorm.forward

    def sync_batch_norm_forward(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        # It checks the device's type against a list, of which this is the one open place.
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return forward(self, input)

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in [
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "synchronize", lambda device=None: None),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device_count", lambda: world_size),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "stream", lambda stream: stream),
            (torch.accelerator, "current_stream", _Stream),
            (torch, "Event", _Event),
            (nn.SyncBatchNorm, "forward", sync_batch_norm_forward),
            (torch, "batch_norm_stats", _stats),
            (torch, "batch_norm_gather_stats_with_counts", _gather_stats),
            (torch, "batch_norm_elemt", _normalise),
            (torch, "batch_norm_backward_reduce", _reduce_gradients),
            (torch, "batch_norm_backward_elemt", _input_gradient),
        ]:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(_OnCpu())
        yield


def without_devices(wrapper: type) -> None:
    """Let `wrapper`, a DistributedDataParallel, overlook that its modules are on the CPU."""
    init, set_state = wrapper.__init__, wrapper.__setstate__

    @functools.wraps(init)
    def init_on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        with _no_sync_batch_norm():
            init(self, module, **options)

    @functools.wraps(set_state)
    def set_state_on_cpu(self: Any, state: Any) -> None:
        with _no_sync_batch_norm():
            set_state(self, state)

    wrapper.__init__, wrapper.__setstate__ = init_on_cpu, set_state_on_cpu


@contextlib.contextmanager
def _no_sync_batch_norm() -> Iterator[None]:
    """Within, no layer is known as a SyncBatchNorm, which wrappers refuse on the CPU."""
    with contextlib.ExitStack() as stack:
        for owner in (nn, nn.modules):
            stack.enter_context(mock.patch.object(owner, "SyncBatchNorm", type("Hidden", (), {})))
        yield


class _Stream(contextlib.AbstractContextManager[None]):
    """On the CPU all work is done in order."""

    def __init__(self, device: Any = None) -> None: ...

    def __exit__(self, *raised: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


class _Event:
    def record(self) -> None: ...

    def wait(self, stream: object) -> None: ...


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func in _TAKES_DEVICE_FIRST:
            args = tuple(_on_cpu(arg) for arg in args)
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    """`value`, or the CPU if it means a GPU: an index, "cuda:1", or a device."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _CPU
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        return _CPU
    return value


# What torch.nn.SyncBatchNorm calls; torch has these kernels for GPUs only.


def _channels(input: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that are reduced, and the shape that broadcasts a vector of channels."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    return dims, [-1 if dim == 1 else 1 for dim in range(input.dim())]


def _stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dims, _ = _channels(input)
    variance, mean = torch.var_mean(input.float(), dims, correction=0)
    return mean, torch.rsqrt(variance + eps)


def _gather_stats(
    input: torch.Tensor,
    means: torch.Tensor,  # (ranks, channels), as the next
    invstds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,  # (ranks,)
) -> tuple[torch.Tensor, torch.Tensor]:
    count = counts.float().sum()
    shares = (counts.float() / count)[:, None]
    mean = (shares * means).sum(0)
    variance = (shares * (invstds**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
    return mean, torch.rsqrt(variance + eps)


def _normalise(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    _, shape = _channels(input)
    scale = invstd if weight is None else invstd * weight
    output = (input - mean.view(shape)) * scale.view(shape)
    return (output if bias is None else output + bias.view(shape)).to(input.dtype)


def _reduce_gradients(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    *needed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dims, shape = _channels(input)
    dtype = input.dtype if weight is None else weight.dtype
    sum_dy = grad.float().sum(dims)
    sum_dy_xmu = (grad.float() * (input - mean.view(shape))).sum(dims)
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def _input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    _, shape = _channels(input)
    count = counts.sum()
    scale = invstd if weight is None else invstd * weight
    centred = (input - mean.view(shape)) * (invstd**2 * sum_dy_xmu / count).view(shape)
    return ((grad - (sum_dy / count).view(shape) - centred) * scale.view(shape)).to(input.dtype)
