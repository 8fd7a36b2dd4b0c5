"""Inputs and contributions of the virtual ranks that a rank carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.text import counted
from fddp.errors import InternalError, TreeMismatchError
from fddp.runtime.contributions import Contributions
from fddp.runtime.inputs import check_no_derivatives, checked_weight, matched_leaves
from fddp.runtime.step import Step
from fddp.runtime.virtual_sums import VirtualSums
from fddp.sync.rounds import EXHAUSTED
from fddp.tree.foreign import ForeignTreeDef
from fddp.tree.pytree import TreeDef


class VirtualBatches:
    """Inputs of the virtual ranks that this rank carries; made by `GradSync.virtual_batches`.

    Attributes:
        ranks: virtual ranks that this rank carries.
    """

    def __init__(self, ranks: range, batches: Callable[[int], Any] | Sequence[Any]) -> None:
        self.ranks = ranks
        is_sequence = hasattr(batches, "__getitem__") and not isinstance(batches, Mapping)
        if not (callable(batches) or (is_sequence and hasattr(batches, "__len__"))):
            raise TypeError(
                f"virtual_batches takes a function of a virtual rank, or a sequence with one input "
                f"for each of this rank's, got a {type(batches).__name__}"
            )
        if not callable(batches) and len(batches) != len(ranks):
            raise ValueError(
                f"this rank carries {counted(len(ranks), 'virtual rank')}, {ranks[0]} to "
                f"{ranks[-1]}, and got {counted(len(batches), 'batch')}; pass one for each, or a "
                f"function of the virtual rank"
            )
        self._batches = batches

    def of(self, virtual_rank: int) -> Any:
        """Input of a virtual rank; for a function, its result."""
        if callable(self._batches):
            return self._batches(virtual_rank)
        return self._batches[virtual_rank - self.ranks[0]]

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Any]:
        return map(self.of, self.ranks)

    def __repr__(self) -> str:
        return f"VirtualBatches(v{self.ranks[0]} to v{self.ranks[-1]})"


def arguments_of(
    virtual_rank: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a loss function for one virtual rank."""

    def own(value: Any) -> Any:
        return value.of(virtual_rank) if isinstance(value, VirtualBatches) else value

    return tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}


def check_batches(values: Sequence[Any], carried: range) -> None:
    """Check that arguments have inputs of the virtual ranks that this rank carries.

    Raises:
        TypeError: there are none.
        ValueError: they are of other virtual ranks, as after a rebuild.
    """
    batches = [value for value in values if isinstance(value, VirtualBatches)]
    if not batches and not any(value is EXHAUSTED for value in values):
        raise TypeError(
            f"a GradSync with virtual ranks needs an input for each that this rank carries, "
            f"{carried[0]} to {carried[-1]}; pass sync.virtual_batches(batch_of), or "
            f"fddp.EXHAUSTED"
        )
    for other in batches:
        if other.ranks != carried:
            raise ValueError(
                f"the inputs are of virtual ranks {other.ranks[0]} to {other.ranks[-1]}, and this "
                f"rank carries {carried[0]} to {carried[-1]}; make them with virtual_batches of "
                f"this GradSync"
            )


def gathered_trees(
    step: Step, trees: Any, weight: float | Sequence[float]
) -> tuple[VirtualSums, list[Tensor | None], float, TreeDef]:
    """Return the sums of trees of gradients, one for each virtual rank of this rank but the last,
    and the leaves, weight and structure of the last.

    Raises:
        TypeError, ValueError: there is not one tree and one weight for each virtual rank, or the
            call is another than `sync(grads)` and `reduce_scatter`.
        TreeMismatchError: a tree has other leaves than the plan, or another structure.
        WeightError: a weight is invalid.
    """
    if step.method not in (Method.CALL, Method.REDUCE_SCATTER):
        raise ValueError(
            f"{step.method.text} has one tree of gradients, and a GradSync with virtual ranks one "
            f"for each; use sync(sync.virtual_batches(grads_of))"
        )
    check_batches([trees], step.program.carried)
    if not isinstance(trees, VirtualBatches):
        raise TypeError("pass weight=0 with the gradients instead of fddp.EXHAUSTED")
    weights = [*weight] if isinstance(weight, Sequence) else [weight] * len(trees)
    if len(weights) != len(trees):
        raise ValueError(
            f"got {counted(len(weights), 'weight')} for {counted(len(trees), 'virtual rank')} of "
            f"this rank; pass one for each, or a single number"
        )
    sums: VirtualSums | None = None
    structure: TreeDef | None = None
    leaves: list[Tensor | None] = []
    checked = 0.0
    for tree, own_weight in zip(trees, weights, strict=True):
        leaves, treedef = matched_leaves(tree, step.program, "gradients")
        if structure is not None and treedef != structure:
            raise TreeMismatchError(
                f"the gradients of virtual ranks differ in structure: {structure} and {treedef}"
            )
        structure = treedef
        if isinstance(treedef, ForeignTreeDef):
            # Other ranks may be in `value_and_grad`; JAX differentiates before the step.
            step.leave_method()
        check_no_derivatives(leaves, step.program, "gradients", graphs=True)
        step.note_devices(leaves)
        sums = sums or VirtualSums(step.program, step.pool, step.devices)
        checked = checked_weight(own_weight)
        if sums.missing:
            sums.add(Contributions(leaves, checked))
    if sums is None or structure is None:
        raise InternalError("this rank carries no virtual rank")
    return sums, leaves, checked, structure
