"""Virtual ranks: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.schedule.sum_tree import SumTree
from fddp.core.schedule.virtual import VirtualRanks
from fddp.transport import open_transport
from fddp.transport.tree_sum import sum_along_tree_
from tests.support.digests import digest
from tests.support.models import rand, varied_loss, varied_params
from tests.support.ranks import Launch, launch_fixture, launch_over

pytestmark = pytest.mark.slow  # together, some ten seconds

COUNT = 8
STEPS = 3
launch = launch_fixture("loopback", "c10d", "shm")


# Sums over the rows of ranks


# Copied by each rank, and longer than a segment of the staging buffers.
LENGTHS = (5, 30_000)


def fill_rows_(memory: Tensor, rank: int, tree: Any, ranks: int) -> Tensor:
    """Fill a buffer with rows; those that hold no summand are NaN."""
    rows = memory.view(ranks, tree.width, -1).fill_(torch.nan)
    for number in range(tree.summands[rank]):
        first = sum(tree.summands[:rank]) + number
        rows[:, number] = summand(first, ranks, rows.shape[2])
    return memory


def summand(number: int, ranks: int, length: int) -> Tensor:
    wide = 10.0 ** (3.0 * rand(ranks, length, seed=90 + number))
    return (rand(ranks, length, seed=number) * wide).float()


def trees_over(ranks: int) -> list[SumTree]:
    """Sums over all virtual ranks, and those of each of two hosts, which may leave several."""
    whole = [VirtualRanks.over(count, ranks).tree for count in (4, 5, 13, 15)]
    hosts = [VirtualRanks.over(n, 2 * ranks).stage(1, ranks) for n in (6, 10) if n >= 2 * ranks]
    return [*whole, *chain.from_iterable(hosts)]


def summed_rows(group: Any) -> tuple[str, list[Tensor]]:
    """The transport, and this rank's sums, with memory of torch's and of the transport."""
    found = []
    with open_transport(group, "auto") as transport:
        rank, ranks = transport.rank, transport.world_size
        for length, tree, own in product(LENGTHS, trees_over(ranks), (False, True)):
            numel = ranks * tree.width * length
            empty = transport.empty(numel, torch.float32, torch.device("cpu"))
            buffer = fill_rows_(empty if own else torch.empty(numel), rank, tree, ranks)
            work = transport.reduce_scatter(buffer, tree=tree, wait_soon=tree.width % 2 == 0)
            work.wait("the sum")
            found.append(buffer.view(ranks, tree.width, -1)[rank, : tree.sums].clone())
        return transport.name, found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_of_rows(launch: Launch, size: int) -> None:
    results = launch(size, summed_rows)
    assert {name for name, _ in results} == {launch.name} or size == 1
    trees = trees_over(size)
    assert size == 1 or any(tree.sums > max(tree.summands) for tree in trees)
    for place, (length, tree, _) in enumerate(product(LENGTHS, trees, (False, True))):
        numbers = range(sum(tree.summands))
        due = sum_along_tree_([summand(n, size, length) for n in numbers], tree.additions)
        for rank, (_, found) in enumerate(results):
            assert torch.equal(found[place], torch.stack([d[rank] for d in due])), (length, tree)


TREES = {
    "of other numbers": lambda rank: VirtualRanks.over(5 + 2 * rank, 2).tree,
    "on one rank": lambda rank: None if rank else SumTree.along((2,)),
}


def mismatched(group: Any, kind: str) -> tuple[str, SumTree | None]:
    with open_transport(group, "auto") as transport:
        tree = TREES[kind](transport.rank)
        if tree is not None and tree.width == 2:
            with pytest.raises(ValueError, match=r"6 elements can't hold 2 rows in each of 2"):
                transport.reduce_scatter(torch.ones(6), tree=tree)
        work = transport.reduce_scatter(torch.ones(8), tree=tree)
        with pytest.raises(fddp.DesyncError) as caught:
            work.wait("the sum")
        return str(caught.value), tree


@pytest.mark.parametrize("name", ["loopback", "shm"])
@pytest.mark.parametrize("kind", TREES)
def test_other_trees_are_reported(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    results = launch_over(name, request)(2, mismatched, kind)
    for rank, (_, tree) in enumerate(results):
        along = "" if tree is None else f" along tree {tree.digest:016x}"
        for text, _ in results:
            assert f"rank {rank} reduce_scatter{along} of torch.float32 (8,)" in text


# Bits of steps


def weight_of(p: Any, x: Any, number: int, step: int) -> float:
    """None of these sums is exact in float64; some virtual ranks have no weight."""
    return 0.0 if number == step + 2 else 0.1 + number * 1.7 + step * 3.3


def inputs_of(number: int, step: int) -> Tensor:
    x = rand(4, 8, seed=10 * step + number, dtype=torch.float32)
    return x.requires_grad_()


def digests(group: Any, count: int, options: dict[str, Any]) -> list[str]:
    """MD5 of the gradients and losses of each step, of parameters at the end, and of a call."""
    params, found = varied_params(), []
    options = {"bucket_cap_mb": 4e-4, "first_bucket_mb": 2e-4, "sparse": ("rows",), **options}
    weighted = options.pop("weighted", True)
    with fddp.GradSync(params, group=group, virtual_ranks=count, **options) as sync:
        weight_fn = weight_of if weighted else None
        step = sync.value_and_grad(varied_loss, with_info=True, weight_fn=weight_fn)
        for number in range(STEPS):
            if number == 2:  # a virtual rank runs out of inputs
                batches = [
                    fddp.EXHAUSTED if v == 1 else inputs_of(v, number) for v in sync.carried_ranks
                ]
            else:
                batches = [inputs_of(v, number) for v in sync.carried_ranks]
            losses, grads, info = step(
                params,
                sync.virtual_batches(batches),
                sync.virtual_batches(lambda v: v),
                number,
            )
            assert len(losses) == len(sync.carried_ranks)
            assert [loss is None for loss in losses] == [b is fddp.EXHAUSTED for b in batches]
            assert info.all_finite
            found.append(digest(grads) + repr((info.total_weight, info.active)))
            params = {n: p if grads[n] is None else p - 0.1 * grads[n] for n, p in params.items()}
        found.append(digest(params))
        trees = sync.virtual_batches(
            lambda v: {
                n: None if v == 2 else (p.float() * (v + 0.1)).to(p.dtype)
                for n, p in params.items()
            }
        )
        found.append(digest(sync(trees, weight=[0.3 + v for v in sync.carried_ranks])))
        found.append(digest(sync(trees)))
    return found


@pytest.fixture(scope="module")
def due() -> list[str]:
    """The digests on one rank."""
    (found,) = fddp.loopback(1, digests, COUNT, {})
    assert len({*found}) == STEPS + 3
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_same_bits_on_any_number_of_ranks(launch: Launch, size: int, due: list[str]) -> None:
    assert launch(size, digests, COUNT, {}) == [due] * size


HOSTS = fddp.Topology(host=2, local=2)


def nested_digests(group: Any, counts: list[int]) -> list[list[str]]:
    options = {"mesh": HOSTS, "algorithm": "hierarchical"}
    return [digests(group, count, options) for count in counts]


def test_the_same_bits_along_one_axis_after_the_other(launch: Launch) -> None:
    """Ranks and hosts send one sum, several, or more than they have added up."""
    counts = [4, 8, 11, 13]
    alone = [fddp.loopback(1, digests, count, {})[0] for count in counts]
    assert launch(4, nested_digests, counts) == [alone] * 4


@pytest.mark.parametrize(
    "topology", [fddp.Topology(host=3, local=2), fddp.Topology(pod=2, host=2, local=2)]
)
@pytest.mark.parametrize("count", [8, 15])
def test_other_topologies_have_the_same_bits(topology: fddp.Topology, count: int) -> None:
    (alone,) = fddp.loopback(1, digests, count, {})
    options = {"mesh": topology, "algorithm": "hierarchical"}
    ranks = topology.world_size
    assert fddp.loopback(ranks, digests, count, options) == [alone] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 12])
def test_the_same_bits_for_any_number_of_virtual_ranks(count: int) -> None:
    (alone,) = fddp.loopback(1, digests, count, {})
    for ranks in range(2, min(count, 6) + 1):
        assert fddp.loopback(ranks, digests, count, {}) == [alone] * ranks


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5},
        {"bucket_cap_mb": 25.0},
        {"mesh": fddp.Topology(host=3, local=2)},
        {"mesh": fddp.Topology(host=2, one=1, local=3)},
        {"mesh": fddp.Topology(host=2, one=1, local=3), "algorithm": "hierarchical"},
        {"mesh": fddp.Topology(host=3, local=2), "algorithm": "hierarchical", "nonfinite": "skip"},
        {"mesh": fddp.Topology(one=1, local=6), "algorithm": "hierarchical"},
        {"nonfinite": "skip"},
        {"nonfinite": "raise"},
        {"deterministic": True},
    ],
)
def test_options_do_not_change_bits(options: dict[str, Any], due: list[str]) -> None:
    assert fddp.loopback(6, digests, COUNT, options) == [due] * 6


def test_another_number_of_virtual_ranks_has_other_bits(due: list[str]) -> None:
    """Or else the tests above could not fail."""
    assert fddp.loopback(1, digests, COUNT + 1, {})[0] != due


def test_the_mean_equals_a_sum_by_hand() -> None:
    def run(group: Any) -> Tensor:
        with fddp.GradSync({"w": torch.zeros(20)}, group=group, virtual_ranks=6) as sync:
            return sync(sync.virtual_batches(lambda v: {"w": summand(v, 1, 20)[0]}))["w"].clone()

    scaled = [summand(v, 1, 20)[0] * (1 / 6) for v in range(6)]
    a, b, c, d, e, f = scaled
    by_hand = ((a + b) + (c + d)) + (e + f)
    flat = ((((a + b) + c) + d) + e) + f
    assert not torch.equal(by_hand, flat)
    for ranks in range(1, 7):
        for found in fddp.loopback(ranks, run):
            assert torch.equal(found, by_hand)


def sparse_summand(number: int) -> Tensor:
    """Of ten rows: some of their own, some of several virtual ranks, one of all and repeated."""
    rows = torch.tensor([number % 4, number + 2, 9, 9, (3 * number) % 10])
    return torch.sparse_coo_tensor(rows[None], summand(number, 5, 3), (10, 3))


def test_the_mean_of_sparse_gradients_equals_a_sum_by_hand() -> None:
    """A row that some virtual ranks lack is added along the tree, too."""

    def run(group: Any, mesh: fddp.Topology | None = None) -> tuple[bool, Tensor]:
        algorithm: Any = "hierarchical" if mesh else "all_reduce"
        with fddp.GradSync(
            {"rows": torch.zeros(10, 3)},
            group=group,
            virtual_ranks=7,
            sparse=("rows",),
            mesh=mesh,
            algorithm=algorithm,
        ) as sync:
            trees = sync.virtual_batches(lambda v: {"rows": None if v == 3 else sparse_summand(v)})
            found = sync(trees, weight=[0.0 if v == 5 else 1.0 + v for v in sync.carried_ranks])
        return found["rows"].is_coalesced(), found["rows"].to_dense()

    total = sum(1.0 + v for v in range(7) if v != 5)
    absent = torch.zeros(10, 3)
    a, b, c, d, e, f, g = (
        absent if v in (3, 5) else sparse_summand(v).coalesce().to_dense() * ((1.0 + v) / total)
        for v in range(7)
    )
    by_hand = ((a + b) + (c + d)) + ((e + f) + g)
    assert not torch.equal(by_hand, (((((a + b) + c) + d) + e) + f) + g)
    for ranks in range(1, 8):
        for is_coalesced, found in fddp.loopback(ranks, run):
            assert is_coalesced
            assert torch.equal(found, by_hand)
    for _, found in fddp.loopback(6, run, fddp.Topology(host=2, local=3)):
        assert torch.equal(found, by_hand)


def test_ranks_send_rows_of_sparse_sums() -> None:
    """Rows that several virtual ranks of a span have are sent once."""

    def run(group: Any) -> list[int]:
        sent: list[int] = []
        with fddp.GradSync(
            {"rows": torch.zeros(10, 3)}, group=group, virtual_ranks=8, sparse=("rows",)
        ) as sync:
            transport = sync._engine.transport
            gather = transport.all_gather

            def note(tensor: Tensor, **options: Any) -> Any:
                sent.append(tensor.numel())
                return gather(tensor, **options)

            transport.all_gather = note  # type: ignore[method-assign]
            same = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.ones(2, 3), (10, 3))
            mean = sync(sync.virtual_batches(lambda v: {"rows": same}))
            assert torch.equal(mean["rows"].to_dense(), same.to_dense())
        return sent

    # Counts of each span, row numbers and values.
    assert fddp.loopback(2, run) == [[1, 2, 6]] * 2
    assert fddp.loopback(3, run) == [[2, 4, 12]] * 3


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, min(n, 6)))),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 1e3), min_size=16, max_size=16).filter(lambda w: w[0] > 0.1),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
    st.booleans(),
    st.booleans(),
)
def test_drawn_trees(
    pair: tuple[int, int],
    sizes: list[int],
    weights: list[float],
    dtype: torch.dtype,
    wide: bool,
    inference: bool,
) -> None:
    """The memory of sums outlives a step in inference mode."""
    count, ranks = pair
    options: Any = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4}
    if wide:
        options["reduce_dtype"] = torch.float64

    def tree(number: int) -> dict[str, Tensor]:
        return {
            f"leaf{i}": (rand(n, seed=50 * number + i) * 10.0 ** rand(n, seed=number)).to(dtype)
            for i, n in enumerate(sizes)
        }

    def run(group: Any) -> str:
        with fddp.GradSync(tree(0), group=group, virtual_ranks=count, **options) as sync:
            own, trees = [weights[v] for v in sync.carried_ranks], sync.virtual_batches(tree)
            with torch.inference_mode(inference):
                first = digest(sync(trees, weight=own))
            assert not inference or digest(sync(trees, weight=own)) == first
            return first

    (alone,) = fddp.loopback(1, run)
    assert fddp.loopback(ranks, run) == [alone] * ranks


def test_shards_once_gathered() -> None:
    def run(group: Any, mesh: fddp.Topology | None = None) -> Tensor:
        with fddp.GradSync(
            {"w": torch.zeros(24)},
            group=group,
            mesh=mesh,
            virtual_ranks=5,
            algorithm="reduce_scatter",
        ) as sync:
            trees = sync.virtual_batches(lambda v: {"w": summand(v, 1, 24)[0]})
            return sync.all_gather(sync.reduce_scatter(trees))["w"].clone()

    (alone,) = fddp.loopback(1, run)
    for ranks in (2, 3, 5):
        assert all(torch.equal(found, alone) for found in fddp.loopback(ranks, run))
    for mesh in (fddp.Topology(host=2, local=2), fddp.Topology(host=5, one=1)):
        ranks = mesh.world_size
        assert all(torch.equal(found, alone) for found in fddp.loopback(ranks, run, mesh))


# Numbers that are not finite


def spoiled(group: Any, policy: str, number: int, value: float, sparse: bool) -> Any:
    def grads_of(v: int, spoils: bool = True) -> dict[str, Tensor]:
        bad = torch.full((6, 2), value if spoils and v == number else 1.0)
        return {"w": bad.to_sparse(1) if sparse else bad, "v": torch.ones(6)}

    with fddp.GradSync(
        {"w": torch.zeros(6, 2), "v": torch.zeros(6)},
        group=group,
        virtual_ranks=5,
        nonfinite=policy,
        sparse=("w",) if sparse else (),
    ) as sync:
        try:
            grads, info = sync(sync.virtual_batches(grads_of), with_info=True)
        except fddp.NonFiniteError as error:
            return str(error)
        later = sync(sync.virtual_batches(lambda v: grads_of(v, spoils=False)))
        return grads["w"] is None, info.skipped, later["w"].to_dense().eq(1.0).all().item()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [0, 3, 4])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("sparse", [False, True])
def test_policies(size: int, number: int, value: float, sparse: bool) -> None:
    is_bad = value != 3e38
    found = fddp.loopback(size, spoiled, "skip", number, value, sparse)
    assert found == [(is_bad, is_bad, True)] * size
    if is_bad:
        carrier = next(r for r, own in enumerate(VirtualRanks.over(5, size).runs) if number in own)
        kind = "NaN" if value != value else "infinities"
        for text in fddp.loopback(size, spoiled, "raise", number, value, sparse):
            assert f"are not finite: rank {carrier} has 12 {kind} in leaf 'w'" in text


def test_overflow_of_partial_sums_is_skipped_on_any_number_of_ranks() -> None:
    def run(group: Any) -> bool:
        params = {"w": torch.zeros(6)}
        with fddp.GradSync(params, group=group, virtual_ranks=4, nonfinite="skip") as sync:
            grads = sync.virtual_batches(lambda v: {"w": torch.full((6,), 3e38)})
            _, info = sync(grads, weight=[7.0] * len(grads), with_info=True)
            return info.skipped

    assert {*fddp.loopback(1, run), *fddp.loopback(2, run), *fddp.loopback(3, run)} == {True}


# Errors


def test_a_failure_of_one_virtual_rank_reaches_all() -> None:
    def run(group: Any) -> str:
        with fddp.GradSync({"w": torch.ones(3)}, group=group, virtual_ranks=5) as sync:

            def loss(p: Any, number: int) -> Tensor:
                if number == 2:
                    raise RuntimeError("no data")
                return (p["w"] * number).sum()

            step = sync.value_and_grad(loss)
            numbers = sync.virtual_batches(lambda v: v)
            with pytest.raises((RuntimeError, fddp.PeerError), match="no data") as caught:
                step({"w": torch.ones(3)}, numbers)
            _, grads = sync.value_and_grad(lambda p, v: (p["w"] * v).sum())(
                {"w": torch.ones(3)}, numbers
            )
            assert grads["w"].tolist() == [2.0] * 3
            return type(caught.value).__name__

    assert fddp.loopback(2, run) == ["PeerError", "RuntimeError"]
    assert fddp.loopback(1, run) == ["RuntimeError"]


def test_misuse_is_named() -> None:
    def run(group: Any) -> None:
        params = {"w": torch.ones(3)}
        with fddp.GradSync(params, group=group, virtual_ranks=4) as sync:
            step = sync.value_and_grad(lambda p, v: (p["w"] * v).sum())
            batches = sync.virtual_batches(lambda v: 1.0 + v)
            with pytest.raises(TypeError, match=r"needs an input for each that this rank carries"):
                step(params, 1.0)
            with pytest.raises(TypeError, match=r"accumulated gradients are a sum of some virtual"):
                step(params, batches, accumulated=(params, 1.0))
            with pytest.raises(ValueError, match=r"carries 2 virtual ranks, \d to \d, and got 3 b"):
                sync.virtual_batches([1.0, 2.0, 3.0])
            with pytest.raises(TypeError, match=r"needs an input for each"):
                sync(params)
            with pytest.raises(ValueError, match=r"got 3 weights for 2 virtual ranks"):
                sync(sync.virtual_batches(lambda v: params), weight=[1.0] * 3)
            with pytest.raises(ValueError, match=r"reduce_\(grads\) has one tree of gradients"):
                sync.reduce_(params)
            with pytest.raises(ValueError, match=r"update\(grads, state\) has one tree of"):
                sync.update(params, ())
            with pytest.raises(fddp.WeightError, match=r"the total weight over 4 ranks is 0.0"):
                sync(sync.virtual_batches(lambda v: params), weight=0.0)
            assert step(params, batches)[1]["w"].tolist() == [2.5] * 3
        with fddp.GradSync(params, group=group) as plain:
            assert plain.carried_ranks == range(0)
            with pytest.raises(ValueError, match=r"this GradSync has no virtual ranks; build it"):
                plain.virtual_batches(lambda v: v)
        hook = fddp.hooks.bf16_compress
        with pytest.raises(ValueError, match=r"sums in its own order, which deterministic=True"):
            fddp.GradSync(params, group=group, virtual_ranks=4, hook=hook)

    fddp.loopback(2, run)


def test_a_schedule_with_virtual_ranks() -> None:
    def run(group: Any) -> Any:
        schedule = fddp.make_schedule(
            fddp.plan_buckets({"w": torch.ones(3)}), 2, virtual_ranks=3, split_mb=2**-19
        )
        with pytest.raises(ValueError, match=r"this one has 3 virtual ranks; pass virtual_ranks=4"):
            fddp.GradSync(schedule, group=group, virtual_ranks=4)
        with fddp.GradSync(schedule, group=group) as sync:
            return sync(sync.virtual_batches(lambda v: {"w": torch.full((3,), v + 1.0)}))["w"]

    assert [found.tolist() for found in fddp.loopback(2, run)] == [[2.0] * 3] * 2


def test_at_most_log2_buffers_are_in_use() -> None:
    def run(group: Any) -> int:
        params = {"w": torch.zeros(64)}
        with fddp.GradSync(params, group=group, virtual_ranks=32) as sync:
            sync(sync.virtual_batches(lambda v: {"w": summand(v, 1, 64)[0]}))
            released = sync._engine._pool._released
            return sum(len(released[key].buffers()) for key in released if isinstance(key, tuple))

    assert fddp.loopback(1, run) == [5]  # and the buffer of the step


def test_rows_that_are_exchanged_are_used_again() -> None:
    def run(group: Any) -> set[int]:
        params, found = {"w": torch.zeros(64)}, set()
        with fddp.GradSync(params, group=group, virtual_ranks=6) as sync:
            for _ in range(3):
                sync(sync.virtual_batches(lambda v: {"w": summand(v, 1, 64)[0]}))
                released = sync._engine._pool._released
                (key,) = [key for key in released if isinstance(key, tuple) and key[0] == "rows"]
                (memory,) = released[key].buffers()
                found.add(memory.data_ptr())
        return found

    assert [len(found) for found in fddp.loopback(2, run)] == [1, 1]


# Uneven inputs


def test_virtual_ranks_that_run_out() -> None:
    """Each has a number of batches of its own, and ranks go on until none has any."""
    lengths = [3, 1, 4, 1, 5]

    def run(group: Any) -> list[str]:
        params = {"w": rand(6, seed=1, dtype=torch.float32)}
        found = []
        with fddp.GradSync(params, group=group, virtual_ranks=5) as sync:
            step = sync.value_and_grad(lambda p, x: (p["w"] * x).square().sum())
            longest = max(lengths[v] for v in sync.carried_ranks)
            rounds = (
                sync.virtual_batches(
                    [
                        rand(6, seed=10 * v + number).float()
                        if number < lengths[v]
                        else fddp.EXHAUSTED
                        for v in sync.carried_ranks
                    ]
                )
                for number in range(longest)
            )
            for batches in fddp.uneven(rounds, sync):
                found.append(digest(step(params, batches)[1]))
        return found

    (alone,) = fddp.loopback(1, run)
    assert len({*alone}) == 5
    for ranks in (2, 3, 5):
        assert fddp.loopback(ranks, run) == [alone] * ranks


# Rebuilding on other numbers of ranks


def rebuilt_digests(
    sizes: Sequence[int], meshes: Sequence[fddp.Topology] | None = None
) -> list[str]:
    """Digests of steps, each on another number of ranks, which go on with each other's engines."""
    algorithm: Any = "hierarchical" if meshes else "all_reduce"
    found: list[str] = []
    syncs: dict[int, Any] = {}
    params = {"w": rand(30, seed=3, dtype=torch.float32), "b": rand(7, seed=4).bfloat16()}

    def take(group: Any, number: int) -> str:
        sync, mesh = syncs.get(group.rank), meshes[number] if meshes else None
        if number == 0:
            sync = fddp.GradSync(
                params, group=group, virtual_ranks=COUNT, mesh=mesh, algorithm=algorithm
            )
        elif sync is None:
            sync = fddp.GradSync.join(group, mesh=mesh)
        else:
            sync = sync.rebuild(group, mesh=mesh)
        syncs[group.rank] = sync
        step = sync.value_and_grad(
            lambda p, x: (p["w"] * x).sum().square() + (p["b"] * x[:7]).sum(),
            weight_fn=lambda p, x: float(x[0].abs()) * 10.0**number,
        )
        xs = sync.virtual_batches(lambda v: rand(30, seed=99 * number + v, dtype=torch.float32))
        return digest(step(params, xs)[1])

    for number, size in enumerate(sizes):
        results = fddp.loopback(size, take, number)
        assert len({*results}) == 1
        found += results[:1]
        for rank in [*syncs]:
            if rank >= size:
                syncs.pop(rank).close()
    for sync in syncs.values():
        sync.close()
    return found


def test_rebuilds_keep_bits() -> None:
    alone = rebuilt_digests([1] * 7)
    assert len({*alone}) == 7
    assert rebuilt_digests([4, 3, 2, 1, 4, 8, 5]) == alone
    assert rebuilt_digests([2, 6, 6, 3, 7, 1, 4]) == alone
    hosts = [fddp.Topology(host=n, local=m) for n, m in [(2, 2), (3, 2), (1, 2), (2, 4), (2, 1)]]
    assert rebuilt_digests([mesh.world_size for mesh in hosts], hosts) == alone[: len(hosts)]


def test_too_many_ranks_to_rebuild_on() -> None:
    syncs = fddp.loopback(
        2, lambda group: fddp.GradSync({"w": torch.ones(2)}, group=group, virtual_ranks=2)
    )

    def grow(group: Any) -> str:
        continues = syncs[group.rank].rebuild if group.rank < 2 else fddp.GradSync.join
        with pytest.raises((ValueError, fddp.PlanMismatchError)) as caught:
            continues(group)
        return str(caught.value)

    for text in fddp.loopback(3, grow):
        assert "2 virtual ranks can be carried by 1 to 2 ranks, got 3" in text
    for sync in syncs:
        sync.close()
