"""Values of the operators over every transport: dtypes, trees, memory, axes, plans."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, vmap

import fddp
from fddp.collectives.calls import Call
from fddp.collectives.execute import finish_buckets, start_bucket
from fddp.collectives.operator_program import OperatorProgram, bucketed
from fddp.core.plan.leaf import LeafSpec
from fddp.testing import gradients, param_trees
from tests.support.collectives import OPERATORS
from tests.support.examples import examples
from tests.support.groups import rank_of, size_of
from tests.support.models import rand, same_bits
from tests.support.on_ranks import on_processes, on_threads
from tests.support.ranks import Launch

FLOATING = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
WHOLE = ["uint8", "int8", "int32", "int64"]
MOVED = ["int16", "bool"]  # which transports can't add up


def tree(rank: int, names: list[str]) -> dict[str, Any]:
    """Numbers whose sums over ranks are exact in every dtype."""
    leaves: dict[str, Any] = {
        name: torch.arange(1, 7).view(2, 3).mul(1 + rank).to(getattr(torch, name)) for name in names
    }
    return {
        **leaves,
        "scalar": torch.tensor(1.0 + rank),
        "empty": torch.zeros(0, 3),
        "none": None,
        "nested": [OrderedDict(z=torch.ones(2) * rank, a=(torch.ones(1),)), None],
        "transposed": (torch.arange(12.0).view(3, 4) + rank).T,
        "expanded": torch.tensor([1.0 + rank]).expand(3),
        "stepped": torch.arange(8.0)[rank % 2 :: 2],
        "conjugate": torch.complex(torch.ones(2), torch.ones(2) * rank).conj(),
    }


def leaves_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in fddp.tree.pytree.flatten(tree)[0] if leaf is not None]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_of_every_dtype(world_size: int) -> None:
    fddp.loopback(world_size, every_dtype)


@pytest.mark.parametrize("launch", ["c10d", "shm"], indirect=True)
def test_values_on_processes(launch: Launch) -> None:
    launch(2, every_dtype)
    launch(4, along_axes)


def every_dtype(group: Any) -> None:
    rank, n = rank_of(group), size_of(group)
    summed, moved = FLOATING + WHOLE, FLOATING + WHOLE + MOVED

    def stacked(names: list[str], numbers: Iterable[int] = range(n)) -> Any:
        trees = [tree(number, names) for number in numbers]
        return fddp.tree_map(lambda *x: torch.stack([y.resolve_conj() for y in x]), *trees)

    own = tree(rank, summed)
    with fddp.Communicator(group) as ranks:
        expect(
            fddp.psum(own, ranks), fddp.tree_map(lambda x: x.sum(0, dtype=x.dtype), stacked(summed))
        )
        floats = tree(rank, FLOATING)
        means = fddp.tree_map(lambda x: x.sum(0) / n, stacked(FLOATING))
        torch.testing.assert_close(leaves_of(fddp.pmean(floats, ranks)), leaves_of(means))
        everything = tree(rank, moved)
        expect(fddp.all_gather(everything, ranks), stacked(moved))
        for root in range(n):
            expect(
                fddp.broadcast_from(everything, root, ranks),
                fddp.tree_map(lambda x, root=root: x[root], stacked(moved)),
            )
        real = {k: v for k, v in everything.items() if not k.startswith("co")}
        both = {k: v for k, v in stacked(moved).items() if not k.startswith("co")}
        expect(fddp.pmax(real, ranks), fddp.tree_map(lambda x: x.amax(0), both))
        rows = fddp.tree_map(lambda x: torch.stack([(r + 1) * x for r in range(n)]), own)
        total = fddp.tree_map(lambda x: x.sum(0, dtype=x.dtype) * (rank + 1), stacked(summed))
        expect(fddp.reduce_scatter(rows, ranks), total)
        sent, received = [10 * rank + r for r in range(n)], [10 * r + rank for r in range(n)]
        expect(fddp.all_to_all(stacked(moved, sent), ranks), stacked(moved, received))
        assert same_bits([everything, tree(rank, moved)])  # not written


def expect(found: Any, wanted: Any) -> None:
    assert fddp.tree.pytree.flatten(found)[1] == fddp.tree.pytree.flatten(wanted)[1]
    for x, y in zip(leaves_of(found), leaves_of(wanted), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x, y)


@on_processes(2)
def test_bits_that_are_moved_stay(rank: int, n: int) -> None:
    """NaN of any payload, negative zeros, and numbers of kinds that have no sums."""
    bits = torch.tensor([0x7FC00123, -0x80000000, 0x7FFFFFFF, 1], dtype=torch.int32)
    odd = bits.view(torch.float32)
    mesh = fddp.Topology(other=1, both=2)
    for kind in (odd, torch.tensor([True, False]), odd.to(torch.float8_e4m3fn)):
        own = kind if rank == 1 else torch.zeros_like(kind)
        for options in ({}, {"mesh": mesh, "axis": "both"}):
            found = fddp.broadcast_from(own, 1, **options)
            assert torch.equal(found.view(torch.uint8), kind.view(torch.uint8))
            for found in (
                fddp.all_gather(own, **options)[1],
                fddp.all_to_all(own.expand(2, -1), **options)[1],
            ):
                assert torch.equal(found.view(torch.uint8), kind.view(torch.uint8))


@on_threads(2)
def test_tiles(group: Any) -> None:
    rank = rank_of(group)
    x = torch.arange(6.0).view(3, 2) + 10 * rank
    with fddp.Communicator(group) as ranks:
        gathered = fddp.all_gather({"x": x}, ranks, tiled=True)["x"]
        assert torch.equal(gathered, torch.cat([x - 10 * rank, x - 10 * rank + 10]))
        scattered = fddp.reduce_scatter(gathered, ranks, tiled=True)
        assert torch.equal(scattered, 2 * x)
        # The ranks' axis first, or the ranks' runs one behind the other: the same numbers.
        assert torch.equal(fddp.all_gather(x, ranks).flatten(0, 1), gathered)
        assert torch.equal(fddp.reduce_scatter(gathered.view(2, 3, 2), ranks), scattered)
        sent = gathered + 100 * rank
        received = fddp.all_to_all(sent, ranks, tiled=True)
        mine = gathered[3 * rank : 3 * rank + 3]
        assert torch.equal(received, torch.cat([mine, mine + 100]))
        assert torch.equal(fddp.all_to_all(sent.view(2, 3, 2), ranks).flatten(0, 1), received)


def test_axes_of_a_mesh() -> None:
    fddp.loopback(4, along_axes)


def along_axes(group: Any) -> None:
    rank = rank_of(group)
    mesh = fddp.Topology(row=2, column=2)
    row, column = divmod(rank, 2)
    one = torch.tensor(10.0**rank)
    with fddp.Communicator(group, mesh=mesh) as ranks:
        assert fddp.psum(one, ranks).item() == 1111
        assert fddp.psum(one, ranks, axis=("row", "column")).item() == 1111
        assert fddp.psum(one, ranks, axis=("column", "row")).item() == 1111
        in_row, in_column = (11.0, 1100.0)[row], (101.0, 1010.0)[column]
        assert fddp.psum(one, ranks, axis="column").item() == in_row
        assert fddp.psum(one, ranks, axis=("row",)).item() == in_column
        assert fddp.pmean(one, ranks, axis="column").item() == in_row / 2
        assert fddp.pmax(torch.tensor(rank), ranks, axis="row").item() == 2 + column
        assert fddp.all_gather(torch.tensor(rank), ranks, axis="row").tolist() == [
            column,
            2 + column,
        ]
        assert (
            fddp.broadcast_from(torch.tensor(rank), 1, ranks, axis="column").item() == 2 * row + 1
        )
        pair = torch.tensor([1.0, 10.0]) * 100**rank
        assert fddp.reduce_scatter(pair, ranks, axis="row").item() == pair[row] * (
            1 + 100.0 ** (2 if row == 0 else -2)
        )
        sent = 10 * rank + torch.arange(2)
        received = [10 * (2 * row) + column, 10 * (2 * row + 1) + column]
        assert fddp.all_to_all(sent, ranks, axis="column").tolist() == received
    # A mesh laid over a bare group is opened once.
    first = fddp.collectives.communicator.communicator_of(group, mesh)
    assert fddp.psum(one, group, mesh=mesh, axis="row").item() == in_column
    assert (
        fddp.collectives.communicator.communicator_of(group, fddp.Topology(row=2, column=2))
        is first
    )


@on_processes(4)
def test_groups_and_device_meshes(rank: int, n: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    one = torch.tensor(10.0**rank)
    assert fddp.psum(one).item() == 1111
    assert fddp.psum(one, mesh=mesh, axis="column").item() == (11.0, 1100.0)[rank // 2]
    assert fddp.psum(one, mesh["row"]).item() == (101.0, 1010.0)[rank % 2]
    part = dist.new_group([1, 3])
    if rank % 2:
        assert fddp.psum(one, part).item() == 1010
        assert fddp.broadcast_from(one, 0, part).item() == 10
        with fddp.Communicator(part) as own:
            assert (own.rank, own.world_size) == (rank // 2, 2)
            assert fddp.psum(one, own).item() == 1010


@on_processes(3)
def test_rows_as_torch_sends_them(rank: int, n: int) -> None:
    for backend in ("gloo", "fddp"):
        group = dist.new_group(backend=backend)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            for shape in ((n, 2), (n,), (n, 0)):
                sent = (10 * rand(*shape, seed=rank)).to(dtype)
                received = torch.empty_like(sent)
                dist.all_to_all_single(received, sent, group=group)
                assert torch.equal(fddp.all_to_all(sent, group), received)
                assert torch.equal(fddp.all_to_all(sent, group, tiled=True), received)


@on_threads(2)
def test_plans(group: Any) -> None:
    rank = rank_of(group)
    own = {
        "b": rand(5, seed=rank),
        "a": rand(2, 2, seed=9 + rank),
        "none": None,
        "n": torch.ones(2, dtype=torch.int64),
    }
    plan = fddp.plan_buckets(own, bucket_cap_mb=1e-5, first_bucket_mb=1e-5)
    assert len(plan.buckets) == 2
    with fddp.Communicator(group) as ranks, fddp.Communicator(group, bucket_cap_mb=1e-5) as small:
        wanted = fddp.psum(own, ranks)
        assert same_bits([wanted, fddp.psum(own, ranks, plan=plan), fddp.psum(own, small)])
        grad = torch.func.grad(
            lambda x: (fddp.psum({**own, "b": x}, ranks, plan=plan)["b"] ** 2).sum()
        )
        torch.testing.assert_close(grad(own["b"]), 4 * wanted["b"])
        rows = {"b": own["b"].expand(2, 5).contiguous()}
        rows_plan = fddp.plan_buckets(rows)
        torch.testing.assert_close(
            fddp.reduce_scatter(rows, ranks, plan=rows_plan)["b"], wanted["b"]
        )
        rows = {"b": rand(2, 5, seed=rank), "a": rand(2, 1, seed=9 + rank)}
        rows_plan = fddp.plan_buckets(rows, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
        assert len(rows_plan.buckets) == 2
        alike = [fddp.all_to_all(rows, ranks), fddp.all_to_all(rows, ranks, plan=rows_plan)]
        assert same_bits(alike)


def test_a_bucket_of_a_graph_is_sent_without_waiting_for_other_ranks() -> None:
    sent = threading.Barrier(2)

    def send(group: Any) -> float:
        with fddp.Communicator(group) as ranks:
            units = (LeafSpec("a", (2,), "float32"), LeafSpec("b", (2,), "float32"))
            devices = (torch.device("cpu"),) * 2
            program = OperatorProgram("psum", ranks.place(()), -1, units, devices, ((1,), (0,)))
            call = Call(ranks, program, None)
            if group.rank == 1:
                sent.wait(timeout=20)  # until rank 0 has begun
            for bucket in range(2):
                start_bucket(call, bucket, [torch.ones(2)])
            if group.rank == 0:
                sent.wait(timeout=20)
            return float(sum(finish_buckets(call)).sum())

    assert fddp.loopback(2, send) == [8.0, 8.0]


def test_a_bucket_is_closed_when_it_reaches_the_cap() -> None:
    units = [LeafSpec(str(k), (2,), "float32") for k in range(5)]
    for cap_bytes, wanted in ((15, ((4,), (2, 3), (0, 1))), (16, ((4,), (2, 3), (0, 1)))):
        assert bucketed(units, [torch.device("cpu")] * 5, cap_bytes) == wanted


@on_threads(2)
def test_results_are_values(group: Any) -> None:
    """Memory of buckets is reused, but never under a result that is still referenced."""
    with fddp.Communicator(group) as ranks:
        held: list[Tensor] = []
        operators = {
            "psum": fddp.psum,
            "pmax": fddp.pmax,
            "gather": fddp.all_gather,
            "scatter": fddp.reduce_scatter,
            "rows": fddp.all_to_all,
            "from": lambda tree, group: fddp.broadcast_from(tree, 1, group),
        }
        for step in range(4):
            own = {"a": torch.full((2, 3), 1.0 + step), "b": torch.full((2,), 10 * step)}
            for name, operator in operators.items():
                results = operator(own, ranks)
                for leaf in results.values():
                    others = {x.untyped_storage().data_ptr() for x in (*held, *own.values())}
                    assert leaf.untyped_storage().data_ptr() not in others
                    held.append(leaf)
                version, copy = results["b"]._version, results["b"].clone()
                results["a"].add_(1)  # writable, one by one
                assert results["b"]._version == version
                assert torch.equal(results["b"], copy), name
        before = [leaf.clone() for leaf in held]
        del results
        for _ in range(3):
            for operator in operators.values():
                operator(own, ranks)
        assert same_bits([before, held])
        # Unreferenced memory is reused.
        pointers = {fddp.psum(own, ranks)["a"].data_ptr() for _ in range(6)}
        assert len(pointers) <= 2


@pytest.mark.parametrize("name", OPERATORS)
def test_one_rank_alone_communicates_nothing(name: str) -> None:
    root = (0,) if name == "broadcast_from" else ()
    x = torch.arange(3.0)[None]

    def act(ranks: Any, axis: str | None = None) -> Any:
        return lambda x: getattr(fddp, name)(x, *root, ranks, axis=axis)

    def operations(ranks: Any) -> int:
        return sum(len(log.ops) for log in fddp.flight(ranks).logs)

    def alone_along_an_axis(group: Any) -> None:
        with fddp.Communicator(group, mesh=fddp.Topology(row=2, column=1)) as ranks:
            assert act(ranks, "column")(x).flatten().tolist() == [0.0, 1.0, 2.0]
            assert operations(ranks) == 0

    def alone(group: Any) -> None:
        with fddp.Communicator(group) as ranks:
            run = act(ranks)
            result = run(x)
            assert result.flatten().tolist() == [0.0, 1.0, 2.0]
            assert (result.data_ptr() == x.data_ptr()) is (name == "sync_on_backward")
            weighted = grad(lambda x: (run(x) * result).sum())
            assert torch.equal(weighted(x), x)
            assert torch.equal(grad(lambda x: (weighted(x) * x).sum())(x), x)
            assert torch.equal(vmap(run)(torch.stack([x, x])), torch.stack([result, result]))
            assert operations(ranks) == 0

    fddp.loopback(2, alone_along_an_axis)
    fddp.loopback(1, alone)


@examples(8)
@given(st.data())
def test_trees_of_any_kind(data: Any) -> None:
    """Sums over ranks, leaf by leaf, whatever the tree and the buckets."""
    params = data.draw(param_trees(max_leaves=6))
    trees = data.draw(gradients(params, ranks=2))
    cap_mb = data.draw(st.sampled_from([1e-6, 1e-5, 25.0]))
    dense = [fddp.tree_map(lambda x: x.to_dense() if x.is_sparse else x, one) for one in trees]
    present = [[leaf is not None for leaf in fddp.tree.pytree.flatten(one)[0]] for one in dense]
    if present[0] != present[1]:
        return

    def run(group: Any) -> Any:
        with fddp.Communicator(group, bucket_cap_mb=cap_mb) as ranks:
            return fddp.all_gather(dense[group.rank], ranks)

    for found in fddp.loopback(2, run):
        wanted = fddp.tree_map(lambda *x: torch.stack([y.resolve_conj() for y in x]), *dense)
        assert same_bits([found, wanted])
