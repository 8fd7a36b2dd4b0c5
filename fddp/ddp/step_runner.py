"""One step of a wrapped module: open it, close it, write its results to `.grad`.

[Note: changed parameters]
The parameters of a wrapped module may change between steps. A parameter that is frozen stays in the
plan, unused. If one is unfrozen, replaced or added, the rank can run neither a step of the old plan
nor the collectives that make a new plan before all ranks are ready for it. So it fails its next
step with `ParametersChangedError` and leaves its gradients untouched. If all ranks fail with this
error, they make a new plan and repeat the step. Otherwise all of them raise. If a rank fails for
another reason, the others raise that error, and the comparison waits for the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fddp.core.protocol.calls import Method
from fddp.ddp.debug_logs import log_rebuilt
from fddp.ddp.logging_data import Recorder
from fddp.ddp.request import ModuleRequest
from fddp.ddp.unused_parameters import GraphChangedError, ParameterUse, Usage
from fddp.errors import FddpError, InternalError, PlanMismatchError
from fddp.native.autograd_leaves import add_to_context, param_set
from fddp.native.backward_watch import BackwardWatch
from fddp.runtime.contributions import BackwardContributions, Contributions, TreeContributions
from fddp.runtime.failures import peer_error
from fddp.runtime.state import Outcome
from fddp.runtime.step import Step
from fddp.runtime.step_info import make_info
from fddp.sync.engine import Engine
from fddp.tree.pytree import flatten

_CHANGE = "freeze, unfreeze and replace parameters on all ranks between the same two steps"
_SKIP_IN_CONTEXT = (
    "nonfinite='skip' can't skip a step whose gradients are in a context of distributed autograd: "
    "gradients can't be removed from there, and the optimizer would use each rank's own; build the "
    "wrapper with nonfinite='raise'"
)


class ParametersChangedError(FddpError):
    """A rank's parameters are no longer those of the plan."""


@dataclass(slots=True)
class _NoGraphInfo:
    """Stands for an inspected graph. Backward passes of a module are not inspected beforehand."""

    used: list[bool]
    opaque: bool = True


class HookedParameters:
    """Parameters in the order of the plan's leaves, with hooks for their gradients.

    The hooks do nothing after this object is freed. They announce the first gradient of a step to
    `watch`. With `undefined_counts`, an undefined gradient stands for zeros.

    Attributes:
        graph: graph of any backward pass, as far as it is known beforehand.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        watch: BackwardWatch,
        *,
        undefined_counts: bool,
    ) -> None:
        self.leaves, treedef = flatten(dict(params))
        self.names = treedef.paths
        self.hooks = param_set(self.leaves, watch)
        self.hooks.count_undefined(undefined_counts)
        self.graph = _NoGraphInfo([True] * len(self.names))
        self._all_names = frozenset(self.names)
        self._counts: Sequence[int] = ()
        self._ranks: Mapping[str, int] = {}  # the same counts by name

    def are_captured(self) -> bool:
        """Return True if the running `autograd.grad` returns a parameter's gradient."""
        leaves = (leaf for leaf in self.leaves if leaf.requires_grad)
        try:
            for leaf in leaves:
                # Raises for leaves whose gradients autograd.grad captures.
                torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
        except RuntimeError:
            return True
        return False

    def used_names(self) -> frozenset[str]:
        """Names of the parameters that received a gradient on this rank."""
        if self.hooks.all_used():
            return self._all_names
        flags = self.hooks.used()
        return frozenset(name for name, used in zip(self.names, flags, strict=True) if used)

    def by_name(self, counts: Sequence[int]) -> Mapping[str, int]:
        """Return by name the numbers of ranks that used each leaf."""
        if counts != self._counts:
            self._counts, self._ranks = counts, dict(zip(self.names, counts, strict=True))
        return self._ranks


@dataclass(frozen=True)
class BucketMemory:
    """Use of the memory of buckets.

    Attributes:
        is_gradient: True if results, which are views of it, replace gradients that were there
            before, instead of being written into them.
        is_lazy: True if it is allocated when a bucket is complete, and released after the step.
    """

    is_gradient: bool
    is_lazy: bool


class StepRunner:
    """Runs the steps of a wrapped module on the engine. Construction is a collective call.

    Args:
        find_unused, static: as for `Usage`.
        memory: memory of the buckets and gradients.

    Attributes:
        engine: the engine, which owns the plan.
        usage: the parameters that steps used.
        parameters: the parameters with their hooks; set by `set_parameters`.
        step: the open step, or None.
        work: further waits for the end of a step.
        has_changed: True if the parameters are no longer those of the plan.
        skipped: True if all ranks left out the last step because of a non-finite number.
        has_failed: True if the last step failed in good order on all ranks and nothing has been
            communicated since.
    """

    parameters: HookedParameters

    def __init__(
        self,
        request: ModuleRequest,
        *,
        find_unused: bool,
        static: bool,
        memory: BucketMemory,
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
        self.recorder = recorder
        self.step: Step | None = None
        self.work: list[Callable[[], object]] = []
        self.skipped = False
        self.has_failed = False
        self._request = request
        self.memory = memory
        self.has_changed = False
        self._open_error: BaseException | None = None
        self._begun_s = 0.0
        self._write: Callable[[Sequence[Tensor | None]], None] = _write_nothing

    def set_parameters(self, watch: BackwardWatch) -> None:
        """Hook the parameters of the request."""
        self.parameters = HookedParameters(
            self._request.params,
            watch,
            undefined_counts=self.usage.reports_unused,
        )
        self._assign = partial(self.parameters.hooks.assign, replace=self.memory.is_gradient)

    def change_parameters(self, request: ModuleRequest, watch: BackwardWatch) -> None:
        """Replace the parameters; see [Note: changed parameters]."""
        # The next set removes its hooks from parameters that stay.
        del self.parameters, self._assign
        self._request = request
        self.set_parameters(watch)
        self.usage.params = request.params
        self.has_changed = True

    def declare_static(self) -> None:
        """Require that all steps use the same parameters."""
        self.usage.static = True
        self.parameters.hooks.count_undefined(self.usage.reports_unused)

    @property
    def is_begun(self) -> bool:
        """True if a step is open, or could not be opened."""
        return self.step is not None or self._open_error is not None

    def open(self, *, again: bool = False) -> None:
        """Open a step whose gradients the hooks collect.

        Does not raise, because backward is running; errors are raised at the end of backward.
        """
        hooks = self.parameters.hooks
        try:
            self._begun_s = time.perf_counter()
            if not again:
                hooks.begin()
            number = self.engine.step
            step = self.step = self.engine.open(
                Method.MODULE, with_stats=self.recorder.wants(number)
            )
            self.engine.in_backward = True
            step.allow_idle_ranks = self.usage.joining
            if step.context.bound_hook is not None:
                # Hooks may call operators, and also run on ranks that have failed.
                self.engine.transport.leave_step()
            if self.has_changed and not again:
                step.fail(ParametersChangedError(f"this rank's parameters have changed; {_CHANGE}"))
                return
            step.begin(self._contributions(step), self.parameters.leaves)
            self._write = self._assign
            step.arm(hooks, self.parameters.graph, self.engine.arrivals)
        except BaseException as error:
            if self.step is None:
                self._open_error = error
            else:
                self.step.fail(error)

    def _contributions(self, step: Step) -> BackwardContributions:
        is_gradient = self.memory.is_gradient
        return BackwardContributions(
            step.program,
            weight=1.0,
            accumulated=None,
            idle=step.context.idle,
            aliases_buffer=self.parameters.hooks.aliases_buffer if is_gradient else None,
            packs_early=not self.memory.is_lazy,
        )

    def open_distributed(self, context: int) -> None:
        """Open a step over the gradients in a context of distributed autograd.

        Backward has ended. Results are written over this rank's gradients in the context, and
        added to it where this rank has none. An undefined gradient stands for zeros.
        """
        from torch.distributed.autograd import get_gradients

        params = self.parameters.leaves
        grads = get_gradients(context)
        own = [grads.get(param) for param in params]
        used = self.parameters.hooks.used()
        self.step = self.engine.open(Method.MODULE, with_stats=False)
        if self.engine.terms.nonfinite == "skip":
            self.step.fail(ValueError(_SKIP_IN_CONTEXT))
            return
        contributions = TreeContributions(self.engine.program, _filled(own, used, params), 1.0)
        self.step.begin(contributions, params)
        self._write = partial(_add_to_context, context, params, own)

    def finish(self, reached_s: float, end_s: float | None = None) -> None:
        """Close the step, and write its results.

        Args:
            reached_s: time at which backward reached an output, in seconds of `perf_counter`.
            end_s: time at which it ended; now, if it has only just.
        """
        end_s = time.perf_counter() if end_s is None else end_s
        if self._open_error is not None or self.step is None:
            raise self._open_error or InternalError("a step was to end that was not open")
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
            _raise_changed_graph(self.step.failures if self.step else ())
            raise
        step, report = self.step, outcome.report
        if step.program.control.with_order and not self.engine.program.control.with_order:
            plan = self.engine.program.plan
            log_rebuilt(len(plan.buckets), plan.caps_bytes)
        self._write(outcome.leaves)
        if outcome.skipped:
            # Gradients accumulated before the step are part of the sum, and go, too.
            for param in self.parameters.leaves:
                param.grad = None
        self.parameters.hooks.reset_used()
        if self.work:
            self.wait_for_work()
        self.usage.note(ParameterUse(here, self.parameters.by_name(report.users)))
        if step.record_time:
            program = step.program
            idle = step.context.idle - set(report.late)
            backward_s = (min(reached_s, self._begun_s), end_s)
            self.recorder.record(
                make_info(step, outcome, backward_s, begun_s=self.recorder.forward_start_s),
                program.plan,
                has_rebuilt=not program.control.with_order,
                reduced=len(program.plan.buckets) - len(idle),
            )

    def fail_on_misuse(self, here: frozenset[str]) -> None:
        """Fail the step if parameters were used against what was declared.

        A method of its own, so that no frame in an error's traceback refers to the error.
        """
        problem = self.usage.problem(here)
        if problem is not None and self.step is not None:
            self.step.fail(problem)

    def close_step(self) -> Outcome:
        """Close the open step and return its outcome.

        Raises:
            As `Engine.finish`.
        """
        if self.step is None:
            raise InternalError("a step was to be closed that was not open")
        self.engine.in_backward = False
        outcome = self._close(self.step)
        contributions = self.step.contributions
        if isinstance(contributions, BackwardContributions):
            self.engine.arrivals = contributions.arrivals()
        return outcome

    def _close(self, step: Step) -> Outcome:
        self.skipped = self.has_failed = False
        self.engine.transport.leave_step()
        try:
            outcome = self.engine.finish(step)
        except BaseException:
            self.has_failed = not self.engine.is_closed
            raise
        self.skipped = outcome.skipped
        return outcome

    def _repeat(self) -> Outcome:
        """Make a new plan together with all ranks, and repeat the step."""
        _check_changed_everywhere(self.engine, self.step.failures if self.step else ())
        hook, number = self.engine.hook, self.engine.step
        self.engine.close("the parameters changed")
        self.engine = _engine(self._request)
        self.engine.step = number
        if hook is not None:
            self.engine.set_hook(hook)
        self.has_changed = False
        self.open(again=True)
        if self._open_error is not None:
            raise self._open_error
        return self.close_step()

    def take_part(self, weight: float) -> None:
        """Run a step to which this rank contributes nothing; its gradients stay unchanged."""
        step = self.engine.open(Method.MODULE, with_stats=False)
        step.allow_idle_ranks = True
        nothing = Contributions()
        nothing.weight = weight
        step.begin(nothing, self.parameters.leaves)
        self._close(step)
        self.wait_for_work()
        del step
        self.release_memory()

    def fail(self, error: BaseException) -> None:
        """Fail the open step, or one that is opened for this purpose."""
        self.step = self.step or self.engine.open(Method.NOTHING, with_stats=False)
        self.step.fail(error)

    def restore_grads(self) -> None:
        """Restore the gradients from before a failed step. Further calls have no effect.

        Gradients that were being reduced in place are lost. They become None.
        """
        self.parameters.hooks.restore()
        self.parameters.hooks.disarm()
        if self.step is None:
            return
        contributions = self.step.contributions
        if isinstance(contributions, BackwardContributions):
            program = self.step.program
            for bucket in contributions.in_place:
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
        if self.memory.is_lazy:
            self.engine.release_memory(keep_views=self.memory.is_gradient)

    def reset(self) -> None:
        """Drop the state of a step that has ended."""
        self.parameters.hooks.disarm()
        self.engine.in_backward = False
        self.work.clear()
        self.step = self._open_error = None
        self._write = _write_nothing
        self.release_memory()


def _engine(request: ModuleRequest) -> Engine:
    engine = Engine(request)
    engine.label = "this DistributedDataParallel"
    engine.advice = "make a new one of its module, on a working group"
    return engine


def _check_changed_everywhere(engine: Engine, failures: Sequence[str]) -> None:
    rank = engine.transport.rank
    # A rank that failed before its forward pass has not compared its parameters.
    others = {
        other: text
        for other, text in enumerate(failures)
        if text and not text.startswith(ParametersChangedError.__name__)
    }
    if others:
        raise peer_error(engine.step - 1, others)
    for other, text in enumerate(failures):
        if not text:
            raise PlanMismatchError(
                f"the parameters of the wrapped module have changed on rank {rank}, but not on "
                f"rank {other}; {_CHANGE}"
            )


def _raise_changed_graph(failures: Sequence[str]) -> None:
    """Raise one error on all ranks if a graph changed that was declared static, and no rank failed
    for another reason."""
    kind = f"{GraphChangedError.__name__}: "
    texts = [text for text in failures if text]
    if texts and all(text.startswith(kind) for text in texts):
        advice = "No rank has gradients of this step; the group is in step and can go on"
        changes = [text.removeprefix(kind) for text in texts]
        raise RuntimeError("\n".join([*changes, advice])) from None


def _filled(
    grads: Sequence[Tensor | None], used: Sequence[bool], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients, with zeros for parameters that were used and have none."""
    rows = zip(grads, used, params, strict=True)
    return [torch.zeros_like(p) if flag and grad is None else grad for grad, flag, p in rows]


def _add_to_context(
    context: int,
    params: Sequence[Tensor],
    own: Sequence[Tensor | None],
    results: Sequence[Tensor | None],
) -> None:
    """Write results over a context's own gradients, and add those that it does not have."""
    _copy_to(own, results)
    rows = zip(params, own, results, strict=True)
    new = [(p, result) for p, grad, result in rows if grad is None and result is not None]
    add_to_context(context, new)


def _write_nothing(results: Sequence[Tensor | None]) -> None:
    """Write no gradients; stands for the write of a step that is not open."""


def _copy_to(targets: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> None:
    for target, result in zip(targets, results, strict=True):
        if target is not None and result is not None:
            target.copy_(result)
