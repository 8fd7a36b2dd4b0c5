"""Broadcast of pytrees, for the start of a run."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from fddp.collectives.operator_program import batches
from fddp.core.entrance import entrance
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.differences import LEAVES, check_equal
from fddp.core.protocol.messages import Schema
from fddp.core.text import counted, leaf_text
from fddp.errors import PlanMismatchError, TransformError, error_text
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.runtime.agreement import check_equal_leaves, exchange
from fddp.runtime.inputs import check_no_transform, outside_transforms
from fddp.transport import Group, open_transport
from fddp.transport.base import Transport
from fddp.tree.describe import leaf_specs
from fddp.tree.foreign import adapted
from fddp.tree.modules import named_params
from fddp.tree.pytree import flatten

AT_ONCE_BYTES = 250 * 1024 * 1024
"""Size of the temporary buffer of a broadcast that returns new tensors."""

# Size of the temporary buffer of a broadcast that writes into existing tensors.
_WRITTEN_AT_ONCE_BYTES = 32 * 1024 * 1024

_REPORT: Schema = (str, object, LEAVES)  # error, source, leaves


@entrance
def broadcast(
    tree: Any, src: int = 0, *, group: Group | None = None, timeout_s: float | None = None
) -> Any:
    """Broadcast rank `src`'s tree to every rank. A collective call.

    Args:
        tree: dense tensors of any dtype and strides; None stays None. Ranks must have the same
            paths, shapes and dtypes. An `nn.Module` stands for its parameters by name, frozen ones
            included; broadcast `dict(module.named_buffers())` as well. Not written.
        src: source rank in the group.
        group: as in `GradSync`.
        timeout_s: as in `GradSync`.

    Returns:
        A new tree of the same structure. Leaves of one dtype and device are sent in one buffer.

    Raises:
        PlanMismatchError: ranks have different trees, a leaf is not a tensor, or a `torch.func`
            transform or a tracer is active. Raised on every rank. Use `broadcast_from` inside of
            transforms.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda g: fddp.broadcast({"w": torch.tensor(g.rank)}, 1, group=g))
        [{'w': tensor(1)}, {'w': tensor(1)}]
    """
    transformed: TransformError | None = None
    try:
        check_no_transform(
            "broadcast(tree)",
            "call it outside, or use fddp.broadcast_from, which is differentiable",
        )
    except TransformError as error:
        transformed = error
    with (
        outside_transforms(),
        open_transport(group, "auto", timeout_s, "broadcast", shares=True) as transport,
    ):
        failure: Exception | None = None
        specs: list[LeafSpec] = []
        try:
            if transformed is not None:
                raise transformed
            src = index(src)
            leaves, treedef = adapted(*flatten(named_params(tree, frozen=True)), "tree")
            specs = _specs(treedef.paths, leaves)
        except Exception as error:
            failure = error
        _check_alike(transport, specs, src, failure)
        tensors = [leaf.detach() for leaf in leaves if leaf is not None]
        copies = iter(broadcast_tensors(transport, tensors, src))
        return treedef.unflatten([None if leaf is None else next(copies) for leaf in leaves])


def _specs(paths: Sequence[str], leaves: Sequence[Any]) -> list[LeafSpec]:
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf is None:
            continue
        kind = type(leaf).__name__
        if isinstance(leaf, Tensor):
            kind = wrapper_kind(leaf) or str(leaf.layout).replace("torch.strided", "")
        if kind:
            raise PlanMismatchError(
                f"{leaf_text(path)} is a {kind}; broadcast takes dense tensors: {PLAIN_INSTEAD}"
            )
    # Strides may differ between ranks.
    return [spec._replace(strides=None) for spec in leaf_specs(paths, leaves)]


def _check_alike(
    transport: Transport, specs: list[LeafSpec], src: int, failure: Exception | None
) -> None:
    problem = error_text(failure) if failure else ""
    received = exchange(transport, [problem, None if failure else src, specs], _REPORT)
    for rank, (theirs, *_) in enumerate(received):
        if theirs:
            raise PlanMismatchError(f"rank {rank} can't take part: {theirs}") from failure
    check_equal("src", [theirs for _, theirs, _ in received], "pass the same src on every rank")
    check_equal_leaves([theirs for *_, theirs in received])
    if src not in range(transport.world_size):
        raise PlanMismatchError(
            f"src={src!r} is out of range; the group has {counted(transport.world_size, 'rank')}, "
            f"numbered from 0"
        )


def broadcast_tensors(transport: Transport, tensors: Sequence[Tensor], src: int) -> list[Tensor]:
    """New tensors with rank `src`'s values. Tensors of one dtype and device are sent together."""
    copies: dict[int, Tensor] = {}
    for members in _batches(tensors, AT_ONCE_BYTES):
        like = [tensors[i] for i in members]
        parts = _received(transport, like, src, "the broadcast of a tree")
        made = [torch.empty_like(own).copy_(part) for own, part in zip(like, parts, strict=True)]
        copies.update(zip(members, made, strict=True))
        del parts  # before the buffer of the next batch is allocated
    return [copies[i] for i in range(len(tensors))]


def broadcast_parts(transport: Transport, tensors: Sequence[Tensor], src: int) -> list[Tensor]:
    """As `broadcast_tensors`, without copies: contiguous views of the buffers that were sent."""
    found: dict[int, Tensor] = {}
    for members in _batches(tensors, AT_ONCE_BYTES):
        like = [tensors[i] for i in members]
        parts = _received(transport, like, src, "the broadcast of a tree")
        found.update(zip(members, parts, strict=True))
    return [found[i] for i in range(len(tensors))]


def broadcast_(transport: Transport, tensors: Sequence[Tensor], src: int) -> None:
    """Write rank `src`'s tensors into the tensors of all ranks, a batch at a time."""
    for members in _batches(tensors, _WRITTEN_AT_ONCE_BYTES):
        own = [tensors[i] for i in members]
        parts = _received(transport, own, src, "the broadcast of a module")
        if transport.rank == src:
            continue
        for tensor, part in zip(own, parts, strict=True):
            tensor.copy_(part)


def _received(
    transport: Transport, tensors: list[Tensor], src: int, what: str
) -> tuple[Tensor, ...]:
    """Values of rank `src`'s tensors, which have one dtype and device, in one buffer."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    transport.broadcast(flat, src).wait(what)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return tuple(part.view(own.shape) for own, part in zip(tensors, parts, strict=True))


def _batches(tensors: Sequence[Tensor], most_bytes: int) -> list[list[int]]:
    kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
    return batches(kinds, [tensor.nbytes for tensor in tensors], most_bytes)
