"""Steps of a wrapped module.

`fddp.core.protocol.lifecycle` states when a step begins and ends. The class here passes on events
of forward and backward passes and of callers, and executes the actions that follow.

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
output is reached again, if the pass runs a node that the forward pass made, or if they reach a
parameter of which no rank had one: the module may have kept a tensor that leads there. Such a pass
takes a step of its own. Otherwise calling the module without its wrapper takes none. Nodes are
known by thread and number, and until the next forward pass after a step.

The hooks are compiled (`BackwardWatch`). The usual pass enters Python at its first gradient and at
its end only. If a pass is aborted, its graph task frees the end without running it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from fddp.core.entrance import entrance
from fddp.core.protocol.calls import Method
from fddp.core.protocol.lifecycle import (
    BETWEEN,
    OWING,
    RUNNING,
    SUSPENDED,
    Action,
    Event,
    Life,
    advance,
)
from fddp.core.schedule.schedule import summands
from fddp.core.text import leaf_text
from fddp.ddp.arguments import Options, Settings
from fddp.ddp.changed_parameters import ParametersChangedError, check_changed_everywhere
from fddp.ddp.debug_logs import log_rebuilt
from fddp.ddp.finalization import (
    LEFT_OUT,
    NOTHING,
    UNFINALIZED,
    check_complete,
    needs_end_of_backward,
)
from fddp.ddp.local_gradients import LocalGradientReports
from fddp.ddp.logging_data import Recorder, backend_name
from fddp.ddp.micro_batches import IN_CONTEXT, MicroBatches
from fddp.ddp.mixed_precision import wire_dtype
from fddp.ddp.parameter_watch import ParameterWatch
from fddp.ddp.parameters import HookedParameters
from fddp.ddp.request import ModuleRequest, current_request
from fddp.ddp.unused_parameters import ParameterUse, Usage, changed_graph_error
from fddp.ddp.weak_callback import weak_callback
from fddp.ddp.weights import IN_CONTEXT as WEIGHTED_IN_CONTEXT
from fddp.ddp.weights import Weights
from fddp.errors import DesyncError, InternalError, TransformError, WeightError
from fddp.hooks import Hook
from fddp.hooks import cast as cast_hook
from fddp.native import extension
from fddp.native.torch_private import current_graph_task_id
from fddp.runtime.contributions import BackwardContributions, Contributions
from fddp.runtime.finish import send
from fddp.runtime.step import Outcome, Step
from fddp.runtime.stopping import Stopping
from fddp.sync.engine import Engine
from fddp.transport import LoopbackGroup

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
_CLOSED = "the wrapped module was closed"
_INTERRUPTED = "a step of the wrapped module was interrupted"
_SKIP_IN_CONTEXT = (
    "nonfinite='skip' can't skip a step whose gradients are in a context of distributed autograd: "
    "gradients can't be removed from there, and the optimizer would use each rank's own; build the "
    "wrapper with nonfinite='raise'"
)


class Steps:
    """Steps of a wrapped module: passes on events, and executes the actions that follow.

    Does not refer to the wrapper, which is freed as soon as nobody uses it.

    Args:
        module: the module whose parameters `watch` follows.
        options: settings of the wrapper.
        group: group to average over.
        watch: current parameters.
        settings: settings that may change.
        recorder: logger of the steps.
    """

    # Set by `open`.
    engine: Engine  # owns the plan; changed parameters bring a new one
    usage: Usage  # the parameters that steps used
    parameters: HookedParameters
    _request: ModuleRequest  # of the next engine

    def __init__(
        self,
        module: Module,
        options: Options,
        group: dist.ProcessGroup | LoopbackGroup,
        watch: ParameterWatch,
        settings: Settings,
        recorder: Recorder,
    ) -> None:
        self.options = options
        self.settings = settings
        self.recorder = recorder
        self.is_open = False  # `open` was called
        self.is_stopped = False  # gradients are left alone
        self.has_changed = False  # the parameters are no longer those of the plan
        self.skipped = False  # all ranks left out the last step because of a non-finite number
        self.stopping = Stopping()  # requests to stop, of every engine
        self.weights = Weights()  # of backward passes
        # Further waits for the end of a step, which other parts of the wrapper append.
        self.work: list[Callable[[], object]] = []
        # Earlier backward passes of the current step.
        virtual = options.arguments.virtual_ranks
        self.micro_batches = None if virtual is None else MicroBatches()
        self.lock = threading.RLock()  # held while an event is noted
        self.trace: list[Event] | None = None  # all events, where a test sets a list
        self._module_name = type(module).__name__
        self._group = group
        self._watch = watch
        self._reports = LocalGradientReports(options.arguments.local_gradients)
        self.passes = extension.compiled.BackwardWatch(
            self, settings, self.lock, weak_callback(self.on_output_grad), self._reports
        )
        self.passes.report_local(self._reports.is_on)
        self._output_hooks: list[RemovableHandle] = []  # of outputs that are leaves
        self._life = Life()
        self._follows: tuple[bool, bool] | None = None  # by `passes`; None if not known
        # State of the step, until "release".
        self.step: Step | None = None  # the engine's; None before "open"
        self._context: int | None = None  # of distributed autograd; None for `.grad`
        self._weight = 1.0  # of a rank that is out of inputs
        self._error: BaseException | None = None  # to report by "fail", or to raise by "raise"
        self._begun_s = 0.0  # time of the first gradient, on the clock of `perf_counter`
        self._ended_s: float | None = None  # when backward ended, if `finalize` closes the step
        self._arrived: int | None = None  # number of gradients when the last bucket was sent early
        self._assign: Callable[[list[Tensor | None]], None] | None = None  # writes results
        self._here: frozenset[str] = frozenset()  # names of the parameters used on this rank
        self._outcome: Outcome | None = None
        self._follow()

    def open(self) -> Steps:
        """Open the communicator, unless it is open. Return `self`. The first is a collective call.

        Raises:
            PlanMismatchError: parameters or options differ between ranks.
        """
        if not self.is_open:
            try:
                self._request = current_request(self._watch, self.options, self._group)
                self._make_engine()
                self.usage = Usage(
                    self._request.params,
                    self.engine.transport.rank,
                    self.engine.transport.world_size,
                    find_unused=self.options.arguments.find_unused_parameters,
                    static=self.options.arguments.static_graph,
                )
                self.__dict__.pop("parameters", None)  # of `watch_unopened`
                self._hook_parameters()
                self.recorder.start(
                    self.options,
                    self.engine.program.plan,
                    self.usage.names,
                    backend_name(self._group),
                    module_name=self._module_name,
                    rank=self.engine.transport.rank,
                    world_size=self.engine.transport.world_size,
                )
                # Gradients are reduced in the dtype that mixed precision asks for, if any.
                mixed = self.options.arguments.mixed_precision
                wire = None if mixed is None else wire_dtype(mixed)
                if wire is not None:
                    self.engine.set_hook(cast_hook(wire))
                    self.recorder.note(comm_hook=f"{wire} gradients")
            except AttributeError as error:  # which a property must not raise
                raise InternalError(f"the steps could not be made: {error}") from error
            self.is_open = True
            if self.settings.in_step:
                self.engine.transport.enter_step(self.engine.step)
        return self

    def continue_with(self, weights: Weights) -> None:
        """Take over the weights of earlier steps, whose block may be open."""
        self.weights = weights

    def watch_unopened(self) -> None:
        """Report local gradients also before `open`. Does not communicate."""
        if not self._reports.is_on:
            return
        request, group = current_request(self._watch, self.options, self._group), self._group
        self.parameters = HookedParameters(request, self.passes, undefined_counts=False)
        rank = group.rank if isinstance(group, LoopbackGroup) else group.rank()
        self._reports.follow(self.parameters.names, self.parameters.leaves, rank)

    # Events

    @property
    def life(self) -> Life:
        """Life of the current step."""
        with self.lock:
            self._note_news(self.passes.take_news())
            return self._life

    def note(self, event: Event) -> None:
        """Note an event, and execute the actions that follow from it.

        Raises:
            InternalError: the event cannot come now.
            Exception: by the action "raise" and its like.
        """
        with self.lock:
            try:
                if news := self.passes.take_news():
                    self._note_news(news)
                self._execute_after(event)
            finally:
                if _followed(self._life) != self._follows:
                    self._follow()

    def _note_news(self, news: int) -> None:
        """Note what `passes` has done without a call."""
        if news & extension.compiled.OUTPUT_REACHED:
            if self.trace is not None:
                self.trace.append("output reached")
            self._life, _ = advance(self._life, "output reached")  # the end is queued
            self._follows = (True, True)
        if news & extension.compiled.PASS_ABORTED:
            self._follows = None
            is_on_cpu = all(leaf.is_cpu for leaf in self.parameters.leaves)
            is_late = not (is_on_cpu or self.settings.in_step)
            self._execute_after("pass aborted late" if is_late else "pass aborted")

    def _follow(self) -> None:
        """Let `passes` follow the life."""
        self._follows = awaits_gradients, takes_outputs = _followed(self._life)
        takes_outputs = takes_outputs and self.micro_batches is None
        is_on = not self.is_stopped
        self.passes.follow(awaits_gradients and is_on, takes_outputs and is_on)

    def _execute_after(self, event: Event) -> None:
        """Execute the actions that follow from an event, and from events that they lead to."""
        then: Event | None = event
        while then is not None:
            event, then = then, None
            if self.trace is not None:
                self.trace.append(event)
            self._life, actions = advance(self._life, event)
            for action in actions:
                if action == "complete owed":
                    context = self._context  # of the event, not of the step that is owed
                    self._complete_owed()
                    self._context, then = context, event
                    break
                try:
                    then = self._execute(action)
                except BaseException:
                    if not action.startswith("raise"):
                        self._execute_after("interrupted")
                    raise
                if then is not None:  # in place of the further actions
                    break

    def _execute(self, action: Action) -> Event | None:
        """Execute an action. Return the event that it leads to, if any."""
        match action:
            case "queue end":
                if self.micro_batches is not None:
                    self.micro_batches.check_cleared(self.parameters.leaves)
                self.passes.queue_end()
            case "forget end":
                self.passes.forget_end()
            case "save":
                defers = not self.settings.is_manual and self._context is None
                self.parameters.hooks.begin(defer=defers)
            case "open" | "open in context" | "open empty" | "take part":
                return self._open_step(action)
            case "arm":
                self._arm()
            case "fail":
                self._opened.fail(self._error or RuntimeError(_ABORTED))
                self._error = None
            case "send":
                self._fail_on_misuse(self.parameters.used_names())
                send(self._opened)
                self._arrived = self._opened.arrived
            case "await report":
                return self._await_report()
            case "write":
                try:
                    self._write()
                except BaseException as error:
                    self._error = error
                    return "write failed"
            case "restore" | "forget":
                self.parameters.restore(self.step, leave=action == "forget")
            case "exchange failures":
                pass  # by `Engine.finish`
            case "abandon":
                # No effect where the engine itself has given up.
                self.engine.close(_CLOSED if self.is_stopped else _INTERRUPTED)
            case "release":
                self._release()
            case "raise":
                raised, self._error = self._error, None
                try:
                    raise raised or InternalError("a step failed without an error")
                finally:
                    del raised  # whose traceback refers to this frame
            case "raise unfinalized":
                raise RuntimeError(UNFINALIZED)
            case "raise nothing to finalize":
                raise RuntimeError(NOTHING)
        return None

    # Forward passes

    def begin_forward(self) -> None:
        """Prepare for a forward pass, which may be a checkpoint's, within a backward pass."""
        if self.work and current_graph_task_id() < 0:
            self.wait_for_work()
        self.engine.check_complete()
        if self.engine.setup.code.accelerators:
            self.parameters.hooks.note_home()
        awaits_step = self._life.expects
        self.note("forward began")
        self.passes.begin_forward(keep=awaits_step)
        self._reports.look()
        if self.step is None and self.options.arguments.lazy_bucket_allocation:
            self._release_memory()
        for handle in self._output_hooks:
            handle.remove()
        self._output_hooks.clear()

    def change_parameters(self) -> None:
        """Follow a change of the parameters; see [Note: changed parameters]."""
        self.note("forward began")
        self._request = current_request(self._watch, self.options, self._group)
        self.usage.follow(self._request.params)
        self.has_changed = True
        del self.parameters  # the next set removes its hooks from parameters that stay
        self._hook_parameters()

    def expect(self, outputs: list[Tensor]) -> None:
        """Take a step in backward passes through these outputs of a forward pass.

        Until one of them has ended, any gradient of a parameter belongs to a step.
        """
        self._hook(self.passes.expect_outputs(outputs), self.passes.reach_output)
        if not self.is_stopped:
            self.note("outputs made")

    def allow(self, outputs: list[Tensor]) -> None:
        """Report no gradients of backward passes through these outputs, of a forward pass within
        `no_sync`; see [Note: local gradients]."""
        self._hook(self.passes.allow_outputs(outputs), self.passes.reach_allowed_output)

    def _hook(self, leaves: list[Tensor], hook: Callable[[Tensor], None]) -> None:
        for leaf in leaves:
            # A leaf may be an output of the next forward pass, too.
            handle: RemovableHandle = leaf.register_hook(hook)  # type: ignore[no-untyped-call]
            self._output_hooks.append(handle)

    # Backward passes, as `passes` observes them

    def on_output_grad(self) -> None:
        """Take a backward pass that has reached an output, or leave it alone.

        `passes` takes it without this call if it is sure to; see `BackwardWatch`.

        Raises:
            TransformError: the pass would leave parameters with this rank's own gradients.
            RuntimeError: a step waits for `finalize`.
        """
        with self.lock:
            if not self._takes_pass() or self.is_stopped:
                return
            self.check_finalized()
            if extension.compiled.is_compiled_backward():
                raise TransformError(_COMPILED)
            has_inputs = extension.compiled.has_explicit_inputs()
            if has_inputs and self.parameters.are_captured():
                raise TransformError(_CAPTURED)
            self.note("inputs reached" if has_inputs else "output reached")
            self.passes.note_output()

    def on_first_grad(self, context: int | None) -> None:
        """Open a step, before the first gradient of a backward pass is accumulated.

        Args:
            context: the context of distributed autograd that receives the gradients, if any.
        """
        with self.lock:
            if self._takes_pass():
                if context is not None and self.weights.is_on:
                    raise WeightError(WEIGHTED_IN_CONTEXT)
                self._context = context
                event: Event = "grad arrived" if context is None else "context grad arrived"
                self.parameters.hooks.on_home_streams(partial(self.note, event))

    def _takes_pass(self) -> bool:
        """Return True if backward passes take a step. Otherwise, note one of a virtual rank."""
        is_on = self.settings.is_on
        if self.micro_batches is not None and not (is_on or self.is_stopped):
            self.micro_batches.begin_pass(self.engine, self.parameters.leaves)
        return is_on

    def on_abort(self) -> None:
        """Restore the gradients when a backward pass is aborted.

        The loop may clear or keep them before the next forward pass, which completes the step. On
        devices, the pass has raised its error in the caller's thread before this is called in
        another: the caller may be changing gradients, so they are left as they are, unless it waits
        in `in_step`.
        """
        with self.lock:
            try:
                self._note_news(self.passes.take_news())
            finally:
                self._follow()

    @entrance
    def on_end(self) -> None:
        """End the step at the end of backward, or leave that to `finalize`.

        Raises:
            As `Engine.finish`. The gradients are then those from before, or this rank's own.
        """
        with self.lock:
            if self.settings.is_manual:
                self._ended_s = time.perf_counter()
                self._note_on_streams("left unsent" if self.settings.in_step else "left open")
            else:
                self._close("backward ended")
        # Hooks of users may call the wrapper, also from other threads.
        try:
            self.parameters.hooks.run_hooks()
        finally:
            if self.work:  # to which they may have added
                self.wait_for_work()

    def _close(self, event: Event) -> None:
        """Note an event that closes the step. Log its error."""
        # The lock is entered again if nobody profiles, which has no effect.
        profiled = extension.compiled.is_profiled()
        with torch.profiler.record_function("fddp.finish") if profiled else self.lock:
            try:
                self._note_on_streams(event)
            except BaseException as error:
                self.recorder.set_error_and_log(str(error))
                raise

    def _note_on_streams(self, event: Event) -> None:
        """Note an event on the streams of the step."""
        if self.step is None:
            self.note(event)
        else:
            self.parameters.hooks.on_home_streams(partial(self.note, event))

    # Callers

    def check_finalized(self) -> None:
        """Raise a RuntimeError if a step waits for `finalize`."""
        if self._life.name in SUSPENDED:
            raise RuntimeError(UNFINALIZED)

    def finalize(self) -> None:
        """Close a step under manual finalization.

        Raises:
            RuntimeError: there is no such step, it lacks gradients, or some came too late.
            Exception: as `on_end`.
        """
        with self.lock:
            if self.life.name == "open":
                check_complete(self._opened, self.parameters)
            if self._arrived is not None and self._opened.arrived > self._arrived:
                self.note("left out")
                raise RuntimeError(LEFT_OUT)
            self._close("finalized")

    @property
    def needs_end_of_backward(self) -> bool:
        """True if the next step can be closed only after backward."""
        return self.has_changed or needs_end_of_backward(self.engine)

    @property
    def is_in_progress(self) -> bool:
        """True if a backward pass is expected or in progress, or its step is not closed."""
        life = self.life
        return life.expects or life.name not in BETWEEN

    @property
    def is_owed(self) -> bool:
        """True if the other ranks wait for the end of a step whose backward pass has ended."""
        name = self.life.name
        return name in OWING or name in SUSPENDED

    def settle(self) -> None:
        """Complete the step of a backward pass that was aborted, so that no rank waits for it. Then
        raise the error of the last step, if its report is read later: before a call of the module,
        and outside of the block that reports errors of the next step."""
        if self.passes.is_queued:
            self.await_abort()
        with self.lock:
            if news := self.passes.take_news():
                self._note_news(news)
            if self._life.name in OWING:
                self._complete_owed()
        if self.is_open:
            self.engine.check()

    def _complete_owed(self) -> None:
        try:
            # Also before a forward pass that is captured in a graph.
            with self.engine.beside_capture() if self.engine.is_captured else nullcontext():
                self.note("due")
        except Exception as error:
            warnings.warn(
                f"the step of an aborted backward pass was given up on all ranks: {error}",
                stacklevel=4,
            )

    def await_abort(self) -> None:
        """Wait until the threads of devices have freed a backward pass that raised an error, which
        they do a moment after it was raised here. Has no effect within a pass."""
        until_s = time.perf_counter() + _ABORT_S
        while self.passes.is_queued and current_graph_task_id() < 0:
            if time.perf_counter() > until_s:
                return  # another thread runs the pass
            time.sleep(1e-5)

    def fail(self, error: BaseException) -> None:
        """End the other ranks' step with an error of this rank, and restore its gradients.

        Does nothing within a backward pass that still runs.

        Raises:
            As `Engine.finish`: `error` if the other ranks received it.
        """
        with self.lock:
            self._error = error
            try:
                self.note("raised")
            finally:
                self._error = None

    def publish_failure(self, error: BaseException) -> None:
        """Publish an error to ranks that wait in operators of the step which `fail` will end."""
        with self.lock:
            if self.life.name not in RUNNING:
                number = self.engine.step if self.step is None else self.step.number
                self.engine.publish_step_failure(number, error)

    def take_part(self, weight: float) -> None:
        """Take part in a step to which this rank contributes nothing; gradients stay unchanged.

        Raises:
            RuntimeError: a step waits for `finalize`.
            Exception: as `Engine.finish`.
        """
        self.settle()
        with self.lock:
            self._weight = weight
            work = self.work[:]
            self.note("joined")
            for wait in work:
                wait()

    def declare_static(self, options: Options) -> None:
        """Require that all steps use the same parameters. `options` declare that."""
        self.options = options
        self.usage.declare_static()
        self.parameters.hooks.count_undefined(self.usage.reports_unused)

    def wait_for_work(self) -> None:
        """Wait for `work`, and clear it."""
        for wait in self.work:
            wait()
        self.work.clear()

    def stop(self) -> None:
        """Leave all gradients alone from now on."""
        self.is_stopped = True
        self._reports.stop()
        self.passes.report_local(False)
        if self.is_open:
            self.parameters.hooks.await_gradients([])
            self.parameters.hooks.leave_out_hooks(False)
        self._follow()

    def close(self) -> None:
        """Free the communicator, if it is open."""
        self.stop()
        if self.is_open:
            self.note("closed")

    # Actions. Attributes are read instead of local variables, where frames in an error's traceback
    # would keep a step alive.

    @property
    def _opened(self) -> Step:
        if self.step is None:
            raise InternalError("a step was to be used that is not open")
        return self.step

    def _open_step(self, action: Action) -> Event | None:
        """Open a step. Its error is raised at the end of backward, because backward is running."""
        self._begun_s = time.perf_counter()
        engine = self.engine
        try:
            self.step = engine.open(
                Method.NOTHING if action == "open empty" else Method.MODULE,
                with_stats=action == "open"
                and self.recorder.wants(engine.step)
                and not engine.is_captured,
            )
        except BaseException as error:
            self._error = error
            return "open failed"
        if action == "open":
            engine.note_backward(runs=True)
            if self.step.code.hook is not None:
                # Hooks may call operators, and also run on ranks that have failed.
                engine.transport.enter_step(None)
            self._assign = self.parameters.assign
        elif action == "open in context":
            self._begin_in_context()
        elif action == "take part":
            # The mean over items has none of this rank, whatever the divisor of `join`.
            is_weighted = self.weights.some
            nothing = Contributions(weight=0.0 if is_weighted else self._weight)
            self.step.begin(nothing, self.parameters.leaves, allow_idle_ranks=not is_weighted)
        return None

    def _begin_in_context(self) -> None:
        """Begin the step over the gradients in a context of distributed autograd.

        Results are written over this rank's gradients in the context, and added to it where this
        rank has none.
        """
        try:
            if self._context is None:
                raise InternalError("a step was opened in no context of distributed autograd")
            if self.micro_batches is not None:
                raise RuntimeError(IN_CONTEXT)
            if self.engine.terms.nonfinite == "skip":
                raise ValueError(_SKIP_IN_CONTEXT)
            self._assign = self.parameters.begin_in_context(self._opened, self._context)
        except BaseException as error:
            self._opened.fail(error)

    def _arm(self) -> None:
        """Pack gradients as they arrive. An error fails the step."""
        try:
            if self.has_changed:
                raise ParametersChangedError
            weight = self.weights.take(joining=self.usage.joining)
            assert self.step is not None
            if self.step.is_captured:
                self._check_new_gradients(self.step)
            arguments, virtual = self.options.arguments, self.micro_batches
            replaces = arguments.gradient_as_bucket_view and virtual is None
            self.step.begin(
                BackwardContributions(
                    weight=1.0 if weight is None else weight,
                    factor=1.0,
                    accumulated=None,
                    idle=self.step.idle,
                    aliases_buffer=self.parameters.hooks.aliases_buffer if replaces else None,
                    packs_early=not arguments.lazy_bucket_allocation,
                ),
                self.parameters.leaves,
                earlier=None
                if virtual is None
                else virtual.sums(self.engine, self.step, self.parameters.leaves),
                allow_idle_ranks=self.usage.joining and not self.weights.some,
            )
            self.step.arm(self.parameters.hooks, self.parameters.graph, self.engine.arrivals)
        except BaseException as error:
            self._error = error
            self._execute_after("failed")

    def _check_new_gradients(self, step: Step) -> None:
        """Raise for gradients of an earlier step, whose memory a later one would reuse."""
        for name, leaf in zip(self.parameters.names, self.parameters.leaves, strict=True):
            if leaf.grad is not None and step.pool.is_view(leaf.grad):
                raise TransformError(
                    f"{leaf_text(name)} has a gradient of a step from before the capture of a "
                    f"graph; call zero_grad(set_to_none=True) before backward()"
                )

    def _fail_on_misuse(self, here: frozenset[str]) -> None:
        """Fail the step if parameters were used against what was declared."""
        if self.micro_batches is not None:
            here |= self.micro_batches.used_names(self.parameters.names)
        problem = self.usage.problem(here)
        if problem is not None:
            self._opened.fail(problem)

    def _await_report(self) -> Event:
        """Run the step to its end. Return the event of its report."""
        if self._ended_s is None:
            self._ended_s = time.perf_counter()
        self._here = self.parameters.used_names()
        if self.usage.static and self._life.name == "complete":
            self._fail_on_misuse(self._here)
        self.skipped = False
        self.engine.note_backward(runs=False)
        self.engine.transport.enter_step(None)
        assert self.step is not None
        try:
            self._outcome = self.engine.finish(self.step)
        except BaseException as error:
            self._error = error
        else:
            self.skipped = self._outcome.skipped
            self.engine.note_arrivals(self.step.contributions)
            report = self._outcome.report
            return "reported repair" if report is not None and report.late else "reported regular"
        if isinstance(self._error, ParametersChangedError) and self._life.name == "complete":
            try:
                self._replace_engine()
            except BaseException as error:
                self._error = error
            else:
                self._error = None  # whose traceback refers to the step
                return "reported change"
        if self.engine.is_closed:
            return "transport failed"
        self._error = changed_graph_error(self.step.failures) or self._error
        return "reported desync" if isinstance(self._error, DesyncError) else "reported failure"

    def _write(self) -> None:
        """Make the results of the step the gradients, and record it."""
        step, outcome, assign = self.step, self._outcome, self._assign
        if step is None or outcome is None or assign is None:
            raise InternalError("results were to be written of no step")
        program = step.program
        report, hooks = outcome.report, self.parameters.hooks
        if program.control.with_order and not self.engine.program.control.with_order:
            plan = self.engine.program.plan
            log_rebuilt(len(plan.buckets), plan.caps_bytes)
        assign(outcome.leaves)
        if outcome.skipped:
            # Gradients accumulated before the step are part of the sum, and go, too.
            for param in self.parameters.leaves:
                param.grad = None
        hooks.reset_used()
        self._reports.settle()
        # Without a report, all ranks have used all.
        everyone = [summands(program.schedule)] * len(program.plan.reduced)
        users = everyone if report is None else report.users
        is_partial = len(self._here) < len(self.parameters.names)
        if is_partial and 0 in users and self.micro_batches is None:
            hooks.await_gradients([count == 0 for count in users])
        if self.work:
            self.wait_for_work()
        self.usage.note(ParameterUse(self._here, self.parameters.by_name(users)))
        if step.record_time:
            backward_s = min(self.passes.reached_s, self._begun_s), self._ended_s or self._begun_s
            self.recorder.record_step(outcome, backward_s)

    def _release(self) -> None:
        """Drop the state of the step."""
        self.parameters.hooks.disarm()
        self.work.clear()
        self.step = self._context = self._ended_s = self._arrived = self._outcome = None
        self._assign = None
        if self.micro_batches is not None:
            self.micro_batches.reset()
        if self.options.arguments.lazy_bucket_allocation:
            self._release_memory()

    def _release_memory(self) -> None:
        """Release the memory of earlier steps, except that of existing gradients that may be
        reduced in place."""
        keep_views = self.options.arguments.gradient_as_bucket_view
        self.engine.release_memory(keep_views=keep_views)

    # The engine

    def _make_engine(self, step: int = 0, hook: Hook[Any] | None = None) -> None:
        engine = Engine(self._request)
        engine.label = "this DistributedDataParallel"
        engine.advice = "make a new one of its module, on a working group"
        engine.step = step
        if hook is not None:
            engine.set_hook(hook)
        engine.stopping = self.stopping
        self.engine = engine

    def _replace_engine(self) -> None:
        """Make a new plan together with all ranks, once the parameters have changed on all."""
        check_changed_everywhere(self.engine, self._opened.failures)
        self.engine.close("the parameters changed")
        self._make_engine(self.engine.step, self.engine.hook)
        self.has_changed = False
        self.step = None

    def _hook_parameters(self) -> None:
        self.parameters = HookedParameters(
            self._request, self.passes, undefined_counts=self.usage.reports_unused
        )
        self.weights.follow(self.parameters)
        rank = self.engine.transport.rank
        self._reports.follow(self.parameters.names, self.parameters.leaves, rank)


@cache  # lives are few
def _followed(life: Life) -> tuple[bool, bool]:
    """Arguments of `BackwardWatch.follow`."""
    return life.awaits_gradients, life.takes_outputs
