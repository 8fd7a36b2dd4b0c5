"""The compiled leaves of a differentiated call, typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fddp.core.plan.leaf import LeafSpec
from fddp.native import extension as extension
from fddp.native.layout import Layout


class GraphView(Protocol):
    """What a walk over the graph behind a loss tells before backward runs.

    Attributes:
        used: for each leaf, whether the graph leads to it.
        foreign: leaves in the graph that do not belong to the set.
        opaque: whether a node is written in Python and may run backward passes of its own.
        whole: whether the pass must run through the whole graph, because such a node refuses to be
            told which leaves to serve, or leads to none of the set that the graph shows.
    """

    used: list[bool]
    foreign: list[Tensor]
    opaque: bool
    whole: bool


class Members(Protocol):
    """For each bucket, its leaves; opaque to Python."""


class NativePacking(Protocol):
    """How one bucket's leaves get into its buffer; opaque to Python."""


class EagerSlot(Protocol):
    """Where a large leaf's gradient is packed as soon as it arrives; opaque to Python."""


class GraphInfo(Protocol):
    """What is known of a backward pass before it runs.

    Attributes:
        used: for each leaf, whether a gradient may come.
        opaque: whether gradients may come that nothing shows beforehand.
    """

    @property
    def used(self) -> Sequence[bool]: ...

    @property
    def opaque(self) -> bool: ...


class GradientCounter(Protocol):
    """Leaves that announce their gradients (csrc/autograd/gradient_counter.h)."""

    leaves: list[Tensor]

    def arm(
        self,
        members: Members,
        expected: Sequence[int],
        eager: Sequence[EagerSlot],
        on_bucket: Callable[[int], None],
    ) -> None:
        """Starts counting gradients; `on_bucket(b)` is called when bucket b has all it expects."""

    def disarm(self) -> None:
        """Stops counting and lets go of the callback."""

    def take(self, bucket: int, keep: bool) -> list[Tensor | None]:
        """Hands over a bucket's gradients; what arrives from now on is late."""

    def pack(
        self, bucket: int, buffer: Tensor, packing: NativePacking, keep: bool, scale: float
    ) -> float:
        """As `take`, and packs all of them that are not there already, times `scale`, into the
        bucket's memory on the CPU; a bound on the magnitudes of all, as `pack_`."""

    def used(self) -> list[bool]:
        """For each leaf, whether a gradient came."""

    def late(self) -> list[bool]:
        """For each bucket, whether a gradient came after `take`."""

    def counts(self) -> list[int]:
        """For each leaf, how many gradients came."""

    def arrivals(self) -> list[int]:
        """Leaves in the order of their gradients, repeats included."""

    def arrival_times(self) -> list[float]:
        """When each of these gradients came, in seconds on the clock of `time.perf_counter`."""

    def arrival_count(self) -> int:
        """How many gradients came."""

    def take_one(self, leaf: int) -> Tensor | None:
        """Hands over one leaf's gradient."""


class LeafSet(GradientCounter, Protocol):
    """Fresh autograd leaves over parameters (csrc/autograd/leaves.cpp)."""

    def inspect(self, loss: Tensor) -> GraphView:
        """Walks the graph behind a loss."""


class ParamSet(GradientCounter, Protocol):
    """Parameters that live across steps; see [Note: parameter hooks] (csrc/autograd/params.cpp)."""

    def watch(self, on: bool) -> None:
        """Whether a backward pass opens a step, by calling `on_begin`."""

    def intact(self) -> bool:
        """Whether the hooks are where gradients will arrive."""

    def reset_used(self) -> None:
        """Reset `used` to False for all parameters."""

    def aliases_buffer(self, leaves: Sequence[int], buffer: Tensor, layout: Any) -> bool:
        """Return True if the gradients of `leaves` are slices of `buffer`, as far as they exist,
        and nothing else refers to its memory."""

    def assign(self, results: Sequence[Tensor | None], replace: bool) -> None:
        """Assign `results` as gradients: in place where a gradient existed before the step, unless
        `replace` is set. None keeps the previous gradient."""

    def restore(self) -> None:
        """Restore, after a failed step, the gradients that existed before it."""


class LeafTypes(Protocol):
    """What the leaves of a tree must be."""

    def first_mismatch(self, leaves: list[Any], differentiable: bool) -> int:
        """Return the position of the first leaf that is not a tensor of its shape and dtype, or -1.

        None matches, unless `differentiable`: then reduced leaves must be present, and must not be
        inference tensors. A leaf that is not reduced mismatches only by another floating dtype.
        """

    def first_differentiated(self, leaves: list[Any], graphs: bool) -> int:
        """Position of the first leaf with derivatives that a result without any would cut off, or
        -1: a tangent of forward mode or, with `graphs`, a graph behind it."""


@cache
def leaf_set_type() -> Callable[[Sequence[Tensor | None]], LeafSet]:
    """Constructor of `LeafSet(params)`: one leaf for each parameter, none of which may be None,
    over its memory."""
    return cast("Callable[[Sequence[Tensor | None]], LeafSet]", extension.load().LeafSet)


def param_set(params: Sequence[Tensor], on_begin: Callable[[], None]) -> ParamSet:
    """Hooks parameters; `on_begin` is called before the first gradient of a step, and must not
    raise, nor lead back to the set."""
    return cast(ParamSet, extension.load().ParamSet(params, on_begin))


def serves_some() -> bool:
    """Whether the backward pass that runs was told which leaves to serve (`autograd.grad`)."""
    return cast(bool, extension.load().has_explicit_inputs())


def distributed_context() -> int | None:
    """The context of distributed autograd that the backward pass which runs belongs to."""
    return cast("int | None", extension.load().distributed_context())


@cache
def eager_slot_type() -> Callable[[int, Tensor, Any, float], EagerSlot]:
    """Constructor of `EagerSlot(leaf, buffer, layout, scale)`: the gradient of a leaf is packed on
    arrival into the only slice of a compiled layout, times `scale`."""
    return cast("Callable[[int, Tensor, Any, float], EagerSlot]", extension.load().EagerSlot)


def members(leaves: Sequence[Sequence[int]]) -> Members:
    """Bucket members in compiled form."""
    return cast(Members, extension.load().BucketMembers(leaves))


def packing(
    together: Sequence[int], layout: Layout, early: Sequence[tuple[int, Layout]]
) -> NativePacking:
    """Compiled form of which positions of a bucket are packed together, and where, and of where
    each of the others lies."""
    slots = [(position, slot.native) for position, slot in early]
    return cast(NativePacking, extension.load().BucketPacking(together, layout.native, slots))


def leaf_types(specs: Sequence[LeafSpec]) -> LeafTypes:
    """What the leaves of a plan must be, in compiled form."""
    dtypes = [getattr(torch, spec.dtype, None) for spec in specs]
    return cast(
        LeafTypes,
        extension.load().LeafTypes(
            [spec.shape for spec in specs],
            [dtype if isinstance(dtype, torch.dtype) else None for dtype in dtypes],
            [spec.reducible for spec in specs],
        ),
    )
