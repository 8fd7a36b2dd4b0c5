"""Averages of parameters over ranks, at periodic steps: local SGD.

In local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019) ranks take local
steps and periodically average parameters instead of gradients. Post-local SGD (Lin et al., "Don't
Use Large Mini-Batches, Use Local SGD", ICLR 2020) starts with steps of averaged gradients; its
hierarchical form averages often within a host, where links are fast, and rarely across hosts.

`Periodic` defines the steps of the averages. A `GradSync` over the tree of parameters averages.

Non-finite numbers in one rank's parameters reach all ranks. A rank that detects its own can pass
`weight=0`: it then contributes nothing, and receives the mean of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fddp.core.protocol.differences import check_equal
from fddp.errors import TreeMismatchError
from fddp.runtime.agreement import exchange
from fddp.sync.grad_sync import GradSync
from fddp.transport import Group
from fddp.tree.pytree import flatten, tree_map

if TYPE_CHECKING:
    from typing_extensions import Self

WORLD = "world"
"""Name of the single axis of a group without named axes."""


@dataclass(frozen=True, init=False)
class Periodic:
    """Averages at step `warmup_steps` (steps count from 0), and then once in every period.

    Attributes:
        periods: pairs of an axis and the number of steps between averages along it, outermost axis
            first.
        warmup_steps: number of steps before the first average.

    Args:
        period: period of all ranks, or one for each axis of a mesh. An average along an outer axis
            includes the inner axes: its period must be a multiple of theirs.
        warmup_steps: as above.

    Raises:
        ValueError: a period is below 1, the warm-up is below 0, or a period is no multiple of an
            inner one.

    Example:
        >>> when = Periodic(4, warmup_steps=2)
        >>> [step for step in range(12) if when.due(step)]
        [2, 6, 10]
        >>> when = Periodic({"host": 4, "local": 2})
        >>> [when.due(step) for step in range(5)]
        [('host', 'local'), (), ('local',), (), ('host', 'local')]
    """

    periods: tuple[tuple[str, int], ...]
    warmup_steps: int

    def __init__(self, period: int | Mapping[str, int], *, warmup_steps: int = 0) -> None:
        periods = tuple(period.items()) if isinstance(period, Mapping) else ((WORLD, period),)
        _check_periods(periods, warmup_steps)
        object.__setattr__(self, "periods", periods)
        object.__setattr__(self, "warmup_steps", warmup_steps)

    def due(self, step: int) -> tuple[str, ...]:
        """Return the axes to average along after a step, outermost first; () for no average.

        Args:
            step: number of the last step, from 0.
        """
        since = step - self.warmup_steps
        return tuple(name for name, n in self.periods if since >= 0 and since % n == 0)


class _Average(GradSync):
    """A `GradSync` for one average of parameters, with a title of its own."""

    _title = "parameter average"


class _PeriodicAverage(GradSync):
    """A `GradSync` for periodic averages of parameters, with a title of its own."""

    _title = "periodic average"


class Averager:
    """Averages trees over ranks at periodic steps. Construction is a collective call.

    It is stateless: checkpoints only need the number of the step.

    Args:
        tree: tree of parameters, of which paths, shapes and dtypes are used. Floating-point and
            complex leaves are averaged; other leaves stay local.
        when: steps of the averages.
        group: group for a single period; as in `GradSync`.
        mesh: mesh whose axes have periods, instead of a group. An average along inner axes is over
            the ranks that differ in these axes only.
        timeout_s: as in `GradSync`.

    Raises:
        PlanMismatchError: trees or `when` differ between ranks; on every rank.
        ValueError: the axes of the mesh and those of `when` differ.

    Example:
        >>> import fddp, torch
        >>> from fddp.sync.averaging import Averager, Periodic
        >>> def train(group):
        ...     params = {"w": torch.tensor(0.0)}
        ...     seen = []
        ...     with Averager(params, Periodic(2, warmup_steps=1), group=group) as averager:
        ...         for step in range(4):
        ...             params = {"w": params["w"] + 1 + group.rank}  # of its own
        ...             params = averager.average(params, step)
        ...             seen.append(params["w"].item())
        ...     return seen
        >>> fddp.loopback(2, train)
        [[1.0, 3.0, 4.0, 6.0], [2.0, 3.0, 5.0, 6.0]]
    """

    def __init__(
        self,
        tree: Any,
        when: Periodic,
        *,
        group: Group | None = None,
        mesh: DeviceMesh | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.when = when
        self._syncs: dict[tuple[str, ...], GradSync] = {}
        try:
            for axes, span in _spans(when, mesh).items():
                self._syncs[axes] = _PeriodicAverage(
                    tree, group=group, mesh=span, timeout_s=timeout_s
                )
            transport = next(iter(self._syncs.values()))._engine.transport  # of all ranks
            received = exchange(transport, str(when), str, "averages")
            check_equal("the period of averages", received, "pass equal periods on every rank")
        except BaseException:
            self.close()
            raise

    def average(self, tree: Any, step: int, *, weight: float = 1.0) -> Any:
        """Return the weighted mean over ranks if an average is due after this step, else the tree
        itself; a collective call if it is due.

        Args:
            tree: parameters. Not written.
            step: number of the last step, from 0; the same on all ranks.
            weight: weight of this rank, such as its number of samples since the last average; with
                0 it contributes nothing, and still receives the mean.

        Returns:
            A new tree, equal on all averaged ranks except for integer leaves.

        Raises:
            TreeMismatchError: the tree has other leaves than at construction.
            DesyncError: ranks passed different steps.
            WeightError, PeerError: as calling a `GradSync`.
        """
        sync = self._due(step)
        return tree if sync is None else _mean(sync, tree, weight)

    def average_(self, tree: Any, step: int, *, weight: float = 1.0) -> None:
        """Average in place: as `average`, but write into the tensors of `tree`, such as
        `dict(module.named_parameters())`."""
        sync = self._due(step)
        if sync is not None:
            _check_whole(sync, tree)
            sync.reduce_(tree, weight=weight)

    def _due(self, step: int) -> GradSync | None:
        axes = self.when.due(step)
        if not axes:
            return None
        self._syncs[axes]._engine.when = f" (the average after step {step})"
        return self._syncs[axes]

    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        for sync in self._syncs.values():
            sync.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def average(
    tree: Any, *, group: Group | None = None, weight: float = 1.0, timeout_s: float | None = None
) -> Any:
    """Return the weighted mean over ranks of a tree; a collective call. For repeated averages an
    `Averager` is cheaper.

    Args:
        tree: tensors; None stays None. Floating-point and complex leaves are averaged; other
            leaves stay local. Not written.
        group, timeout_s: as in `GradSync`.
        weight: weight of this rank; with 0 it contributes nothing.

    Returns:
        A new tree of the same structure.

    Raises:
        PlanMismatchError: trees differ between ranks; on every rank.
        DesyncError: another rank builds a `GradSync` or an `Averager`; on every rank.
        WeightError, PeerError: as calling a `GradSync`.

    Example:
        >>> import fddp, torch
        >>> from fddp.sync.averaging import average
        >>> own = lambda rank: {"w": torch.tensor(float(rank)), "seen": torch.tensor(rank)}
        >>> fddp.loopback(2, lambda group: average(own(group.rank), group=group))
        [{'w': tensor(0.5000), 'seen': tensor(0)}, {'w': tensor(0.5000), 'seen': tensor(1)}]
    """
    with _Average(tree, group=group, timeout_s=timeout_s) as sync:
        return _mean(sync, tree, weight)


def _mean(sync: GradSync, tree: Any, weight: float) -> Any:
    _check_whole(sync, tree)
    # Parameters outlive the step, and forked processes may read them: copy them out of memory that
    # ranks share. Integer leaves are not averaged.
    shared = sync.transport.startswith("shm")
    return tree_map(
        lambda own, mean: _copied(mean) if shared and mean is not own else mean,
        tree,
        sync(tree, weight=weight),
    )


def _copied(mean: Any) -> Any:
    return mean.clone() if isinstance(mean, Tensor) else mean.copy()


def _check_whole(sync: GradSync, tree: Any) -> None:
    """Report missing parameters to all ranks; missing gradients would count as zeros."""
    leaves, treedef = flatten(tree)
    if treedef.paths != sync.plan.paths:
        return  # reported by the step
    for leaf, spec in zip(leaves, sync.plan.leaves, strict=True):
        if leaf is None and spec.dtype != "none":
            sync._engine.fail_step(
                TreeMismatchError(
                    f"leaf {spec.path!r} to average is None where the averager expects "
                    f"{spec.dtype} of shape {spec.shape}; pass all parameters"
                )
            )


def _spans(when: Periodic, mesh: DeviceMesh | None) -> dict[tuple[str, ...], DeviceMesh | None]:
    """Return the submesh of each set of axes that can be due together."""
    names = tuple(name for name, _ in when.periods)
    if mesh is None:
        if names != (WORLD,):
            raise ValueError(
                f"there are periods for the axes {names}; pass a DeviceMesh that has them"
            )
        return {names: None}
    if names == (WORLD,):
        return {names: mesh}
    if names != mesh.mesh_dim_names:
        raise ValueError(
            f"there are periods for the axes {names}, and the mesh has {mesh.mesh_dim_names}; "
            f"give each axis a period, or slice the mesh: mesh[{names}]"
        )
    return {names[i:]: mesh[names[i:]] if i else mesh for i in range(len(names))}


def _check_periods(periods: tuple[tuple[str, int], ...], warmup_steps: int) -> None:
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps must be an int of at least 0, got {warmup_steps!r}")
    if not periods:
        raise ValueError("there must be a period for one axis at least")
    for name, period in periods:
        if type(period) is not int or period < 1:
            raise ValueError(f"the period of {name!r} must be an int of at least 1, got {period!r}")
    for (outer, long), (inner, short) in pairwise(periods):
        if long % short:
            raise ValueError(
                f"the period of {outer!r}, {long}, is no multiple of that of {inner!r}, {short}, "
                f"along which ranks are averaged at the same time; axes go from the outermost on"
            )
