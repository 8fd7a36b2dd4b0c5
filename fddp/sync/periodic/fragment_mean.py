"""Mean of one fragment over ranks, started in one step and finished in a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.runtime.contributions import TreeContributions
from fddp.runtime.inputs import check_no_derivatives, checked_weight, matched_leaves
from fddp.runtime.step import Step
from fddp.sync.grad_sync import GradSync
from fddp.tree.foreign import ForeignTreeDef
from fddp.tree.pytree import TreeDef, tree_map


class Started(NamedTuple):
    """A mean in flight.

    Attributes:
        step: its step.
        treedef: structure of the results; None if this rank has failed.
    """

    step: Step
    treedef: TreeDef | None


class FragmentMean(GradSync):
    """A `GradSync` for the leaves of a fragment, by path."""

    _title = "periodic average"

    def start(
        self, contribution: Callable[[], Any], state: tuple[Any, ...], weight: float, moment: str
    ) -> Started:
        """Start the collectives of a mean; does not wait for other ranks.

        Args:
            contribution: returns the leaves of this rank. Its error, and any other one of this
                rank, is raised by `finish`, on every rank.
            state: state of the hook; () without one.
            weight: weight of this rank.
            moment: text that must be the same on all ranks.
        """
        engine = self._engine
        engine.when = moment
        step = engine.open(Method.UPDATE, with_stats=False)
        treedef: TreeDef | None = None
        try:
            step.hook_states = engine.checked_states(state, "step(params, state)")
            own, treedef = matched_leaves(contribution(), step.program, "parameters")
            if isinstance(treedef, ForeignTreeDef):
                step.method = Method.NOTHING  # ranks may use different libraries
            check_no_derivatives(own, step.program, "parameters", graphs=True)
            step.begin(TreeContributions(step.program, own, checked_weight(weight)), own)
        except BaseException as error:
            step.fail(error)
        step.start()
        return Started(step, treedef)

    def finish(self, started: Started) -> tuple[Any, tuple[Any, ...]]:
        """Wait for a mean. Return it, by path, in memory of its own; and the hook's new state.

        Raises:
            Exception: as calling a `GradSync`.
        """
        outcome = self._engine.finish(started.step)
        assert started.treedef is not None  # else the step has failed
        mean = started.treedef.unflatten(outcome.leaves)
        if self.transport.startswith("shm"):
            # Parameters outlive the step, and forked processes may read them: copy them out of
            # memory that ranks share.
            mean = tree_map(copied, mean)
        return mean, tuple(started.step.hook_states)


def copied(leaf: Any) -> Any:
    """Return a copy of a tensor or of an array of JAX."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
