"""Collectives on whole trees, for the start of a run."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fddp.errors import PlanMismatchError
from fddp.transports import Group, open_transport
from fddp.transports.base import Transport
from fddp.tree import flatten


def broadcast(
    tree: Any, src: int = 0, *, group: Group | None = None, timeout_s: float | None = None
) -> Any:
    """A copy of rank `src`'s tree on every rank; a collective call.

    Args:
        tree: tensors of any dtype and layout; None stays None. Ranks must have the same paths,
            shapes and dtypes. Not written.
        src: rank in the group whose values are taken.
        group: as in `GradSync`.
        timeout_s: as in `GradSync`.

    Returns:
        A new tree of the same structure. Leaves of one dtype and device travel together.

    Raises:
        PlanMismatchError: ranks differ in their trees, or a leaf is no tensor; on every rank.

    Example:
        >>> import fddp, torch
        >>> fddp.loopback(2, lambda g: fddp.broadcast({"w": torch.tensor(g.rank)}, 1, group=g))
        [{'w': tensor(1)}, {'w': tensor(1)}]
    """
    with open_transport(group, "auto", timeout_s) as transport:
        failure: Exception | None = None
        specs: list[list[object]] = []
        try:
            leaves, treedef = flatten(tree)
            specs = [_spec(path, leaf) for path, leaf in zip(treedef.paths, leaves, strict=True)]
        except Exception as error:
            failure = error
        _check_alike(transport, specs, src, failure)
        results: list[Tensor | None] = [None] * len(leaves)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf is not None:
                groups.setdefault((leaf.dtype, leaf.device), []).append(i)
        for members in groups.values():
            tensors = [leaves[i].detach().resolve_conj().resolve_neg() for i in members]
            for i, copy in zip(members, _broadcast(transport, tensors, src), strict=True):
                results[i] = copy
        return treedef.unflatten(results)


def _spec(path: str, leaf: Any) -> list[object]:
    if leaf is None:
        return [path, "None"]
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return [path, "not a dense tensor", type(leaf).__name__]
    return [path, str(leaf.dtype), list(leaf.shape)]


def _check_alike(
    transport: Transport, specs: list[list[object]], src: int, failure: Exception | None
) -> None:
    problem = f"{type(failure).__name__}: {failure}" if failure else ""
    own = json.dumps([problem, src, specs]).encode()
    told = [json.loads(text) for text in transport.exchange(own)]
    if failure is not None:
        raise failure
    for rank, (problem, _, _) in enumerate(told):
        if problem:
            raise PlanMismatchError(f"rank {rank} could not take its tree apart: {problem}")
    for rank, (_, theirs_src, theirs) in enumerate(told):
        for path, kind, *rest in theirs:
            if kind == "not a dense tensor":
                raise PlanMismatchError(
                    f"leaf {path!r} on rank {rank} is {rest[0]}; broadcast takes dense tensors"
                )
        if theirs_src != told[0][1]:
            raise PlanMismatchError(
                f"src is {told[0][1]} on rank 0 and {theirs_src} on rank {rank}; pass one src"
            )
        if not 0 <= theirs_src < transport.world_size:
            raise PlanMismatchError(
                f"src={theirs_src} is no rank of a group of {transport.world_size}"
            )
        mine = told[0][2]
        for ours, others in zip(mine, theirs, strict=False):
            if ours != others:
                raise PlanMismatchError(
                    f"rank 0 has leaf {ours[0]!r} ({ours[1:]}) where rank {rank} has "
                    f"{others[0]!r} ({others[1:]}); build every rank's tree alike"
                )
        if len(mine) != len(theirs):
            raise PlanMismatchError(
                f"rank 0 has {len(mine)} leaves and rank {rank} has {len(theirs)}; "
                f"build every rank's tree alike"
            )


def _broadcast(transport: Transport, tensors: list[Tensor], src: int) -> list[Tensor]:
    """Copies of the source's tensors, through one flat buffer."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    transport.broadcast(flat, src).wait("the broadcast of a tree")
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [
        torch.empty_like(tensor).copy_(part.view(tensor.shape))
        for tensor, part in zip(tensors, parts, strict=True)
    ]
