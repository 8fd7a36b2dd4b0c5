"""Averages of parameters without state between them.

In local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019) ranks take local
steps and periodically average parameters instead of gradients. Post-local SGD (Lin et al., "Don't
Use Large Mini-Batches, Use Local SGD", ICLR 2020) starts with steps of averaged gradients; its
hierarchical form averages often within a host, where links are fast, and rarely across hosts: with
one `Averager` for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fddp import GradSync, tree_map
from fddp.extend import Group, entrance
from fddp.periodic.methods import local_sgd
from fddp.periodic.schedule import Periodic
from fddp.periodic.sync import PeriodicSync, kept

if TYPE_CHECKING:
    from typing_extensions import Self


class Averager:
    """Averages trees over ranks at periodic steps. Construction is a collective call.

    It executes the schedule `fddp.periodic.local_sgd`, and is stateless: checkpoints only need the
    number of the step.

    Non-finite numbers in one rank's parameters reach all ranks. A rank that detects its own can
    pass `weight=0`: it then contributes nothing, and receives the mean of the others.

    Args:
        tree: tree of parameters, of which paths, shapes and dtypes are used. Floating-point and
            complex leaves are averaged; other leaves stay local.
        when: steps of the averages.
        group, timeout_s: as in `GradSync`.

    Raises:
        PlanMismatchError: trees or `when` differ between ranks; on every rank.

    Example:
        >>> import fddp, torch
        >>> from fddp.averaging import Averager, Periodic
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

    @entrance
    def __init__(
        self,
        tree: Any,
        when: Periodic,
        *,
        group: Group | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.when = when
        self._sync = PeriodicSync(
            tree, lambda own: local_sgd(own, when), group=group, timeout_s=timeout_s
        )
        self._state = self._sync.init(tree)

    @entrance
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

    @entrance
    def average_(self, tree: Any, step: int, *, weight: float = 1.0) -> None:
        """Average in place: as `average`, but write into the tensors of `tree`, or into
        the parameters of a module."""
        self._sync.step_(tree, {**self._state, "step": step}, weight=weight)

    @entrance
    def close(self) -> None:
        """Free the communicators; a second call does nothing."""
        self._sync.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Average(GradSync):
    title = "parameter average"


@entrance
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
        >>> from fddp.averaging import average
        >>> own = lambda rank: {"w": torch.tensor(float(rank)), "seen": torch.tensor(rank)}
        >>> fddp.loopback(2, lambda group: average(own(group.rank), group=group))
        [{'w': tensor(0.5000), 'seen': tensor(0)}, {'w': tensor(0.5000), 'seen': tensor(1)}]
    """
    with _Average(tree, group=group, timeout_s=timeout_s) as sync:
        mean = sync(tree, weight=weight)  # without results for leaves that are not averaged
        return tree_map(lambda own, new: kept(sync, new), tree, mean)
