"""The ways to get a loss and its gradients that the benchmark compares.

A step drops the old gradients, runs forward and backward, and synchronises. No optimizer runs: it
would cost all of them the same. Each contestant has a model of its own, with the same values. All
close buckets at DDP's defaults, which are fddp's too: 1 MiB for the first, 25 MiB for the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fddp
from fddp.bench.models import Workload

#: options of DDP, one mode each; those that this torch lacks are left out
_DDP_MODES = ("gradient_as_bucket_view", "static_graph", "batched_grad_copy")

#: fddp's wrapper, and the mode of DDP in which it leaves gradients in the same tensors
WRAPPERS = {
    "fddp.DDP default": "DDP default",
    "fddp.DDP gradient_as_bucket_view": "DDP gradient_as_bucket_view",
}

LOCAL_MODULE = "local only, as module"
LOCAL_FUNCTION = "local only, as function"
FDDP = "fddp"
FLAT = "one flat all-reduce"


@dataclass(frozen=True)
class Contestant:
    """One way to run a step.

    Attributes:
        name: for tables.
        form: whether the model is a module or a function.
        is_ddp: whether it is a mode of torch's DDP.
        step: runs a step.
        gradients: what the last step gave, in the order of the module's parameters.
    """

    name: str
    form: Literal["module", "function"]
    is_ddp: bool
    step: Callable[[], None]
    gradients: Callable[[], list[Tensor]]


def contestants(workload: Workload, batch: Tensor) -> list[Contestant]:
    """All of them, ready to run; a collective call."""
    modes = [mode for mode in _DDP_MODES if mode in _ddp_parameters()]
    return [
        _local_module(workload, batch),
        _local_function(workload, batch),
        _fddp(workload, batch),
        _wrapped(workload, batch, fddp.DistributedDataParallel),
        _wrapped(workload, batch, fddp.DistributedDataParallel, "gradient_as_bucket_view"),
        _wrapped(workload, batch, DistributedDataParallel),
        *(_wrapped(workload, batch, DistributedDataParallel, mode) for mode in modes),
        _flat(workload, batch),
    ]


def _local_module(workload: Workload, batch: Tensor) -> Contestant:
    module = workload.build()

    def step() -> None:
        module.zero_grad()
        module(batch).backward()

    return Contestant(LOCAL_MODULE, "module", False, step, lambda: _grads(module))


def _local_function(workload: Workload, batch: Tensor) -> Contestant:
    params, loss_fn = workload.to_function(workload.build())
    # Made once, so that nothing but the model is in the time that others are held against.
    leaves = [leaf.requires_grad_() for leaf in _leaves(params)]
    grads: tuple[Tensor, ...] = ()

    def step() -> None:
        nonlocal grads
        grads = torch.autograd.grad(loss_fn(params, batch), leaves)

    return Contestant(LOCAL_FUNCTION, "function", False, step, lambda: list(grads))


def _fddp(workload: Workload, batch: Tensor) -> Contestant:
    params, loss_fn = workload.to_function(workload.build())
    synced_fn = fddp.GradSync(params).value_and_grad(loss_fn)
    grads: Any = None

    def step() -> None:
        # As in a loop, the old gradients live until the new ones take their name.
        nonlocal grads
        _, grads = synced_fn(params, batch)

    return Contestant(FDDP, "function", False, step, lambda: _leaves(grads))


def _wrapped(
    workload: Workload,
    batch: Tensor,
    wrapper: type[DistributedDataParallel],
    mode: str | None = None,
) -> Contestant:
    """torch's DDP or fddp's, with one option set."""
    module = workload.build()
    options: dict[str, Any] = {} if mode is None else {mode: True}
    wrapped = wrapper(module, **options)

    def step() -> None:
        module.zero_grad()
        wrapped(batch).backward()

    is_ddp = wrapper is DistributedDataParallel
    name = f"{'DDP' if is_ddp else 'fddp.DDP'} {mode or 'default'}"
    return Contestant(name, "module", is_ddp, step, lambda: _grads(module))


def _flat(workload: Workload, batch: Tensor) -> Contestant:
    module = workload.build()
    params = list(module.parameters())
    sizes = [param.numel() for param in params]

    def step() -> None:
        module.zero_grad()
        module(batch).backward()
        flat = torch.cat([grad.flatten() for grad in _grads(module)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for param, part in zip(params, torch.split(flat, sizes), strict=True):
            param.grad = part.view_as(param)

    return Contestant(FLAT, "module", False, step, lambda: _grads(module))


def _ddp_parameters() -> set[str]:
    return set(inspect.signature(DistributedDataParallel).parameters)


def _grads(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def _leaves(tree: Any) -> list[Tensor]:
    """Tensors of nested lists and dicts, in insertion order: that of the module's parameters."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in _leaves(part)]
