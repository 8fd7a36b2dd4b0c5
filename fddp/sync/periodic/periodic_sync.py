"""Execution of periodic schedules: averages of parameters or outer gradients between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from fddp.collectives.replicas.check import check_replicas
from fddp.core.schedule.periodic import Event
from fddp.errors import TreeMismatchError
from fddp.hooks.hook import Hook
from fddp.runtime.inputs import outside_transforms
from fddp.sync.periodic.agreement import ScheduleSource, agreed, spans_of
from fddp.sync.periodic.fragment_mean import FragmentMean, Started, copied
from fddp.sync.periodic.outer import check_outer_updates, updates_of
from fddp.transport import Group, TransportName
from fddp.transport.mesh import resolve_mesh
from fddp.tree.pytree import tree_map

if TYPE_CHECKING:
    from typing_extensions import Self


class FragmentState(TypedDict):
    """State of one fragment on one rank.

    Attributes:
        params: the parameters that all ranks share since the last outer step, by path; {} without
            an outer optimizer.
        outer: state of the outer optimizer; () without one.
        hook: state of the communication hook; () if it keeps none.
        sent: contribution of this rank to the collective in flight, by path; {} if none is.
        weight: weight of this contribution.
    """

    params: dict[str, Any]
    outer: Any
    hook: tuple[Any, ...]
    sent: dict[str, Any]
    weight: float


class PeriodicState(TypedDict):
    """State of a `PeriodicSync` on one rank: a tree of tensors and numbers, for `torch.save`.

    Attributes:
        step: number of steps taken.
        fragments: state of each fragment.
    """

    step: int
    fragments: tuple[FragmentState, ...]


class _Live(NamedTuple):
    """A mean in flight, and the contribution of this rank."""

    sent: dict[str, Any]
    started: Started
    mean: FragmentMean


class PeriodicSync:
    """Executes a periodic schedule, which is checked. Construction is a collective call.

    Without an outer optimizer, parameters are averaged (local SGD). With one, ranks average outer
    gradients: the parameters that all ranks shared after the last outer step, minus the rank's own.
    The outer optimizer turns their mean into an update of the shared parameters, from which all
    ranks continue (DiLoCo). Averages along inner axes only are of parameters in any case.

    Each fragment has a communicator of its own. A collective in flight is part of the state as the
    contribution of this rank. A new `PeriodicSync` that continues from such a state, on all ranks,
    sends it again.

    Args:
        tree: parameters, of which paths, shapes and dtypes are used, or an `nn.Module`. Leaves of
            other than floating and complex dtypes stay local.
        schedule: the schedule, or a function that makes one for the tree, such as `local_sgd`.
        outer: outer optimizer: `sgd` of this module, or another pair `(init, update)` with updates
            to be added, such as a gradient transformation of torchopt (of optax, if the leaves are
            JAX arrays).
        hook: communication hook of `fddp.hooks` for averages over all ranks, such as
            `bf16_compress` or `error_feedback(int8())`.
        group, transport, timeout_s: as in `GradSync`.
        mesh: mesh whose axes have periods, instead of a group.

    Attributes:
        schedule: the schedule.

    Raises:
        ScheduleError: the schedule is wrong.
        PlanMismatchError: trees, schedules or hooks differ between ranks; on every rank.
        TreeMismatchError: the schedule was made for another tree.
        ValueError: the axes of the mesh and those of the schedule differ.

    Example:
        >>> import fddp, torch
        >>> from fddp import periodic
        >>> def train(group):
        ...     params, outer = {"w": torch.tensor(4.0)}, periodic.sgd(1.0, momentum=0.0)
        ...     schedule = periodic.diloco(params, 2)
        ...     with periodic.PeriodicSync(params, schedule, outer=outer, group=group) as sync:
        ...         state = sync.init(params)
        ...         for _ in range(4):
        ...             params = {"w": params["w"] - 1.0 - group.rank}  # an inner step
        ...             params, state = sync.step(params, state)
        ...         return params["w"].item(), state["step"]
        >>> fddp.loopback(2, train)
        [(-2.0, 4), (-2.0, 4)]
    """

    def __init__(
        self,
        tree: Any,
        schedule: ScheduleSource,
        *,
        outer: Any = None,
        hook: Hook[Any] | None = None,
        group: Group | None = None,
        mesh: DeviceMesh | None = None,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
    ) -> None:
        self._outer = outer
        self._group = resolve_mesh(group, mesh).group
        self._live: dict[int, _Live] = {}
        self._means: dict[tuple[int, tuple[str, ...]], FragmentMean] = {}
        name = "" if outer is None else type(outer).__qualname__
        with outside_transforms():
            self._tree, self.schedule = agreed(
                tree, schedule, name, (group, mesh), timeout_s, FragmentMean._title
            )
        self._everyone = self.schedule.fragments[0].when.axes
        self._parts = [self.schedule.paths(n) for n in range(len(self.schedule.fragments))]
        try:
            for number, paths in enumerate(self._parts):
                for axes, span in spans_of(self._everyone, mesh).items():
                    self._means[number, axes] = FragmentMean(
                        self._tree.part(tree, paths),
                        group=group,
                        mesh=span,
                        hook=hook if axes == self._everyone else None,
                        transport=transport,
                        timeout_s=timeout_s,
                    )
        except BaseException:
            self.close()
            raise

    def init(self, params: Any) -> PeriodicState:
        """Return the state before the first step. With an outer optimizer a collective call, which
        compares the parameters of all ranks, and what their outer optimizers make of them.

        Args:
            params: parameters. Not written.

        Raises:
            DesyncError: parameters or outer optimizers differ between ranks; on every rank.
            TreeMismatchError: the tree has other leaves than at construction.
        """
        if self._outer is not None:
            check_replicas(self._tree.part(params, self._tree.averaged), group=self._group)
        fragments = []
        with torch.no_grad():
            for number, paths in enumerate(self._parts):
                shared, outer = dict[str, Any](), ()
                if self._outer is not None:
                    shared = {
                        p: _copied(leaf) for p, leaf in self._tree.part(params, paths).items()
                    }
                    outer = self._outer.init(shared)
                hook = self._means[number, self._everyone].init_state()
                fragments.append(
                    FragmentState(params=shared, outer=outer, hook=hook, sent={}, weight=1.0)
                )
            if self._outer is not None:
                check_outer_updates(self._outer, fragments, self._group)
        return PeriodicState(step=0, fragments=tuple(fragments))

    def step(
        self, params: Any, state: PeriodicState, *, weight: float = 1.0
    ) -> tuple[Any, PeriodicState]:
        """Execute the events after an inner step; a collective call if there are any.

        Args:
            params: parameters after the inner step. Not written.
            state: state returned by `init` or the previous step. Not written.
            weight: weight of this rank in the means that are started, such as its number of samples
                since the last one; with 0 it contributes nothing, and still receives them.

        Returns:
            Parameters and state. The parameters are the given tree if no average is applied, else a
            new tree, with new tensors for the leaves of the fragments that are.

        Raises:
            TreeMismatchError: the tree has other leaves than at construction, or the state is of
                another schedule.
            DesyncError: ranks are at different steps.
            WeightError, PeerError, RankLostError, SyncTimeoutError: as calling a `GradSync`. The
                error of a contribution is raised when the mean is applied.
        """
        step, fragments = state["step"], [*state["fragments"]]
        if len(fragments) != len(self._parts):
            raise TreeMismatchError(
                f"the state has {len(fragments)} fragments, and the schedule {len(self._parts)}; "
                f"pass a state of this schedule"
            )
        with torch.no_grad():
            for live in self._live.values():
                live.started.step.start()  # further stages of hooks
            for event in self.schedule.due(step):
                known = fragments[event.fragment]
                if event.kind == "start":
                    known = self._start(event, params, {**known, "weight": weight}, step)
                else:
                    changed, known = self._apply(event, params, known, step)
                    params = self._tree.replaced(params, changed)
                fragments[event.fragment] = known
        return params, PeriodicState(step=step + 1, fragments=tuple(fragments))

    def step_(self, params: Any, state: PeriodicState, *, weight: float = 1.0) -> PeriodicState:
        """Execute the events in place: as `step`, but write the results into the tensors of
        `params`, such as `dict(module.named_parameters())`. Return the new state."""
        changed, state = self.step(params, state, weight=weight)
        if changed is not params:
            with torch.no_grad():
                tree_map(lambda own, new: own if own is new else own.copy_(new), params, changed)
        return state

    def _start(self, event: Event, params: Any, state: FragmentState, step: int) -> FragmentState:
        """Start a mean, and return the state with the contribution of this rank."""
        number, sent = event.fragment, dict[str, Any]()

        def contribution() -> dict[str, Any]:
            part = self._tree.part(params, self._parts[number])
            if self._is_outer(event):
                shared = state["params"]
                sent.update((path, shared[path] - _detached(leaf)) for path, leaf in part.items())
            elif self.schedule.fragments[number].delay:
                sent.update((path, _copied(leaf)) for path, leaf in part.items())
            else:
                sent.update(part)
            return sent

        if number in self._live:  # of a run that was left for an earlier state, on all ranks
            live = self._live.pop(number)
            live.mean.finish(live.started)
        mean = self._means[number, event.axes]
        hook = state["hook"] if event.axes == self._everyone else ()
        moment = f" (fragment {number} after step {step})"
        started = mean.start(contribution, hook, state["weight"], moment)
        self._live[number] = _Live(sent, started, mean)
        return {**state, "sent": sent}

    def _apply(
        self, event: Event, params: Any, state: FragmentState, step: int
    ) -> tuple[dict[str, Any], FragmentState]:
        """Wait for a mean. Return the parameters to continue from, by path, and the new state."""
        number, fragment = event.fragment, self.schedule.fragments[event.fragment]
        live = self._live.get(number)
        if live is None or not _are_equal(live.sent, state["sent"]):
            self._resend(event, state, step)
            live = self._live[number]
        del self._live[number]
        mean, hook = live.mean.finish(live.started)
        state = {**state, "sent": {}}
        if event.axes == self._everyone:
            state["hook"] = hook
        if self._is_outer(event):
            updates, state["outer"] = updates_of(self._outer, mean, state["outer"], state["params"])
            mean = state["params"] = tree_map(lambda p, u: p + u, state["params"], updates)
        if fragment.mixing:
            own = self._tree.part(params, self._parts[number])
            rest = 1.0 - fragment.mixing
            mean = tree_map(
                lambda leaf, new: _detached(leaf) * fragment.mixing + new * rest, own, mean
            )
        elif self._is_outer(event):
            mean = tree_map(copied, mean)  # the caller may write its parameters
        return mean, state

    def _resend(self, event: Event, state: FragmentState, step: int) -> None:
        """Start the mean of a loaded state again."""
        sent = state["sent"]
        mean = self._means[event.fragment, event.axes]
        hook = state["hook"] if event.axes == self._everyone else ()
        moment = f" (fragment {event.fragment}, sent again after step {step})"
        started = mean.start(lambda: sent, hook, state["weight"], moment)
        self._live[event.fragment] = _Live(sent, started, mean)

    def _is_outer(self, event: Event) -> bool:
        """Return True if the mean is of outer gradients."""
        return self._outer is not None and event.axes == self._everyone

    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self._live.clear()
        for mean in self._means.values():
            mean.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PeriodicSync({self.schedule!r})"


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return copied(_detached(leaf))


def _are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if two contributions are the same, or equal."""
    if first is second:
        return True
    return first.keys() == second.keys() and all(
        first[path] is leaf or bool((first[path] == leaf).all()) for path, leaf in second.items()
    )
