"""The ways to get a loss and its gradients that the benchmark compares.

A step drops the old gradients, runs forward and backward, and synchronises. No optimizer runs: it
would cost all of them the same. Each contestant has a model of its own, with the same values. All
close buckets at DDP's defaults, which are fddp's too: 1 MiB for the first, 25 MiB for the others.

torch's DDP, its `replicate` and the flat all-reduce go over gloo. fddp runs twice: over the
transport that it takes by itself, and over gloo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fddp
from benchmarks.models import Workload
from fddp.transport import TransportName

LOCAL_MODULE = "local only, as module"
LOCAL_FUNCTION = "local only, as function"
FDDP = "fddp"
DETERMINISTIC = "fddp, deterministic"
DONATED = "fddp, donated"
REPLICATE = "replicate"
FLAT = "one flat all-reduce"
AGAIN = "DDP view, again"
"""A second instance of a mode: its ratio to the first is the noise of the measurement."""

OVER_GLOO = ", gloo"

_VIEW = {"gradient_as_bucket_view": True}
_OWN_BUFFERS = "view, own buffers"

#: options of DDP, one mode each; those that this torch lacks are left out
_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": _VIEW,
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
}
#: one more for modules with buffers, which DDP otherwise broadcasts in every forward
_BUFFER_MODES: dict[str, dict[str, Any]] = {
    _OWN_BUFFERS: {**_VIEW, "forward_sync_buffers": False},
}
#: those of fddp's wrapper: in the others it does what it does by default
_WRAPPER_MODES = ("default", "view", _OWN_BUFFERS)

Make: TypeAlias = Callable[[Workload, Tensor], "Contestant"]


@dataclass(frozen=True)
class Contestant:
    """One way to run a step.

    Attributes:
        name: for tables.
        form: form of the model, a module or a function.
        is_ddp: True for a mode of torch's DDP, of which the fastest is the reference.
        transport: transport of the gradients; "none" without communication.
        step: runs a step.
        gradients: gradients of the last step, in the order of the module's parameters.
        close: gives up connections and memory.
    """

    name: str
    form: Literal["module", "function"]
    is_ddp: bool
    transport: str
    step: Callable[[], None]
    gradients: Callable[[], list[Tensor]]
    close: Callable[[], None] = lambda: None


def twin(name: str) -> str | None:
    """The mode of torch's DDP that a contestant of fddp's wrapper stands in for.

    Example:
        >>> twin("fddp.DDP default, gloo")
        'DDP default'
    """
    is_wrapper = name.startswith("fddp.DDP ")
    return name.removeprefix("fddp.").removesuffix(OVER_GLOO) if is_wrapper else None


def makers(has_buffers: bool) -> dict[str, Make]:
    """Factories of the contestants by name; a collective call."""
    modes = {**_MODES, **(_BUFFER_MODES if has_buffers else {})}
    supported = inspect.signature(DistributedDataParallel).parameters
    modes = {name: given for name, given in modes.items() if supported.keys() >= given.keys()}
    made: dict[str, Make] = {
        LOCAL_MODULE: local_module,
        LOCAL_FUNCTION: _local_function,
        FDDP: partial(_fddp, FDDP, {}),
        FDDP + OVER_GLOO: partial(_fddp, FDDP + OVER_GLOO, {"transport": "c10d"}),
        DETERMINISTIC: partial(_fddp, DETERMINISTIC, {"deterministic": True}),
    }
    transports: dict[str, TransportName] = {"": "auto", OVER_GLOO: "c10d"}
    for mode in filter(modes.__contains__, _WRAPPER_MODES):
        for suffix, transport in transports.items():
            name = f"fddp.DDP {mode}{suffix}"
            made[name] = partial(_wrapper, name, modes[mode], transport)
    for mode, given in modes.items():
        made[f"DDP {mode}"] = partial(_ddp, f"DDP {mode}", given)
    made[AGAIN] = partial(_ddp, AGAIN, _VIEW, is_mode=False)
    made[REPLICATE] = _replicate
    made[FLAT] = _flat
    return made


def contestants(workload: Workload, batch: Tensor) -> list[Contestant]:
    """All of them, ready to run; a collective call."""
    has_buffers = any(True for _ in workload.build().buffers())
    return [make(workload, batch) for make in makers(has_buffers).values()]


def local_module(workload: Workload, batch: Tensor) -> Contestant:
    """Steps without communication."""
    module = workload.build()

    def step() -> None:
        module.zero_grad()
        module(batch).backward()

    return Contestant(LOCAL_MODULE, "module", False, "none", step, lambda: _grads(module))


def _local_function(workload: Workload, batch: Tensor) -> Contestant:
    params, loss_fn, buffers = workload.to_function(workload.build())
    # Made once, so that nothing but the model is in the time that others are held against.
    leaves = [leaf.requires_grad_() for leaf in _leaves(params)]
    grads: tuple[Tensor, ...] = ()

    def step() -> None:
        nonlocal grads, buffers
        if buffers is None:
            loss = loss_fn(params, batch)
        else:
            loss, buffers = loss_fn(params, buffers, batch)
        grads = torch.autograd.grad(loss, leaves)

    return Contestant(LOCAL_FUNCTION, "function", False, "none", step, lambda: list(grads))


def donating(workload: Workload, batch: Tensor) -> Contestant:
    """fddp in a loop that donates gradients before the next step."""
    return _fddp(DONATED, {}, workload, batch, donates=True)


def _fddp(
    name: str, options: dict[str, Any], workload: Workload, batch: Tensor, *, donates: bool = False
) -> Contestant:
    params, loss_fn, buffers = workload.to_function(workload.build())
    sync = fddp.GradSync(params, **options)
    synced_fn = sync.value_and_grad(loss_fn, has_aux=buffers is not None)
    grads: Any = None

    def step() -> None:
        # As in a loop, the old gradients live until the new ones take their name.
        nonlocal grads, buffers
        if donates and grads is not None:
            sync.donate(grads)
        if buffers is None:
            _, grads = synced_fn(params, batch)
        else:
            (_, buffers), grads = synced_fn(params, buffers, batch)

    return Contestant(
        name, "function", False, sync.transport, step, lambda: _leaves(grads), sync.close
    )


def _wrapper(
    name: str,
    options: dict[str, Any],
    transport: TransportName,
    workload: Workload,
    batch: Tensor,
) -> Contestant:
    module = workload.build()
    wrapped = fddp.DistributedDataParallel(module, **options, transport=transport)
    used = wrapped.steps.engine.transport.name
    return of_module(name, module, wrapped, batch, is_ddp=False, transport=used)


def _ddp(
    name: str, options: dict[str, Any], workload: Workload, batch: Tensor, *, is_mode: bool = True
) -> Contestant:
    module = workload.build()
    wrapped = DistributedDataParallel(module, **options)
    return of_module(name, module, wrapped, batch, is_ddp=is_mode, transport="gloo")


def _replicate(workload: Workload, batch: Tensor) -> Contestant:
    module = workload.build()
    replicate(module)
    return of_module(REPLICATE, module, module, batch, is_ddp=False, transport="gloo")


def of_module(
    name: str, module: nn.Module, wrapped: nn.Module, batch: Tensor, *, is_ddp: bool, transport: str
) -> Contestant:
    """A contestant whose steps go through a module that synchronises the gradients of another."""

    def step() -> None:
        module.zero_grad()
        wrapped(batch).backward()

    return Contestant(name, "module", is_ddp, transport, step, lambda: _grads(module))


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

    return Contestant(FLAT, "module", False, "gloo", step, lambda: _grads(module))


def _grads(module: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def _leaves(tree: Any) -> list[Tensor]:
    """Tensors of nested lists and dicts, in insertion order: that of the module's parameters."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in _leaves(part)]
