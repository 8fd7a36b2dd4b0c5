"""Slices that are returned again: they cannot be distinguished from new ones."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fddp.native.buffer_pool import BufferPool, invalidate, new_memory
from fddp.native.layout import Layout
from fddp.native.pack import is_unused, kept_slices, slices, storage_use_count

LAYOUT = Layout((0, 6, 6, 18), ((6,), (0, 4), (3, 4), ()), ((1,), (4, 1), (1, 3), ()), 19)
CPU = torch.device("cpu")


@pytest.fixture
def buffer() -> Tensor:
    return torch.arange(19.0)


def state(tensor: Tensor) -> tuple[Any, ...]:
    """What a caller can see of a result."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.data_ptr() if tensor.numel() else 0,
        tensor._version,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        dict(tensor.__dict__),
        tensor._backward_hooks,
        weakref.getweakrefcount(tensor),
    )


def test_unused_slices_are_returned_again(buffer: Tensor) -> None:
    numbers = [id(leaf) for leaf in kept_slices(buffer, LAYOUT)]
    assert [id(leaf) for leaf in kept_slices(buffer, LAYOUT)] == numbers
    assert [*map(state, kept_slices(buffer, LAYOUT))] == [*map(state, slices(buffer, LAYOUT))]


def test_slices_in_use_are_left_alone(buffer: Tensor) -> None:
    first = kept_slices(buffer, LAYOUT)
    second = kept_slices(buffer, LAYOUT)
    assert not {*map(id, first)} & {*map(id, second)}
    assert not is_unused(buffer)
    del first
    assert not is_unused(buffer)
    del second
    assert is_unused(buffer)


def test_the_version_counter_starts_again(buffer: Tensor) -> None:
    leaf = kept_slices(buffer, LAYOUT)[0]
    leaf.add_(1.0)
    number = id(leaf)
    del leaf
    again = kept_slices(buffer, LAYOUT)[0]
    assert (id(again), again._version) == (number, 0)


def test_slices_do_not_outlive_their_buffer() -> None:
    buffer = torch.arange(19.0)
    gc.disable()
    try:
        kept_slices(buffer, LAYOUT)
        owner = weakref.ref(buffer)
        leaf = weakref.ref(kept_slices(buffer, LAYOUT)[0])
        del buffer
        assert owner() is None
        assert leaf() is None
    finally:
        gc.enable()


def test_slices_in_use_outlive_their_buffer() -> None:
    buffer = torch.arange(19.0)
    leaf = kept_slices(buffer, LAYOUT)[2]
    expected = leaf.clone()
    del buffer
    crowd = [torch.full((19,), -1.0) for _ in range(50)]
    assert torch.equal(leaf, expected), crowd


def test_another_layout_gets_its_own(buffer: Tensor) -> None:
    other = Layout((0, 6, 6, 18), ((3, 2), (0,), (12,), (1,)), ((2, 1), (1,), (1,), (1,)), 19)
    fewer = Layout((1,), ((4,),), ((1,),), 19)
    for layout in (LAYOUT, other, fewer, LAYOUT):
        found = kept_slices(buffer, layout)
        assert [leaf.shape for leaf in found] == [*layout.shapes]
        assert [*map(state, found)] == [*map(state, slices(buffer, layout))]
        del found
        assert is_unused(buffer)


# Operations on one result, which is dropped afterwards. The next one is as new.

SINKS: list[Any] = []


def set_attribute(leaf: Tensor) -> None:
    leaf.note = "mine"


def transpose_(leaf: Tensor) -> None:
    leaf.t_()


def refer_weakly(leaf: Tensor) -> None:
    SINKS.append(weakref.ref(leaf))


def change_class(leaf: Tensor) -> None:
    class Own(Tensor):
        pass

    leaf.__class__ = Own


def exchange_memory(leaf: Tensor) -> None:
    leaf.data = torch.zeros(2)


def swap(leaf: Tensor) -> None:
    torch.utils.swap_tensors(leaf, torch.zeros(leaf.shape))


def keep_storage_object(leaf: Tensor) -> None:
    leaf.untyped_storage()


def require_grad(leaf: Tensor) -> None:
    leaf.requires_grad_().square().sum().backward()


def observe(leaf: Tensor) -> None:
    copy.deepcopy(leaf)
    leaf.numpy().sum()
    str(leaf)
    torch.linalg.vector_norm(leaf)


MARKS: dict[str, Callable[[Tensor], object]] = {
    "attribute": set_attribute,
    "transposed": transpose_,
    "weak reference": refer_weakly,
    "class": change_class,
    "data": exchange_memory,
    "set_": lambda leaf: leaf.set_(torch.zeros(3)),
    "swapped": swap,
    "storage object": keep_storage_object,
    "autograd": require_grad,
    "shared": lambda leaf: leaf.share_memory_(),
    "observed": observe,
    "written": lambda leaf: leaf.mul_(2.0),
    "donated": lambda leaf: invalidate([leaf], "donated"),
}


@pytest.mark.parametrize("name", MARKS)
def test_marked_slices_are_as_new(buffer: Tensor, name: str) -> None:
    leaf = kept_slices(buffer, LAYOUT)[2]
    MARKS[name](leaf)
    del leaf
    assert is_unused(buffer)
    expected = state(slices(buffer, LAYOUT)[2])
    found = kept_slices(buffer, LAYOUT)[2]
    assert state(found) == expected
    assert torch.equal(found, buffer[6:18].view(4, 3).T)


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
def test_memory_in_use_is_not_unused(buffer: Tensor, name: str) -> None:
    held = HOLDS[name](kept_slices(buffer, LAYOUT)[2])
    assert not is_unused(buffer)
    del held
    assert is_unused(buffer)


def test_a_dictionary_in_use_is_not_returned_again(buffer: Tensor) -> None:
    leaf = kept_slices(buffer, LAYOUT)[0]
    attributes = leaf.__dict__
    del leaf
    again = kept_slices(buffer, LAYOUT)[0]
    attributes["note"] = "mine"
    assert not hasattr(again, "note")


def test_inference_mode_makes_plain_tensors() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(19)
        number = id(kept_slices(buffer, LAYOUT)[0])
        again = kept_slices(buffer, LAYOUT)[0]
        assert not again.is_inference()
    assert id(again) == number


def test_arguments_that_do_not_fit_are_refused() -> None:
    assert kept_slices(torch.empty(19, device="meta"), LAYOUT)[2].device.type == "meta"
    with pytest.raises(ValueError, match="elements, the layout needs"):
        kept_slices(torch.zeros(3), LAYOUT)
    with pytest.raises(TypeError):
        kept_slices(None, LAYOUT)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        is_unused(3)  # type: ignore[arg-type]


class TestFinalizers:
    """Finalizers of results run when their memory is taken, and may use it."""

    def test_they_run_when_the_memory_is_taken(self) -> None:
        pool, ended = BufferPool(new_memory), []
        leaf = kept_slices(taken(pool), LAYOUT)[0]
        address = leaf.data_ptr()
        weakref.finalize(leaf, ended.append, "leaf")
        del leaf
        assert ended == []
        assert taken(pool).data_ptr() == address
        assert ended == ["leaf"]

    def test_a_finalizer_may_take_the_memory_itself(self) -> None:
        pool, junk = BufferPool(new_memory), []
        first, second = (kept_slices(taken(pool), LAYOUT) for _ in range(2))
        assert not is_alias(first, second)
        weakref.finalize(first[0], lambda: junk.append(kept_slices(taken(pool), LAYOUT)))
        del first
        third = kept_slices(taken(pool), LAYOUT)
        assert len(junk) == 1
        assert not is_alias(third, junk[0])
        assert not is_alias(third, second)
        assert not is_alias(second, junk[0])

    def test_a_finalizer_may_use_the_pool_while_a_buffer_is_released(self) -> None:
        pool, junk = BufferPool(new_memory), []
        held = [kept_slices(taken(pool), LAYOUT) for _ in range(2)]
        weakref.finalize(held[0][1], lambda: junk.append(kept_slices(taken(pool), LAYOUT)))
        del held[0][1]
        held.append(kept_slices(taken(pool), LAYOUT))
        held.append(kept_slices(taken(pool), LAYOUT))
        assert len(junk) == 1
        for one, other in itertools.combinations([*held, *junk], 2):
            assert not is_alias(one, other)

    def test_a_slice_that_is_revived_keeps_its_memory(self) -> None:
        pool = BufferPool(new_memory)
        revived: list[Tensor] = []

        class Revived(Tensor):
            def __del__(self) -> None:
                revived.append(self)

        leaf = kept_slices(taken(pool), LAYOUT)[0]
        leaf.__class__ = Revived
        del leaf
        found = kept_slices(taken(pool), LAYOUT)
        assert len(revived) == 1
        assert not is_alias(found, revived)
        revived[0].__class__ = Tensor


def taken(pool: BufferPool) -> Tensor:
    """A buffer of the pool, released at once, as its slices are made before it is used again."""
    buffer = pool.acquire(0, LAYOUT.numel, torch.float32, CPU)
    held = kept_slices(buffer, LAYOUT)
    pool.release(0, buffer)
    del held
    return buffer


def last_address(pool: BufferPool) -> int | None:
    released = pool._released.get(0)
    return released[-1].data_ptr() if released else None


def is_alias(some: list[Tensor], others: list[Tensor]) -> bool:
    """True if a tensor shares memory with one of the others."""
    places = {leaf.data_ptr() for leaf in some if leaf.numel()}
    return not places.isdisjoint(leaf.data_ptr() for leaf in others if leaf.numel())


ACTS = st.sampled_from(["hold", "hold a view", *MARKS])


@given(st.lists(st.lists(st.tuples(ACTS, st.booleans()), max_size=3), min_size=2, max_size=8))
def test_what_is_held_never_changes(steps: list[list[tuple[str, bool]]]) -> None:
    """A loop that keeps, marks and drops its results, beside the rules of a pool."""
    pool = BufferPool(new_memory)
    held: list[tuple[Tensor, Tensor]] = []
    for number, acts in enumerate(steps):
        buffer = pool.acquire(0, 19, torch.float32, CPU)
        buffer.copy_(torch.arange(19.0) + 100 * number)
        expected = [*map(state, slices(buffer, LAYOUT))]
        results = kept_slices(buffer, LAYOUT)
        assert [*map(state, results)] == expected
        pool.release(0, buffer)
        del buffer
        leaf = results[2]
        for act, releases in acts:
            if act == "hold":
                held.append((leaf, leaf.clone()))
            elif act == "hold a view":
                held.append((leaf[1:], leaf[1:].clone()))
            elif not any(kept is leaf or kept._base is leaf for kept, _ in held):
                MARKS[act](leaf)
                break  # it may be no tensor of this form any more
            if releases and held:
                del held[0]
        del leaf, results
        for kept, value in held:
            assert torch.equal(kept, value)
    SINKS.clear()


def test_the_count_of_owners_includes_kept_slices(buffer: Tensor) -> None:
    del kept_slices(buffer, LAYOUT)[:]
    assert storage_use_count(buffer) == 5
    assert is_unused(buffer)
