"""Execution of periodic schedules: averages of parameters or outer gradients between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from fddp import (
    Communicator,
    GradSync,
    check_replicas,
    plan_buckets,
    tree_map,
)
from fddp.errors import PlanMismatchError, TreeMismatchError, error_text
from fddp.extend import (
    Group,
    StepHandle,
    check_equal,
    check_paths,
    entrance,
    exchange,
    leaf_text,
    tree_flatten,
)
from fddp.periodic.outer import trial_updates, updates_of
from fddp.periodic.schedule import PeriodicSchedule

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


class _Ranks(Communicator):
    title = "periodic average"


class _Mean(GradSync):
    title = "periodic average"


class PeriodicSync:
    """Executes a periodic schedule. Construction is a collective call.

    Without an outer optimizer, parameters are averaged (local SGD). With one, ranks average outer
    gradients: the parameters that all ranks shared after the last outer step, minus the rank's own.
    The outer optimizer turns their mean into an update of the shared parameters, from which all
    ranks continue (DiLoCo).

    Each fragment is a `GradSync`. A collective in flight is part of the state as the contribution
    of this rank. A new `PeriodicSync` that continues from such a state, on all ranks, sends it
    again.

    Args:
        tree: parameters, of which paths, shapes and dtypes are used, or an `nn.Module`. Leaves of
            other than floating and complex dtypes stay local.
        schedule: the schedule, or a function that makes one for the tree, such as `local_sgd`.
        outer: outer optimizer: `sgd` of this module, or another pair `(init, update)` with updates
            to be added, such as a gradient transformation of torchopt (of optax, if the leaves are
            JAX arrays).
        group, timeout_s: as in `GradSync`.
        options: further options of each fragment's `GradSync`, such as `hook=bf16_compress` or
            `transport`.

    Attributes:
        schedule: the schedule.

    Raises:
        PlanMismatchError: trees, schedules or hooks differ between ranks; on every rank.
        TreeMismatchError: the schedule was made for another tree.

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

    @entrance
    def __init__(
        self,
        tree: Any,
        schedule: PeriodicSchedule | Callable[[Any], PeriodicSchedule],
        *,
        outer: Any = None,
        group: Group | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        tree, self._outer, self._group = _params(tree), outer, group
        with _Ranks(group, timeout_s=timeout_s) as ranks:
            self.schedule = _agreed(ranks, tree, schedule, outer)
        self._paths = tree_flatten(tree)[1].paths
        self._live: dict[int, tuple[dict[str, Any], StepHandle]] = {}
        self._means: list[_Mean] = []
        try:
            for number in range(len(self.schedule.fragments)):
                part = self._part(tree, number)
                mean = _Mean(part, group=group, timeout_s=timeout_s, **options)
                self._means.append(mean)
        except BaseException:
            self.close()
            raise

    @entrance
    def init(self, params: Any) -> PeriodicState:
        """Return the state before the first step. With an outer optimizer a collective call, which
        compares the parameters of all ranks, and what their outer optimizers make of them.

        Args:
            params: parameters. Not written.

        Raises:
            DesyncError: parameters or outer optimizers differ between ranks; on every rank.
            TreeMismatchError: the tree has other leaves than at construction.
        """
        parts = [self._part(params, number) for number in range(len(self._means))]
        shared: list[dict[str, Any]] = [{} for _ in parts]
        outer: list[Any] = [() for _ in parts]
        if self._outer is not None:
            check_replicas({path: part[path] for part in parts for path in part}, self._group)
            with torch.no_grad():
                shared = [tree_map(_copied, part) for part in parts]
                outer = [self._outer.init(part) for part in shared]
                pairs = zip(shared, outer, strict=True)
                trials = [trial_updates(self._outer, part, state) for part, state in pairs]
            check_replicas({"outer optimizer": trials}, self._group)
        return PeriodicState(
            step=0,
            fragments=tuple(
                FragmentState(params=part, outer=state, hook=mean.init_state(), sent={}, weight=1.0)
                for part, state, mean in zip(shared, outer, self._means, strict=True)
            ),
        )

    @entrance
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
        if len(fragments) != len(self._means):
            raise TreeMismatchError(
                f"the state has {len(fragments)} fragments, and the schedule {len(self._means)}; "
                f"pass a state of this schedule"
            )
        with torch.no_grad():
            for _, handle in self._live.values():
                handle.send()
            for kind, number in self.schedule.due(step):
                fragment = fragments[number]
                if kind == "start":
                    fragments[number] = self._start(number, params, fragment, weight, step)
                else:
                    params, fragments[number] = self._apply(number, params, fragment, step)
        return params, PeriodicState(step=step + 1, fragments=tuple(fragments))

    @entrance
    def step_(self, params: Any, state: PeriodicState, *, weight: float = 1.0) -> PeriodicState:
        """Execute the events in place: as `step`, but write the results into the tensors of
        `params`, or into the parameters of a module. Return the new state."""
        params = _params(params)
        changed, state = self.step(params, state, weight=weight)
        if changed is not params:
            with torch.no_grad():
                tree_map(_written, params, changed)
        return state

    @property
    def stopping(self) -> bool:
        """True from the step on that applies a mean in which a rank has asked all ranks to stop:
        the same step on every rank. As `GradSync.stopping`."""
        return any(mean.stopping for mean in self._means)

    def request_stop(self) -> None:
        """Ask all ranks to stop, by the next mean of each fragment. As `GradSync.request_stop`."""
        for mean in self._means:
            mean.request_stop()

    def _start(
        self, number: int, params: Any, state: FragmentState, weight: float, step: int
    ) -> FragmentState:
        """Start a mean, and return the state with the contribution of this rank."""
        sent: dict[str, Any] = {}

        def contribution() -> dict[str, Any]:
            part = self._part(params, number)
            if self._outer is not None:
                part = {path: state["params"][path] - _detached(part[path]) for path in part}
            elif self.schedule.fragments[number].delay:
                part = tree_map(_copied, part)
            sent.update(part)
            return sent

        state = {**state, "sent": sent, "weight": weight}
        self._send(number, state, contribution, f" (fragment {number} after step {step})")
        return state

    def _send(
        self, number: int, state: FragmentState, contribution: Callable[[], Any], label: str
    ) -> None:
        if number in self._live:  # of a run that was left for an earlier state, on all ranks
            self._live.pop(number)[1].wait()
        weight, hook = state["weight"], state["hook"]
        handle = self._means[number].start(contribution, weight=weight, state=hook, label=label)
        self._live[number] = state["sent"], handle

    def _apply(
        self, number: int, params: Any, state: FragmentState, step: int
    ) -> tuple[Any, FragmentState]:
        """Wait for a mean. Return the parameters to continue from, and the new state."""
        sent, sync = state["sent"], self._means[number]
        if number not in self._live or not _are_equal(self._live[number][0], sent):
            label = f" (fragment {number}, sent again after step {step})"
            self._send(number, state, lambda: sent, label)  # the state was loaded
        handle = self._live.pop(number)[1]
        mean = handle.wait()
        state = {**state, "sent": {}, "hook": handle.state}
        mean = tree_map(lambda leaf: kept(sync, leaf), mean)
        if self._outer is not None:
            updates, state["outer"] = updates_of(self._outer, mean, state["outer"], state["params"])
            state["params"] = tree_map(lambda p, u: p + u, state["params"], updates)
            mean = tree_map(_copied, state["params"])  # the caller may write its parameters
        mixing = self.schedule.fragments[number].mixing
        if mixing:
            own, rest = self._part(params, number), 1.0 - mixing
            mean = tree_map(lambda leaf, new: _detached(leaf) * mixing + new * rest, own, mean)
        leaves, treedef = tree_flatten(_params(params))
        pairs = zip(self._paths, leaves, strict=True)
        return treedef.unflatten([mean.get(path, leaf) for path, leaf in pairs]), state

    def _part(self, tree: Any, number: int) -> dict[str, Any]:
        """Return the leaves of a fragment by path."""
        leaves, treedef = tree_flatten(_params(tree))
        check_paths(treedef, self._paths, "the tree of parameters")
        by_path = dict(zip(self._paths, leaves, strict=True))
        part = {path: by_path[path] for path in self.schedule.fragments[number].paths}
        for path, leaf in part.items():
            if leaf is None:
                raise TreeMismatchError(
                    f"{leaf_text(path)} to average is None; pass all parameters"
                )
        return part

    @entrance
    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self._live.clear()
        for mean in self._means:
            mean.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PeriodicSync({self.schedule!r})"


def _agreed(ranks: Communicator, tree: Any, source: Any, outer: Any) -> PeriodicSchedule:
    """Return the schedule of a tree, which is the same on all ranks; a collective call."""
    schedule, problem, terms = PeriodicSchedule(()), None, []
    try:
        schedule = source if isinstance(source, PeriodicSchedule) else source(tree)
        _check_fit(schedule, tree)
        terms = [("the outer optimizer", type(outer).__qualname__)]
        terms += [("the number of fragments", str(len(schedule.fragments)))]
        for number, fragment in enumerate(schedule.fragments):
            values = vars(fragment).items()
            terms += [(f"{name} of fragment {number}", str(value)) for name, value in values]
    except Exception as error:
        problem = error
    own = (error_text(problem) if problem else "", terms)
    received = exchange(own, (str, [(str, str)]), ranks, topic="periodic schedule")
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(received):
        if text:
            raise PlanMismatchError(f"rank {rank} can't average its tree: {text}")
    for column in zip(*(terms for _, terms in received), strict=False):
        values = [value for _, value in column]
        check_equal(column[0][0], values, "pass the same schedule and optimizer on every rank")
    return schedule


def _check_fit(schedule: PeriodicSchedule, tree: Any) -> None:
    """Check that the fragments have all leaves of a tree that can be averaged, and no other."""
    plan = plan_buckets(tree)
    leaves = {plan.leaves[leaf].path for leaf in plan.reduced}
    owned = {path for fragment in schedule.fragments for path in fragment.paths}
    for path in sorted(leaves ^ owned):
        where = "in the schedule only" if path in owned else "in no fragment of the schedule"
        raise TreeMismatchError(f"{leaf_text(path)} is {where}; make the schedule for this tree")


def _params(tree: Any) -> Any:
    """Return the parameters of a module by name, and any other tree unchanged."""
    if not isinstance(tree, nn.Module):
        return tree
    return {name: param for name, param in tree.named_parameters() if param.requires_grad}


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def _written(own: Any, new: Any) -> Any:
    """Write a result bit by bit, whatever a tensor's class makes of `copy_`."""
    return own if own is new else own.as_subclass(Tensor).copy_(new)


def kept(sync: GradSync, leaf: Any) -> Any:
    """Return a result to keep as a parameter. Parameters outlive the step, and forked processes may
    read them, so it is copied out of memory that ranks share."""
    return _copied(leaf) if sync.transport.startswith("shm") else leaf


def _are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if two contributions are the same, or have the same bits; NaN equals itself."""
    if first is second:
        return True
    return first.keys() == second.keys() and all(
        first[path] is leaf or _bits(first[path]) == _bits(leaf) for path, leaf in second.items()
    )


def _bits(leaf: Any) -> tuple[object, ...]:
    """Dtype, shape and bits of a leaf."""
    values = leaf
    if isinstance(leaf, Tensor):
        values = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return leaf.dtype, tuple(leaf.shape), np.asarray(values).tobytes()
