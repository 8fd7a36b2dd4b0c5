"""Random sizes, on the ranks of one process: each call is started on all of them, then awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from tests.support.backends import NUMBERS, check_equal, values
from tests.support.crews import crew_of

_RANKS = 3
_SIZES = st.sampled_from([0, 1, 2, 63, 64, 65, 1000, 5461, 5462, 70_000, 200_001])
_MATRICES = st.lists(_SIZES, min_size=_RANKS**2, max_size=_RANKS**2)


@pytest.fixture(scope="module")
def backends() -> Iterator[list[Any]]:
    made = crew_of(_RANKS).groups
    yield made
    for backend in made:
        backend.shutdown()


def _on_all(call: Callable[[int], Any]) -> None:
    for work in [call(rank) for rank in range(_RANKS)]:
        assert work.wait()


@given(_MATRICES, st.sampled_from(NUMBERS))
@settings(max_examples=40)
def test_all_to_all(backends: list[Any], matrix: list[int], dtype: torch.dtype) -> None:
    rows = [matrix[_RANKS * rank : _RANKS * (rank + 1)] for rank in range(_RANKS)]
    columns = [matrix[rank::_RANKS] for rank in range(_RANKS)]
    sent = [values(rank, sum(row), dtype) for rank, row in enumerate(rows)]
    received = [torch.empty(sum(column), dtype=dtype) for column in columns]
    _on_all(
        lambda rank: backends[rank].alltoall_base(
            received[rank], sent[rank], columns[rank], rows[rank]
        )
    )
    parts = [tensor.split(row) for tensor, row in zip(sent, rows, strict=True)]
    expected = [torch.cat([part[rank] for part in parts]) for rank in range(_RANKS)]
    check_equal(received, expected)


@given(st.lists(_SIZES, min_size=_RANKS, max_size=_RANKS), st.sampled_from(NUMBERS))
@settings(max_examples=40)
def test_all_gather(backends: list[Any], sizes: list[int], dtype: torch.dtype) -> None:
    own = [values(rank, size, dtype) for rank, size in enumerate(sizes)]
    outputs = [[torch.empty_like(tensor) for tensor in own] for _ in range(_RANKS)]
    _on_all(lambda rank: backends[rank].allgather([outputs[rank]], [own[rank]]))
    for gathered in outputs:
        check_equal(gathered, own)


@given(_SIZES, st.sampled_from(NUMBERS), st.integers(0, _RANKS - 1))
@settings(max_examples=40)
def test_reductions(backends: list[Any], size: int, dtype: torch.dtype, root: int) -> None:
    own = [values(rank, size * _RANKS, dtype) for rank in range(_RANKS)]
    total = torch.stack([tensor.double() for tensor in own]).sum(0).to(dtype)
    outputs = [torch.empty(size, dtype=dtype) for _ in range(_RANKS)]
    _on_all(lambda rank: backends[rank]._reduce_scatter_base(outputs[rank], own[rank]))
    check_equal([torch.cat(outputs)], [total])
    options = c10d.ReduceOptions()
    options.rootRank = root
    kept = [tensor.clone() for tensor in own]
    _on_all(lambda rank: backends[rank].reduce([kept[rank]], options))
    check_equal([kept[root]], [total])
    _on_all(lambda rank: backends[rank].allreduce([own[rank]]))
    check_equal(own, [total] * _RANKS)


@given(st.lists(st.tuples(_SIZES, st.integers(0, 2)), max_size=8), st.randoms())
@settings(max_examples=40)
def test_messages(backends: list[Any], messages: list[tuple[int, int]], random: Any) -> None:
    """From rank 0 to rank 1; received in another order of tags than sent."""
    sent = [values(number, size, torch.float32) for number, (size, _) in enumerate(messages)]
    works = [
        backends[0].send([tensor], 1, tag) for tensor, (_, tag) in zip(sent, messages, strict=True)
    ]
    order = sorted(range(len(messages)), key=lambda number: messages[number][1])
    received = {number: torch.empty_like(sent[number]) for number in order}
    works += [backends[1].recv([received[number]], 0, messages[number][1]) for number in order]
    random.shuffle(works)
    for work in works:
        work.wait()
    check_equal([received[number] for number in sorted(received)], sent)
