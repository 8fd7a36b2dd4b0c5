"""Steps with NaN and infinity in several kinds of leaves, generated from tables: which leaves of
which ranks, the policy, the algorithm, the hook, the dtype and the transport."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.hooks import fp16_compress, int8, power_sgd, top_k
from tests.support.hook_models import same_leaves
from tests.support.models import same_bits
from tests.support.pairwise import pairwise
from tests.support.ranks import HOSTS, RankPool, on_hosts
from tests.support.spoiled_trees import INF, NAN, TINY

pytestmark = pytest.mark.slow  # together, some ten seconds

RANKS = 4
DENSE, LATE, ROWS, MORE = "dense", "late", "rows", "rows too"
SHAPES = {DENSE: (6, 5), LATE: (4,), ROWS: (6, 2), MORE: (5, 3)}
SPOILED: dict[str, dict[int, dict[str, float]]] = {
    "dense": {1: {DENSE: NAN}},
    "sparse": {1: {ROWS: NAN}},
    "sparse and dense of one rank": {3: {ROWS: INF, DENSE: NAN}},
    "sparse of one rank, dense of another": {0: {ROWS: NAN}, 2: {DENSE: INF}},
    "two sparse ones": {0: {MORE: NAN}, 3: {ROWS: INF}},
    "opposite infinities": {1: {ROWS: INF}, 2: {ROWS: -INF}},
    "late": {2: {LATE: NAN}},
    "late and sparse": {2: {LATE: NAN}, 1: {ROWS: NAN}},
    "late and dense": {0: {LATE: INF}, 3: {DENSE: NAN}},
    "all": {0: {ROWS: NAN}, 1: {MORE: NAN}, 2: {DENSE: NAN}, 3: {LATE: NAN}},
}
"""Factors of gradients, by rank and leaf."""

MESH = fddp.Topology(host=2, local=2)
HIERARCHICAL = {"mesh": MESH, "algorithm": "hierarchical"}
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "flat": (torch.float32, {}),
    "float16": (torch.float16, {}),
    "hierarchical": (torch.float32, HIERARCHICAL),
    "deterministic": (torch.float32, {"deterministic": True}),
    "cast": (torch.float32, {"hook": fp16_compress}),
    "quantized": (torch.float32, {"hook": int8(4), **HIERARCHICAL}),
    "sparsified": (torch.float32, {"hook": top_k(0.5)}),
    "low rank": (torch.float32, {"hook": power_sgd(1), **HIERARCHICAL}),
}
POLICIES = ["propagate", "skip", "raise"]


class Case(NamedTuple):
    spoiled: str
    policy: str
    variant: str


def loss_fn(p: dict[str, Tensor], factors: dict[str, float], late: bool) -> Tensor:
    """Gradients of all leaves are ones, times a factor. If `late`, the one that `LATE` multiplies
    is computed by a re-entrant checkpoint when the bucket of the leaf has left."""

    def layer(name: str, factor: float, x: Tensor) -> Tensor:
        param = p[name].clone()
        if param.requires_grad:
            param.register_hook(lambda grad: grad * factor)
        return x + param.sum()

    x = torch.zeros((), dtype=p[DENSE].dtype, requires_grad=True)
    if late:
        x = checkpoint(partial(layer, LATE, factors.get(LATE, 1.0)), x, use_reentrant=True)
    x = checkpoint(partial(layer, DENSE, factors.get(DENSE, 1.0)), x, use_reentrant=late)
    x = checkpoint(partial(layer, LATE, 1.0), x, use_reentrant=late)
    for name in ROWS, MORE:
        rows = F.embedding(torch.tensor([1, 3]), p[name], sparse=True)
        x = x + rows.sum() * factors.get(name, 1.0)
    return x


def train(group: Any, case: Case) -> dict[str, Any]:
    """A good step, a bad one, and a good one."""
    dtype, options = VARIANTS[case.variant]
    spoiled = SPOILED[case.spoiled]
    late = any(LATE in factors for factors in spoiled.values())
    own = {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}
    policy: Any = case.policy
    seen: dict[str, Any] = {}
    with fddp.GradSync(
        own, group=group, sparse=(ROWS, MORE), nonfinite=policy, **TINY, **options
    ) as sync:
        step = sync.value_and_grad(loss_fn, with_info=True)
        _, _, state, _ = step(own, {}, False, hook_state=sync.init_state())
        try:
            factors = spoiled.get(sync.rank, {})
            _, grads, kept, info = step(own, factors, late, hook_state=state)
            assert info.skipped or bool(info.repaired) == late
            seen["flags"] = info.skipped, info.all_finite
            found = [grad.to_dense() for grad in grads.values() if grad is not None]
            seen["gradients"] = len(found), all(grad.isfinite().all() for grad in found)
            seen["kept"] = same_leaves(kept, state)
        except fddp.NonFiniteError as error:
            seen["counts"], seen["overflowed"] = error.counts, error.overflowed
        seen["after"] = dense(step(own, {}, False, hook_state=state)[1])
    return seen


def train_without(group: Any, variant: str) -> dict[str, Tensor]:
    """The good steps alone."""
    dtype, options = VARIANTS[variant]
    own = {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}
    with fddp.GradSync(own, group=group, sparse=(ROWS, MORE), **TINY, **options) as sync:
        step = sync.value_and_grad(loss_fn)
        _, _, state = step(own, {}, False, hook_state=sync.init_state())
        return dense(step(own, {}, False, hook_state=state)[1])


@cache
def expected(variant: str) -> dict[str, Tensor]:
    """Gradients of the last good step."""
    return fddp.loopback(RANKS, train_without, variant)[0]


def dense(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.to_dense() if g.is_sparse else g for name, g in grads.items()}


def counts(case: Case) -> dict[int, dict[str, tuple[int, int]]]:
    """Numbers of NaN and infinities in each spoiled leaf of each rank."""
    sizes = {DENSE: 30, LATE: 4, ROWS: 2 * 2, MORE: 2 * 3}
    return {
        rank: {
            name: (sizes[name], 0) if factor != factor else (0, sizes[name])
            for name, factor in factors.items()
        }
        for rank, factors in SPOILED[case.spoiled].items()
    }


def check(case: Case, runs: list[dict[str, Any]]) -> None:
    wanted: dict[str, Any] = {
        "propagate": {"flags": (False, False), "gradients": (4, False), "kept": True},
        "skip": {"flags": (True, False), "gradients": (0, True), "kept": True},
        "raise": {"counts": counts(case), "overflowed": {}},
    }
    afters = [seen.pop("after") for seen in runs]
    assert runs == [wanted[case.policy]] * RANKS
    assert same_bits([*afters, expected(case.variant)])


def name_of(value: str | Case) -> str:
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(
    "case", [Case(*c) for c in product(SPOILED, POLICIES, VARIANTS)], ids=name_of
)
def test_on_threads(case: Case) -> None:
    check(case, fddp.loopback(RANKS, train, case))


SOME = ["sparse", "sparse of one rank, dense of another", "all"]
ON_PROCESSES = [
    (transport, Case(spoiled, policy, "low rank"))
    for transport, spoiled, policy in pairwise([*HOSTS], SOME, POLICIES)
]


@pytest.mark.parametrize(("transport", "case"), ON_PROCESSES, ids=name_of)
def test_on_processes(ranks: RankPool, transport: str, case: Case) -> None:
    check(case, ranks.run(RANKS, on_hosts, transport, train, case))


def test_a_gradient_that_is_packed_twice_is_counted_once() -> None:
    """The first gradient of a leaf is NaN. A late one follows, and its bucket is reduced again."""

    def loss(p: dict[str, Tensor], factor: float, late: bool) -> Tensor:
        def layer(name: str, times: float, x: Tensor) -> Tensor:
            return x + (p[name] * times).sum()

        x = torch.zeros((), requires_grad=True)
        for name, times in ((LATE, 1.0), (DENSE, 1.0), (LATE, factor))[0 if late else 1 :]:
            x = checkpoint(partial(layer, name, times), x, use_reentrant=True)
        return x

    def run(group: Any, factor: float) -> Any:
        own = {name: torch.ones(2) for name in (DENSE, LATE)}
        options: Any = {"deterministic": True, "nonfinite": "raise", **TINY}
        with fddp.GradSync(own, group=group, **options) as sync:
            step = sync.value_and_grad(loss, with_info=True)
            step(own, 1.0, False)
            return step(own, factor if group.rank else 1.0, True)[2].repaired

    assert all(fddp.loopback(2, run, 1.0))
    with pytest.raises(fddp.NonFiniteError) as caught:
        fddp.loopback(2, run, NAN)
    assert caught.value.counts == {1: {LATE: (2, 0)}}
