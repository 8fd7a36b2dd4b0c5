"""Steps in the compiled interpreter are those of the interpreter in Python, to the bit."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.native.usual_step import collectives_of_one, step_setup
from fddp.runtime.step import Step, UsualRun
from fddp.telemetry.waits import waits_since
from tests.support.python_steps import only_python
from tests.support.ranks import RankPool

SHAPES = ((3,), (2, 5), (), (40,), (7,), (1, 6))
OPTIONS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 0.0001, "first_bucket_mb": 0.0001},
    "one bucket": {},
    "wider sums": {"reduce_dtype": torch.float32, "bucket_cap_mb": 0.0002},
    "deterministic": {"deterministic": True, "bucket_cap_mb": 0.0001},
}


class Turn(NamedTuple):
    """One rank's part in a step: leaves in the order of use, its weight, a factor on its loss."""

    order: tuple[int, ...]
    weight: float
    factor: float
    call: str  # "value_and_grad", "sync", "reduce_" or "raise"


class Case(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    options: str
    steps: tuple[tuple[Turn, ...], ...]  # by step and rank


ALL = tuple(range(len(SHAPES)))
PLAIN = Turn(ALL, 1.0, 1.0, "value_and_grad")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(1, 3))
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    dtypes = (draw(kinds),) * len(SHAPES)
    if draw(st.booleans()):
        dtypes = tuple(draw(kinds) for _ in SHAPES)
    rarely = st.integers(0, 7).map(lambda n: n == 0)

    def turn(call: str) -> Turn:
        order = draw(st.permutations(ALL))
        if draw(rarely):
            order = order[: draw(st.integers(0, len(ALL)))]
        weight = draw(st.sampled_from([0.0, 0.5, 2.0, 3.0])) if draw(rarely) else 1.0
        factor = draw(st.sampled_from([1e5, 1e38, torch.inf])) if draw(rarely) else 1.0
        return Turn(tuple(order), weight, factor, "raise" if draw(rarely) else call)

    def step() -> tuple[Turn, ...]:
        call = draw(st.sampled_from(["value_and_grad", "value_and_grad", "sync", "reduce_"]))
        return tuple(turn(call) for _ in range(world_size))

    steps = tuple(step() for _ in range(draw(st.integers(2, 5))))
    return Case(dtypes, draw(st.sampled_from(sorted(OPTIONS))), steps)


def params_of(case: Case) -> dict[str, Tensor]:
    return {
        f"p{i}": (1 + torch.arange(torch.Size(shape).numel())).reshape(shape).to(dtype)
        for i, (shape, dtype) in enumerate(zip(SHAPES, case.dtypes, strict=True))
    }


def loss_of(params: dict[str, Tensor], turn: Turn) -> Tensor:
    if turn.call == "raise":
        raise ValueError("no data")
    loss = torch.zeros((), dtype=torch.float64)
    for i in turn.order:
        loss = loss + ((i + 1) * turn.factor * params[f"p{i}"]).sum().double()
    return loss


def result_of(sync: fddp.GradSync, turn: Turn, params: dict[str, Tensor]) -> Any:
    if turn.call in ("value_and_grad", "raise"):
        step = sync.value_and_grad(loss_of, weight_fn=lambda params, turn: turn.weight)
        return step(params, turn)[1]
    grads: dict[str, Tensor | None] = dict.fromkeys(params)
    for i in turn.order:
        grads[f"p{i}"] = params[f"p{i}"] * turn.factor
    if turn.call == "reduce_":
        return sync.reduce_(grads, weight=turn.weight)
    return sync(grads, weight=turn.weight)


def bytes_of(leaf: Tensor | None) -> object:
    if leaf is None:
        return None
    return (
        leaf.dtype,
        leaf.shape,
        leaf.stride(),
        leaf.contiguous().view(-1).view(torch.uint8).tolist(),
    )


def run(group: Any, case: Case) -> tuple[list[object], list[object], list[str]]:
    """Results or errors of each step, the recorded operations, and the plans."""
    results: list[object] = []
    params = params_of(case)
    with fddp.GradSync(params, group=group, **OPTIONS[case.options]) as sync:
        plans = []
        for turns in case.steps:
            try:
                tree = result_of(sync, turns[group.rank], params)
                results.append({name: bytes_of(leaf) for name, leaf in tree.items()})
            except fddp.FddpError as error:
                results.append(f"{type(error).__name__}: {error}")
            except ValueError as error:
                results.append(str(error))
            plans.append(sync.plan.digest)
        ops = [
            (op.number, op.step, op.kind, op.bucket, op.leaves, op.nbytes, op.state)
            for op in fddp.flight(sync).logs[0].ops
        ]
    return results, ops, plans


@given(cases())
@example(Case((torch.float32,) * 6, "small buckets", ((PLAIN, PLAIN),) * 3))
@example(Case((torch.float16,) * 6, "small buckets", ((PLAIN, PLAIN._replace(factor=1e38)),) * 3))
@example(Case((torch.float32,) * 6, "one bucket", ((PLAIN, PLAIN._replace(call="raise")),) * 2))
@example(Case((torch.bfloat16,) * 6, "wider sums", ((PLAIN, PLAIN._replace(weight=3.0)),) * 3))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_both_interpreters_give_the_same(case: Case) -> None:
    world_size = len(case.steps[0])
    compiled = fddp.loopback(world_size, run, case)
    with only_python():
        reference = fddp.loopback(world_size, run, case)
    assert compiled == reference


class Spy:
    """Counts the steps of the compiled interpreter, and those that Python took over."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = self.taken_over = 0
        begin, hand_over = UsualRun.of, UsualRun.hand_over

        def count_begin(step: Step) -> UsualRun | None:
            run = begin(step)
            self.begun += run is not None
            return run

        def count_hand_over(run: UsualRun, step: Step) -> None:
            self.taken_over += 1
            hand_over(run, step)

        patch.setattr(UsualRun, "of", count_begin)
        patch.setattr(UsualRun, "hand_over", count_hand_over)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@pytest.mark.parametrize("options", ["small buckets", "one bucket"])
@pytest.mark.parametrize("call", ["value_and_grad", "sync", "reduce_"])
def test_usual_steps_run_without_python(options: str, call: str, spy: Spy) -> None:
    turn = PLAIN._replace(call=call)
    case = Case((torch.float32,) * 6, options, ((turn, turn),) * 4)
    fddp.loopback(2, run, case)
    # The first backward pass reports the order of gradients.
    steps = 3 if call == "value_and_grad" else 4
    assert (spy.begun, spy.taken_over) == (2 * steps, 0)


@pytest.mark.parametrize(
    "unusual",
    [
        PLAIN._replace(order=(0, 1, 2)),
        PLAIN._replace(factor=1e38),
        PLAIN._replace(weight=2.0),
        PLAIN._replace(call="raise"),
    ],
)
def test_python_takes_over_on_every_rank(unusual: Turn, spy: Spy) -> None:
    """Only rank 1 is unusual, which rank 0 learns from the control word."""
    first = (PLAIN, PLAIN)
    case = Case((torch.float16,) * 6, "small buckets", (first, first, (PLAIN, unusual), first))
    compiled = fddp.loopback(2, run, case)
    taken_over = spy.taken_over
    with only_python():
        assert fddp.loopback(2, run, case) == compiled
    # A rank with another weight, or with a failure, does not begin in the compiled interpreter.
    assert taken_over >= 1


def wrapped_steps(group: Any, count: int) -> list[list[object]]:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).double()
    for number, param in enumerate(module.parameters()):
        torch.nn.init.constant_(param, 1.0 / (1 + number))  # ranks are threads of one generator
    ddp = fddp.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0001)
    found = []
    for number in range(count):
        ddp(torch.full((2, 4), 1.0 + group.rank + number, dtype=torch.float64)).sum().backward()
        found.append([bytes_of(param.grad) for param in module.parameters()])
        module.zero_grad()
    return found


def test_wrapped_modules_take_usual_steps(spy: Spy) -> None:
    count = 15  # the first eleven are measured, which is not usual
    compiled = fddp.loopback(2, wrapped_steps, count)
    assert (spy.begun, spy.taken_over) == (2 * (count - 11), 0)
    with only_python():
        assert fddp.loopback(2, wrapped_steps, count) == compiled


def slow_rank(rank: int, world_size: int, usual: bool) -> tuple[list[float], str]:
    """Rank 1 comes later than rank 0 checks its peers."""
    grads = {"w": torch.arange(5.0) * (rank + 1)}
    with nullcontext() if usual else only_python(), fddp.GradSync(grads) as sync:
        sync(grads)
        time.sleep(0.6 * rank)
        return sync(grads)["w"].tolist(), fddp.flight(sync).logs[0].ops[-1].state


@pytest.mark.parametrize("usual", [True, False])
def test_python_waits_for_a_slow_rank(ranks: RankPool, usual: bool) -> None:
    expected = [0.0, 1.5, 3.0, 4.5, 6.0], "done"
    assert ranks.run(2, slow_rank, usual) == [expected] * 2


def times_of_wait(rank: int, world_size: int) -> tuple[float, float, float]:
    """Time waited, and launch to start and end of the wait, for a rank that is late."""
    grads = {"w": torch.arange(5.0)}
    with fddp.GradSync(grads) as sync:
        sync(grads)
        time.sleep(0.6 * rank)
        start_s = time.perf_counter()
        sync(grads)
        waited_s = sum(end_s - begin_s for begin_s, end_s in waits_since(start_s))
        op = fddp.flight(sync).logs[0].ops[-1]
        assert op.waited_s is not None
        assert op.done_s is not None
        return waited_s, op.waited_s, op.done_s


def test_a_wait_that_python_continues_is_recorded_from_its_start(ranks: RankPool) -> None:
    """Python continues after a quarter of a second."""
    (waited_s, begin_s, end_s), _ = ranks.run(2, times_of_wait)
    assert end_s > 0.4
    assert begin_s < 0.2
    assert waited_s == pytest.approx(end_s - begin_s, abs=0.2)


class _OnThreads(torch.autograd.Function):
    """Differentiates the squares of leaves on a thread each; the last leaf comes first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.leaves = leaves
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def run(leaf: Tensor, delay_s: float) -> None:
            time.sleep(delay_s)
            with torch.enable_grad():
                (leaf * leaf).sum().backward()

        *others, last = ctx.leaves
        threads = [threading.Thread(target=run, args=(leaf, 0.05)) for leaf in others]
        threads.append(threading.Thread(target=run, args=(last, 0.0)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return grad, *[None] * len(ctx.leaves)


def gradients_of_threads(group: Any) -> tuple[list[object], list[tuple[object, ...]]]:
    params = {f"p{i}": torch.ones(30) for i in range(4)}

    def spoil(leaf: Tensor) -> None:
        leaf.data = torch.ones(3)
        leaf.grad = None
        leaf.grad = torch.ones(3)

    def loss(leaves: dict[str, Tensor], is_spoiled: bool) -> Tensor:
        if is_spoiled:
            leaves["p3"].register_post_accumulate_grad_hook(spoil)
        x = torch.ones((), requires_grad=True)
        return _OnThreads.apply(x, *leaves.values())

    results: list[object] = []
    with fddp.GradSync(params, group=group, bucket_cap_mb=5e-5, first_bucket_mb=5e-5) as sync:
        for is_spoiled in (False, False, True, False):
            try:
                _, grads = sync.value_and_grad(loss)(params, is_spoiled)
                results.append({name: bytes_of(grad) for name, grad in grads.items()})
            except fddp.TreeMismatchError as error:
                results.append(str(error))
        log = fddp.flight(sync).logs[0]
    return results, [(op.number, op.step, op.bucket, op.state) for op in log.ops]


def test_gradients_of_other_threads_wait_until_python_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand_over = UsualRun.hand_over

    def hand_over_slowly(run: UsualRun, step: Step) -> None:
        time.sleep(0.2)
        hand_over(run, step)

    monkeypatch.setattr(UsualRun, "hand_over", hand_over_slowly)
    compiled = fddp.loopback(1, gradients_of_threads)
    with only_python():
        assert fddp.loopback(1, gradients_of_threads) == compiled


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ArithmeticError


def references_to_steps(group: Any) -> list[weakref.ref[Step]]:
    found = []
    params = {"w": torch.ones(3)}
    losses: list[Callable[[Any], Tensor]] = [lambda p: p["w"].sum()] * 2
    losses.append(lambda p: _Raises.apply(p["w"]).sum())
    with fddp.GradSync(params, group=group) as sync:
        for loss in losses:
            with suppress(ArithmeticError):
                sync.value_and_grad(loss)(params)
            current = sync._engine._current
            assert current is not None
            found.append(current)
    return found


def test_steps_are_freed_without_the_collector() -> None:
    """The compiled step must not close a cycle through the hooks of gradients."""
    gc.disable()
    try:
        (references,) = fddp.loopback(1, references_to_steps)
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_invalid_arguments_are_rejected() -> None:
    new: Any = step_setup
    with pytest.raises(TypeError):
        new(None, collectives_of_one(), 1.0)

    def run(group: Any) -> None:
        with fddp.GradSync({"w": torch.ones(3)}, group=group) as sync:
            engine = sync._engine
            assert engine.usual is not None
            begin: Any = engine.usual.setup.begin
            word, ring, later = torch.ones(1), engine.recorder.ring, weakref.ref(engine)
            with pytest.raises(TypeError):
                begin((0, 0, 0), None, [torch.ones(4)], word, [torch.ones(3)], later)
            with pytest.raises(ValueError, match="expected 1 buffers, got 0"):
                begin((0, 0, 0), ring, [], word, [torch.ones(3)], later)
            with pytest.raises(ValueError, match="expected 1 leaves, got 0"):
                begin((0, 0, 0), ring, [torch.ones(4)], word, [], later)
            with pytest.raises((TypeError, RuntimeError)):
                begin((0, 0, 0), ring, [torch.ones(4)], word, "gradients", later)
            assert begin((0, 0, 0), ring, [torch.ones(4)], word, [None], later) is None

    fddp.loopback(1, run)
