"""Typed interface of the compiled autograd leaves and gradient counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NewType, Protocol, cast

import torch
from torch import Tensor

from fddp.core.plan.leaf import LeafSpec
from fddp.native import extension as extension
from fddp.native.backward_watch import BackwardWatch
from fddp.native.layout import Layout

Members = NewType("Members", object)
"""Leaves of each bucket, in compiled form."""

NativePacking = NewType("NativePacking", object)
"""Packing plan of one bucket, in compiled form."""

EagerSlot = NewType("EagerSlot", object)
"""Destination of a large leaf whose gradient is packed on arrival, in compiled form."""


class GraphView(Protocol):
    """Result of walking the autograd graph behind a loss before backward.

    Attributes:
        used: for each leaf, True if the graph leads to it.
        foreign: leaves in the graph that do not belong to the set.
        opaque: True if a node is written in Python and may run nested backward passes.
        whole: True if backward must run through the whole graph, because such a node does not
            support a restricted set of inputs, or leads to none of the leaves of the set.
    """

    used: list[bool]
    foreign: list[Tensor]
    opaque: bool
    whole: bool


class GraphInfo(Protocol):
    """Prediction for a backward pass before it runs.

    Attributes:
        used: for each leaf, True if a gradient may arrive.
        opaque: True if gradients may arrive that the graph does not show.
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
        """Start counting gradients. `on_bucket(b)` is called once bucket b has all it expects."""

    def on_home_streams(self, body: Callable[[], object]) -> None:
        """Call `body` on the streams of the step, for which the current ones then wait."""

    def disarm(self) -> None:
        """Stop counting and release the callback."""

    def take(self, bucket: int, keep: bool) -> list[Tensor | None]:
        """Return a bucket's gradients. Gradients that arrive later count as late."""

    def pack(
        self, bucket: int, buffer: Tensor, packing: NativePacking, keep: bool, scale: float
    ) -> float:
        """Take a bucket's gradients and pack those that are not packed yet, times `scale`, into
        the bucket's CPU memory. Return a bound on all magnitudes, as `pack_` does."""

    def used(self) -> list[bool]:
        """For each leaf, return True if a gradient arrived."""

    def all_used(self) -> bool:
        """Return True if a gradient arrived for every leaf."""

    def is_complete(self) -> bool:
        """Return True if a gradient arrived for every leaf, and none late."""

    def is_as_expected(self) -> bool:
        """Return True if each leaf received as many gradients as `arm` expected."""

    def late(self) -> list[bool]:
        """For each bucket, return True if a gradient arrived after `take`."""

    def counts(self) -> list[int]:
        """Return the number of gradients that arrived, by leaf."""

    def arrivals(self) -> list[int]:
        """Return the leaf of each gradient in order of arrival, repeats included."""

    def arrival_times(self) -> list[float]:
        """Return the arrival time of each gradient, in seconds of `time.perf_counter`."""

    def arrival_count(self) -> int:
        """Return the number of gradients that arrived."""

    def take_one(self, leaf: int) -> Tensor | None:
        """Return one leaf's gradient."""


class LeafSet(GradientCounter, Protocol):
    """Fresh autograd leaves over parameters (csrc/autograd/leaves.cpp)."""

    def inspect(self, loss: Tensor) -> GraphView:
        """Walk the graph behind a loss."""


class ParamSet(GradientCounter, Protocol):
    """Parameters that live across steps; see [Note: parameter hooks] (csrc/autograd/params.cpp)."""

    def count_undefined(self, on: bool) -> None:
        """Set whether an undefined gradient within a step stands for zeros. Otherwise it is
        ignored."""

    def hook_count(self) -> int:
        """Return the number of hooks where gradients arrive, those of other owners included."""

    def leave_out_hooks(self, on: bool) -> None:
        """Set whether users' hooks after accumulation are left out of backward passes that take no
        step; see [Note: hooks after accumulation] in csrc/autograd/accumulation_hooks.h."""

    def run_hooks(self) -> None:
        """Run the deferred hooks of parameters that `assign` has given a mean, after the step."""

    def begin(self, defer: bool) -> None:
        """Start a step, before its first gradient. It ends with `disarm`, with or without `arm`.
        If `defer`, users' hooks after accumulation run only when `run_hooks` is called."""

    def intact(self, params: list[Tensor]) -> bool:
        """Return True if the hooks are still where gradients of `params`, which were given to the
        constructor, will arrive."""

    def await_gradients(self, leaves: Sequence[bool]) -> None:
        """Let the first gradient of one of these leaves open a step, until one begins, although no
        output was reached. Empty: none."""

    def reset_used(self) -> None:
        """Reset `used` to False for all parameters."""

    def aliases_buffer(self, leaves: Sequence[int], buffer: Tensor, layout: Any) -> bool:
        """Return True if the gradients of `leaves` are slices of `buffer`, as far as they exist,
        and nothing else refers to its memory."""

    def assign(self, results: Sequence[Tensor | None], replace: bool) -> None:
        """Assign `results` as gradients: in place where a gradient existed before the step, unless
        `replace` is set. None keeps the previous gradient. New gradients have the strides that
        their parameters have now."""

    def restore(self) -> None:
        """Restore the gradients that existed before the step. No effect after `disarm`."""

    def forget(self) -> None:
        """Forget the gradients that existed before the step, which `restore` would restore."""


class LeafTypes(Protocol):
    """Compiled validation of the leaves of a tree."""

    def first_mismatch(self, leaves: list[Any], differentiable: bool) -> int:
        """Return the position of the first leaf that is not a tensor of its shape and dtype, or -1.

        None matches, unless `differentiable`: then reduced leaves must be present, and must not be
        inference tensors. A leaf that is not reduced mismatches only by another floating dtype.
        """

    def first_differentiated(self, leaves: list[Any], graphs: bool) -> int:
        """Return the position of the first leaf whose derivatives would be lost, or -1: one with a
        forward-mode tangent or, with `graphs`, with a graph behind it."""


@cache
def leaf_set_type() -> Callable[[Sequence[Tensor | None]], LeafSet]:
    """Return the constructor `LeafSet(params)`: one leaf for each parameter, none of them None,
    over its memory."""
    return cast("Callable[[Sequence[Tensor | None]], LeafSet]", extension.load().LeafSet)


def param_set(params: Sequence[Tensor], watch: BackwardWatch) -> ParamSet:
    """Register hooks on parameters, which announce the first gradient of a step to `watch`."""
    return cast(ParamSet, extension.load().ParamSet(params, watch))


def add_to_context(context: int, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add parameters with their gradients to a context of distributed autograd."""
    extension.load().add_to_context(context, grads)


@cache
def eager_slot_type() -> Callable[[int, Tensor, Any, float], EagerSlot]:
    """Return the constructor `EagerSlot(leaf, buffer, layout, scale)`: a leaf's gradient is packed
    on arrival, times `scale`, into the only slice of a compiled layout."""
    return cast("Callable[[int, Tensor, Any, float], EagerSlot]", extension.load().EagerSlot)


def members(leaves: Sequence[Sequence[int]]) -> Members:
    """Compile the lists of each bucket's leaves."""
    return Members(extension.load().BucketMembers(leaves))


def packing(
    together: Sequence[int], layout: Layout, early: Sequence[tuple[int, Layout]]
) -> NativePacking:
    """Compile the packing of a bucket: positions that are packed together, with their layout, and
    the position and layout of each leaf that is packed on arrival."""
    slots = [(position, slot.native) for position, slot in early]
    return NativePacking(extension.load().BucketPacking(together, layout.native, slots))


def leaf_types(specs: Sequence[LeafSpec]) -> LeafTypes:
    """Compile the validation of a plan's leaves."""
    dtypes = [getattr(torch, spec.dtype, None) for spec in specs]
    return cast(
        LeafTypes,
        extension.load().LeafTypes(
            [spec.shape for spec in specs],
            [dtype if isinstance(dtype, torch.dtype) else None for dtype in dtypes],
            [spec.reducible for spec in specs],
        ),
    )
