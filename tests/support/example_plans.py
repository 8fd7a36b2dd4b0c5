"""A plan with leaves of all kinds, and a schedule of it."""

from __future__ import annotations

import fddp
from fddp.core.plan.plan import LeafSpec, plan_leaves


def example_plan() -> fddp.BucketPlan:
    """A plan with a strided, a scalar, an empty, an integer and a sparse leaf."""
    leaves = [
        LeafSpec("a", (3, 2), "float32", strides=(1, 3)),
        LeafSpec("b", (), "float64"),
        LeafSpec("c", (0, 5), "float32"),
        LeafSpec("n", (4,), "int64"),
        LeafSpec("table", (9, 2), "float32", sparse=True),
    ]
    return plan_leaves(leaves, order=(4, 2, 1, 0), caps_bytes=(16, 64))


def example_schedule() -> fddp.Schedule:
    """A hierarchical schedule of `example_plan`, for four ranks."""
    return fddp.make_schedule(
        example_plan(), fddp.Topology(host=2, local=2), algorithm="hierarchical"
    )
