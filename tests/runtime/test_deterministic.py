"""Deterministic mode: bits that depend on the topology, and on nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.check import check_schedule
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.sum_tree import SumTree
from fddp.testing import schedules
from fddp.transport import open_transport
from fddp.transport.tree_sum import sum_along_tree_
from tests.support.digests import digest
from tests.support.models import rand, varied_loss, varied_params
from tests.support.oracle import find_fault
from tests.support.ranks import RankPool, launch_over

GRID = fddp.Topology(host=2, local=2)
STEPS = 4


# Sums in one association


def by_hand(parts: list[Tensor]) -> Tensor:
    """The sum on a grid of two by two, in float32 or wider, rounded once."""
    wide = [part.float() if part.dtype.itemsize == 2 else part for part in parts]
    return ((wide[0] + wide[1]) + (wide[2] + wide[3])).to(parts[0].dtype)


def part_of(rank: int, dtype: torch.dtype, numel: int = 24) -> Tensor:
    reals = rand(numel, seed=rank) * 10.0 ** rand(numel, seed=50 + rank)
    return reals.to(dtype) if not dtype.is_complex else torch.complex(reals, -reals).to(dtype)


FORMATS = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]


def scattered(group: Any) -> list[Any]:
    """Own chunks: along both axes at once, and along one after the other."""
    found = []
    with open_transport(group) as transport:
        transport.open_subgroups(GRID, [("host", "local"), ("host",), ("local",)])
        pair, both = SumTree.along((2,)), SumTree.along((2, 2))
        for dtype in FORMATS:
            buffer = part_of(transport.rank, dtype)
            transport.reduce_scatter(buffer, axes=("host", "local"), tree=both).wait("the sum")
            found.append(buffer.chunk(4)[transport.rank].clone())
        buffer = part_of(transport.rank, torch.float32)
        transport.reduce_scatter(buffer, axes=("local",), tree=pair).wait("within")
        own = buffer.chunk(2)[transport.rank % 2]
        transport.reduce_scatter(own, axes=("host",), tree=pair).wait("across")
        found.append(own.chunk(2)[transport.rank // 2].clone())
    return found


@pytest.mark.parametrize("name", ["loopback", "c10d", "shm"])
def test_sums_along_a_tree(name: str, request: pytest.FixtureRequest) -> None:
    for rank, found in enumerate(launch_over(name, request)(4, scattered)):
        *at_once, in_turn = found
        for dtype, result in zip(FORMATS, at_once, strict=True):
            due = by_hand([part_of(r, dtype) for r in range(4)])
            assert torch.equal(result, due.chunk(4)[rank]), dtype
        due = by_hand([part_of(r, torch.float32) for r in range(4)])
        assert torch.equal(in_turn, due.chunk(2)[rank % 2].chunk(2)[rank // 2])


def test_another_order_gives_other_bits() -> None:
    """Or else the tests above could not fail."""
    parts = [part_of(rank, torch.float32) for rank in range(4)]
    (flat,), (nested,) = (
        sum_along_tree_([part.clone() for part in parts], SumTree.along(sizes).additions)
        for sizes in ((4,), (2, 2))
    )
    assert torch.equal(nested, by_hand(parts))
    assert not torch.equal(flat, nested)


# Schedules


@given(schedules(deterministic=True))
def test_schedules_are_proved(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_fault(schedule, tries=1) is None
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert "deterministic=True" in repr(schedule)
    assert schedule.retained == {
        b for b, spec in enumerate(schedule.plan.buckets) if not spec.sparse
    }
    assert not {*schedule.wire_dtypes} & {"float16", "bfloat16"}
    assert "all_reduce" not in {op.kind for op in schedule.ops}
    assert schedule.piggyback_op < 0


def flat(**options: Any) -> Schedule:
    plan = fddp.plan_buckets({"w": torch.zeros(8)})
    return make_schedule(plan, GRID, **options)


def changed(schedule: Schedule, **fields: Any) -> Schedule:
    values = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    return Schedule(**{**values, **fields})


def across_first() -> Schedule:
    """Reduce-scatters along the hosts, and then within."""
    swapped = {("local",): ("host",), ("host",): ("local",), (): (), GRID.names: GRID.names}
    shards = {**swapped, ("local", "host"): ("host", "local")}
    schedule = flat(algorithm="hierarchical", deterministic=True)
    ops = tuple(
        op._replace(axes=swapped[op.axes], region=op.region._replace(shard=shards[op.region.shard]))
        for op in schedule.ops
    )
    return changed(schedule, ops=ops)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: changed(flat(), deterministic=True),
            r"^op 2 \(all_reduce of bucket 0, leaf 'w', along host and local\): its order of "
            r"summation depends on the transport, but the schedule is deterministic; "
            r"use reduce_scatter and all_gather \(on all 4 ranks\)$",
        ),
        (
            lambda: changed(flat(algorithm="reduce_scatter"), deterministic=True),
            r"it adds late gradients to a sum, but the schedule is deterministic; reduce the "
            r"whole bucket 'again'",
        ),
        (
            lambda: changed(flat(deterministic=True), scaling="average"),
            r"averaging rounds partial sums, but the schedule is deterministic; set scaling to "
            r"'before' or 'after'",
        ),
        (
            across_first,
            r"^op 1 \(reduce_scatter of bucket 0, leaf 'w', along host\): it sums along host "
            r"before the inner axes, but the schedule is deterministic; sum along local first",
        ),
        (
            lambda: changed(
                make_schedule(
                    fddp.plan_buckets({"w": torch.zeros(8).half()}), GRID, deterministic=True
                ),
                wire_dtypes=("float16",),
            ),
            r"the wire dtype float16 rounds partial sums, but the schedule is deterministic; use "
            r"float32 or float64",
        ),
    ],
)
def test_nondeterministic_schedules_are_refused(make: Any, text: str) -> None:
    with pytest.raises(fddp.ScheduleError, match=text):
        check_schedule(make())


def test_arguments_that_do_not_go_with_it() -> None:
    with pytest.raises(ValueError, match="averages along each axis in turn are rounded"):
        flat(deterministic=True, scaling="average")
    with pytest.raises(ValueError, match="'all_gather' does not sum"):
        flat(deterministic=True, algorithm="all_gather")

    def run(group: Any) -> None:
        grads = {"w": torch.ones(4)}
        outcome = r"sums in its own order, which deterministic=True does not allow"
        with pytest.raises(ValueError, match=outcome):
            fddp.GradSync(grads, group=group, deterministic=True, hook=fddp.hooks.bf16_compress)
        with pytest.raises(ValueError, match="pass deterministic=True to make_schedule instead"):
            fddp.GradSync(
                make_schedule(fddp.plan_buckets(grads), fddp.Topology(world=2)),
                group=group,
                deterministic=True,
            )
        with fddp.GradSync(grads, group=group, deterministic=True) as sync:
            with pytest.raises(ValueError, match=outcome):
                sync._engine.set_hook(fddp.hooks.bf16_compress)
            assert torch.equal(sync(grads)["w"], grads["w"])

    fddp.loopback(2, run)


# Bits of whole steps


def digests(group: Any, options: dict[str, Any]) -> list[str]:
    """The MD5 of each step's gradients."""
    options = dict(options)
    given, params = options.pop("given", False), varied_params()
    caps = {name: options.pop(name) for name in [*options] if name.endswith("_mb")}
    source = fddp.plan_buckets(params, sparse=("rows",), **caps) if given else params
    if not given:
        options |= {**caps, "sparse": ("rows",)}
    found, late = [], 0
    with fddp.GradSync(source, group=group, mesh=GRID, **options) as sync:
        step = sync.value_and_grad(varied_loss, with_info=True, weight_fn=weight_of)
        for number in range(STEPS):
            x = rand(4, 8, seed=10 * number + sync.rank, dtype=torch.float32)
            _, grads, info = step(params, x.requires_grad_(), sync.rank, number)
            late += len(info.repaired)
            found.append(digest(grads))
        own = {n: p.float() * (sync.rank + 0.1) for n, p in params.items()}
        own = {n: g.to(params[n].dtype) for n, g in own.items()}
        found.append(digest(sync(own)))
        assert late or not options.get("deterministic") or caps["first_bucket_mb"] > 1e-3
    return found


def weight_of(p: Any, x: Tensor, rank: int, step: int) -> float:
    """None of these sums is exact in float64; in one step a rank has no weight."""
    return 0.0 if (rank, step) == (2, 1) else (0.1 + rank * 1.7 + step * 3.3) / 16


TINY = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}
SOME = {"bucket_cap_mb": 4e-4, "first_bucket_mb": 2e-4}
LARGE = {"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0}

VARIANTS: dict[str, dict[str, Any]] = {
    "flat, tiny buckets": {**TINY},
    "flat, some buckets": {**SOME},
    "flat, large buckets": {**LARGE},
    "hierarchical, tiny buckets": {**TINY, "algorithm": "hierarchical"},
    "hierarchical, large buckets": {**LARGE, "algorithm": "hierarchical"},
    "a plan in another order": {**SOME, "given": True},
}


def deterministic(group: Any, name: str) -> list[str]:
    return digests(group, {**VARIANTS[name], "deterministic": True})


def free(group: Any, name: str) -> list[str]:
    return digests(group, VARIANTS[name])


@pytest.fixture(scope="module")
def due() -> list[str]:
    """The digests of one variant, on threads."""
    first, *others = fddp.loopback(4, deterministic, "flat, tiny buckets")
    assert others == [first] * 3
    assert len({*first}) == STEPS + 1
    return first


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_bits_by_threads(name: str, due: list[str]) -> None:
    assert fddp.loopback(4, deterministic, name) == [due] * 4


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_the_same_bits_by_processes(ranks: RankPool, transport: str, due: list[str]) -> None:
    for run in ranks.run(4, all_variants, transport):
        assert run == dict.fromkeys(VARIANTS, due)


def all_variants(rank: int, world_size: int, transport: str) -> dict[str, list[str]]:
    return {
        name: digests(None, {**options, "deterministic": True, "transport": transport})
        for name, options in VARIANTS.items()
    }


def test_free_sums_have_other_bits(due: list[str]) -> None:
    """Also among each other."""
    tiny, large = (fddp.loopback(4, free, f"flat, {size} buckets")[0] for size in ("tiny", "large"))
    assert tiny != due
    assert large != due
    assert tiny != large, "late gradients are added to a sum"


# Shards, and drawn trees


def wild(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = rand(*shape, seed=rank) * 10.0 ** (2.0 * rand(*shape, seed=99 + rank))
    return values.clamp(-3e4, 3e4).to(dtype)


CASE = st.tuples(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(
        [
            GRID,
            fddp.Topology(host=2, local=3),
            fddp.Topology(host=3, local=2),
            fddp.Topology(pod=2, host=1, local=2),
            fddp.Topology(a=2, b=2, c=2),
        ]
    ),
    st.lists(st.floats(0.0, 1e3), min_size=8, max_size=8).filter(lambda w: any(w[:4])),
    st.integers(1, 400),
    st.sampled_from([None, 2.0**-17]),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(CASE)
def test_drawn_trees_have_the_same_bits_under_any_algorithm(case: Any) -> None:
    leaves, topology, weights, cap_bytes, split_mb = case
    like = {f"p{i}": torch.zeros(n, dtype=dtype) for i, (n, dtype) in enumerate(leaves)}

    def run(group: Any) -> list[str]:
        own = {
            name: wild(100 * i + group.rank, tuple(leaf.shape), leaf.dtype)
            for i, (name, leaf) in enumerate(like.items())
        }
        if group.rank % 2:
            own["p0"] = None
        found = []
        for algorithm, cap_mb in product(
            ("all_reduce", "hierarchical", "reduce_scatter"), (cap_bytes / 2**20, 25.0)
        ):
            schedule = make_schedule(
                fddp.plan_buckets(like, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb),
                topology,
                algorithm=algorithm,
                split_mb=split_mb,
                deterministic=True,
            )
            with fddp.GradSync(schedule, group=group) as sync:
                for weight in (1.0, weights[group.rank]):
                    try:
                        if algorithm == "reduce_scatter":
                            mean = sync.all_gather(sync.reduce_scatter(own, weight=weight))
                        else:
                            mean = sync(own, weight=weight)
                    except fddp.WeightError:
                        found.append("the weights are out of proportion")
                    else:
                        found.append(digest(mean))
        assert {*found[::2]} == {found[0]}
        assert {*found[1::2]} == {found[1]}
        return found[:2]

    runs = fddp.loopback(topology.world_size, run)
    assert runs == [runs[0]] * topology.world_size


@pytest.mark.parametrize("algorithm", ["all_reduce", "hierarchical"])
def test_the_mean_equals_a_sum_by_hand(algorithm: Any) -> None:
    """A quarter is exact, so that only the sums round."""
    parts = [wild(rank, (37,), torch.float32) for rank in range(4)]

    def run(group: Any) -> Tensor:
        own = {"w": parts[group.rank]}
        with fddp.GradSync(
            own, group=group, mesh=GRID, algorithm=algorithm, deterministic=True
        ) as sync:
            mean: dict[str, Tensor] = sync(own)
            return mean["w"]

    for mean in fddp.loopback(4, run):
        assert torch.equal(mean, by_hand([part / 4 for part in parts]))
