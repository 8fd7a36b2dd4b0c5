"""Backward passes of one step over virtual ranks; see [Note: virtual ranks].

Each backward pass is that of one virtual rank. Those within `no_sync` leave their gradients in
`.grad`, from where they are added to the sums of this rank. The last one takes the step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import Module

from fddp.core.text import counted
from fddp.errors import InternalError
from fddp.native.torch_private import queue_callback
from fddp.native.untraced import untraced
from fddp.runtime.contributions import Contributions
from fddp.runtime.results import Devices
from fddp.runtime.step import Step
from fddp.runtime.virtual_sums import VirtualSums
from fddp.sync.engine import Engine

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOT_CLEARED = (
    "a step over virtual ranks began with gradients in .grad, which are of no virtual rank; call "
    "zero_grad() before the first backward pass of each step"
)
_CHANGED = (
    "the parameters changed between the backward passes of one step over virtual ranks; change "
    "them between steps"
)
IN_CONTEXT = (
    "gradients in a context of distributed autograd can't be summed over virtual ranks; leave out "
    "virtual_ranks"
)


class MicroBatches:
    """Gradients of the virtual ranks that this rank carries, over the passes of one step.

    Errors are noted, and raised by `sums`, because the step of the other ranks has to end.
    """

    def __init__(self) -> None:
        self._sums: VirtualSums | None = None
        self._problem: Exception | None = None
        self._end: weakref.ref[partial[None]] | None = None  # callback at the end of a pass

    def reset(self) -> None:
        """Forget the passes of a step that has ended."""
        self._sums = self._problem = None

    def begin_pass(self, engine: Engine, leaves: Sequence[Tensor]) -> None:
        """Note a backward pass within `no_sync`, unless it is noted. Call `add` at its end."""
        if self._end is None or self._end() is None:
            self.check_cleared(leaves)
            # Freed with the graph task, if the pass is aborted.
            end = partial(self.add, engine, leaves)
            self._end = weakref.ref(end)
            queue_callback(end)

    def check_cleared(self, leaves: Sequence[Tensor]) -> None:
        """Note an error if a backward pass begins with gradients in place."""
        if any(leaf.grad is not None for leaf in leaves):
            self._problem = self._problem or RuntimeError(_NOT_CLEARED)

    @untraced()
    def add(self, engine: Engine, leaves: Sequence[Tensor]) -> None:
        """Add the gradients of a backward pass to the sums, and clear them. Warns of an error."""
        self._end = None
        try:
            sums = self._sums = self._sums or _new_sums(engine, leaves)
            if not sums.missing:
                raise RuntimeError(_wrong_number(engine, "more than"))
            sums.add(Contributions([leaf.grad for leaf in leaves], 1.0))
        except Exception as error:
            warnings.warn(f"the step over virtual ranks will fail: {error}", stacklevel=2)
            self._problem = self._problem or error
        for leaf in leaves:
            leaf.grad = None

    def sums(self, engine: Engine, step: Step, leaves: Sequence[Tensor]) -> VirtualSums:
        """Return the sums of all passes before the last, which takes the step.

        Raises:
            RuntimeError: the number of passes is wrong, parameters changed, or `.grad` was not
                cleared.
        """
        if self._problem is not None:
            raise self._problem
        sums = self._sums = self._sums or _new_sums(engine, leaves)
        if sums.missing:
            raise RuntimeError(_wrong_number(engine, "less than"))
        if sums.program is not step.program:
            raise RuntimeError(_CHANGED)
        return sums

    def used_names(self, names: Sequence[str]) -> frozenset[str]:
        """Return those of the leaves' names that an earlier pass of the step has used."""
        if self._sums is None:
            return frozenset()
        flags = zip(self._sums.program.plan.reduced, self._sums.used, strict=True)
        return frozenset(names[leaf] for leaf, flag in flags if flag)


def check_virtual(module: Module, *, delays: bool) -> None:
    """Check that nothing but the mean over virtual ranks depends on the number of ranks.

    Raises:
        ValueError: the module has running statistics, or parameters with a delayed all-reduce.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BATCH_NORMS) and part.track_running_stats:
            raise ValueError(
                f"the running statistics of {name or 'the module'} ({type(part).__name__}) would "
                f"depend on the number of ranks; pass track_running_stats=False, or average them "
                f"over virtual ranks by a GradSync (docs/guide/virtual.md)"
            )
    if delays:
        raise ValueError(
            "parameters with a delayed all-reduce are averaged over ranks, and virtual_ranks sums "
            "over virtual ranks; leave out one of the two"
        )


def _new_sums(engine: Engine, leaves: Sequence[Tensor]) -> VirtualSums:
    devices = Devices()
    for bucket in engine.program.buckets:
        devices[bucket.device] = leaves[bucket.leaves[0]].device
    return VirtualSums(engine.program, engine._pool, devices)


def _wrong_number(engine: Engine, found: str) -> str:
    run = engine.program.carried
    if not run:
        raise InternalError("a step over virtual ranks has none on this rank")
    return (
        f"a step took {found} {counted(len(run), 'backward pass')} on this rank, which carries "
        f"the virtual ranks {run[0]} to {run[-1]}; run one for each, all but the last within "
        f"no_sync()"
    )
