"""The newest state reaches every rank, whole, whatever the ranks had before."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.collectives.replicas import chunked_broadcast
from fddp.collectives.replicas.containers import containers_from_json, containers_to_json
from fddp.transport.base import Transport
from fddp.tree.pytree import flatten
from tests.support.endings import ending
from tests.support.on_ranks import on_threads
from tests.support.ranks import Launch

Moments = namedtuple("Moments", ["first", "second"])
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def tensors(shapes: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Tensor]:
    def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return bits.to(dtype) if not dtype.is_floating_point else numbers.to(dtype)

    return st.builds(made, shapes, st.sampled_from(DTYPES), st.integers(0, 2**31))


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LEAVES = st.one_of(
    tensors(SHAPES),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-3, 99))
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Return True if two trees have the same containers, kinds of leaves and bits."""
    (mine, one), (theirs, other) = flatten(a), flatten(b)
    return one == other and all(same_leaf(x, y) for x, y in zip(mine, theirs, strict=True))


def same_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        whole = x.dtype == y.dtype and x.shape == y.shape
        return whole and bits_of(x) == bits_of(y)
    if isinstance(x, float) and isinstance(y, float):
        return x.hex() == y.hex()
    return type(x) is type(y) and bool(x == y)


def bits_of(x: Tensor) -> bytes:
    return x.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
@given(trees=st.lists(st.tuples(TREES, st.integers(0, 3)), min_size=1, max_size=4))
def test_newest_state_of_the_lowest_rank_wins(trees: list[tuple[Any, int]]) -> None:
    try:
        held = [(tree, step) for tree, step in trees if tree is not None or step > 9]
        [flatten(tree) for tree, _ in held]
    except ValueError:
        return  # keys whose paths clash, as 1 and "1"
    newest = max((step for _, step in held), default=None)

    def run(group: Any) -> Any:
        tree, step = trees[group.rank]
        return fddp.reconcile(tree, group, step=step)

    if newest is None:
        assert "none of" in ending(lambda: fddp.loopback(len(trees), run)).text
        return
    expected = next(tree for tree, step in held if step == newest)
    with mock.patch.object(chunked_broadcast, "PIECE_BYTES", 7):
        results = fddp.loopback(len(trees), run)
    for (tree, _), (found, step) in zip(trees, results, strict=True):
        assert step == newest
        # A rank's own containers stay where they have the same leaves.
        if flatten(tree)[1].paths != flatten(expected)[1].paths:
            assert same(found, expected)
        else:
            pairs = zip(flatten(found)[0], flatten(expected)[0], strict=True)
            assert all(same_leaf(x, y) for x, y in pairs)


def adam(group: Any) -> Any:
    torch.manual_seed(group.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + group.rank()))
    for _ in range(1 + group.rank()):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    mine = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tree, step = fddp.reconcile(
        None if group.rank() == 1 else mine, group, step=group.rank(), timeout_s=20.0
    )
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    return tree, step, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("launch", ["c10d"], indirect=True)
def test_states_of_torch_over_processes(launch: Launch) -> None:
    outcome = launch(3, adam)
    assert [step for _, step, _ in outcome] == [2] * 3
    assert [rate for *_, rate in outcome] == [0.1 / 3] * 3
    assert same(outcome[0][0], outcome[2][0])
    assert same(outcome[1][0], outcome[2][0])
    assert type(outcome[1][0]["model"]) is OrderedDict


def test_equal_state_is_not_sent() -> None:
    sent = []
    broadcast = Transport.broadcast

    def counted(self: Transport, tensor: Tensor, src: int, **options: Any) -> Any:
        sent.append(tensor.numel())
        return broadcast(self, tensor, src, **options)

    def run(group: Any, other: float) -> Any:
        tree = {"w": torch.ones(5), "b": other if group.rank else 0.0}
        found, _ = fddp.reconcile(tree, group, step=4)
        return found is tree

    with mock.patch.object(Transport, "broadcast", counted):
        assert fddp.loopback(3, run, 0.0) == [True] * 3
        assert sent == []
        assert fddp.loopback(3, run, 1.0) == [True, False, False]
        assert 20 in sent


def test_ranks_with_the_state_keep_their_trees() -> None:
    """Though others have to be sent it; nothing is written where it is."""

    def run(group: Any, late: int) -> Any:
        w = torch.arange(12.0).view(3, 4).t()  # not in order in memory
        tree = {"w": w, "p": torch.nn.Parameter(torch.ones(2)), "n": 1}
        versions = w._version, tree["p"]._version
        mine = None if group.rank == late else tree
        found, _ = fddp.reconcile(mine, group, step=5)
        fddp.check_replicas(found, group)
        return found is tree, (w._version, tree["p"]._version) == versions

    with mock.patch.object(chunked_broadcast, "PIECE_BYTES", 7):
        assert fddp.loopback(3, run, 2) == [(True, True), (True, True), (False, True)]
        assert fddp.loopback(3, run, 0) == [(False, True), (True, True), (True, True)]


@on_threads(3)
def test_the_same_bits_of_another_step(group: Any) -> None:
    tree, own = {"w": torch.ones(2)}, [5, 5, 4][group.rank]
    found, step = fddp.reconcile(tree, group, step=own)
    assert (found is tree, step) == (own == 5, 5)


@pytest.mark.parametrize("other", [torch.zeros(4, 1), torch.zeros(4, dtype=torch.int32)])
def test_shapes_and_dtypes_are_part_of_a_state(other: Tensor) -> None:
    """Two states of one step, whose tensors have the same bits."""

    def run(group: Any) -> Any:
        return fddp.reconcile(other if group.rank else torch.zeros(4), group, step=1)[0]

    for found in fddp.loopback(2, run):
        assert (found.shape, found.dtype) == ((4,), torch.float32)


def test_received_tensors_are_plain_and_untied() -> None:
    def run(group: Any) -> Any:
        tied = torch.nn.Parameter(torch.full((2,), float(group.rank)))
        tree = [tied, tied] if group.rank else (tied, tied)
        found, _ = fddp.reconcile(tree, group, step=group.rank)
        one, two = found
        return type(found), type(one), one.requires_grad, one is two

    assert fddp.loopback(2, run) == [
        (list, Tensor, False, False),  # containers as at the source
        (list, torch.nn.Parameter, True, True),
    ]


def test_bits_that_change_on_the_way_are_seen_by_all() -> None:
    broadcast = Transport.broadcast

    def spoilt(self: Transport, tensor: Tensor, src: int, **options: Any) -> Any:
        work = broadcast(self, tensor, src, **options)
        if tensor.numel() == 12 and self.rank == 2:
            wait = work.wait
            work.wait = lambda what: (wait(what), tensor[9].bitwise_xor_(1))
        return work

    def run(group: Any) -> Any:
        tree = {"b": torch.zeros(1), "w": torch.full((2,), float(group.rank))}
        return ending(lambda: fddp.reconcile(tree, group, step=9 - group.rank))

    with mock.patch.object(Transport, "broadcast", spoilt):
        results = fddp.loopback(3, run)
    for outcome in results:
        assert outcome.kinds[0] == "DesyncError"
        assert "leaf 'w' has the digest" in outcome.text
        assert "on rank 0, the source of the state of step 9, and" in outcome.text
        assert "on rank 2 after the broadcast" in outcome.text


def test_own_layout_and_containers_stay() -> None:
    def run(group: Any) -> Any:
        value = torch.arange(24.0).view(1, 2, 3, 4) * (1 + group.rank)
        if group.rank == 1:
            value = value.to(memory_format=torch.channels_last)
        tree = Moments(first=value, second=value[0, 0].t().conj())
        return fddp.reconcile(tree, group, step=9 - group.rank)[0]

    zero, one = fddp.loopback(2, run)
    assert type(zero) is type(one) is Moments
    assert torch.equal(zero.first, one.first)
    assert torch.equal(zero.second, one.second)
    assert zero.first.is_contiguous()
    assert one.first.is_contiguous(memory_format=torch.channels_last)


@on_threads(2)
def test_inputs_are_not_written(group: Any) -> None:
    tree = [torch.full((3,), float(group.rank))]
    found, _ = fddp.reconcile(tree, group, step=group.rank)
    found[0] += 1.0 if group.rank == 0 else 0.0
    assert tree[0].tolist() == [float(group.rank)] * 3
    assert found[0].tolist() == [2.0 - group.rank] * 3


def test_jax_trees() -> None:
    jnp = pytest.importorskip("jax.numpy")
    optax = pytest.importorskip("optax")

    def run(group: Any) -> Any:
        params = {"w": jnp.full(3, 1.0 + group.rank), "n": 5 * group.rank}
        state = optax.adam(0.1).init({"w": params["w"]})
        return fddp.reconcile({"params": params, "state": state}, group, step=group.rank)[0]

    zero, one = fddp.loopback(2, run)
    assert type(zero["state"]) is type(one["state"])
    assert zero["params"]["w"].tolist() == [2.0] * 3
    assert zero["params"]["n"] == 5
    assert type(zero["params"]["w"]) is type(one["params"]["w"]) is type(jnp.ones(1))

    def late(group: Any) -> Any:
        tree = {"w": jnp.ones(2), "n": 1} if group.rank else None
        return fddp.reconcile(tree, group, step=3)[0]["w"]

    assert isinstance(fddp.loopback(2, late)[0], Tensor)


# Refused, on every rank


def refusals(trees: list[Any], steps: list[Any]) -> list[Any]:
    def run(group: Any) -> Any:
        tree, step = trees[group.rank], steps[group.rank]
        seen = ending(lambda: fddp.reconcile(tree, group, step=step))
        return seen, fddp.reconcile(1.5, group, step=0)  # the group is usable

    outcome = fddp.loopback(len(trees), run)
    assert {kind for seen, _ in outcome for kind in seen.kinds[:1]} == {"PlanMismatchError"}
    assert [after for _, after in outcome] == [(1.5, 0)] * len(trees)
    return [seen.text for seen, _ in outcome]


@pytest.mark.parametrize(
    ("trees", "steps", "text"),
    [
        ([None, None], [3, 3], "none of 2 ranks has a state"),
        (
            [1.0, 2.0],
            [0, -1],
            "rank 1 can't take part: ValueError: step must be an int of at least",
        ),
        ([1.0, 2.0], [True, 1], "rank 0 can't take part: ValueError: step must be an int"),
        ([1.0, [{1}]], [1, 1], "rank 1 can't take part: TypeError: leaf '0' is a set"),
        (
            [1.0, torch.empty(2, device="meta")],
            [1, 1],
            "the tree itself is a meta",
        ),  # as replicas are
        (
            [None, Moments(1, 2)],
            [0, 1],
            "rank 0 can't take part: ValueError: the tree has containers other than dict",
        ),
        ([[1.0], {1.5: 2.0}], [0, 1], "the key 1.5 is neither text nor an integer"),
    ],
)
def test_inconsistent_state_is_refused(trees: list[Any], steps: list[Any], text: str) -> None:
    outcome = refusals(trees, steps)
    assert outcome[0] == outcome[1]
    assert text in outcome[0]


@on_threads(2)
def test_not_in_a_transform(group: Any) -> None:
    fn = torch.func.grad(lambda x: fddp.reconcile([x], group, step=1)[0][0])
    with pytest.raises(fddp.PlanMismatchError, match="TransformError: reconcile"):
        fn(torch.tensor(1.0))


# Containers as text


@given(TREES)
def test_containers_both_ways(tree: Any) -> None:
    made = containers_from_json(containers_to_json(tree))
    try:
        treedef = flatten(tree)[1]
    except ValueError:
        return  # keys whose paths clash, as 1 and "1"
    assert flatten(made)[1] == treedef


@given(st.one_of(st.text(max_size=40), st.recursive(st.none() | st.text(), st.lists).map(repr)))
def test_arbitrary_text_is_a_tree_or_an_error(text: str) -> None:
    for candidate in (text, json.dumps(text), text.replace("'", '"').replace("None", "null")):
        try:
            tree = containers_from_json(candidate)
        except ValueError:
            continue
        assert isinstance(tree, (dict, list, tuple, type(None)))


def test_deep_trees() -> None:
    tree: Any = 1.0
    for _ in range(201):
        tree = [tree]
    with pytest.raises(ValueError, match="more than 200 levels"):
        containers_to_json(tree)
    with pytest.raises(ValueError, match="recursion"):
        containers_from_json('["list",' * 100_000 + "null" + "]" * 100_000)
