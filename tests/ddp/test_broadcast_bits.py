"""The broadcast of a wrapped module's parameters and buffers: ranks hold the same bits afterwards.

Also of classes whose `copy_` does not keep the bits; what can't be written is refused on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fddp
from tests.support.unsupported_tensors import Open, Quantised, Rounding, integers

Outcome = Any


def with_frozen(w: Tensor) -> Any:
    module: Any = nn.Linear(3, 2)
    module.frozen = nn.Parameter(w, requires_grad=False)
    return module


def with_buffer(w: Tensor) -> Any:
    module: Any = nn.Linear(3, 2)
    module.register_buffer("frozen", w)
    return module


def wrap(group: Any, module: Any) -> Any:
    return fddp.DistributedDataParallel(module, process_group=group)


def outcome(call: Callable[[], object]) -> Outcome:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("make", [with_frozen, with_buffer])
@pytest.mark.parametrize("differ", [False, True])
def test_the_tensors_inside_of_a_class_are_broadcast(
    make: Callable[[Tensor], Any], differ: bool
) -> None:
    def run(group: Any) -> Outcome:
        module = make(integers(Open, 3 + group.rank * differ))
        wrap(group, module)
        return module.frozen.values_.tolist(), module.frozen.scale.item()

    before = [3, -7, 5, 1], torch.tensor(0.3).item()
    assert fddp.loopback(2, run) == [before, before], "not rounded anew"


def test_a_buffer_is_rounded_in_no_forward_either() -> None:
    def run(group: Any) -> Outcome:
        module = with_buffer(integers(Open))
        ddp = wrap(group, module)
        version = module.frozen._version
        ddp(torch.ones(1, 3))
        unchanged = module.frozen._version == version
        module.frozen.values_[0] += 1 + group.rank
        ddp(torch.ones(1, 3))
        grew = module.frozen._version > version
        return module.frozen.values_.tolist(), unchanged, grew

    first, second = fddp.loopback(2, run)
    assert first == ([4, -7, 5, 1], True, False)
    assert second == ([4, -7, 5, 1], True, True), "a graph that holds the old value sees it"


@pytest.mark.parametrize("make", [with_frozen, with_buffer])
def test_a_class_that_rounds_in_copy(make: Callable[[Tensor], Any]) -> None:
    def run(group: Any) -> Outcome:
        module = make((torch.tensor([0.3, 0.7]) + group.rank).as_subclass(Rounding))
        wrap(group, module)
        return module.frozen.as_subclass(Tensor).tolist()

    first, second = fddp.loopback(2, run)
    assert first == second == torch.tensor([0.3, 0.7]).tolist()


def test_a_class_that_does_not_name_its_tensors() -> None:
    def run(group: Any) -> Outcome:
        return outcome(lambda: wrap(group, with_frozen(integers(Quantised))))

    wanted = "RuntimeError: 'frozen' of the module is a Quantised, which can't be written"
    assert all(text.startswith(wanted) for text in fddp.loopback(2, run))


def test_classes_and_their_settings_are_compared() -> None:
    def run(group: Any) -> Outcome:
        w = integers(Open) if group.rank else torch.ones(4)
        return outcome(lambda: wrap(group, with_frozen(w)))

    first, second = fddp.loopback(2, run)
    assert first == second
    assert "'frozen' of the module is torch.float32 (4,) on rank 0 and a Open None" in first


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("make", [with_frozen, with_buffer])
def test_expanded(make: Callable[[Tensor], Any], rank: int | None) -> None:
    def run(group: Any) -> Outcome:
        w = torch.ones(1).expand(4) if rank in (None, group.rank) else torch.ones(4)
        return outcome(lambda: wrap(group, make(w)))

    first, second = fddp.loopback(2, run)
    assert first == second
    assert "'frozen' of the module is" in first
    assert "expanded (strides (0,))" in first


def _made_in_inference(value: Tensor) -> Tensor:
    with torch.inference_mode():
        return value.expand(4).clone()


@pytest.mark.parametrize(
    "make",
    [lambda v: v.expand(4), _made_in_inference, lambda v: torch._efficientzerotensor(4)],
    ids=["expanded", "inference", "zero"],
)
def test_a_buffer_that_cannot_be_written_is_replaced_in_forward(
    make: Callable[[Tensor], Tensor],
) -> None:
    def run(group: Any) -> Outcome:
        module = with_buffer(torch.zeros(4))
        ddp = wrap(group, module)
        ddp(torch.ones(1, 3))  # compares buffers
        module.frozen = make(torch.tensor(1.0 + group.rank))
        ddp(torch.ones(1, 3))
        return (module.frozen + 0).tolist()

    first, second = fddp.loopback(2, run)
    assert first == second == (make(torch.tensor(1.0)) + 0).tolist()


# Modes and transforms


@pytest.mark.parametrize(
    "within",
    [
        lambda call: torch.func.vmap(lambda x: (call(), x)[1])(torch.ones(2)),
        lambda call: _in_mode(call, FakeTensorMode(allow_non_fake_inputs=True)),
        lambda call: _in_mode(call, torch.inference_mode()),
    ],
    ids=["vmap", "fake", "inference"],
)
def test_the_constructor_suspends_modes(within: Callable[[Any], object]) -> None:
    def run(group: Any) -> Outcome:
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            module[0].bias.fill_(1.0 + group.rank)  # type: ignore[union-attr]
        found: list[Any] = []
        within(lambda: found.append(wrap(group, module)))
        found[0](torch.ones(4, 3)).sum().backward()
        return module[0].bias.tolist(), module[0].bias.grad is not None  # type: ignore[union-attr, operator]

    assert fddp.loopback(2, run) == [([1.0, 1.0], True)] * 2


def _in_mode(call: Callable[[], object], mode: Any) -> None:
    with mode:
        call()


def test_a_fake_forward_pass_communicates_nothing() -> None:
    def run(group: Any) -> Outcome:
        ddp = wrap(group, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        shape: Any = ()
        if group.rank == 0:  # alone
            with FakeTensorMode(allow_non_fake_inputs=True):
                shape = tuple(ddp(torch.ones(4, 3)).shape)
        ddp(torch.ones(4, 3)).sum().backward()
        return shape

    assert fddp.loopback(2, run) == [(4, 2), ()]


# A rank that can't make its wrapper


def frozen() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (frozen, "any parameter that requires a gradient"),
        (lambda: nn.LazyLinear(2), "uninitialized"),
    ],
)
def test_the_reason_reaches_the_other_ranks(make: Callable[[], nn.Module], wanted: str) -> None:
    def run(group: Any) -> Outcome:
        module = make() if group.rank == 1 else nn.Linear(3, 2)
        return outcome(lambda: wrap(group, module))

    other, own = fddp.loopback(2, run)
    assert other.startswith("PlanMismatchError: rank 1 could not build its plan")
    assert wanted in other
    assert wanted in own
