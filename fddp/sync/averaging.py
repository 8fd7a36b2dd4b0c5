"""Averages of parameters over ranks, at periodic steps: local SGD.

In local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019) ranks take local
steps and periodically average parameters instead of gradients. Post-local SGD (Lin et al., "Don't
Use Large Mini-Batches, Use Local SGD", ICLR 2020) starts with steps of averaged gradients; its
hierarchical form averages often within a host, where links are fast, and rarely across hosts.

`Periodic` defines the steps of the averages. An `Averager` executes the schedule
`fddp.periodic.local_sgd` without keeping state.

Non-finite numbers in one rank's parameters reach all ranks. A rank that detects its own can pass
`weight=0`: it then contributes nothing, and receives the mean of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from fddp.core.schedule.periods import WORLD as WORLD
from fddp.core.schedule.periods import Periodic as Periodic
from fddp.sync.periodic.agreement import spans_of
from fddp.sync.periodic.fragment_mean import FragmentMean
from fddp.sync.periodic.periodic_sync import PeriodicSync
from fddp.sync.periodic.schedules import local_sgd
from fddp.transport import Group
from fddp.tree.pytree import tree_map

if TYPE_CHECKING:
    from typing_extensions import Self


class _Average(FragmentMean):
    """A mean of one average of parameters, with a title of its own."""

    _title = "parameter average"


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
        spans_of(when.axes, mesh)  # raises before any communication
        self.when = when
        self._sync = PeriodicSync(
            tree,
            lambda own: local_sgd(own, when),
            group=group,
            mesh=mesh,
            timeout_s=timeout_s,
        )
        self._state = self._sync.init(tree)

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
        return self._sync.step(tree, {**self._state, "step": step}, weight=weight)[0]

    def average_(self, tree: Any, step: int, *, weight: float = 1.0) -> None:
        """Average in place: as `average`, but write into the tensors of `tree`, such as
        `dict(module.named_parameters())`."""
        self._sync.step_(tree, {**self._state, "step": step}, weight=weight)

    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self._sync.close()

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
        mean, _ = sync.finish(sync.start(lambda: tree, (), weight, ""))
        # Under weight 0, leaves that are not averaged have no result.
        return tree_map(lambda own, result: result, tree, mean)
