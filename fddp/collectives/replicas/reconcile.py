"""Reconciliation of states: the newest state on all ranks, after a failure or for late ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fddp.collectives.replicas.chunked_broadcast import broadcast_bytes_, broadcast_text
from fddp.collectives.replicas.snapshot import Snapshot, allocate_like
from fddp.core.entrance import entrance
from fddp.core.protocol.messages import Schema, malformed_message_error, optional
from fddp.core.text import leaf_text
from fddp.errors import DesyncError, InternalError, PlanMismatchError, error_text
from fddp.runtime.agreement import exchange
from fddp.runtime.inputs import check_no_transform, outside_transforms
from fddp.transport import Group, open_transport
from fddp.transport.base import Transport

_WHAT = "the newest state"
_MAX_STEP = 2**63
T = TypeVar("T")


@entrance
def reconcile(
    tree: Any, group: Group | None = None, *, step: int | None, timeout_s: float | None = None
) -> tuple[Any, int]:
    """The newest state of all ranks, on every rank. A collective call.

    The source is the lowest rank with the highest step. Each rank verifies its result by a hash. If
    all ranks already have the same bits, only digests are exchanged.

    Args:
        tree: this rank's state: parameters, optimizer state, hook state, position in the data; a
            tree of plain, dense tensors, numbers, text and None. Ranks may have different trees.
            None for a rank that has no state. Not written.
        group: as in `GradSync`.
        step: number of steps that the state has completed, 0 or more; ignored if `tree` is None.
        timeout_s: as in `GradSync`.

    Returns:
        `(tree, step)` of the newest state. A rank whose tree is of that step and has the same paths
        and bits gets the tree that it passed. Other ranks get new tensors, on the device of their
        own leaf with the same path, or else on the source's type of device. These are plain
        tensors: no `nn.Parameter`, `requires_grad` is False, and tied leaves become separate
        tensors. Containers are dicts, OrderedDicts, lists and tuples as at the source. If either
        tree has others, such as named tuples, a rank whose tree has the same paths keeps its own.
        A rank whose containers are kept and hold JAX arrays gets JAX arrays.

    Raises:
        PlanMismatchError: no rank has a state, a rank's tree or step is invalid, or a rank can't
            build the containers of the newest tree. Raised on every rank; names the rank.
        DesyncError: a rank holds other bits afterwards. Raised on every rank; names the first leaf.
        RankLostError, SyncTimeoutError: a rank did not arrive.

    Example:
        >>> import fddp, torch
        >>> def recover(group):
        ...     mine = {"w": torch.full((2,), 1.0 + group.rank), "seen": 100 * group.rank}
        ...     late = group.rank == 0  # a rank that has just been started
        ...     tree, step = fddp.reconcile(None if late else mine, group, step=10 + group.rank)
        ...     return tree["w"].tolist(), tree["seen"], step
        >>> fddp.loopback(3, recover)
        [([3.0, 3.0], 200, 12), ([3.0, 3.0], 200, 12), ([3.0, 3.0], 200, 12)]
    """
    problem: Exception | None = None
    try:
        check_no_transform("reconcile(tree)", "call it outside")
    except Exception as error:
        problem = error
    with (
        outside_transforms(),
        open_transport(group, "auto", timeout_s, "reconcile", shares=True) as transport,
    ):
        return reconciled(transport, tree, step, problem)


@torch.no_grad()
def reconciled(
    transport: Transport, tree: Any, step: int | None, problem: Exception | None = None
) -> tuple[Any, int]:
    """`reconcile` over a transport. `problem` is the error of this rank if it can't take part."""
    own = None
    try:
        if problem is None and tree is not None:
            if type(step) is not int or not 0 <= step < _MAX_STEP:
                raise ValueError(
                    f"step must be an int of at least 0 if tree is not None, got {step!r}"
                )
            own = Snapshot.of(tree)
    except Exception as error:
        problem = error
    newest = _newest(transport, own, step, problem)
    found, is_same = _broadcast_state(transport, own, newest)
    return tree if is_same else found.tree(), newest.step


class _Newest(NamedTuple):
    rank: int
    step: int
    steps: Sequence[int | None]  # of all ranks


def _newest(
    transport: Transport, own: Snapshot | None, step: int | None, failure: Exception | None
) -> _Newest:
    """The source rank and its step. Raises on all ranks if one can't take part."""
    received = _agree(transport, failure, None if own is None else step, optional(int))
    steps = [theirs for _, theirs in received]
    for rank, theirs in enumerate(steps):
        if theirs is not None and theirs < 0:
            raise malformed_message_error(rank, "own state", ValueError(f"its step is {theirs}"))
    held = [theirs for theirs in steps if theirs is not None]
    if not held:
        raise PlanMismatchError(
            f"none of {len(steps)} ranks has a state; pass a tree on at least one rank, from a "
            f"checkpoint or a fresh start at step 0"
        )
    return _Newest(steps.index(max(held)), max(held), steps)


def _broadcast_state(
    transport: Transport, own: Snapshot | None, newest: _Newest
) -> tuple[Snapshot, bool]:
    """The newest state, and True if this rank held it before."""
    text, whole = "", ""
    if own is not None and newest.steps[transport.rank] == newest.step:
        whole = _whole(own, own.digests())
    if transport.rank == newest.rank and own is not None:
        text = own.description()
    received = exchange(transport, [whole, len(text)], (str, int), "newest state")
    wanted, length = received[newest.rank]
    if own is not None and all(theirs == wanted for theirs, _ in received):
        return own, True
    has_it = whole != "" and whole == wanted
    text = broadcast_text(transport, text, length, newest.rank, _WHAT)
    found, failure = own, None
    if not has_it:
        try:
            found = allocate_like(text, own)
        except Exception as error:
            failure = error
    _agree(transport, failure, None, None)
    if found is None:
        raise InternalError("a rank has neither a state nor a failure")
    broadcast_bytes_(transport, found.runs(), newest.rank, _WHAT, keeps=not has_it)
    if not has_it:
        found = found.laid_out_as(own)
    _check(transport, found, newest)
    return found, has_it


def _agree(
    transport: Transport, failure: Exception | None, value: T, schema: Schema
) -> list[tuple[str, T]]:
    """Exchange values by rank. Raises on all ranks if one has failed."""
    mine = [error_text(failure) if failure else "", value]
    received = exchange(transport, mine, (str, schema), "own state")
    for rank, (problem, _) in enumerate(received):
        if problem:
            raise PlanMismatchError(f"rank {rank} can't take part: {problem}") from failure
    return received


def _check(transport: Transport, found: Snapshot, newest: _Newest) -> None:
    """Raise on every rank if a rank holds other bits than the source."""
    digests = found.digests()
    received = exchange(transport, _whole(found, digests), str, "digest")
    differing = [rank for rank, theirs in enumerate(received) if theirs != received[newest.rank]]
    if not differing:
        return
    leaves = exchange(transport, digests, (str,) * len(digests), "leaf digests")
    pairs = zip(leaves[newest.rank], leaves[differing[0]], strict=True)
    leaf = next(i for i, (wanted, theirs) in enumerate(pairs) if wanted != theirs)
    raise DesyncError(
        f"{leaf_text(found.treedef.paths[leaf])} has the digest {leaves[newest.rank][leaf]} on "
        f"rank {newest.rank}, the source of the state of step {newest.step}, and "
        f"{leaves[differing[0]][leaf]} on rank {differing[0]} after the broadcast; memory or "
        f"network of a host corrupted data: exclude that host, and restart from a checkpoint"
    )


def _whole(held: Snapshot, digests: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([held.treedef.paths, digests]).encode()).hexdigest()
