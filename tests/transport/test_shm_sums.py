"""Sums and gathers of the shared-memory core, to the bit of torch."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.core.schedule.sum_tree import SumTree
from tests.support.crews import COPIED, IN_PLACE, Crew, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


AVERAGED = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


def awkward(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Numbers of all magnitudes, with special ones among them where the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (numel,), generator=generator, dtype=dtype)
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    real = real if dtype.is_complex else dtype
    count = numel * (2 if dtype.is_complex else 1)
    info = torch.finfo(real)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    exponents = torch.randint(
        int(math.log2(info.tiny)) - 8, int(math.log2(info.max)), (count,), generator=generator
    )
    wide = torch.where(torch.rand(count, generator=generator) < 0.5, exponents, 0)
    values = (values * torch.pow(2.0, wide.double())).to(real)
    specials = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, -info.max, info.tiny, info.tiny / 8],
        dtype=real,
    )
    places = torch.randint(0, count, (max(1, count // 16),), generator=generator)
    kinds = torch.randint(0, len(specials), places.shape, generator=generator)
    values[places] = specials[kinds]
    return values.view(dtype) if dtype.is_complex else values


def expected_sum(tensors: Sequence[Tensor], order: tuple[int, ...], average: bool) -> Tensor:
    """By torch: partial sums along the innermost axis first, rounded once."""
    dtype = tensors[0].dtype
    parts = [_as_real(tensor).to(DTYPES.get(_as_real(tensor).dtype)) for tensor in tensors]
    for size in reversed(order or (len(parts),)):
        rows = [parts[i : i + size] for i in range(0, len(parts), size)]
        parts = [reduce(torch.add, row) for row in rows]
    (total,) = parts
    total = total / len(tensors) if average else total
    return total.to(_as_real(tensors[0]).dtype).view(dtype)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, signs of zeros too; any NaN is as good as another."""
    actual, expected = _as_real(actual), _as_real(expected)
    assert actual.dtype == expected.dtype
    if actual.is_floating_point():
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan)
        actual, expected = actual[~nan], expected[~nan]
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "average"),
    [*((dtype, False) for dtype in DTYPES), *((dtype, True) for dtype in AVERAGED)],
    ids=str,
)
def test_sums_have_the_bits_of_torch(
    crews: Callable[[int], Crew], dtype: torch.dtype, average: bool
) -> None:
    for size in (2, 3, 4):
        crew = crews(size)
        for numel in (1, 17, COPIED + 5, IN_PLACE + 13):
            inputs = [awkward(dtype, numel, seed=numel + rank) for rank in range(size)]
            expected = expected_sum(inputs, (), average)
            for start in (0, 1):  # the first element lies on a line of the cache, or does not
                tensors = []
                for arena, values in zip(crew.arenas, inputs, strict=True):
                    tensors.append(arena.empty(numel + start, dtype)[start:])
                    tensors[-1].copy_(values)
                run(crew, "all_reduce", tensors, average=average)
                for tensor in tensors:
                    assert_same_bits(tensor, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_along_trees_have_the_bits_of_torch(
    crews: Callable[[int], Crew], dtype: torch.dtype
) -> None:
    for order in ((2,), (3,), (2, 2), (3, 2), (2, 3)):
        size = math.prod(order)
        crew, tree = crews(size), SumTree.along(order)
        for numel in (size, COPIED // size * size, IN_PLACE // size * size + size):
            inputs = [awkward(dtype, numel, seed=numel + rank) for rank in range(size)]
            expected = expected_sum(inputs, order, False).chunk(size)
            for start in (0, 1):
                tensors = []
                for arena, values in zip(crew.arenas, inputs, strict=True):
                    tensors.append(arena.empty(numel + start, dtype)[start:])
                    tensors[-1].copy_(values)
                run(crew, "reduce_scatter", tensors, tree=tree)
                for rank, tensor in enumerate(tensors):
                    assert_same_bits(tensor.chunk(size)[rank], expected[rank])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_value_is_kept(
    crews: Callable[[int], Crew], dtype: torch.dtype
) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for size in (2, 3):  # the loop for pairs, and that for more
        others = [torch.full_like(every, -0.0) for _ in range(size - 1)]
        tensors = [every.clone(), *others]
        run(crews(size), "all_reduce", tensors)
        for tensor in tensors:
            assert_same_bits(tensor, every)


@settings(max_examples=30)
@given(data=st.data())
def test_staged_and_shared_memory_mix(crews_of_three: Crew, data: st.DataObject) -> None:
    """Some ranks' tensors lie in their arenas and others' anywhere, at any alignment; the memory
    around them stays as it is."""
    crew, size = crews_of_three, 3
    numel = size * data.draw(st.integers(0, 400_000), label="numel of a chunk")
    kinds = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
    kind = data.draw(st.sampled_from(kinds))
    tensors, around = [], []
    for rank, arena in enumerate(crew.arenas):
        place = data.draw(st.sampled_from(["arena", "heap", "unaligned"]), label=f"rank {rank}")
        if place == "arena":
            around.append(arena.empty(numel + 2, torch.float32).fill_(-1.0))
            tensor = around[-1][1:-1]
        elif place == "heap" or numel == 0:
            tensor = torch.empty(numel)
        else:
            tensor = torch.frombuffer(bytearray(4 * numel + 1), dtype=torch.float32, offset=1)
        tensors.append(tensor.copy_(torch.arange(numel) % 1000 * (rank + 1)))
    inputs = [tensor.clone() for tensor in tensors]
    run(crew, kind, tensors, **({"src": 1} if kind == "broadcast" else {}))
    for rank, tensor in enumerate(tensors):
        mine = slice(rank * numel // size, (rank + 1) * numel // size)
        if kind == "all_reduce":
            assert torch.equal(tensor, sum(inputs))
        elif kind == "reduce_scatter":
            assert torch.equal(tensor[mine], sum(inputs)[mine])
        elif kind == "all_gather":
            chunks = [values.chunk(size)[r] for r, values in enumerate(inputs) if numel]
            assert torch.equal(tensor, torch.cat(chunks) if chunks else tensor)
        elif kind == "all_to_all":
            assert torch.equal(tensor, torch.cat([values[mine] for values in inputs]))
        else:
            assert torch.equal(tensor, inputs[1])
    assert all((memory[0], memory[-1]) == (-1.0, -1.0) for memory in around)


@pytest.fixture(scope="module")
def crews_of_three(crews: Callable[[int], Crew]) -> Crew:
    return crews(3)


@pytest.mark.parametrize("numel", [COPIED, IN_PLACE])
def test_bits_do_not_depend_on_the_thread_that_adds_up(
    crews: Callable[[int], Crew], numel: int
) -> None:
    """Threads differ in what they do with subnormal numbers; which one carries out is chance."""
    crew, tiny = crews(2), torch.full((numel,), 1e-39)
    # What is left to those who wait, and what the progress threads hurry with.
    for options in ({"wait_soon": numel == COPIED}, {"prompt": True}):
        tensors = [tiny.clone(), tiny.clone()]
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor can't flush subnormal numbers")
        try:
            run(crew, "all_reduce", tensors, **options)
        finally:
            torch.set_flush_denormal(False)
        assert all(torch.equal(tensor, tiny + tiny) for tensor in tensors)
