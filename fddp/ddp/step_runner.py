"""Steps of a wrapped module: open one, close it, write its results to `.grad`."""

from __future__ import annotations

import time
from collections.abc import Callable

from fddp.core.protocol.calls import Method
from fddp.ddp.autograd_context import SKIP_IN_CONTEXT, begin_in_context
from fddp.ddp.changed_parameters import ParametersChangedError, check_changed_everywhere
from fddp.ddp.debug_logs import log_rebuilt
from fddp.ddp.logging_data import Recorder
from fddp.ddp.micro_batches import IN_CONTEXT, MicroBatches
from fddp.ddp.module_step import ModuleStep
from fddp.ddp.parameters import HookedParameters
from fddp.ddp.request import ModuleRequest
from fddp.ddp.switch import Switch
from fddp.ddp.unused_parameters import ParameterUse, Usage, raise_changed_graph
from fddp.errors import InternalError
from fddp.native.backward_watch import BackwardWatch
from fddp.runtime.contributions import BackwardContributions, Contributions
from fddp.runtime.step import Step
from fddp.runtime.step_context import Outcome
from fddp.runtime.step_info import make_info
from fddp.sync.engine import Engine


class StepRunner:
    """Opens and closes the steps of a wrapped module. Construction is a collective call.

    Args:
        request: the parameters and their bucketing.
        watch: observer of backward passes.
        recorder: logger of the steps.
        switch: settings that may change.

    Attributes:
        engine: the engine, which owns the plan. Changed parameters bring a new one.
        usage: the parameters that steps used.
        parameters: the parameters with their hooks.
        current: the step that is open or waits to be closed, or None.
        micro_batches: earlier backward passes of the current step; None without virtual ranks.
        recorder: as above.
        work: further waits for the end of a step.
        has_changed: True if the parameters are no longer those of the plan.
        skipped: True if all ranks left out the last step because of a non-finite number.
        has_failed: True if the last step failed in good order on all ranks and nothing has been
            communicated since.
    """

    def __init__(
        self, request: ModuleRequest, watch: BackwardWatch, recorder: Recorder, switch: Switch
    ) -> None:
        arguments = request.options.arguments
        self.engine = _engine(request)
        self.usage = Usage(
            request.params,
            self.engine.transport.rank,
            self.engine.transport.world_size,
            find_unused=arguments.find_unused_parameters,
            static=arguments.static_graph,
        )
        self.recorder = recorder
        self.current: ModuleStep | None = None
        self.micro_batches = None if arguments.virtual_ranks is None else MicroBatches()
        self.work: list[Callable[[], object]] = []
        self.has_changed = self.skipped = self.has_failed = False
        self._replaces = arguments.gradient_as_bucket_view
        self._is_lazy = arguments.lazy_bucket_allocation
        self._request = request
        self._watch = watch
        self._switch = switch
        self.parameters = HookedParameters(
            request, self._watch, undefined_counts=self.usage.reports_unused
        )

    def change_parameters(self, request: ModuleRequest) -> None:
        """Replace the parameters; see [Note: changed parameters]."""
        self._request = request
        self.usage.params = request.params
        self.has_changed = True
        # The next set removes its hooks from parameters that stay.
        del self.parameters
        self.parameters = HookedParameters(
            request, self._watch, undefined_counts=self.usage.reports_unused
        )

    def declare_static(self) -> None:
        """Require that all steps use the same parameters."""
        self.usage.static = True
        self.parameters.hooks.count_undefined(self.usage.reports_unused)

    @property
    def step(self) -> Step | None:
        """The open step of the engine, or None."""
        return None if self.current is None else self.current.step

    @property
    def is_begun(self) -> bool:
        """True if a step is open, or could not be opened."""
        return self.current is not None and self.current.is_begun

    # Attributes are read instead of local variables, where frames in an error's traceback would
    # keep a step alive.

    def open(self, *, again: bool = False) -> None:
        """Open a step whose gradients the hooks collect.

        Does not raise, because backward is running; errors are raised at the end of backward.
        """
        hooks, engine = self.parameters.hooks, self.engine
        self.current = ModuleStep()
        try:
            if not again:
                hooks.begin(defer=not self._switch.is_manual)
            step = self.current.step = engine.open(
                Method.MODULE, with_stats=self.recorder.wants(engine.step)
            )
            engine.note_backward(runs=True)
            if step.bound_hook is not None:
                # Hooks may call operators, and also run on ranks that have failed.
                engine.transport.enter_step(None)
            if self.has_changed and not again:
                step.fail(ParametersChangedError())
                return
            step.begin(
                self._contributions(step),
                self.parameters.leaves,
                allow_idle_ranks=self.usage.joining,
            )
            self.current.write = self.parameters.assign
            step.arm(hooks, self.parameters.graph, engine.arrivals)
        except BaseException as error:
            if self.current.step is None:
                self.current.open_error = error
            else:
                self.current.step.fail(error)

    def _contributions(self, step: Step) -> Contributions:
        if self.micro_batches is not None:
            return self.micro_batches.contributions(self.engine, step, self.parameters.leaves)
        return BackwardContributions(
            step.program,
            weight=1.0,
            accumulated=None,
            idle=step.context.idle,
            aliases_buffer=self.parameters.hooks.aliases_buffer if self._replaces else None,
            packs_early=not self._is_lazy,
        )

    def open_in_context(self, current: ModuleStep, context: int) -> None:
        """Open a step over the gradients in a context of distributed autograd. Backward has ended.

        Results are written over this rank's gradients in the context, and added to it where this
        rank has none.
        """
        step = current.step = self.engine.open(Method.MODULE, with_stats=False)
        if self.micro_batches is not None:
            step.fail(RuntimeError(IN_CONTEXT))
        elif self.engine.terms.nonfinite == "skip":
            step.fail(ValueError(SKIP_IN_CONTEXT))
        else:
            current.write = begin_in_context(step, self.parameters, context)

    def finish(self, reached_s: float) -> None:
        """Close the step, and write its results.

        Args:
            reached_s: time at which backward reached an output, in seconds of `perf_counter`.
        """
        if self.current is None or self.current.step is None:
            raise (self.current and self.current.open_error) or InternalError(
                "a step was to end that was not open"
            )
        end_s = time.perf_counter() if self.current.ended_s is None else self.current.ended_s
        here = self.parameters.used_names()
        if self.usage.static:
            self.fail_on_misuse(here)
        try:
            try:
                outcome = self.close_step()
            except ParametersChangedError:
                outcome = self._repeat()
        except BaseException:
            self.restore_grads()
            raise_changed_graph(self.current.failures)
            raise
        self._write(outcome, here, (min(reached_s, self.current.begun_s), end_s))

    def _write(
        self, outcome: Outcome, here: frozenset[str], backward_s: tuple[float, float]
    ) -> None:
        """Write the results of the closed step, and record it."""
        if self.current is None or self.current.step is None:
            raise InternalError("results were to be written of no step")
        step, report, program = self.current.step, outcome.report, self.current.step.program
        if program.control.with_order and not self.engine.program.control.with_order:
            plan = self.engine.program.plan
            log_rebuilt(len(plan.buckets), plan.caps_bytes)
        self.current.write(outcome.leaves)
        if outcome.skipped:
            # Gradients accumulated before the step are part of the sum, and go, too.
            for param in self.parameters.leaves:
                param.grad = None
        self.parameters.hooks.reset_used()
        is_partial = len(here) < len(self.parameters.names)
        if is_partial and 0 in report.users and self.micro_batches is None:
            self.parameters.hooks.await_gradients([users == 0 for users in report.users])
        self.wait_for_work()
        self.usage.note(ParameterUse(here, self.parameters.by_name(report.users)))
        if step.record_time:
            idle = step.context.idle - set(report.late)
            self.recorder.record(
                make_info(step, outcome, backward_s, begun_s=self.recorder.forward_start_s),
                program.plan,
                has_rebuilt=not program.control.with_order,
                reduced=len(program.plan.buckets) - len(idle),
            )

    def fail_on_misuse(self, here: frozenset[str]) -> None:
        """Fail the step if parameters were used against what was declared."""
        if self.micro_batches is not None:
            here |= self.micro_batches.used_names(self.parameters.names)
        problem = self.usage.problem(here)
        if problem is not None and self.step is not None:
            self.step.fail(problem)

    def close_step(self) -> Outcome:
        """Close the open step and return its outcome.

        Raises:
            As `Engine.finish`.
        """
        if self.current is None or self.current.step is None:
            raise InternalError("a step was to be closed that was not open")
        self.engine.note_backward(runs=False)
        outcome = self._close(self.current.step)
        self.engine.note_arrivals(self.current.step)
        return outcome

    def _close(self, step: Step) -> Outcome:
        self.skipped = self.has_failed = False
        self.engine.transport.enter_step(None)
        try:
            outcome = self.engine.finish(step)
        except BaseException:
            self.has_failed = not self.engine.is_closed
            raise
        self.skipped = outcome.skipped
        return outcome

    def _repeat(self) -> Outcome:
        """Make a new plan together with all ranks, and repeat the step."""
        check_changed_everywhere(self.engine, () if self.step is None else self.step.failures)
        hook, number = self.engine.hook, self.engine.step
        self.engine.close("the parameters changed")
        self.engine = _engine(self._request)
        self.engine.step = number
        if hook is not None:
            self.engine.set_hook(hook)
        self.has_changed = False
        self.open(again=True)
        if self.current is not None and self.current.open_error is not None:
            raise self.current.open_error
        return self.close_step()

    def take_part(self, weight: float) -> None:
        """Run a step to which this rank contributes nothing; its gradients stay unchanged."""
        step = self.engine.open(Method.MODULE, with_stats=False)
        nothing = Contributions()
        nothing.weight = weight
        step.begin(nothing, self.parameters.leaves, allow_idle_ranks=True)
        self._close(step)
        self.wait_for_work()
        del step
        self.release_memory()

    def fail(self, error: BaseException) -> None:
        """Fail the open step, or one that is opened for this purpose."""
        self.current = self.current or ModuleStep()
        if self.current.step is None:
            self.current.step = self.engine.open(Method.NOTHING, with_stats=False)
        self.current.step.fail(error)

    def restore_grads(self, *, leave: bool = False) -> None:
        """Restore the gradients from before a failed step. Further calls have no effect.

        Gradients that were being reduced in place are lost. They become None.

        Args:
            leave: True to leave all gradients as they are, and forget those from before.
        """
        hooks = self.parameters.hooks
        hooks.forget() if leave else hooks.restore()
        hooks.disarm()
        if self.step is None:
            return
        contributions = self.step.contributions.backward
        if contributions is not None:
            program = self.step.program
            for bucket in () if leave else contributions.in_place:
                for number in program.member_numbers[bucket]:
                    self.parameters.leaves[program.differentiated[number]].grad = None
            contributions.in_place.clear()

    def wait_for_work(self) -> None:
        """Wait for `work`, and clear it."""
        for wait in self.work:
            wait()
        self.work.clear()

    def release_memory(self) -> None:
        """Release the memory of earlier steps if it is lazy, except that of existing gradients
        that may be reduced in place."""
        if self._is_lazy:
            self.engine.release_memory(keep_views=self._replaces)

    def drop(self) -> None:
        """Drop the state of a step that has ended."""
        self.parameters.hooks.disarm()
        self.engine.note_backward(runs=False)
        self.work.clear()
        self.current = None
        if self.micro_batches is not None:
            self.micro_batches.reset()
        self.release_memory()


def _engine(request: ModuleRequest) -> Engine:
    engine = Engine(request)
    engine.label = "this DistributedDataParallel"
    engine.advice = "make a new one of its module, on a working group"
    return engine
