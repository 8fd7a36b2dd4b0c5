"""Virtual ranks as values, and the proof of their association."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fddp
from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Kind
from fddp.core.schedule.schedule import Schedule, summed_blocks
from fddp.core.schedule.sum_tree import SumTree, fold, partial_sums, tree_additions
from fddp.core.schedule.virtual import Span, VirtualRanks, _additions, _spans, halves

MOST = 64
GRID = fddp.Topology(host=2, local=2)
PAIRS = st.integers(1, MOST).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
ALL_PAIRS = [(count, ranks) for count in range(1, MOST + 1) for ranks in range(1, count + 1)]


def reference_tree(start: int, stop: int) -> str:
    """The tree from its definition, top down."""
    size = stop - start
    if size == 1:
        return str(start)
    left = 2 ** math.ceil(math.log2(size) - 1)
    return f"({reference_tree(start, start + left)}+{reference_tree(start + left, stop)})"


def in_text(left: str, right: str) -> str:
    return f"({left}+{right})"


def plan(*leaves: LeafSpec) -> BucketPlan:
    specs = leaves or (LeafSpec("a", (5,), "float32"), LeafSpec("b", (3,), "bfloat16"))
    order = [i for i, spec in enumerate(specs) if spec.reducible]
    return plan_leaves(specs, order=order, caps_bytes=[1])


def schedule_of(count: int, ranks: Any, **options: Any) -> Schedule:
    return make_schedule(plan(), ranks, virtual_ranks=count, **options)


# The value


@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_the_sum_of_every_number_of_ranks_is_the_tree(count: int) -> None:
    due = reference_tree(0, count)
    assert fold(map(str, range(count)), tree_additions(count), in_text) == due
    for ranks in range(1, count + 1):
        virtual = VirtualRanks.over(count, ranks)
        sums = [
            fold(map(str, range(*span)), tree_additions(span.stop - span.start), in_text)
            for span in chain.from_iterable(virtual.spans)
        ]
        assert fold(sums, virtual.additions, in_text) == due, ranks


def test_runs_are_contiguous_and_even() -> None:
    for count, ranks in ALL_PAIRS:
        runs = VirtualRanks.over(count, ranks).runs
        assert [*chain.from_iterable(runs)] == [*range(count)]
        assert {*map(len, runs)} <= {count // ranks, -(-count // ranks)}


def bound(carried: int) -> float:
    return max(1.0, 2 * math.log2(carried + 2) - 2 + 1e-9)


@pytest.mark.parametrize("count", [425, 426, 4096, 2**16 - 1, 2**16])
def test_bound_for_many_virtual_ranks(count: int) -> None:
    """From 426 on a rank may send more than log2 of all, rounded up."""
    most = 0
    for ranks in range(1, 12):
        virtual = VirtualRanks.over(count, ranks)
        for run, sent in zip(virtual.runs, virtual.sent, strict=True):
            assert sent <= bound(len(run))
            most = max(most, sent)
    assert (most > math.ceil(math.log2(count))) == (count in (426, 2**16 - 1, 2**16))


def test_bound_on_what_a_rank_sends() -> None:
    """At most 2 log2(n + 2) - 2 sums for n virtual ranks, and log2 of all, rounded up."""
    for count, ranks in ALL_PAIRS:
        virtual = VirtualRanks.over(count, ranks)
        for run, sent in zip(virtual.runs, virtual.sent, strict=True):
            assert sent <= bound(len(run)), (count, ranks)
            assert sent <= max(1, math.ceil(math.log2(count))), (count, ranks)
        if count % ranks == 0 and (count // ranks).bit_count() == 1:
            assert {*virtual.sent} == {1}, (count, ranks)


def summed_in_stages(virtual: VirtualRanks, sizes: tuple[int, ...]) -> str:
    """The sum of the ranks of a topology along one axis after the other, in text."""
    left = [
        [
            fold(map(str, range(*span)), tree_additions(span.stop - span.start), in_text)
            for span in own
        ]
        for own in virtual.spans
    ]
    for place, parts in reversed([*enumerate(sizes)]):
        block = math.prod(sizes[place + 1 :])  # ranks summed already
        groups = []
        for number, tree in enumerate(virtual.stage(block, parts)):
            own = left[number * parts : (number + 1) * parts]
            assert tree.summands == tuple(map(len, own))
            groups.append(partial_sums(chain.from_iterable(own), tree.additions, in_text))
            assert tree.sums == len(groups[-1])
        left = groups
    ((total,),) = left
    return str(total)


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= MOST)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(0, MOST), st.randoms(use_true_random=False))
def test_sums_along_one_axis_after_the_other_are_the_tree(
    sizes: list[int], more: int, random: Any
) -> None:
    """Also if the virtual ranks are distributed unevenly, and the axes are summed some at once."""
    ranks = math.prod(sizes)
    count = ranks + more
    due = reference_tree(0, count)
    assert summed_in_stages(VirtualRanks.over(count, ranks), tuple(sizes)) == due
    edges = [0, *sorted(random.sample(range(1, count), ranks - 1)), count]
    spans = tuple(tuple(_spans(*edge, count)) for edge in pairwise(edges))
    virtual = VirtualRanks(count, spans, _additions([*chain.from_iterable(spans)], count))
    assert summed_in_stages(virtual, tuple(sizes)) == due
    assert summed_in_stages(virtual, (math.prod(sizes[:-1]), sizes[-1])) == due
    leaf = plan_leaves([LeafSpec("w", (ranks,), "float32")], order=[0], caps_bytes=[1])
    axes = fddp.Topology(**{f"axis{place}": size for place, size in enumerate(sizes)})
    schedule = make_schedule(leaf, axes, algorithm="reduce_scatter", virtual_ranks=count)
    check_schedule(dataclasses.replace(schedule, virtual=virtual))


@pytest.mark.slow
def test_bound_on_what_crosses_hosts() -> None:
    """The ranks of a host send as many sums as one rank in their place would."""
    for count, ranks in ALL_PAIRS:
        virtual = VirtualRanks.over(count, ranks)
        for block in (b for b in range(1, ranks + 1) if ranks % b == 0):
            hosts = VirtualRanks.over(count, ranks // block)
            assert virtual.roots(block) == hosts.spans
            for own in virtual.roots(block):
                assert len(own) <= max(1, math.ceil(math.log2(count))), (count, ranks, block)


def test_spans_are_the_largest_nodes() -> None:
    """Neighbours on a rank make up no node, or they would be sent as one."""
    for count, ranks in ALL_PAIRS:
        for own in VirtualRanks.over(count, ranks).spans:
            for left, right in pairwise(own):
                assert halves(Span(left.start, right.stop), count) != (left, right)


def test_printed_form() -> None:
    assert str(VirtualRanks.over(1, 1)) == "v0\nrank 0: v0 to v0, sends v0:1"
    text = str(schedule_of(5, 2))
    assert "deterministic=True, virtual_ranks=5)" in text
    assert text.endswith(
        "((v0 + v1) + (v2 + v3)) + v4\n"
        "rank 0: v0 to v1, sends v0:2\n"
        "rank 1: v2 to v4, sends v2:4, v4:5"
    )


def test_printed_form_of_sums_along_one_axis_after_the_other() -> None:
    nested = schedule_of(6, fddp.Topology(host=2, local=3), algorithm="hierarchical")
    assert str(nested).endswith(
        "rank 5: v5 to v5, sends v5:6\n"
        "ranks 0 to 2: v0 to v2, send v0:2, v2:3 along host\n"
        "ranks 3 to 5: v3 to v5, send v3:4, v4:6 along host"
    )
    assert summed_blocks(nested) == {3: ("host",)}
    at_once = schedule_of(6, fddp.Topology(host=2, local=3))
    assert summed_blocks(at_once) == {}
    assert at_once.virtual == nested.virtual


@settings(max_examples=40, deadline=None)
@given(PAIRS)
def test_json_keeps_schedules(pair: tuple[int, int]) -> None:
    schedule = schedule_of(*pair)
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert schedule.digest != make_schedule(plan(), pair[1], deterministic=True).digest


def test_other_schedules_do_not_mention_virtual_ranks() -> None:
    assert "virtual" not in make_schedule(plan(), 2, deterministic=True).to_json()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"count": 0}, r"virtual_ranks must be an int from 1 to 65536, got 0"),
        ({"count": True}, r"virtual_ranks must be an int from 1 to 65536, got True"),
        ({"spans": ()}, r"spans must be a tuple of one or more spans for each rank, got \(\)"),
        ({"spans": ((),)}, r"spans must be a tuple of one or more spans for each rank"),
        ({"spans": (((0, 2),),)}, r"spans must be a tuple of one or more spans for each rank"),
        ({"additions": [0]}, r"additions must be a tuple of ints, got \[0\]"),
    ],
)
def test_malformed_values_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(VirtualRanks.over(4, 2), **change)


# Associations along axes


def along(sizes: Sequence[int], ranks: Sequence[int]) -> str:
    """The sum along axes from its definition: the outermost axis last."""
    if len(ranks) == 1:
        return str(ranks[0])
    size = len(ranks) // sizes[0]
    blocks = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    return reduce(in_text, [along(sizes[1:], block) for block in blocks])


@given(st.lists(st.integers(1, 4), max_size=4))
def test_sums_along_axes(sizes: list[int]) -> None:
    tree, ranks = SumTree.along(sizes), range(math.prod(sizes))
    assert (tree.sums, tree.width, tree.summands) == (1, 1, (1,) * len(ranks))
    assert fold(map(str, ranks), tree.additions, in_text) == along(sizes, ranks)


def test_trees_have_digests_of_their_own() -> None:
    trees = {
        *(VirtualRanks.over(*pair).tree for pair in ALL_PAIRS),
        *(SumTree.along((a, b)) for a in range(1, 9) for b in range(1, 9)),
    }
    assert len({tree.digest for tree in trees}) == len(trees)


# The proof


@settings(max_examples=60, deadline=None)
@given(PAIRS)
def test_built_schedules_are_proved(pair: tuple[int, int]) -> None:
    check_schedule(schedule_of(*pair))


def test_meshes_and_shards_are_proved() -> None:
    check_schedule(schedule_of(8, fddp.Topology(host=2, local=3)))
    check_schedule(schedule_of(8, fddp.Topology(host=1, local=3), algorithm="reduce_scatter"))
    check_schedule(schedule_of(8, 3, algorithm="reduce_scatter", scaling="after"))
    for algorithm in ("hierarchical", "reduce_scatter"):
        for topology in (
            fddp.Topology(host=2, local=3),
            fddp.Topology(host=3, one=1, local=2),
            fddp.Topology(one=1, world=3),
            fddp.Topology(pod=2, host=2, local=2),
        ):
            check_schedule(schedule_of(11, topology, algorithm=algorithm, split_mb=2**-18))
    check_schedule(schedule_of(8, 3, split_mb=2**-18))
    rows = plan(LeafSpec("rows", (4, 2), "float32", sparse=True), LeafSpec("a", (5,), "float32"))
    check_schedule(make_schedule(rows, 3, virtual_ranks=7))
    check_schedule(make_schedule(rows, GRID, virtual_ranks=7, algorithm="hierarchical"))


def association_mutants(virtual: VirtualRanks) -> list[VirtualRanks]:
    """Values with one thing changed, none of which is the same association."""
    spans, found = [*virtual.spans], []
    for rank, own in enumerate(spans):
        others = [own[:-1], own[1:], (*own, own[-1]), (*own[:-1], Span(own[-1][0], own[-1][1] + 1))]
        if own[0].stop - own[0].start > 1:
            others.append((Span(own[0].start + 1, own[0].stop), *own[1:]))
        for changed in filter(None, others):
            changed_spans = (*spans[:rank], changed, *spans[rank + 1 :])
            found.append(dataclasses.replace(virtual, spans=changed_spans))
    found.append(dataclasses.replace(virtual, spans=virtual.spans[::-1]))
    found.append(dataclasses.replace(virtual, spans=virtual.spans[1:]))
    for place, times in enumerate(virtual.additions):
        for other in (times - 1, times + 1):
            additions = (*virtual.additions[:place], other, *virtual.additions[place + 1 :])
            found.append(dataclasses.replace(virtual, additions=additions))
    last = len(virtual.additions) - 1
    flat = (0,) + (1,) * last
    if flat != virtual.additions:
        found.append(dataclasses.replace(virtual, additions=flat))
    right = (0,) * last + (last,)
    if right != virtual.additions:
        found.append(dataclasses.replace(virtual, additions=right))
    return found


@pytest.mark.parametrize("pair", [(4, 2), (5, 2), (8, 3), (7, 4), (8, 8), (12, 5), (64, 7)])
def test_changed_associations_are_refused(pair: tuple[int, int]) -> None:
    schedule = schedule_of(*pair)
    assert schedule.virtual is not None
    mutants = association_mutants(schedule.virtual)
    assert len(mutants) >= 10
    for mutant in mutants:
        with pytest.raises(fddp.ScheduleError, match=r"^the sum over \d+ virtual ranks: "):
            check_schedule(dataclasses.replace(schedule, virtual=mutant))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"spans": ((Span(0, 2),), (Span(3, 4),))}, r"on rank 1 v2 is missing; continue with v2"),
        (
            {"spans": ((Span(0, 2),), (Span(1, 2), Span(2, 4)))},
            r"on rank 1 v1 is summed twice; continue with v2",
        ),
        (
            {"spans": ((Span(0, 1),), (Span(1, 3), Span(3, 4)))},
            r"rank 1 sums v1 to v2, which is no node of the tree; split it",
        ),
        ({"spans": ((Span(0, 2),), (Span(2, 3),))}, r"v3 to v3 are missing; add them to the last"),
        ({"spans": ((Span(0, 4),),)}, r"it has spans for 1 of 2 ranks; list those of each"),
        ({"additions": (0,)}, r"it has additions after 1 of 2 spans"),
        ({"additions": (0, 2)}, r"2 additions after v2:4, with 2 sums"),
        ({"additions": (0, 0)}, r"2 sums are left; add them \(on all 2 ranks\)$"),
    ],
)
def test_errors_name_the_fault(change: dict[str, Any], text: str) -> None:
    schedule = schedule_of(4, 2)
    assert schedule.virtual is not None
    changed = dataclasses.replace(schedule.virtual, **change)
    with pytest.raises(fddp.ScheduleError, match=text):
        check_schedule(dataclasses.replace(schedule, virtual=changed))


def test_other_additions_than_the_tree_s_are_named() -> None:
    schedule = schedule_of(4, 4)
    assert schedule.virtual is not None
    flat = dataclasses.replace(schedule.virtual, additions=(0, 1, 1, 1))
    with pytest.raises(fddp.ScheduleError, match=r"v0:2 \+ v2:3 is no addition of the tree; add"):
        check_schedule(dataclasses.replace(schedule, virtual=flat))


def with_chain(schedule: Schedule, chain: list[tuple[Kind, str, tuple[str, ...]]]) -> Schedule:
    """The schedule with other collectives, of these kinds, axes and shards."""
    ops, places = [], iter(chain * 2)  # once more in the repair
    for op in schedule.ops:
        if op.kind in ("reduce_scatter", "all_gather"):
            kind, axis, shard = next(places)
            op = op._replace(kind=kind, axes=(axis,), region=op.region._replace(shard=shard))
        ops.append(op)
    return dataclasses.replace(schedule, ops=tuple(ops))


def nested_schedule() -> Schedule:
    """Of one bucket, along both axes of `GRID`."""
    leaf = plan_leaves([LeafSpec("a", (8,), "float32")], order=[0], caps_bytes=[1])
    return make_schedule(leaf, GRID, virtual_ranks=8, algorithm="hierarchical")


def test_sums_across_hosts_before_those_within_are_refused() -> None:
    nested = nested_schedule()
    check_schedule(nested)
    outward = with_chain(
        nested,
        [
            ("reduce_scatter", "host", ()),
            ("reduce_scatter", "local", ("host",)),
            ("all_gather", "local", ("host", "local")),
            ("all_gather", "host", ("host",)),
        ],
    )
    with pytest.raises(fddp.ScheduleError, match=r"it sums along host before the inner axes"):
        check_schedule(outward)


def test_sums_that_are_left_must_not_be_lost() -> None:
    """An all-gather has the last of the sums that are left."""
    gathered = with_chain(
        nested_schedule(),
        [
            ("reduce_scatter", "local", ()),
            ("all_gather", "local", ("local",)),
            ("reduce_scatter", "host", ()),
            ("all_gather", "host", ("host",)),
        ],
    )
    check_schedule(dataclasses.replace(gathered, virtual=None))
    with pytest.raises(
        fddp.ScheduleError,
        match=r"^op \d \(reduce_scatter of bucket 0, leaf 'a', along host\): it sums along host "
        r"while its elements are not sharded along the inner axes, so that all but one of the sums "
        r"over virtual ranks that these left are lost; all-gather along the inner axes after it "
        r"\(on all 4 ranks\)$",
    ):
        check_schedule(gathered)


def test_a_schedule_that_ends_within_hosts_is_refused() -> None:
    nested = schedule_of(8, GRID, algorithm="reduce_scatter")
    within = [
        op._replace(kind="all_gather", axes=("local",), region=op.region._replace(shard=("local",)))
        if op.axes == ("host",)
        else op
        for op in nested.ops
    ]
    with pytest.raises(fddp.ScheduleError):
        check_schedule(dataclasses.replace(nested, ops=tuple(within)))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (SumTree((1, 1), (0, 0)), r"blocks of 4 ranks end with other sums than at once"),
        (SumTree((1, 2), (0, 1, 0)), r"have other sums than they are said to have"),
    ],
)
def test_stages_are_proved(monkeypatch: Any, wrong: SumTree, text: str) -> None:
    stage = VirtualRanks.stage
    nested = schedule_of(4, GRID, algorithm="hierarchical")

    def changed(self: VirtualRanks, block: int, parts: int) -> tuple[SumTree, ...]:
        found = stage(self, block, parts)
        return found if (block, parts) != (2, 2) else (wrong,)

    monkeypatch.setattr(VirtualRanks, "stage", changed)
    with pytest.raises(fddp.ScheduleError, match=f"along one axis after the other: .*{text}"):
        check_schedule(nested)


def test_other_faults_of_associations() -> None:
    virtual = VirtualRanks.over(4, 4)
    free = dataclasses.replace(make_schedule(plan(), 4), virtual=virtual)
    with pytest.raises(fddp.ScheduleError, match=r"has virtual ranks but is not deterministic"):
        check_schedule(free)
    lone = dataclasses.replace(
        schedule_of(2, 1), virtual=VirtualRanks(2, ((Span(0, 1), Span(1, 2)),), (0, 1))
    )
    with pytest.raises(fddp.ScheduleError, match=r"one rank has several partial sums"):
        check_schedule(lone)


# Simulation


def test_partial_sums_take_time() -> None:
    """A schedule in which some rank sends two sums takes half as long again to exchange them."""
    cost, shapes = fddp.CostModel(0.0, 1e-9), plan(LeafSpec("w", (6000,), "float32"))
    ends = {}
    for count in (3, 5, 6):
        schedule = make_schedule(shapes, 3, virtual_ranks=count)
        ends[count] = fddp.simulate(schedule, cost, [0.0]).step_s
    assert ends[6] == pytest.approx(ends[3])
    assert ends[5] == pytest.approx(1.5 * ends[3], rel=0.05)


def test_partial_sums_across_hosts_take_time() -> None:
    """Only those that are left of a host's travel between hosts."""
    cost = {"host": fddp.CostModel(0.0, 1e-9), "local": fddp.CostModel(0.0, 0.0)}
    shapes = plan(LeafSpec("w", (6000,), "float32"))
    topology, ends = fddp.Topology(host=3, local=2), {}
    for count in (6, 12, 15):
        schedule = make_schedule(shapes, topology, algorithm="hierarchical", virtual_ranks=count)
        ends[count] = fddp.simulate(schedule, cost, [0.0]).step_s
    assert [len(own) for own in VirtualRanks.over(15, 6).roots(2)] == [2, 3, 2]
    assert ends[12] == pytest.approx(ends[6])
    assert ends[15] == pytest.approx(2.0 * ends[6], rel=0.05)


# Arguments


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: schedule_of(3, 4), r"3 virtual ranks can be carried by 1 to 3 ranks, got 4"),
        (lambda: schedule_of(0, 1), r"virtual_ranks must be an int from 1 to 65536, got 0"),
        (lambda: schedule_of(8, 2, scaling="average"), r"use scaling='before' or 'after'"),
        (
            lambda: make_schedule(
                plan(LeafSpec("rows", (4, 2), "float32", sparse=True)),
                2,
                virtual_ranks=4,
                algorithm="reduce_scatter",
            ),
            r"'reduce_scatter' can't shard the sparse leaf 'rows'; plan it as dense",
        ),
        (
            lambda: make_schedule(
                plan_leaves(
                    [LeafSpec("a", (2,), "float32"), LeafSpec("own", (2,), "float32")],
                    order=[0],
                    caps_bytes=[1],
                ),
                2,
                virtual_ranks=4,
            ),
            r"leaf 'own' is in no bucket, and would keep the gradient of the virtual ranks of one",
        ),
    ],
)
def test_arguments_that_do_not_fit(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
