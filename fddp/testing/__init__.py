"""Tests of code that synchronises gradients. Requires `pip install fddp[testing]`.

`check_replication` finds out, in one process, whether a training step keeps replicas equal, and
`check_equivalence` whether it does on several ranks what it does on one device.
Hypothesis strategies: `param_trees`, `gradients`, `plans`, `topologies`, `schedules`, `arrivals`.
Assertions: `assert_mean`, `assert_schedule_ok`, `assert_same_collectives`, `assert_overlap`.
`check_gradients` compares derivatives of functions that communicate with finite differences, and
`check_adjoint` compares forward mode with reverse mode. `loopback` runs any number of ranks in one
process. pytest leaves the frames of these functions out of tracebacks (`__tracebackhide__`).

Example:
    >>> import torch
    >>> from hypothesis import given, settings, strategies as st
    >>> from fddp import GradSync, tree_map
    >>> from fddp.testing import assert_mean, gradients, loopback, param_trees
    >>> @settings(max_examples=5, deadline=None)
    ... @given(st.data())
    ... def test_halving_before_and_doubling_after(data):
    ...     params = data.draw(param_trees())
    ...     trees = data.draw(gradients(params, ranks=3))
    ...     def run(group):
    ...         with GradSync(params, group=group) as sync:
    ...             halved = lambda grads: tree_map(lambda g: g / 2, grads)
    ...             doubled = lambda grads: tree_map(lambda g: g * 2, grads)
    ...             assert_mean(sync, trees, through=lambda grads: doubled(sync(halved(grads))))
    ...     loopback(3, run)
    >>> test_halving_before_and_doubling_after()
"""

try:
    import hypothesis as _hypothesis  # noqa: F401 - report a missing package first
except ImportError as _error:
    raise ImportError("fddp.testing needs hypothesis: pip install fddp[testing]") from _error

from fddp import loopback as loopback
from fddp.testing.adjoint import check_adjoint as check_adjoint
from fddp.testing.adjoint import check_gradients as check_gradients
from fddp.testing.adjoint import pulling_back as pulling_back
from fddp.testing.equivalence import check_equivalence as check_equivalence
from fddp.testing.laws import assert_same_collectives as assert_same_collectives
from fddp.testing.laws import assert_schedule_ok as assert_schedule_ok
from fddp.testing.means import assert_mean as assert_mean
from fddp.testing.overlap import assert_overlap as assert_overlap
from fddp.testing.replication import check_replication as check_replication
from fddp.testing.strategies import arrivals as arrivals
from fddp.testing.strategies import gradients as gradients
from fddp.testing.strategies import param_trees as param_trees
from fddp.testing.strategies import plans as plans
from fddp.testing.strategies import schedules as schedules
from fddp.testing.strategies import topologies as topologies
