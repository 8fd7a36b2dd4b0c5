"""Steps of a wrapped module: where one begins and where it ends.

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
output is reached again, or if they reach a parameter of which no rank had one: the module may have
kept a tensor that leads there. Such a pass takes a step of its own. Otherwise calling the module
without its wrapper takes none.

The hooks are compiled (`BackwardWatch`). The usual pass enters Python at its first gradient and at
its end only. If a pass is aborted, its graph task frees the end without running it.
"""

from __future__ import annotations

import threading
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import Module

from fddp.core.entrance import entrance
from fddp.ddp.arguments import Options
from fddp.ddp.debug_logs import log_initialised
from fddp.ddp.hooked_outputs import HookedOutputs
from fddp.ddp.local_gradients import LocalGradientReports
from fddp.ddp.logging_data import Recorder
from fddp.ddp.mixed_precision import wire_dtype
from fddp.ddp.module_step import ModuleStep, check_finalized
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.request import current_request
from fddp.ddp.step_runner import StepRunner
from fddp.ddp.switch import Switch
from fddp.ddp.weak_callback import weak_callback
from fddp.errors import InternalError, TransformError
from fddp.hooks import cast as cast_hook
from fddp.native import extension
from fddp.native.torch_private import current_graph_task_id
from fddp.runtime.finish import send
from fddp.sync.engine import Engine
from fddp.transport import LoopbackGroup
from fddp.transport.torch_private import is_foreign

if TYPE_CHECKING:
    from fddp._C import BackwardWatch

_ABORT_S = 0.05
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


class Steps:
    """Begins a step at the first gradient of a backward pass, and ends it with the pass.

    Does not refer to the wrapper, which is freed as soon as nobody uses it.

    Args:
        module: the module whose parameters `watch` follows.
        options: settings of the wrapper.
        group: group to average over.
        watch: current parameters.
        switch: settings that may change.
        recorder: logger of the steps.

    Attributes:
        is_open: True after `open`.
        is_stopped: True if gradients are left alone.
        runner: runs the steps; set by `open`.
        passes: observes backward passes; calls `on_first_grad`, `on_abort` and `finish`.
        outputs: outputs of the last forward pass.
        lock: held while a step begins or ends.
        switch: as above.
    """

    runner: StepRunner

    def __init__(
        self,
        module: Module,
        options: Options,
        group: dist.ProcessGroup | LoopbackGroup,
        watch: ParameterWatch,
        switch: Switch,
        recorder: Recorder,
    ) -> None:
        self.is_open = self.is_stopped = False
        self.options = options
        self.switch = switch
        self.lock = threading.RLock()
        self._module_name = type(module).__name__
        self._group = group
        self._watch = watch
        self._recorder = recorder
        self._reports = LocalGradientReports(options.arguments.local_gradients)
        self.passes = extension.compiled.BackwardWatch(
            self, switch, self.lock, weak_callback(self.on_output_grad), self._reports
        )
        self.outputs = HookedOutputs(self.passes)
        self.passes.asks_driver = self._asks_always = options.arguments.virtual_ranks is not None
        self.passes.reports_local = self._reports.is_on

    @property
    def engine(self) -> Engine:
        """The engine, which owns the plan. Changed parameters bring a new one."""
        return self.runner.engine

    def open(self) -> Steps:
        """Open the communicator, unless it is open. Return `self`. The first is a collective call.

        Raises:
            PlanMismatchError: parameters or options differ between ranks.
        """
        if not self.is_open:
            try:
                request = current_request(self._watch, self.options, self._group)
                self.runner = StepRunner(request, self.passes, self._recorder, self.switch)
                _start_log(self, self._recorder, self._module_name, self._group)
                _reduce_narrowly(self.engine, self._recorder, self.options)
            except AttributeError as error:  # which a property must not raise
                raise InternalError(f"the steps could not be made: {error}") from error
            self.is_open = True
            self._reports.follow(self.runner.parameters.names, self.engine.transport.rank)
            if self.switch.in_step:
                self.engine.transport.enter_step(self.engine.step)
        return self

    # Forward

    def begin_forward(self) -> None:
        """Prepare for a forward pass, which may be a checkpoint's, within a backward pass."""
        runner = self.runner
        if runner.work and current_graph_task_id() < 0:
            runner.wait_for_work()
        if not runner.is_begun:
            runner.release_memory()
        self.outputs.clear()
        if not self.passes.is_queued:  # else a checkpoint runs forward again
            self.passes.expect_grads(False)

    def change(self) -> None:
        """Follow a change of the parameters; see [Note: changed parameters]."""
        request = current_request(self._watch, self.options, self._group)
        check_finalized(self.runner.current)
        self.passes.watch(False)
        self.runner.change_parameters(request)
        self._reports.follow(self.runner.parameters.names, self.engine.transport.rank)

    # Backward

    def on_output_grad(self) -> None:
        """Decide whether a backward pass that has reached an output takes a step.

        `passes` takes it without this call if it is sure to; see `BackwardWatch`.

        Raises:
            TransformError: the pass would leave parameters with this rank's own gradients.
            RuntimeError: a step waits for `finalize`.
        """
        with self.lock:
            if self._takes_pass() and not self.is_stopped:
                check_finalized(self.runner.current)
                if extension.compiled.is_compiled_backward():
                    raise TransformError(_COMPILED)
                has_inputs = extension.compiled.has_explicit_inputs()
                if has_inputs and self.runner.parameters.are_captured():
                    raise TransformError(_CAPTURED)
                self._queue_end(required=not has_inputs)
                self.passes.note_output()

    def on_first_grad(self, context: int | None) -> None:
        """Open a step, before the first gradient of a backward pass is accumulated.

        Args:
            context: the context of distributed autograd that receives the gradients, if any.
        """
        with self.lock:
            if not self._takes_pass():
                return
            self._queue_end(required=True)
            if self.runner.step is None:
                if context is None:
                    self.runner.open()
                else:
                    self.runner.current = ModuleStep(context)
                    self.runner.parameters.hooks.begin(defer=False)

    def _takes_pass(self) -> bool:
        """Return True if backward passes take a step. Otherwise, note one of a virtual rank."""
        micro_batches, is_on = self.runner.micro_batches, self.switch.is_on
        if micro_batches is not None:
            leaves = self.runner.parameters.leaves
            if not (is_on or self.is_stopped):
                micro_batches.begin_pass(self.engine, leaves)
            elif is_on and not self.passes.is_queued and not self.runner.is_begun:
                micro_batches.check_cleared(leaves)
        return is_on

    def _queue_end(self, *, required: bool) -> None:
        """Queue the end of the step; see `finish`."""
        if not self.passes.queue_end(required):
            self.abort_stale_step()
            self.passes.queue_end(required)

    def on_abort(self) -> None:
        """Restore the gradients when a backward pass is aborted.

        The loop may clear or keep them before the next forward pass, which completes the step. On
        devices, the pass has raised its error in the caller's thread before this is called in
        another: the caller may be changing gradients, so they are left as they are, unless it waits
        in `in_step`.
        """
        with self.lock:
            if not self.passes.is_queued:
                if self.runner.current is not None and not self.runner.is_begun:
                    self.runner.current = None
                self.passes.forget_output()
                is_on_cpu = all(leaf.is_cpu for leaf in self.runner.parameters.leaves)
                self.runner.restore_grads(leave=not (is_on_cpu or self.switch.in_step))

    @entrance
    def finish(self, *, required: bool) -> None:
        """End the step at the end of backward, or leave that to `finalize`.

        Args:
            required: True if a step is taken even if no gradient came.

        Raises:
            As `Engine.finish`. The gradients are then those from before, or this rank's own.
        """
        with self.lock:
            if not (self.switch.is_manual and self._suspend(required=required)):
                self.end(required=required)
        # Hooks of users may call the wrapper, also from other threads.
        try:
            self.runner.parameters.hooks.run_hooks()
        finally:
            self.runner.wait_for_work()  # to which they may have added

    def end(self, *, required: bool) -> None:
        """Close the step, and make its results the gradients; as `finish`."""
        runner = self.runner
        # The lock is entered again if nobody profiles, which has no effect.
        profiled = extension.compiled.is_profiled()
        with torch.profiler.record_function("fddp.finish") if profiled else self.lock:
            self.passes.forget_end()
            try:
                if runner.current is not None and runner.current.context is not None:
                    runner.open_in_context(runner.current, runner.current.context)
                elif required and not runner.is_begun:
                    runner.open()
                if runner.is_begun:
                    finish = partial(runner.finish, self.passes.note_step())
                    runner.parameters.hooks.on_home_streams(finish)
            except BaseException as error:
                runner.recorder.set_error_and_log(str(error))
                raise
            finally:
                self.passes.watch(self.passes.expects_grads)
                self.drop()

    def _suspend(self, *, required: bool) -> bool:
        """Leave the step open for `finalize`. Return False if there is none."""
        runner = self.runner
        if required and runner.current is None:
            runner.open()
        if runner.current is None or (runner.step is None and runner.current.context is None):
            return False
        self.passes.forget_end()
        runner.current.ended_s = time.perf_counter()
        self.passes.asks_driver = True
        if not self.switch.in_step and runner.step is not None:
            runner.fail_on_misuse(runner.parameters.used_names())
            runner.parameters.hooks.on_home_streams(partial(send, runner.step))
            runner.current.arrived = runner.step.contributions.arrived()
        return True

    @property
    def is_suspended(self) -> bool:
        """True if a step waits for `finalize`."""
        current = self.runner.current
        return current is not None and current.is_suspended

    # Failures

    @property
    def is_broken_off(self) -> bool:
        """True if a backward pass was aborted before the end of its step, which the other ranks
        take even if no gradient had come; also if the step waits for `finalize`."""
        with self.lock:
            passes = self.passes
            is_owed = self.is_suspended or (passes.is_aborted and passes.is_required)
            return (is_owed or self.runner.step is not None) and not passes.is_queued

    def abort_stale_step(self) -> None:
        """Complete the step of a backward pass that was aborted, so that no rank waits for it."""
        await_abort(self.passes)
        if not self.is_open or (self.runner.step is None and not self.passes.is_aborted):
            return
        with self.lock:
            if self.passes.is_queued or self.is_suspended:
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
                self.drop()

    def drop(self) -> None:
        """Drop the state of a step that has ended."""
        if self.is_suspended:
            self.passes.asks_driver = self._asks_always
        self.runner.drop()
        self.passes.forget_output()

    def stop(self) -> None:
        """Leave all gradients alone from now on."""
        self.is_stopped = True
        self.passes.watch(False)
        self.passes.reports_local = self._reports.is_on = False
        if self.is_open:
            self.runner.parameters.hooks.await_gradients([])
            self.runner.parameters.hooks.leave_out_hooks(False)
        self.passes.asks_driver = self._asks_always = True

    def close(self) -> None:
        """Free the communicator, if it is open."""
        self.stop()
        if self.is_open:
            self.engine.close("the wrapped module was closed")


def await_abort(passes: BackwardWatch) -> None:
    """Wait until the threads of devices have freed a backward pass that raised an error, which they
    do a moment after it was raised here. Has no effect within a pass."""
    until_s = time.perf_counter() + _ABORT_S
    while passes.is_queued and current_graph_task_id() < 0:
        if time.perf_counter() > until_s:
            return  # another thread runs the pass
        time.sleep(1e-5)


def _start_log(
    steps: Steps, recorder: Recorder, module_name: str, group: dist.ProcessGroup | LoopbackGroup
) -> None:
    """Log the settings, once the plan is known."""
    options, engine = steps.options, steps.engine
    log_initialised(options.cap_bytes, options.first_cap_bytes)
    recorder.start(
        options,
        engine.program.plan,
        steps.runner.usage.names,
        _backend_name(group),
        module_name=module_name,
        rank=engine.transport.rank,
        world_size=engine.transport.world_size,
    )


def _backend_name(group: dist.ProcessGroup | LoopbackGroup) -> str:
    if isinstance(group, LoopbackGroup):
        return "loopback"
    return group.name() if is_foreign(group) else dist.get_backend(group)


def _reduce_narrowly(engine: Engine, recorder: Recorder, options: Options) -> None:
    """Reduce gradients in the dtype that mixed precision asks for, if any."""
    mixed = options.arguments.mixed_precision
    wire = None if mixed is None else wire_dtype(mixed)
    if wire is not None:
        engine.set_hook(cast_hook(wire))
        recorder.note(comm_hook=f"{wire} gradients")
