"""Weights of the backward passes of a wrapped module.

[Note: weighted passes]
Within `weighted(n)`, the hooks of the parameters multiply each gradient by n before it is
accumulated. So `.grad` holds the sum of n times the gradient over the passes of a step so far. The
step packs it as it is, and reports the sum of n as this rank's weight. A rank that drops its
gradients, because n is 0, still counts them: its parameters were used, with zeros.

That sum of n belongs to the gradients in `.grad`, which loops may clear at any time, and to which
passes outside of a block add. So each weighted pass, before its first gradient, compares the
gradients with those that the pass before has left, by identity and version. If they are others,
they must be zero, and the sum begins anew. Only then are values read.

What depends on data, such as a weight that is NaN, is noted, and fails the step, which the other
ranks take in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.core.text import leaf_text
from fddp.ddp.arguments import Arguments
from fddp.ddp.parameters import HookedParameters
from fddp.ddp.weak_callback import weak_callback
from fddp.errors import WeightError
from fddp.runtime.inputs import checked_weight

IN_CONTEXT = (
    "gradients in a context of distributed autograd can't be weighted; leave out weighted(), or "
    "use fddp.GradSync, which takes weight="
)
_NESTED = (
    "weighted() was entered within another block of weighted() of the same module; end the first "
    "block before the next one: each has the passes of one micro-batch"
)
_OUTSIDE = (
    "a forward pass ran within a block of weighted(), and its backward pass outside, where it has "
    "no weight; call backward() within the block, too"
)
_MIXED = (
    "a backward pass without a weight ends a step that began with weighted ones, whose gradients "
    "are in .grad; run each backward pass of the step in a block of weighted()"
)
_GRAPH = (
    "create_graph=True and weighted() can't be combined: .grad would have the graph of a weighted "
    "gradient; use fddp.GradSync with weight_fn, and fddp.pmean for second derivatives"
)
_FORWARD_OUTSIDE = (
    "within join(), a block of weighted() has to contain the forward pass, too: it announces the "
    "weight to ranks without input, which then count 0"
)


class Weights:
    """Sum of the weights of the passes whose gradients are in `.grad`; see [Note: weighted passes].

    Attributes:
        some: True if a pass of any rank has a weight, by the last vote in `join`.
    """

    def __init__(self) -> None:
        self.some = False
        self._on_first = weak_callback(self._before_first)
        self._parameters: Callable[[], HookedParameters | None] = lambda: None  # a weak reference
        self._sum = 0.0
        # Gradients after the last pass, and their versions. They are kept, because another tensor
        # could take the place in memory of one that is freed.
        self._left: list[tuple[Tensor, int]] = []
        self._problem: WeightError | None = None  # of these gradients
        self._is_outside = False  # a pass is missing in the block of its forward pass
        # Of the block.
        self._own: float | None = None  # its weight; None outside
        self._error: WeightError | None = None  # of the weight that was given
        self._has_forward = False  # a forward pass ran within
        self._has_pass = False  # a backward pass did
        self._is_counted = False  # its weight is in the sum, which no step has taken since

    @property
    def is_on(self) -> bool:
        """True within a block."""
        return self._own is not None

    def follow(self, parameters: HookedParameters) -> None:
        """Weigh the gradients of these parameters from now on, and of no others."""
        if (before := self._parameters()) is not None:
            before.hooks.weigh(1.0, None)
        self._parameters = weakref.ref(parameters)
        if self._own is not None:
            parameters.hooks.weigh(self._own, self._on_first)

    @contextmanager
    @entrance
    def block(self, weight: float | Tensor) -> Iterator[None]:
        """Weigh backward passes; see `DistributedDataParallel.weighted`."""
        if self._own is not None:
            raise WeightError(_NESTED)
        self._has_forward = self._has_pass = self._is_counted = False
        try:
            self._own, self._error = checked_weight(weight), None
        except WeightError as error:
            self._own, self._error = 0.0, error.with_traceback(None)
        if (parameters := self._parameters()) is not None:
            self.follow(parameters)
        try:
            yield
        except BaseException:
            self.forget()
            raise
        else:
            self._leave()
        finally:
            self._own = None
            if (parameters := self._parameters()) is not None:
                parameters.hooks.weigh(1.0, None)

    def note_votes(self, some: bool) -> None:
        """Set `some`."""
        self.some = some

    def note_forward(self) -> None:
        """Note a forward pass with gradients enabled."""
        self._has_forward = True

    def take(self, *, joining: bool) -> float | None:
        """Return the weight of a step that takes the gradients, those of the running pass included;
        None if it has none.

        Raises:
            WeightError: the weight is invalid, or not that of all gradients; or this rank did not
                announce it, while `joining`.
        """
        if self._own is not None:
            self._count(self._own)
            if joining and not self._has_forward:
                self._note(WeightError(_FORWARD_OUTSIDE))
        elif self._left or self._is_outside or self._problem is not None:
            self._compare()
            if self._left:
                self._note(WeightError(_MIXED))
            elif self._is_outside:
                self._note(WeightError(_OUTSIDE))
        else:
            return None
        weight, problem = self._sum, self._problem
        self.forget()
        if problem is not None:
            raise problem
        return weight if self._own is not None else None

    def forget(self) -> None:
        """Forget all passes: a step has taken them, or they are given up."""
        self._left, self._sum, self._problem, self._is_outside = [], 0.0, None, False
        self._is_counted = False

    def _before_first(self) -> None:
        """Count the running pass, before its first gradient is accumulated."""
        if self._own is not None:
            self._count(self._own)
            if torch.is_grad_enabled():
                self._note(WeightError(_GRAPH))

    def _count(self, weight: float) -> None:
        """Add the weight of the block to the sum, unless it is there."""
        if self._is_counted:
            return
        self._is_counted = self._has_pass = True
        self._compare()
        self._sum += weight
        if self._error is not None:
            self._note(self._error)

    def _compare(self) -> None:
        """Begin anew if `.grad` holds other gradients than those that the last pass has left."""
        named = self._named_grads()
        if len(named) == len(self._left) and all(
            grad is left and grad._version == version
            for (_, grad), (left, version) in zip(named, self._left, strict=True)
        ):
            return
        self._left, self._sum, self._problem = [], 0.0, None
        for name, grad in named:
            if (grad._values() if grad.is_sparse else grad).any():
                self._problem = WeightError(
                    f"{leaf_text(name)} had a gradient before the first weighted backward pass of "
                    f"a step, or was changed since: call zero_grad() before that pass, run each "
                    f"backward pass of the step in a block of weighted() of its own, and change "
                    f"gradients after the last one"
                )
                return

    def _leave(self) -> None:
        """End the block without an error."""
        if self._is_counted:
            self._left = [(grad, grad._version) for _, grad in self._named_grads()]
            self._sum = self._sum if self._left else 0.0
        self._is_outside = self._has_forward and not self._has_pass

    def _note(self, problem: WeightError) -> None:
        self._problem = self._problem or problem

    def _named_grads(self) -> list[tuple[str, Tensor]]:
        parameters = self._parameters()
        if parameters is None:
            return []
        rows = zip(parameters.names, parameters.leaves, strict=True)
        return [(name, leaf.grad) for name, leaf in rows if leaf.grad is not None]


def check_weighable(arguments: Arguments, *, delays: bool, steps_early: bool) -> None:
    """Raise a ValueError if passes of a wrapper can't have a weight.

    Args:
        arguments: those of the wrapper.
        delays: True if parameters have a delayed all-reduce.
        steps_early: True if an optimizer steps in backward.
    """
    if delays:
        what = "delay_all_reduce_named_params"
        reason = "these parameters are averaged apart from the step; leave out one of the two"
    elif arguments.virtual_ranks is not None:
        what = "virtual_ranks"
        reason = (
            "virtual ranks of a wrapped module have equal weights; use fddp.GradSync, whose "
            "weight_fn gives each of them a weight"
        )
    elif arguments.report == "next":
        what = "report='next'"
        reason = (
            "results are used before the total weight is known; make the wrapper with report='now'"
        )
    elif steps_early:
        what = "an optimizer that steps in backward"
        reason = (
            "it would step before the total weight is known; call optimizer.step() after backward"
        )
    else:
        return
    raise ValueError(f"weighted() and {what} can't be combined: {reason}")
