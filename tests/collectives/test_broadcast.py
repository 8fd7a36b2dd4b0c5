"""`fddp.broadcast`: one rank's tree on every rank, or an error on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fddp
from tests.support.dtypes import DTYPE_NAMES
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.models import rand, same_bits
from tests.support.on_ranks import on_processes, on_threads
from tests.support.ranks import Launch

DTYPE_NAMES += ["uint8", "int8", "int16", "int32", "int64", "bool"]


def tree(rank: int) -> Any:
    leaves = {name: (10 * rand(3, 4, seed=rank)).to(getattr(torch, name)) for name in DTYPE_NAMES}
    return {
        **leaves,
        "scalar": torch.tensor(float(rank)),
        "empty": torch.zeros(0, 3),
        "none": None,
        "nested": [OrderedDict(z=rand(2, seed=rank), a=(rand(1, seed=rank),))],
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_dtype_from_every_source(world_size: int) -> None:
    for src in range(world_size):
        results = fddp.loopback(world_size, from_source, src)
        assert same_bits([tree(src), *(result for result, _ in results)])
        assert all(survived for _, survived in results)
        for result, _ in results:
            for name in DTYPE_NAMES:
                assert result[name].dtype == getattr(torch, name)
            assert isinstance(result["nested"][0], OrderedDict)
            assert list(result["nested"][0]) == ["z", "a"]


def from_source(group: Any, src: int) -> tuple[Any, bool]:
    own = tree(rank_of(group))
    result = fddp.broadcast(own, src, group=group)
    return result, same_bits([own, tree(rank_of(group))])


@on_processes(3)
def test_src_is_a_rank_of_the_group_not_of_the_job(rank: int, world_size: int) -> None:
    """The default is rank 0 of the default group."""
    own = torch.tensor(float(rank))
    assert fddp.broadcast({"w": own})["w"].item() == 0.0
    if rank:
        group = dist.new_group([1, 2], use_local_synchronization=True)
        assert fddp.broadcast(own, 1, group=group).item() == 2.0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.T,
    "expanded": lambda t: t[:1].expand(3, 4),
    "stride 2": lambda t: torch.stack([t, t], -1)[..., 0],
    "conjugate": lambda t: t.to(torch.complex128).conj(),
    "negative": lambda t: torch.complex(t, t).conj().imag,
    "requires grad": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: nn.Parameter(t),
    "channels_last": lambda t: t.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout: str) -> None:
    make = LAYOUTS[layout]

    def run(group: Any) -> Tensor:
        own = rand(3, 4, seed=group.rank)
        result = fddp.broadcast({"w": make(own), "v": own.clone()}, 1, group=group)
        assert torch.equal(result["v"], rand(3, 4, seed=1))
        return result["w"]

    for result in fddp.loopback(2, run):
        assert torch.equal(result, make(rand(3, 4, seed=1)).detach())
        assert not result.requires_grad
        assert not result.is_conj()
        assert not result.is_neg()
        result.mul_(2)  # writable: no two elements share memory


@on_threads(2)
def test_layouts_may_differ_from_rank_to_rank(group: Any) -> None:
    own = rand(4, 4, seed=group.rank)
    result = fddp.broadcast({"w": own.T if group.rank else own}, group=group)
    assert torch.equal(result["w"], rand(4, 4, seed=0))


@on_threads(2)
def test_leaves_do_not_share_memory_with_anything(group: Any) -> None:
    own = {"a": torch.ones(3), "b": torch.ones(2)}
    result = fddp.broadcast(own, group=group)
    result["a"].zero_()
    assert own["a"].tolist() == [1.0] * 3
    assert result["b"].tolist() == [1.0] * 2
    for key, leaf in result.items():
        assert leaf.untyped_storage().nbytes() == own[key].nbytes


@on_threads(2)
def test_insertion_order_may_differ(group: Any) -> None:
    items = [("a", torch.full((2,), 1.0)), ("b", torch.full((2,), 2.0))]
    result = fddp.broadcast(OrderedDict(items[:: -1 if group.rank else 1]), group=group)
    assert {key: leaf.tolist() for key, leaf in result.items()} == {"a": [1, 1], "b": [2, 2]}


@on_threads(2)
def test_a_module_is_all_its_parameters_by_name(group: Any) -> None:
    module = nn.Linear(1, 1)
    for param in module.parameters():
        nn.init.constant_(param, group.rank)
    module.bias.requires_grad_(False)
    assert fddp.broadcast(module, 1, group=group) == {"weight": 1.0, "bias": 1.0}


@on_threads(2)
def test_trees_without_tensors(group: Any) -> None:
    for empty in ({}, None, {"a": None}):
        assert fddp.broadcast(empty, group=group) == empty


BASE = {"w": torch.zeros(3), "v": torch.zeros(2, dtype=torch.int64)}
ERRORS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "shape": ({**BASE, "w": torch.zeros(4)}, 0, ("'w'", "(3,)", "(4,)", "rank 0", "rank 1")),
    "dtype": ({**BASE, "w": torch.zeros(3).half()}, 0, ("'w'", "float32", "float16", "rank 1")),
    "a leaf less": ({"w": BASE["w"]}, 0, ("'v'", "'w'", "rank 0", "rank 1")),
    "None": ({**BASE, "w": None}, 0, ("'w'", "None", "rank 1")),
    "another src": (BASE, 1, ("src", "0", "1", "rank 1")),
    "a number": ({**BASE, "w": 3.0}, 0, ("'w'", "rank 1", "float")),
    "a sparse tensor": ({**BASE, "w": torch.eye(3).to_sparse()}, 0, ("'w'", "rank 1", "dense")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_differences_are_raised_on_every_rank(name: str) -> None:
    check_errors(fddp.loopback(2, differ, name, timeout_s=5.0), name)


@pytest.mark.parametrize("launch", ["c10d"], indirect=True)
def test_values_and_errors_on_processes(launch: Launch) -> None:
    one, two = launch(2, differ_in_all)
    assert same_bits([tree(1), one[0], two[0]])
    for name in ERRORS:
        check_errors([one[1][name], two[1][name]], name)


def differ_in_all(group: Any) -> Any:
    return from_source(group, 1)[0], {name: differ(group, name) for name in ERRORS}


def differ(group: Any, name: str) -> tuple[Ending, float]:
    other, src, _ = ERRORS[name]
    mine = rank_of(group) == 1
    seen = ending(lambda: fddp.broadcast(other if mine else BASE, src if mine else 0, group=group))
    after = fddp.broadcast(torch.tensor(float(rank_of(group))), 1, group=group)
    return seen, after.item()


def check_errors(runs: list[tuple[Ending, float]], name: str) -> None:
    assert len({seen.text for seen, _ in runs}) == 1
    for seen, after in runs:
        assert seen.kinds[0] == "PlanMismatchError"
        for text in ERRORS[name][2]:
            assert text in seen.text
        assert ";" in seen.text, "what differs; the way out"
        assert after == 1.0


@pytest.mark.parametrize("src", [-1, 2, 17])
@on_threads(2)
def test_a_source_that_is_no_rank(group: Any, src: int) -> None:
    with pytest.raises(fddp.PlanMismatchError, match=rf"src={src}.*2"):
        fddp.broadcast(BASE, src, group=group)


def test_a_tree_that_one_rank_cannot_flatten() -> None:
    def run(group: Any) -> Ending:
        bad = {object(): torch.zeros(1)} if group.rank else {"a": torch.zeros(1)}
        return ending(lambda: fddp.broadcast(bad, group=group))

    first, second = fddp.loopback(2, run, timeout_s=5.0)
    assert first.kinds[0] == "PlanMismatchError", "it raises, and does not wait"
    assert "no error" not in second.kinds


@pytest.mark.parametrize("src", [1.0, "1", None, torch.tensor([0, 1])])
@on_threads(2)
def test_a_source_that_is_no_number_on_one_rank(group: Any, src: Any) -> None:
    with pytest.raises(fddp.PlanMismatchError, match="rank 1 can't take part: TypeError"):
        fddp.broadcast({"w": torch.zeros(2)}, src if group.rank else 1, group=group)
