"""Programs of operators: the leaves of one tree, their buckets, and the layout of each bucket.

The leaves of a program are *units*, one rank's part of a collective. `all_gather` takes units and
returns them with a new leading axis of ranks; `reduce_scatter` takes such leaves and returns units;
`all_to_all` takes and returns such leaves; all other operators take and return units. So an
operator and its transpose have the same units and buckets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

from fddp.core.plan.leaf import ITEM_BYTES, LeafSpec
from fddp.core.text import counted
from fddp.native.layout import Layout, contiguous_strides
from fddp.transport.operation import OperationKind

#: `sum_to` is the transpose of `broadcast_from`: the sum at the root, zeros elsewhere
Operator: TypeAlias = Literal[
    "psum",
    "pmean",
    "pmax",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast_from",
    "sum_to",
]

TRANSPOSES: Mapping[Operator, Operator] = MappingProxyType(
    {
        "psum": "psum",
        "pmean": "pmean",
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "all_to_all": "all_to_all",
        "broadcast_from": "sum_to",
        "sum_to": "broadcast_from",
    }
)
"""The adjoint of each linear operator; see [Note: one function of all ranks]."""

TAKES_ROWS = frozenset({"reduce_scatter", "all_to_all"})
"""Operators of leaves with a leading axis of ranks."""

GIVES_ROWS = frozenset({"all_gather", "all_to_all"})
"""Operators whose results have a leading axis of ranks."""

MOVES_ROWS = GIVES_ROWS | {"pmax"}
"""Operators that run as `GIVES_ROWS`: the maximum is that of the rows."""

_COLLECTIVES: Mapping[Operator, OperationKind] = MappingProxyType(
    {
        "psum": "all_reduce",
        "pmean": "all_reduce",
        "pmax": "all_gather",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "broadcast_from": "broadcast",
        "sum_to": "all_reduce",
    }
)

_MOST_SIZES = 16  # batch sizes with a cached program


@dataclass(frozen=True)
class GroupPosition:
    """This rank's position among the ranks that take part in an operator.

    Attributes:
        axes: axes of the mesh along which they meet; () for all ranks.
        size: number of these ranks.
        own: this rank's number among them.
    """

    axes: tuple[str, ...]
    size: int
    own: int


@dataclass(frozen=True)
class FusedBucket:
    """Units that share one buffer.

    Attributes:
        members: positions among the program's units.
        dtype: dtype of the units.
        device: device of the units.
        numels: number of elements of each unit.
        numel: number of elements of all units.
        layout: location of each unit; None for dtypes that are moved but not summed, whose units
            are packed back to back.
        as_bytes: True if the collective is over the bytes of the buffer, not over its numbers.
    """

    members: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numels: list[int]
    numel: int
    layout: Layout | None
    as_bytes: bool


@dataclass(frozen=True, eq=False)
class OperatorProgram:
    """An operator over fixed leaves.

    Attributes:
        operator: name of the operator.
        place: ranks that take part.
        root: source of `broadcast_from`, as a number among the ranks that take part; else -1.
        units: specs of the leaves that are not None, contiguous.
        devices: device of each unit.
        buckets: units of each bucket, in launch order.
        batch: sizes of the axes that `vmap` added to each unit, outermost first.
        tiled: True if ranks are concatenated along the first axis instead of a new one.
    """

    operator: Operator
    place: GroupPosition
    root: int
    units: tuple[LeafSpec, ...]
    devices: tuple[torch.device, ...]
    buckets: tuple[tuple[int, ...], ...]
    batch: tuple[int, ...] = ()
    tiled: bool = False

    @cached_property
    def fused_buckets(self) -> tuple[FusedBucket, ...]:
        """Buckets in launch order."""
        return tuple(self._fused(members) for members in self.buckets)

    @cached_property
    def collective(self) -> OperationKind:
        """Collective of each bucket. Along axes, a broadcast is the sum of the bytes of the root
        and of zeros, which is exact for any dtype."""
        if self.operator == "broadcast_from" and self.place.axes:
            return "all_reduce"
        return _COLLECTIVES[self.operator]

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtype of each unit."""
        return tuple(getattr(torch, unit.dtype) for unit in self.units)

    @cached_property
    def inexact(self) -> tuple[int, ...]:
        """Positions of the differentiable units: floating and complex dtypes."""
        return tuple(k for k, d in enumerate(self.dtypes) if d.is_floating_point or d.is_complex)

    @cached_property
    def text(self) -> str:
        """Operator and leaves, for errors."""
        along = f" along {', '.join(self.place.axes)}" if self.place.axes else ""
        root = f" root {self.root}" if self.root >= 0 else ""
        name = f"{self.operator}{root}{along}"
        if not self.units:
            return f"{name} of no leaves"
        first, last = self.units[0].path, self.units[-1].path
        paths = repr(first) if len(self.units) == 1 else f"{first!r} .. {last!r}"
        count = counted(len(self.units), "leaf")
        return f"{name} of {count} ({paths})"

    @cached_property
    def details(self) -> list[object]:
        """Values that must be equal on all ranks that meet, as JSON."""
        place = [self.place.axes, self.place.size]
        return [self.operator, place, self.root, self.tiled, self.units, self.buckets]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the details; equal on ranks that may run together."""
        return hashlib.sha256(json.dumps(self.details).encode()).digest()

    @cached_property
    def transposed(self) -> OperatorProgram:
        """The adjoint over the differentiable units. Its inputs are this program's outputs."""
        adjoint = self.differentiable._as(TRANSPOSES[self.operator])
        if adjoint is not self.differentiable:
            adjoint.__dict__["transposed"] = self.differentiable
        return adjoint

    @cached_property
    def differentiable(self) -> OperatorProgram:
        """The same operator over the differentiable units."""
        if len(self.inexact) == len(self.units):
            return self
        number = {unit: k for k, unit in enumerate(self.inexact)}
        kept = [[number[k] for k in bucket if k in number] for bucket in self.buckets]
        return replace(
            self,
            units=tuple(self.units[k] for k in self.inexact),
            devices=tuple(self.devices[k] for k in self.inexact),
            buckets=tuple(tuple(bucket) for bucket in kept if bucket),
        )

    @cached_property
    def summing(self) -> OperatorProgram:
        """The sum of the differentiable units."""
        return self.differentiable._as("psum")

    @cached_property
    def averaging(self) -> OperatorProgram:
        """The mean of the differentiable units."""
        return self.differentiable._as("pmean")

    def batched(self, size: int) -> OperatorProgram:
        """The same operator over units with a leading axis of this size."""
        known = self._batched.get(size)
        if known is None:
            units = tuple(u._replace(shape=(size, *u.shape)) for u in self.units)
            known = replace(self, units=units, batch=(size, *self.batch))
            if len(self._batched) >= _MOST_SIZES:
                self._batched.clear()
            self._batched[size] = known
        return known

    @cached_property
    def _batched(self) -> dict[int, OperatorProgram]:
        return {}

    def _as(self, operator: Operator) -> OperatorProgram:
        return self if operator == self.operator else replace(self, operator=operator)

    def _fused(self, members: tuple[int, ...]) -> FusedBucket:
        units = [self.units[k] for k in members]
        numels = [unit.numel for unit in units]
        *offsets, numel = accumulate(numels, initial=0)
        layout = None
        if units[0].dtype in ITEM_BYTES:
            shapes = tuple(unit.shape for unit in units)
            strides = tuple(contiguous_strides(shape) for shape in shapes)
            layout = Layout(tuple(offsets), shapes, strides, numel)
        dtype, device = self.dtypes[members[0]], self.devices[members[0]]
        is_summed_broadcast = self.operator == "broadcast_from" and self.collective == "all_reduce"
        as_bytes = is_summed_broadcast or (self.operator in MOVES_ROWS and layout is None)
        return FusedBucket(members, dtype, device, numels, numel, layout, as_bytes)


def bucketed(
    units: Sequence[LeafSpec], devices: Sequence[torch.device], cap_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Units by bucket: of one dtype and device, in order. A bucket is closed when it reaches the
    cap. The last units come first, as their gradients do.

    >>> units = [LeafSpec("a", (3,), "float32"), LeafSpec("n", (), "int64")]
    >>> bucketed([*units, LeafSpec("z", (2,), "float32")], [torch.device("cpu")] * 3, 1024)
    ((1,), (0, 2))
    """
    kinds = [(unit.dtype, device) for unit, device in zip(units, devices, strict=True)]
    sizes = [unit.numel * getattr(torch, unit.dtype).itemsize for unit in units]
    return tuple(map(tuple, sorted(batches(kinds, sizes, cap_bytes), reverse=True)))


def batches(
    kinds: Sequence[Hashable], sizes_bytes: Sequence[int], cap_bytes: int
) -> list[list[int]]:
    """Positions by batch: of one kind, in order. A batch is closed when it reaches the cap.

    >>> batches("aabaa", [4, 4, 4, 4, 4], 8)
    [[0, 1], [3, 4], [2]]
    """
    found: dict[Hashable, list[list[int]]] = {}
    filled: dict[Hashable, int] = {}
    for position, (kind, size) in enumerate(zip(kinds, sizes_bytes, strict=True)):
        if kind not in found or filled[kind] >= cap_bytes:
            found.setdefault(kind, []).append([])
            filled[kind] = 0
        found[kind][-1].append(position)
        filled[kind] += size
    return [batch for group in found.values() for batch in group]
