"""Hooks beside policies for NaN, weights, uneven inputs and sparse leaves, generated from one table
in which every two values meet. The mean is that of one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

import fddp
from fddp.hooks import chain, error_feedback, fp16_compress, int8, power_sgd, top_k
from tests.support.hook_models import Halves, Same, same_leaves
from tests.support.models import largest_difference, rand
from tests.support.pairwise import pairwise
from tests.support.spoiled_trees import NAN

EXACT: dict[str, Any] = {"none": None, "same": Same(), "halves": Halves(), "all": top_k(1.0)}
HOOKS: dict[str, Any] = {
    **EXACT,
    "low rank": power_sgd(1),
    "cast": fp16_compress,
    "low rank, cast": chain(power_sgd(1), fp16_compress),
    "quantized": error_feedback(int8()),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "hierarchical": {"mesh": fddp.Topology(host=2, local=2), "algorithm": "hierarchical"},
}
WEIGHTS = {
    "equal": (1.0, 1.0, 1.0, 1.0),
    "0 on rank 1": (1.0, 0.0, 1.0, 1.0),
    "0 on rank 0": (0.0, 1.0, 1.0, 1.0),
    "rank 3 alone": (0.0, 0.0, 0.0, 0.5),
    "unequal": (0.25, 0.5, 0.75, 1.0),
    "far apart": (0.5, 0.25, 0.001, 1.0),
}
WAYS = ["update", "value_and_grad", "uneven"]
POLICIES = ["propagate", "skip", "raise"]
SPOILED = {"no NaN": None, "NaN in v": "v", "NaN in e": "e"}
LAYOUTS = ["dense", "sparse"]
SHAPES = {"e": (4, 3), "m": (6, 5), "v": (7,)}
STEPS, BAD_STEP = 3, 1
CAPS = {"bucket_cap_mb": 0.0001, "first_bucket_mb": 0.0001}


class Case(NamedTuple):
    hook: str
    algorithm: str
    policy: str
    weights: str
    way: str
    spoiled: str
    layout: str

    @property
    def spoiled_rank(self) -> int:
        """The first rank of weight 0, if there is one, whose NaN does not count."""
        weights = WEIGHTS[self.weights]
        return weights.index(0.0) if 0.0 in weights else 1

    def contributing(self, step: int) -> list[int]:
        """Ranks with a weight and an input: in uneven inputs, ranks 1 and 3 have one more."""
        weights = WEIGHTS[self.weights]
        present = (1, 3) if self.way == "uneven" and step == STEPS - 1 else range(4)
        return [rank for rank in present if weights[rank]]

    def is_spoiled(self, step: int) -> bool:
        leaf = SPOILED[self.spoiled]
        return step == BAD_STEP and bool(leaf) and self.spoiled_rank in self.contributing(step)


def grads(rank: int, step: int) -> dict[str, Tensor]:
    return {n: rand(*shape, seed=100 * step + 10 * rank) for n, shape in SHAPES.items()}


def inputs(case: Case, rank: int) -> list[dict[str, Tensor]]:
    steps = [grads(rank, step) for step in range(STEPS)]
    leaf = SPOILED[case.spoiled]
    if leaf and rank == case.spoiled_rank:
        steps[BAD_STEP][leaf].view(-1)[0] = NAN
    return steps if rank in (1, 3) or case.way != "uneven" else steps[:-1]


def train(group: Any, case: Case) -> list[Any]:
    """For each step, its mean, whether it was skipped and kept the state; or its error."""
    weight = WEIGHTS[case.weights][group.rank]
    options: dict[str, Any] = {**ALGORITHMS[case.algorithm], **CAPS, "nonfinite": case.policy}
    sparse = case.layout == "sparse"
    own = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def loss_fn(p: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        rows = F.embedding(torch.arange(4), p["e"], sparse=sparse)
        return (rows * x["e"]).sum() + (p["m"] * x["m"]).sum() + (p["v"] * x["v"]).sum()

    ends: list[Any] = []
    with fddp.GradSync(
        own, group=group, hook=HOOKS[case.hook], sparse=("e",) if sparse else (), **options
    ) as sync:
        step_fn = sync.value_and_grad(loss_fn, weight_fn=lambda p, x: weight, with_info=True)
        state, steps = sync.init_state(), inputs(case, group.rank)
        for x in fddp.uneven(steps, sync) if case.way == "uneven" else steps:
            before = state
            try:
                if case.way == "update":
                    given = {**x, "e": x["e"].to_sparse(1) if sparse else x["e"]}
                    mean, state, info = sync.update(given, state, weight=weight, with_info=True)
                else:
                    _, mean, state, info = step_fn(own, x, hook_state=state)
            except fddp.NonFiniteError as error:
                ends.append(error)
                continue
            mean = {
                n: g.to_dense() if sparse and n == "e" and g is not None else g
                for n, g in mean.items()
            }
            ends.append((mean, info.skipped, info.all_finite, same_leaves(before, state)))
    return ends


def check_step(case: Case, step: int, end: Any) -> None:
    ranks, weights = case.contributing(step), WEIGHTS[case.weights]
    if isinstance(end, fddp.NonFiniteError):
        assert (case.policy, case.is_spoiled(step)) == ("raise", True)
        assert end.counts == {case.spoiled_rank: {SPOILED[case.spoiled]: (1, 0)}}
    elif case.is_spoiled(step):
        assert case.policy != "raise"
        assert end[1:] == (case.policy == "skip", False, True)
    else:
        assert end[1:3] == (False, True)
        if case.hook in EXACT:
            total = sum(weights[rank] for rank in ranks)
            each = [grads(rank, step) for rank in ranks]
            shares = [weights[rank] / total for rank in ranks]
            wanted = {n: sum(g[n] * s for g, s in zip(each, shares, strict=True)) for n in SHAPES}
            assert largest_difference(end[0], wanted) < 1e-12


CASES = [
    Case(*row)
    for row in pairwise([*HOOKS], [*ALGORITHMS], POLICIES, [*WEIGHTS], WAYS, [*SPOILED], LAYOUTS)
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_as_in_one_process(case: Case) -> None:
    for ends in fddp.loopback(4, train, case):
        assert len(ends) == STEPS
        for step, end in enumerate(ends):
            check_step(case, step, end)
