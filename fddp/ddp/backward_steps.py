"""Steps of a wrapped module: opened by the first gradient of a backward pass, closed at its end.

[Note: the end of backward]
What is queued in the autograd engine runs at the end of the graph task that queued it, and
re-entrant checkpointing runs tasks within tasks: its parameters' gradients come before the outer
task has ended. So hooks on the module's outputs queue the end, in the task that reaches these: as
far as the module goes, that is the outermost. Where an output hides its tensors, the first gradient
queues it; within re-entrant checkpoints a backward then ends in several steps. That is right, too:
averaging gradients that are averages already leaves them as they are.

A rank whose backward reaches an output but no parameter takes part, with nothing. One whose
backward reaches no output can't know of the others' step: they time out. From a forward until the
end of a step through its outputs, gradients belong to a step wherever they come from, since a loss
may be kept aside. After it they do only if an output is reached again: the module that is called
without its wrapper takes no step.

[Note: changed parameters]
What is wrapped may change between steps. Parameters that are frozen stay in the plan, unused. When
one is unfrozen, replaced or added, the rank can't take part in a step of the old plan, nor in the
making of a new one before all ranks are ready for it. So it fails its next step with
`ParametersChangedError`, its gradients untouched. If all ranks have, they make a new plan and
repeat the step; otherwise all of them raise. Where a rank fails for another reason, that is what
the others raise, and the comparison is left to the next step.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from fddp.core.protocol.calls import Method
from fddp.ddp.logger import Recorder
from fddp.ddp.nonfinite import skip_in_context_problem
from fddp.ddp.request import ModuleRequest
from fddp.ddp.unused_parameters import ParameterUse, Usage
from fddp.ddp.weak_callback import weak_callback
from fddp.errors import FddpError, InternalError, PlanMismatchError
from fddp.native.autograd_leaves import distributed_context, param_set, serves_some
from fddp.runtime.context import Outcome
from fddp.runtime.contributions import BackwardContributions, Contributions, TreeContributions
from fddp.runtime.failures import peer_error
from fddp.runtime.step import Step
from fddp.runtime.step_info import make_info
from fddp.sync.engine import Engine
from fddp.tree.pytree import flatten


class ParametersChangedError(FddpError):
    """A rank's parameters are no longer those of the plan."""


class _AllMayCome(NamedTuple):
    """Backward passes of a module are not looked into beforehand."""

    used: list[bool]
    opaque: bool = True


@dataclass
class Switches:
    """What a training loop turns on and off.

    Attributes:
        backward: whether backward passes synchronise gradients.
        forward: whether forward passes synchronise buffers.
    """

    backward: bool = True
    forward: bool = True


class Steps:
    """Carries gradients of parameters through the engine, backward by backward. Making one is a
    collective call.

    Args:
        request: the parameters, and how they are bucketed.
        switches: shared with the wrapper.
        find_unused, static: as for `Usage`.
        replace: whether results take the place of gradients that were there before.
        recorder: is told of the steps that it wants.

    Attributes:
        engine: has the plan.
        usage: which parameters steps used.
        is_stopped: whether gradients are left alone.
        work: what else is to be waited for at the end of a step.
        skipped: whether all ranks left out the last step for a number that is not finite.
        has_failed: whether the last step ended with an error, in good order on all ranks, and
            nothing has been communicated since.
    """

    def __init__(
        self,
        request: ModuleRequest,
        switches: Switches,
        *,
        find_unused: bool,
        static: bool,
        replace: bool,
        recorder: Recorder,
    ) -> None:
        self.engine = _engine(request)
        transport = self.engine.transport
        self.usage = Usage(
            request.params,
            transport.rank,
            transport.world_size,
            find_unused=find_unused,
            static=static,
        )
        self.work: list[Callable[[], object]] = []
        self._switches = switches
        self._replace = replace
        self._recorder = recorder
        self._lock = threading.RLock()
        self._step: Step | None = None
        self._end: weakref.ref[_End] | None = None
        self._broken: BaseException | None = None
        self._begun_s = 0.0
        self._touched_s = math.inf  # when the backward pass that runs has reached an output
        self._changed = False
        self.is_stopped = False
        self.skipped = False
        self.has_failed = False
        self._put: Callable[[Sequence[Tensor | None]], None] = partial(_write, ())
        self._context: int | None = None  # of distributed autograd
        self._expects = False  # gradients, whether or not they come by an output
        self._is_touched = False  # an output was reached by the backward pass that runs
        self._handles: list[RemovableHandle] = []
        self._hook(request)

    def _hook(self, request: ModuleRequest) -> None:
        self._request = request
        self._params, treedef = flatten(dict(request.params))  # in the order of the plan's leaves
        self._names = treedef.paths
        self._all_names = frozenset(self._names)
        self._counts: Sequence[int] = ()
        self._ranks: Mapping[str, int] = {}  # the same by name
        self._set = param_set(self._params, weak_callback(self._begin))

    # Of others that fail

    def enter(self) -> None:
        """From now on operators end here where another rank has failed the step that comes."""
        self.engine.transport.enter_step(self.engine.step)

    def leave(self) -> None:
        """What this rank waits for from now on, others bring whether or not they have failed."""
        self.engine.transport.leave_step()

    def raise_alarm(self, error: BaseException) -> None:
        """Tells ranks that wait in operators within the step which `fail` is about to end."""
        with self._lock:
            if self._runs_backward:
                return
            step = self._step
            number = self.engine.step if step is None else step.number
            self.engine.publish_step_failure(number, error)

    # Forward

    def begin_forward(self) -> None:
        """A forward pass begins; it may be a checkpoint's, within a backward pass."""
        if torch._C._current_graph_task_id() < 0:
            self._wait_for_work()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._expects = False
        self._set.watch(False)

    def expect(self, outputs: Sequence[Tensor]) -> None:
        """A forward pass gave these outputs, whose backward passes are steps. Until one of them has
        ended, any gradient of a parameter belongs to a step."""
        for output in outputs:
            if output.requires_grad:
                self._anchor(output)
        self._expects = not self.is_stopped
        self._set.watch(self._expects)

    def intact(self) -> bool:
        """Whether gradients of all parameters will be noticed."""
        return self._set.intact()

    def change(self, request: ModuleRequest) -> None:
        """The parameters are others from now on; see [Note: changed parameters]."""
        self._set.watch(False)
        del self._set  # and with it the hooks on parameters that stay
        self._hook(request)
        self.usage.params = request.params
        self._changed = True

    def _anchor(self, output: Tensor) -> None:
        """Has the end of backward be that of the task that reaches this output."""
        handle: RemovableHandle = output.register_hook(  # type: ignore[no-untyped-call]  # torch's
            weak_callback(self._touched)
        )
        if output.is_leaf:
            self._handles.append(handle)  # it may well be the output of the next forward, too

    def stop(self) -> None:
        """Leaves all gradients alone from now on."""
        self.is_stopped = True
        self._set.watch(False)

    # Backward

    def _touched(self) -> None:
        with self._lock:
            if self._switches.backward and not self.is_stopped:
                if not self._is_touched:
                    self._touched_s = time.perf_counter()
                self._is_touched = True
                self._set.watch(True)
                self._queue_end(required=not serves_some())

    def _begin(self) -> None:
        with self._lock:
            if self._switches.backward and self._queue_end():
                self._context = distributed_context()
                if self._context is None:
                    self._open()

    def _queue_end(self, *, required: bool = True) -> bool:
        """Whether no step is open; its end is queued then. Unless it is `required`, there will be
        a step only if gradients come."""
        if self._end is not None and self._end() is None:
            self.give_up_stale()
        if self._end is None:
            end = _End(self, required)
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)
        return self._step is None

    def _open(self, *, again: bool = False) -> None:
        """Never raises while backward runs: what is wrong is raised at its end."""
        try:
            self._begun_s = time.perf_counter()
            number = self.engine.step
            step = self._step = self.engine.open(
                Method.MODULE, with_stats=self._recorder.wants(number)
            )
            self.engine.in_backward = True
            step.allow_idle_ranks = self.usage.joining
            if step.context.bound_hook is not None:
                self.leave()  # hooks may call operators, and run on ranks that have failed as well
            if self._changed and not again:
                step.fail(ParametersChangedError("the parameters are others than in the plan"))
                return
            contributions = BackwardContributions(
                self.engine.program,
                weight=1.0,
                accumulated=None,
                idle=step.context.idle,
                aliases_buffer=self._set.aliases_buffer if self._replace else None,
            )
            step.begin(contributions, self._params)
            self._put = partial(self._set.assign, replace=self._replace)
            contributions.arm(
                self._set,
                _AllMayCome([True] * len(self._names)),
                self.engine.arrivals,
                step.buffer_of,
                step.scale,
                step.bucket_ready,
            )
        except BaseException as error:
            if self._step is None:
                self._broken = error
            else:
                self._step.fail(error)

    def finish(self, *, required: bool) -> None:
        """Backward has ended: closes the step, and makes its results the gradients.

        Args:
            required: whether there is to be a step even if no gradient came.

        Raises:
            As `Engine.close`; the gradients are then what they were, or this rank's own.
        """
        with self._lock, torch.profiler.record_function("fddp.finish"):
            self._end = None
            try:
                if self._context is not None:
                    self._open_distributed(self._context)
                elif required and self._step is None and self._broken is None:
                    self._open()
                if self._step is not None or self._broken is not None:
                    self._expects = self._expects and not self._is_touched
                    self._finish()
            except BaseException as error:
                self._recorder.set_error_and_log(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._set.watch(self._expects)
                self._let_go()

    def _finish(self) -> None:
        end_s = time.perf_counter()
        if self._broken is not None or self._step is None:
            raise self._broken or InternalError("a step was to end that was not open")
        here = self._used()
        self._judge(here)
        try:
            try:
                outcome = self._close()
            except ParametersChangedError:
                outcome = self._repeat()
        except BaseException:
            self._put_back()
            raise
        step = self._step
        self._put(outcome.leaves)
        if outcome.skipped:
            self._drop()
        self._set.reset_used()
        self._wait_for_work()
        self.usage.note(ParameterUse(here, self._users(outcome.report.users)))
        if step.record_time:
            program = step.program
            idle = step.context.idle - set(outcome.report.late)
            self._recorder.record(
                make_info(
                    step,
                    outcome,
                    (min(self._touched_s, self._begun_s), end_s),
                    begun_s=self._recorder.forward_start_s,
                ),
                program.plan,
                has_rebuilt=not program.control.with_order,
                reduced=len(program.plan.buckets) - len(idle),
            )

    def _judge(self, here: frozenset[str]) -> None:
        """By itself, so that no frame that an error passes through refers to it."""
        problem = self.usage.problem(here)
        if problem is not None and self._step is not None:
            self._step.fail(problem)

    def _wait_for_work(self) -> None:
        for wait in self.work:
            wait()
        self.work.clear()

    def _close(self) -> Outcome:
        if self._step is None:
            raise InternalError("a step was to be closed that was not open")
        self.engine.in_backward = False
        outcome = self._end_of(self._step)
        contributions = self._step.contributions
        if isinstance(contributions, BackwardContributions):
            self.engine.arrivals = contributions.arrivals()
        return outcome

    def _end_of(self, step: Step) -> Outcome:
        self.skipped = self.has_failed = False
        self.leave()
        try:
            outcome = self.engine.finish(step)
        except BaseException:
            self.has_failed = not self.engine.is_closed
            raise
        self.skipped = outcome.skipped
        return outcome

    def _repeat(self) -> Outcome:
        """Makes a new plan with all ranks, and takes the step again."""
        received = self._step.failures if self._step else []
        rank = self.engine.transport.rank
        failures = {
            other: text
            for other, text in enumerate(received)
            if text and not text.startswith(ParametersChangedError.__name__)
        }
        if failures:  # ahead of its forward pass, maybe: it has not looked at its parameters
            raise peer_error(self.engine.step - 1, failures)
        for other, text in enumerate(received):
            if not text:
                raise PlanMismatchError(
                    f"the wrapped module has other parameters than before on rank {rank}, and on "
                    f"rank {other} it has not; freeze, unfreeze and replace parameters on all "
                    f"ranks between the same two steps"
                )
        hook, number = self.engine.hook, self.engine.step
        self.engine.close("the parameters changed")
        self.engine = _engine(self._request)
        self.engine.step = number
        if hook is not None:
            self.engine.set_hook(hook)
        self._changed = False
        self._open(again=True)
        if self._broken is not None:
            raise self._broken
        return self._close()

    def _open_distributed(self, context: int) -> None:
        """A step whose gradients are in a context of distributed autograd when backward has ended,
        and whose results are written there, over this rank's own."""
        from torch.distributed.autograd import get_gradients

        grads = get_gradients(context)
        own = [grads.get(param) for param in self._params]
        self._step = self.engine.open(Method.MODULE, with_stats=False)
        if self.engine.terms.nonfinite == "skip":
            self._step.fail(ValueError(skip_in_context_problem()))
            return
        self._step.begin(TreeContributions(self.engine.program, own, 1.0), self._params)
        self._put = partial(_write, own)

    def take_part(self, weight: float) -> None:
        """A step without a backward pass on this rank, whose gradients stay as they are."""
        self.give_up_stale()
        step = self.engine.open(Method.MODULE, with_stats=False)
        step.allow_idle_ranks = True
        nothing = Contributions()
        nothing.weight = weight
        step.begin(nothing, self._params)
        self._end_of(step)
        self._wait_for_work()

    def fail(self, error: BaseException) -> None:
        """Ends the step that the other ranks take with what went wrong on this one; nothing within
        a backward pass that still runs.

        Raises:
            As `Engine.close`: `error`, if the others could be told.
        """
        with self._lock:
            if self._runs_backward:
                return
            self._end = None
            self._step = self._step or self.engine.open(Method.NOTHING, with_stats=False)
            self._step.fail(error)
            try:
                self._close()
            finally:
                self._put_back()
                self._expects = False
                self._set.watch(False)
                self._let_go()

    @property
    def _runs_backward(self) -> bool:
        """Whether a backward pass has begun a step, and not ended."""
        return self._end is not None and self._end() is not None

    @property
    def is_broken_off(self) -> bool:
        """Whether a backward pass ended before its step."""
        with self._lock:
            is_over = self._end is None or self._end() is None
            return self._step is not None and is_over

    def close(self) -> None:
        """Frees the communicator."""
        self.stop()
        self.engine.close("the module was let go of")

    # Parts

    def _used(self) -> frozenset[str]:
        flags = self._set.used()
        if all(flags):
            return self._all_names
        return frozenset(name for name, used in zip(self._names, flags, strict=True) if used)

    def _users(self, counts: Sequence[int]) -> Mapping[str, int]:
        """For each parameter, the number of ranks that used it."""
        if counts != self._counts:
            self._counts, self._ranks = counts, dict(zip(self._names, counts, strict=True))
        return self._ranks

    def _put_back(self) -> None:
        """Gives back the gradients that were there before a step that failed. Those that were being
        reduced where they lay are nobody's now, and are dropped."""
        self._set.restore()
        if self._step is None:
            return
        contributions = self._step.contributions
        if isinstance(contributions, BackwardContributions):
            program = self._step.program
            for bucket in contributions.in_place:
                for number in program.member_numbers[bucket]:
                    self._params[program.differentiated[number]].grad = None

    def _drop(self) -> None:
        """Leaves no gradient of a step that was left out, nor what was accumulated before it: the
        two have been added up."""
        for param in self._params:
            param.grad = None

    def _let_go(self) -> None:
        self._set.disarm()
        self.engine.in_backward = False
        self.work.clear()
        self._step = self._broken = self._context = None
        self._is_touched, self._touched_s = False, math.inf
        self._put = partial(_write, ())

    def give_up_stale(self) -> None:
        """Completes the step of a backward pass that was broken off, so that no rank waits."""
        with self._lock:
            if self._end is not None and self._end() is not None:
                return
            self._end = None
            if self._step is None:
                return
            self._step.fail(
                RuntimeError(
                    "backward was broken off on this rank, where its error was raised; inside of "
                    "`with ddp.in_step():` all ranks are told which"
                )
            )
            try:
                self._close()
            except Exception as error:
                warnings.warn(
                    f"the step of a backward pass that was broken off was given up on all ranks: "
                    f"{error}",
                    stacklevel=4,
                )
                self._put_back()
            finally:
                self._let_go()


class _End:
    """What is queued for the end of a backward pass; gone with it if that is broken off."""

    def __init__(self, steps: Steps, required: bool) -> None:
        self._steps = steps
        self._required = required

    def __call__(self) -> None:
        self._steps.finish(required=self._required)


def _engine(request: ModuleRequest) -> Engine:
    engine = Engine(request)
    engine.lifecycle.set_label(
        "this DistributedDataParallel", "make a new one of its module, on a working group"
    )
    return engine


def _write(targets: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            target.copy_(result)
