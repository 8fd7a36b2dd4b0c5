"""Results over a bucket's memory: values of their own, although nothing was copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fddp.native import extension
from fddp.native.buffer_pool import BufferPool, new_memory
from fddp.native.layout import Layout
from fddp.native.pack import slices

LAYOUT = Layout((0, 10, 10, 22), ((10,), (0, 4), (3, 4), ()), ((1,), (4, 1), (1, 3), ()), 23)


@pytest.fixture
def buffer() -> Tensor:
    return torch.arange(23.0)


def test_slices_share_the_buffers_memory(buffer: Tensor) -> None:
    first, empty, matrix, scalar = slices(buffer, LAYOUT)
    assert first.data_ptr() == buffer.data_ptr()
    assert torch.equal(first, torch.arange(10.0))
    assert empty.shape == (0, 4)
    assert matrix.stride() == (1, 3)
    assert torch.equal(matrix, torch.arange(10.0, 22.0).view(4, 3).T)
    assert scalar.item() == 22.0
    matrix.add_(1.0)
    assert torch.equal(buffer[10:22], torch.arange(11.0, 23.0))
    # Storages of their own size, so that saving one saves that one alone.
    assert [leaf.untyped_storage().nbytes() for leaf in slices(buffer, LAYOUT)] == [40, 0, 48, 4]
    assert all(leaf.storage_offset() == 0 for leaf in slices(buffer, LAYOUT))


def test_writing_one_does_not_bump_the_others(buffer: Tensor) -> None:
    first, _, matrix, _ = slices(buffer, LAYOUT)
    before = buffer._version
    first.zero_()
    assert (first._version, matrix._version, buffer._version) == (1, 0, before)


def test_owners_are_counted(buffer: Tensor) -> None:
    assert extension.compiled.storage_use_count(buffer) == 1
    results = slices(buffer, LAYOUT)
    assert extension.compiled.storage_use_count(buffer) == 5
    assert [extension.compiled.storage_use_count(leaf) for leaf in results] == [1, 1, 1, 1]
    del results
    assert extension.compiled.storage_use_count(buffer) == 1
    for hold in (Tensor.untyped_storage, lambda whole: whole[1:]):
        held = hold(buffer)
        assert extension.compiled.storage_use_count(buffer) == 2
        del held
    assert extension.compiled.storage_use_count(buffer) == 1


def gradient(leaf: Tensor) -> Tensor:
    param = torch.zeros_like(leaf, requires_grad=True)
    param.grad = leaf
    return param


HOLDS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda leaf: leaf[0],
    "detached": lambda leaf: leaf.detach(),
    "array": lambda leaf: leaf.numpy(),
    "storage": lambda leaf: leaf.untyped_storage(),
    "graph": lambda leaf: (torch.ones(3, 4, requires_grad=True) * leaf).sum(),
    "closure": lambda leaf: lambda: leaf,
    "capsule": torch.utils.dlpack.to_dlpack,
    "gradient": gradient,
}


@pytest.mark.parametrize("name", HOLDS)
def test_memory_in_use_has_owners(buffer: Tensor, name: str) -> None:
    held = HOLDS[name](slices(buffer, LAYOUT)[2])
    assert extension.compiled.storage_use_count(buffer) == 2
    del held
    assert extension.compiled.storage_use_count(buffer) == 1


def test_slices_of_inference_mode_are_plain_tensors() -> None:
    with torch.inference_mode():
        assert not any(leaf.is_inference() for leaf in slices(torch.zeros(23), LAYOUT))


def test_a_buffer_may_begin_inside_its_storage() -> None:
    layout = Layout((1,), ((2,),), ((1,),), 3)
    (leaf,) = slices(torch.arange(10.0)[4:8], layout)
    assert torch.equal(leaf, torch.tensor([5.0, 6.0]))


def test_copies_are_independent(buffer: Tensor) -> None:
    matrix = slices(buffer, LAYOUT)[2]
    for twin in (copy.deepcopy(matrix), pickle.loads(pickle.dumps(matrix)), matrix.clone()):
        assert torch.equal(twin, matrix)
        assert twin.untyped_storage().nbytes() == 48
        twin.zero_()
    assert torch.equal(buffer, torch.arange(23.0))


def test_sharing_one_moves_it_to_shared_memory_and_releases_the_buffer(buffer: Tensor) -> None:
    matrix = slices(buffer, LAYOUT)[2]
    expected = matrix.clone()
    matrix.share_memory_()
    assert matrix.is_shared()
    assert torch.equal(matrix, expected)
    assert extension.compiled.storage_use_count(buffer) == 1


def test_slices_cannot_grow_into_their_neighbours(buffer: Tensor) -> None:
    first = slices(buffer, LAYOUT)[0]
    with pytest.raises(RuntimeError, match="not resizable"):
        first.resize_(11)


def test_slices_take_part_in_autograd(buffer: Tensor) -> None:
    first = slices(buffer, LAYOUT)[0].requires_grad_()
    (first * 2).sum().backward()
    assert torch.equal(first.grad, torch.full((10,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.int64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    buffer = torch.zeros(23, dtype=dtype)
    if dtype is torch.int64:
        with pytest.raises(TypeError, match="the buffer has dtype Long"):
            slices(buffer, LAYOUT)
    else:
        assert all(leaf.dtype == dtype for leaf in slices(buffer, LAYOUT))


def test_slices_on_any_device() -> None:
    leaves = slices(torch.empty(23, device="meta"), LAYOUT)
    assert [(leaf.device.type, tuple(leaf.shape)) for leaf in leaves] == [
        ("meta", shape) for shape in LAYOUT.shapes
    ]


def test_channels_last_is_recognised() -> None:
    layout = Layout((0,), ((2, 3, 4, 5),), ((60, 1, 15, 3),), 120)
    (leaf,) = slices(torch.zeros(120), layout)
    assert leaf.is_contiguous(memory_format=torch.channels_last)


def test_layouts_are_values() -> None:
    twin = pickle.loads(pickle.dumps(LAYOUT))
    assert twin == LAYOUT
    assert hash(twin) == hash(LAYOUT)
    assert torch.equal(slices(torch.ones(23), copy.deepcopy(twin))[0], torch.ones(10))


def test_views_are_known_however_many_buffers_were_freed() -> None:
    pool = BufferPool(new_memory)
    layout = Layout(offsets=(0,), shapes=((2,),), strides=((1,),), numel=2)
    held = []
    for number in range(200):
        buffer = new_memory(2, torch.float32, torch.device("cpu"))
        if number % 20 == 0:
            held += slices(buffer, layout)
        pool.release(number, buffer)
        del buffer
        pool.clear()
    assert len(held) == 10
    assert all(map(pool.is_view, held))
    assert not pool.is_view(torch.ones(2))


@given(
    st.lists(
        st.lists(st.sampled_from(["hold", "view", "drop"]), max_size=3), min_size=2, max_size=8
    )
)
def test_results_that_are_held_never_change(steps: list[list[str]]) -> None:
    pool = BufferPool(new_memory)
    held: list[tuple[Tensor, Tensor]] = []
    for number, acts in enumerate(steps):
        buffer = pool.acquire(0, 23, torch.float32, torch.device("cpu"))
        buffer.copy_(torch.arange(23.0) + 100 * number)
        leaf = slices(buffer, LAYOUT)[2]
        pool.release(0, buffer)
        del buffer
        for act in acts:
            if act == "drop":
                del held[:1]
            else:
                kept = leaf[1:] if act == "view" else leaf
                held.append((kept, kept.clone()))
        del leaf
        assert all(torch.equal(kept, value) for kept, value in held)
