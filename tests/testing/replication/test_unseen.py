"""Nothing passes unseen: what `check_replication` compares, and errors where it can't."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import dataclasses
import enum
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad

import fddp
from fddp.testing import check_replication
from tests.testing.replication.loops import make_module


def square(w, x):
    return (x @ w).square().mean()


W, X = torch.ones(3), torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
LOCAL, MEAN = (lambda grads: grads), fddp.pmean
AVERAGE = pytest.mark.parametrize("average", [LOCAL, MEAN], ids=["local", "mean"])


def judge(step: Callable[..., Any], replicated: tuple[Any, ...], average: Any, path: str) -> None:
    """Check that a step with a mean passes, and that one without has an error for this path."""
    if average is MEAN:
        check_replication(step, replicated=replicated, varying=(X,))
        return
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=replicated, varying=(X,))
    assert raised.value.path == path, raised.value


class Mode(enum.Enum):
    TRAIN = 1


@dataclasses.dataclass(frozen=True)
class State:
    w: torch.Tensor
    name: str = "run"
    mode: Mode = Mode.TRAIN
    best: Any = None
    seen: frozenset[str] = frozenset(("a", "b"))
    decay: Any = min  # functions are constants


class Slots:
    __slots__ = ("__w", "me")

    def __init__(self, w):
        self.__w = w
        self.me = self

    def descend(self, grads):
        self.__w = self.__w - 0.1 * grads

    def grads(self, x):
        return grad(square)(self.__w, x)


class Ema:
    """Averages of parameters, with a cycle, a lock in copies left out, and an inner object."""

    def __init__(self, w):
        self.averages = {"w": w}
        self.inner = State(w)
        self.parent = weakref.ref(self)
        self.self = self


@AVERAGE
def test_dataclasses(average: Any) -> None:
    def step(state, x):
        grads = average(grad(square)(state.w, x))
        return dataclasses.replace(state, w=state.w - 0.1 * grads)

    judge(step, (State(W),), average, "result.w")
    judge(lambda states, x: [step(states[0], x)], ([State(W)],), average, "result['0'].w")


@AVERAGE
def test_slots_that_are_changed_in_place(average: Any) -> None:
    def step(state, x):
        state.descend(average(state.grads(x)))

    judge(step, (Slots(W),), average, "state._Slots__w")


@AVERAGE
def test_objects_within_objects(average: Any) -> None:
    def step(ema, x):
        grads = average(grad(square)(ema.inner.w, x))
        ema.inner = dataclasses.replace(ema.inner, w=ema.inner.w - grads)

    judge(step, (Ema(W),), average, "ema.inner.w")


@AVERAGE
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")  # of copies of schedulers
def test_objects_with_modules_and_optimizers(average: Any) -> None:
    class Trainer:
        def __init__(self):
            self.module = make_module(0)
            self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            self.scaler = torch.amp.GradScaler("cpu", enabled=False)
            self.kinds = [torch.float32, torch.device("cpu"), torch.Size([2]), int, None, b"x"]

    def step(trainer, x):
        trainer.optimizer.zero_grad()
        trainer.module(torch.cat([x, x], 1)[:, :4]).square().mean().backward()
        for parameter in trainer.module.parameters():
            parameter.grad = average(parameter.grad)
        trainer.optimizer.step()
        trainer.scheduler.step()
        return x.sum()  # of this rank, beside state that is changed in place

    judge(step, (Trainer(),), average, "trainer.module['0.bias']")


@AVERAGE
def test_parameters_of_an_optimizer_alone(average: Any) -> None:
    def step(optimizer, x):
        (w,) = optimizer.param_groups[0]["params"]
        w.grad = average(grad(square)(w.detach(), x))
        optimizer.step()

    optimizer = torch.optim.SGD([torch.nn.Parameter(W.clone())], lr=0.1)
    judge(step, (optimizer,), average, "optimizer['param_groups.0.params.0']")


@AVERAGE
def test_gradients_count_where_nothing_else_changes(average: Any) -> None:
    def step(module, x):
        module(torch.cat([x, x], 1)[:, :4]).square().mean().backward()
        for parameter in module.parameters():
            parameter.grad = average(parameter.grad)

    judge(step, (make_module(0),), average, "module['0.bias'].grad")


class Key:
    pass


def test_keys_without_a_text_of_their_own() -> None:
    def step(state, x):
        return {key: value - grad(square)(value, x) for key, value in state.items()}

    judge(step, ({Key(): W},), LOCAL, "result[0]")


def test_other_sources_of_random_numbers_are_state() -> None:
    def step(state, x):
        for source in state[: 1 + (x[0, 0] < x[0, 1]).item()]:
            source.random()
        return state

    rows = torch.tensor([[0.1, 0.9, 0.0]])
    state = [random.Random(0), np.random.default_rng(0)]
    with pytest.raises(fddp.ReplicationError, match="differs between ranks"):
        check_replication(step, replicated=(state,), varying=(rows,))


@pytest.mark.parametrize("make", [threading.Lock, lambda: (n for n in ()), lambda: {}.keys()])
def test_leaves_that_cannot_be_compared(make: Callable[[], Any]) -> None:
    def step(params, x):
        return {"w": fddp.pmean(grad(square)(params["w"], x)), "lock": make()}

    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=({"w": W},), varying=(X,))
    assert raised.value.path == "result['lock']"
    assert f"{type(make()).__qualname__} has no attributes and no numbers" in str(raised.value)
    assert "or leave it out" in str(raised.value)


def forgets(params, x):
    fddp.tree_map(lambda p: p - fddp.pmean(grad(square)(p, x)), params)


def test_a_step_that_returns_nothing() -> None:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(forgets, replicated=({"w": W},), varying=(X,))
    assert str(raised.value) == (
        "nothing was compared: the step returns no numbers as new state and changes nothing of "
        "`params` in place. Return it, first and in the order of replicated=, or change it in "
        "place, with a learning rate that is not zero"
    )
    for nothing in ((None, X.sum()), {"w": None}, "done"):
        with pytest.raises(fddp.ReplicationError, match="nothing was compared"):
            check_replication(lambda p, x, n=nothing: n, replicated=({"w": W},), varying=(X,))
    with pytest.raises(fddp.ReplicationError, match="nothing was compared"):
        check_replication(lambda module, x: x, replicated=(make_module(0),), varying=(X,))


def test_a_tree_that_is_changed_in_place_needs_no_result() -> None:
    def step(params, x):
        params["w"] = params["w"] - fddp.pmean(grad(square)(params["w"], x))
        return x.sum()

    check_replication(step, replicated=({"w": W},), varying=(X,))


def test_state_of_which_a_part_is_changed_in_place() -> None:
    def step(state, x):
        state["momentum"].mul_(0.9)
        return {"w": state["w"] - grad(square)(state["w"], x), "momentum": state["momentum"]}

    judge(step, ({"w": W, "momentum": W.clone()},), LOCAL, "result['w']")


def test_none_in_equal_places_is_equal() -> None:
    def step(params, x):
        return {"w": fddp.pmean(grad(square)(params["w"], x)), "unused": None, "name": "net"}

    check_replication(step, replicated=({"w": W},), varying=(X,))


def test_reports_of_steps_are_of_one_rank() -> None:
    def step(params, x):
        with fddp.GradSync(params) as sync:
            grads, info = sync(grad(square)(params, x), with_info=True)
        return {"params": params - grads, "info": info}

    check_replication(step, replicated=(W,), varying=(X,))


def test_tensors_that_a_module_has_as_attributes_are_as_buffers() -> None:
    def step(module, x):
        module.average = x.mean()
        for parameter in module.parameters():
            parameter.data -= 0.1

    module = make_module(0)
    module.average = torch.zeros(())
    with pytest.warns(UserWarning, match=r"buffer module\['average'\] differs between ranks"):
        check_replication(step, replicated=(module,), varying=(X,))


def test_inputs_that_cannot_be_copied() -> None:
    with pytest.raises(ValueError, match="the inputs `state`, `x` can't be copied: TypeError"):
        check_replication(lambda state, x: state, replicated=(threading.Lock(),), varying=(X,))
