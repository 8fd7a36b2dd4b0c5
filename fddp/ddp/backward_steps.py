"""Backward passes of a wrapped module: where a step begins and where it ends.

[Note: the end of backward]
A callback queued in the autograd engine runs at the end of the graph task that queued it.
Re-entrant checkpointing runs tasks within tasks: gradients of its parameters arrive before the
outer task has ended. So hooks on the module's outputs queue the end, in the task that reaches them,
which is the outermost task that involves the module. If an output hides its tensors, the first
gradient queues the end. Within re-entrant checkpoints, one backward pass then ends in several
steps. This is correct, too: averaging gradients that are already averages does not change them.

A rank whose backward reaches an output but no parameter takes part without gradients. A rank whose
backward reaches no output can't know of the others' step, and they time out. From a forward pass
until the end of a step through its outputs, any gradient belongs to a step, wherever it comes from,
because the loss may be computed elsewhere. After that step, gradients belong to a step only if an
output is reached again. So calling the module without its wrapper takes no step.

The hooks are compiled (`BackwardWatch`). The usual pass enters Python at its first gradient and at
its end only. If a pass is aborted, its graph task frees the end without running it.

[Note: manual finalization]
With manual finalization the end of backward leaves the step open, and `finalize` closes it. The
last bucket, which carries the control word, is sent in between, so that its all-reduce overlaps
other work. From then on the step can take no further gradient and report no failure. Within
`in_step` an exception has to reach the other ranks, so there the last bucket is sent by `finalize`.
A hook within backward may call `finalize`, too, if every parameter has its gradients.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fddp.ddp.request import ModuleRequest
from fddp.ddp.step_runner import StepRunner
from fddp.ddp.weak_callback import weak_callback
from fddp.errors import TransformError
from fddp.native.backward_watch import backward_watch, has_explicit_inputs, is_compiled_backward
from fddp.native.profiling import is_profiled
from fddp.sync.engine import Engine

_COMPILED = (
    "compiled autograd runs a backward pass of a DistributedDataParallel, and calls none of the "
    "hooks by which it averages gradients; run backward without compiled autograd, or call it "
    "within `with ddp.no_sync():` for the gradients of this rank alone"
)
_CAPTURED = (
    "torch.autograd.grad was called for parameters of a DistributedDataParallel, which averages "
    "gradients only in backward(); use fddp.GradSync(params).value_and_grad(loss_fn) for their "
    "mean, or call it within `with ddp.no_sync():` for the gradients of this rank alone"
)

_ABORTED = (
    "backward was aborted on this rank, where its error was raised; use `with ddp.in_step():` to "
    "report that error to all ranks"
)
_NOT_FINALIZED = (
    "Expected to have finalized the prior backward pass before starting a new one; call "
    "finalize_backward() after each backward pass, as require_manual_backward_finalization is set"
)


@dataclass
class Switch:
    """Settings shared by a wrapper and its driver.

    Attributes:
        is_on: True while backward passes synchronise gradients.
        is_manual: True if `finalize` closes steps; see [Note: manual finalization].
        in_step: True within `in_step`.
    """

    is_on: bool = True
    is_manual: bool = False
    in_step: bool = False


@dataclass
class Suspension:
    """State of a step between backward and `finalize`.

    Attributes:
        ended_s: time at which backward ended, in seconds of `perf_counter`; None if no step is
            suspended.
        arrived: number of gradients when the last bucket was sent; None if it was not.
        is_active: True if a step is suspended.
    """

    ended_s: float | None = None
    arrived: int | None = None

    def __post_init__(self) -> None:
        self.is_active = self.ended_s is not None

    def check_inactive(self) -> None:
        """Raise a RuntimeError if a step waits for `finalize`."""
        if self.is_active:
            raise RuntimeError(_NOT_FINALIZED)


class BackwardDriver:
    """Begins a step at the first gradient of a backward pass, and ends it with the pass.

    Attributes:
        runner: runs the steps.
        passes: observes backward passes; calls `on_first_grad`, `on_abort` and `finish`.
        is_stopped: True if gradients are left alone.
        suspension: the step that waits for `finalize`, if there is one.
    """

    def __init__(self, runner: StepRunner, switch: Switch) -> None:
        self.runner = runner
        self.is_stopped = False
        self.suspension = Suspension()
        self._switch = switch
        self._lock = threading.RLock()
        self._context: int | None = None  # of distributed autograd
        self._handles: list[RemovableHandle] = []
        on_output = weak_callback(self.on_output_grad)
        self.passes = backward_watch(self, switch, self._lock, on_output)
        self.passes.asks_driver = self._decides_each_pass
        runner.set_parameters(self.passes)

    @property
    def engine(self) -> Engine:
        """The engine, which owns the plan. Changed parameters bring a new one."""
        return self.runner.engine

    # Forward

    def begin_forward(self) -> None:
        """Prepare for a forward pass, which may be a checkpoint's, within a backward pass."""
        runner = self.runner
        if runner.work and torch._C._current_graph_task_id() < 0:
            runner.wait_for_work()
        if not runner.is_begun:
            runner.release_memory()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.passes.expect_grads(False)

    def expect(self, outputs: list[Tensor]) -> None:
        """Take a step in backward passes through these outputs of a forward pass.

        Until one of them has ended, any gradient of a parameter belongs to a step.
        """
        for leaf in self.passes.expect_outputs(outputs, not self.is_stopped):
            # A leaf may be an output of the next forward pass, too.
            handle: RemovableHandle = leaf.register_hook(  # type: ignore[no-untyped-call]
                self.passes.reach_output
            )
            self._handles.append(handle)

    def change(self, request: ModuleRequest) -> None:
        """Replace the parameters; see [Note: changed parameters]."""
        self.suspension.check_inactive()
        self.passes.watch(False)
        self.runner.change_parameters(request, self.passes)

    # Backward

    def on_output_grad(self) -> None:
        """Decide whether a backward pass that has reached an output takes a step.

        `passes` takes it without this call if it is sure to; see `backward_watch`.

        Raises:
            TransformError: the pass would leave parameters with this rank's own gradients.
            RuntimeError: a step waits for `finalize`.
        """
        with self._lock:
            if self._switch.is_on and not self.is_stopped:
                self.suspension.check_inactive()
                if is_compiled_backward():
                    raise TransformError(_COMPILED)
                has_inputs = has_explicit_inputs()
                if has_inputs and self.runner.parameters.are_captured():
                    raise TransformError(_CAPTURED)
                self._queue_end(required=not has_inputs)
                self.passes.note_output()

    def on_first_grad(self, context: int | None) -> None:
        """Open a step, before the first gradient of a backward pass is accumulated.

        Args:
            context: the context of distributed autograd that receives the gradients, if any.
        """
        with self._lock:
            if not self._switch.is_on:
                return
            self._queue_end(required=True)
            if self.runner.step is None:
                self._context = context
                if context is None:
                    self.runner.open()
                else:
                    self.runner.parameters.hooks.begin()

    def _queue_end(self, *, required: bool) -> None:
        """Queue the end of the step; see `finish`."""
        if not self.passes.queue_end(required):
            self.abort_stale_step()
            self.passes.queue_end(required)

    def on_abort(self) -> None:
        """Restore the gradients when a backward pass is aborted.

        The loop may clear or keep them before the next forward pass, which completes the step.
        """
        with self._lock:
            if not self.passes.is_queued:
                self._forget_pass()
                self.runner.restore_grads()

    def finish(self, *, required: bool) -> None:
        """Close the step, and make its results the gradients.

        Args:
            required: True if a step is taken even if no gradient came.

        Raises:
            As `Engine.finish`. The gradients are then those from before, or this rank's own.
        """
        runner = self.runner
        # The lock is entered twice if nobody profiles, which has no effect.
        scope = torch.profiler.record_function("fddp.finish") if is_profiled() else self._lock
        with self._lock, scope:
            self.passes.forget_end()
            try:
                if self._context is not None:
                    runner.open_distributed(self._context)
                elif required and not runner.is_begun:
                    runner.open()
                if runner.is_begun:
                    runner.finish(self.passes.note_step(), self.suspension.ended_s)
            except BaseException as error:
                runner.recorder.set_error_and_log(f"{type(error).__name__}: {error}")
                raise
            finally:
                self.passes.watch(self.passes.expects_grads)
                self._reset()

    def _reset(self) -> None:
        self.runner.reset()
        if self.suspension.is_active:
            self._set_suspension(Suspension())
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._context = None
        self.passes.forget_output()

    def _set_suspension(self, suspension: Suspension) -> None:
        self.suspension = suspension
        self.passes.asks_driver = self._decides_each_pass

    @property
    def _decides_each_pass(self) -> bool:
        """True if `on_output_grad` decides about every backward pass that reaches an output."""
        return self.is_stopped or self.suspension.is_active

    # Failures

    def publish_failure(self, error: BaseException) -> None:
        """Publish an error to ranks that wait in operators of the step which `fail` will end."""
        with self._lock:
            if self.passes.is_queued:
                return
            step = self.runner.step
            number = self.engine.step if step is None else step.number
            self.engine.publish_step_failure(number, error)

    def fail(self, error: BaseException) -> None:
        """End the other ranks' step with an error of this rank.

        Does nothing within a backward pass that still runs.

        Raises:
            As `Engine.finish`: `error` if the other ranks received it.
        """
        with self._lock:
            if self.passes.is_queued:
                return
            self.passes.forget_end()
            self.runner.fail(error)
            drop_step(self)

    @property
    def is_broken_off(self) -> bool:
        """True if a backward pass was aborted before the end of its step, which the other ranks
        take even if no gradient had come; also if the step waits for `finalize`."""
        with self._lock:
            passes = self.passes
            is_owed = self.suspension.is_active or (passes.is_aborted and passes.is_required)
            return (is_owed or self.runner.step is not None) and not passes.is_queued

    def abort_stale_step(self) -> None:
        """Complete the step of a backward pass that was aborted, so that no rank waits for it."""
        if self.runner.step is None and not self.passes.is_aborted:
            return
        with self._lock:
            if self.passes.is_queued or self.suspension.is_active:
                return
            is_broken_off = self.is_broken_off
            self.passes.forget_end()
            if not is_broken_off:
                return
            try:
                self.runner.fail(RuntimeError(_ABORTED))
                self.runner.close_step()
            except Exception as error:
                warnings.warn(
                    f"the step of an aborted backward pass was given up on all ranks: {error}",
                    stacklevel=4,
                )
                self.runner.restore_grads()
            finally:
                self._reset()

    def stop(self) -> None:
        """Leave all gradients alone from now on."""
        self.is_stopped = True
        self.passes.watch(False)
        self.passes.asks_driver = True

    def close(self) -> None:
        """Free the communicator."""
        self.stop()
        self.engine.close("the wrapped module was closed")


def drop_step(driver: BackwardDriver) -> None:
    """Finish the collectives of a step, and restore the gradients from before it.

    Raises:
        Exception: as `Engine.finish`.
    """
    try:
        driver.runner.close_step()
    finally:
        driver.runner.restore_grads()
        driver.passes.expect_grads(False)
        driver._reset()
