"""Steps of a wrapped module over virtual ranks; see [Note: virtual ranks].

Each backward pass is that of one virtual rank. Those within `no_sync` leave their gradients in
`.grad`, from where they are added to the sums of this rank. The last one takes the step.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch.autograd import Variable
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from fddp.core.protocol.calls import Method
from fddp.core.text import counted
from fddp.ddp.arguments import Arguments
from fddp.ddp.finalization import FinalizingDriver
from fddp.ddp.step_runner import StepRunner
from fddp.errors import InternalError
from fddp.runtime.contributions import BackwardContributions, TreeContributions
from fddp.runtime.results import Devices
from fddp.runtime.step import Step
from fddp.runtime.virtual_step import VirtualBackward, VirtualStep, VirtualSums

_NOT_CLEARED = (
    "a step over virtual ranks began with gradients in .grad, which are of no virtual rank; call "
    "zero_grad() before the first backward pass of each step"
)
_CHANGED = (
    "the parameters changed between the backward passes of one step over virtual ranks; change "
    "them between steps"
)
_IN_CONTEXT = (
    "gradients in a context of distributed autograd can't be summed over virtual ranks; leave out "
    "virtual_ranks"
)


class VirtualRunner(StepRunner):
    """Runs steps of a wrapped module over virtual ranks."""

    _sums: VirtualSums | None = None
    _problem: Exception | None = None

    def check_cleared(self) -> None:
        """Note an error if a backward pass begins with gradients in place."""
        if any(leaf.grad is not None for leaf in self.parameters.leaves):
            self._problem = self._problem or RuntimeError(_NOT_CLEARED)

    def add_micro_batch(self) -> None:
        """Add the gradients of a backward pass to the sums, and clear them.

        Warns of an error instead of raising it, because the step of the other ranks has to end; its
        own raises.
        """
        leaves = self.parameters.leaves
        try:
            sums = self._sums = self._sums or self._new_sums()
            if not sums.missing:
                raise RuntimeError(self._wrong_number("more than"))
            grads = [leaf.grad for leaf in leaves]
            sums.add(TreeContributions(sums.program, grads, 1.0))
        except Exception as error:
            warnings.warn(f"the step over virtual ranks will fail: {error}", stacklevel=2)
            self._problem = self._problem or error
        for leaf in leaves:
            leaf.grad = None

    def _new_sums(self) -> VirtualSums:
        engine, devices = self.engine, Devices()
        for bucket in engine.program.buckets:
            devices[bucket.device] = self.parameters.leaves[bucket.leaves[0]].device
        return VirtualSums(engine.program, engine._pool, engine.scale, devices)

    def _wrong_number(self, found: str) -> str:
        virtual, rank = self.engine.schedule.virtual, self.engine.transport.rank
        if virtual is None:
            raise InternalError("a runner of virtual ranks has none")
        run = virtual.runs[rank]
        return (
            f"a step took {found} {counted(len(run), 'backward pass')} on this rank, which carries "
            f"the virtual ranks {run[0]} to {run[-1]}; run one for each, all but the last within "
            f"no_sync()"
        )

    def _contributions(self, step: Step) -> BackwardContributions:
        if self._problem is not None:
            raise self._problem
        sums = self._sums = self._sums or self._new_sums()
        if sums.missing:
            raise RuntimeError(self._wrong_number("less than"))
        if sums.program is not step.program or not isinstance(step, VirtualStep):
            raise RuntimeError(_CHANGED)
        return VirtualBackward(step.program, weight=1.0, sums=sums)

    def open_distributed(self, context: int) -> None:
        """Fail a step whose gradients are in a context of distributed autograd."""
        self.step = self.engine.open(Method.MODULE, with_stats=False)
        self.step.fail(RuntimeError(_IN_CONTEXT))

    def fail_on_misuse(self, here: frozenset[str]) -> None:
        """As `StepRunner.fail_on_misuse`, for the parameters that any virtual rank has used."""
        used = set(here)
        if self._sums is not None:
            plan = self._sums.program.plan
            flags = zip(plan.reduced, self._sums.used, strict=True)
            used.update(self.parameters.names[leaf] for leaf, flag in flags if flag)
        super().fail_on_misuse(frozenset(used))

    def reset(self) -> None:
        """Drop the state of a step that has ended."""
        super().reset()
        self._sums = self._problem = None


class VirtualDriver(FinalizingDriver):
    """Driver of steps over virtual ranks: notes the backward passes within `no_sync`."""

    runner: VirtualRunner

    def __init__(self, runner: VirtualRunner, switch: Any) -> None:
        self._micro_end: weakref.ref[_MicroBatchEnd] | None = None
        super().__init__(runner, switch)

    _decides_each_pass = True

    def on_output_grad(self) -> None:
        """As `BackwardDriver.on_output_grad`, with a check of the gradients before the pass."""
        if self._notes_pass():
            super().on_output_grad()

    def on_first_grad(self, context: int | None) -> None:
        """As `BackwardDriver.on_first_grad`; also notes passes within `no_sync`."""
        if self._notes_pass():
            super().on_first_grad(context)

    def _notes_pass(self) -> bool:
        """Note that a backward pass has begun. Return True if it takes the step."""
        if self._switch.is_on:
            if not self.passes.is_queued and not self.runner.is_begun:
                self.runner.check_cleared()
            return True
        with self._lock:
            is_queued = self._micro_end is not None and self._micro_end() is not None
            if not (is_queued or self.is_stopped):
                self.runner.check_cleared()
                end = _MicroBatchEnd(self)
                self._micro_end = weakref.ref(end)
                Variable._execution_engine.queue_callback(end)
        return False


class _MicroBatchEnd:
    """Callback at the end of a backward pass within `no_sync`. Freed if the pass is aborted."""

    def __init__(self, driver: VirtualDriver) -> None:
        self._driver = driver

    def __call__(self) -> None:
        self._driver._micro_end = None
        self._driver.runner.add_micro_batch()


def check_virtual(module: Module, arguments: Arguments) -> None:
    """Check that nothing but the mean over virtual ranks depends on the number of ranks.

    Raises:
        ValueError: the module has running statistics, or parameters with a delayed all-reduce.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.track_running_stats:
            raise ValueError(
                f"the running statistics of {name or 'the module'} ({type(part).__name__}) would "
                f"depend on the number of ranks; pass track_running_stats=False, or average them "
                f"over virtual ranks by a GradSync (docs/guide/virtual.md)"
            )
    if arguments.delay_all_reduce_named_params is not None:
        raise ValueError(
            "parameters with a delayed all-reduce are averaged over ranks, and virtual_ranks sums "
            "over virtual ranks; leave out one of the two"
        )
