"""Steps with native instructions are those with functions of Python, to the bit."""

from __future__ import annotations

import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.protocol.launch import Phase, may_launch
from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule
from fddp.native import executor as native
from fddp.native import extension
from fddp.runtime.compiled import CompiledProgram
from fddp.runtime.program import Program
from fddp.telemetry.waits import waits_since
from tests.support.python_steps import only_python
from tests.support.ranks import RankPool
from tests.support.schedules import built

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
def test_native_instructions_give_the_same(case: Case) -> None:
    world_size = len(case.steps[0])
    compiled = fddp.loopback(world_size, run, case)
    with only_python():
        reference = fddp.loopback(world_size, run, case)
    assert compiled == reference


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


def test_wrapped_modules_give_the_same() -> None:
    compiled = fddp.loopback(2, wrapped_steps, 4)
    with only_python():
        assert fddp.loopback(2, wrapped_steps, 4) == compiled


def times_of_wait(rank: int, world_size: int) -> tuple[float, float, float]:
    """Time waited, and launch to start and end of the wait, for a rank that is late."""
    grads = {"w": torch.arange(5.0)}
    with fddp.GradSync(grads) as sync:
        sync(grads)
        time.sleep(0.6 * rank)
        start_s = time.perf_counter()
        assert sync(grads)["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        waited_s = sum(end_s - begin_s for begin_s, end_s in waits_since(start_s))
        op = fddp.flight(sync).logs[0].ops[-1]
        assert op.waited_s is not None
        assert op.done_s is not None
        return waited_s, op.waited_s, op.done_s


def test_a_wait_that_python_continues_is_recorded_from_its_start(ranks: RankPool) -> None:
    """Python continues after a quarter of a second. A busy machine may let a rank begin as late."""
    for _ in range(10):
        (waited_s, begin_s, end_s), _ = ranks.run(2, times_of_wait)
        if begin_s < 0.2 < 0.4 < end_s:
            break
    assert begin_s < 0.2
    assert end_s > 0.4
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


def test_gradients_of_threads_give_the_same() -> None:
    compiled = fddp.loopback(1, gradients_of_threads)
    with only_python():
        assert fddp.loopback(1, gradients_of_threads) == compiled


class _Work:
    """A collective that ends when the test wants it."""

    def __init__(self, run: _Run, position: int) -> None:
        self.run, self.position = run, position

    @property
    def done(self) -> bool:
        return self.position in self.run.done

    def wait(self, what: str) -> None:
        assert self.run.phase == "free" or self.done
        self.run.done.add(self.position)


class _Run:
    """Functions of a step that check the launch rule, then append their position."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ready: set[int] = set()
        self.done: set[int] = set()
        self.phase: Phase = "backward"
        self.ran: list[int] = []

    def new_memory(self, bucket: int) -> Tensor:
        return torch.zeros(self.schedule.buffer_numels[bucket])

    def run(self, position: int) -> _Work | None:
        assert self.may_launch(position)
        if self.schedule.ops[position].kind != "control":  # noted as its word is written
            self.ran.append(position)
        return _Work(self, position) if is_collective(self.schedule.ops[position]) else None

    def write_word(self) -> Tensor:
        assert self.may_launch(self.schedule.control)
        self.ran.append(self.schedule.control)
        return torch.zeros(1)

    def may_launch(self, position: int) -> bool:
        return may_launch(self.schedule, position, self.ready, self.done, self.phase)


@settings(deadline=None)
@given(built(), st.data())
def test_instructions_run_as_far_as_the_launch_rule_allows(
    schedule: Schedule, data: st.DataObject
) -> None:
    """In any order of gradients and of collectives that finish."""
    transport: Any = SimpleNamespace(
        native_collectives=lambda accelerators: extension.compiled.CollectivesOfOne(),
        control_device=torch.device("cpu"),
    )
    with only_python():
        code = CompiledProgram(Program(schedule, 0, False), transport, None, {})
    run = _Run(schedule)
    late = data.draw(st.sets(st.sampled_from(range(len(schedule.plan.buckets)))))
    calls = extension.compiled.StepCalls(
        lambda step, position, wait_soon: step.run(position),
        lambda step, position, error: None,
        lambda step: step.write_word(),
        lambda step, is_regular: (sorted(late), False),
    )
    order = [
        position
        for position, op in enumerate(schedule.ops)
        if op.when == "always" or op.bucket in late
        if not (op.kind == "unpack" and schedule.plan.buckets[op.bucket].sparse)
    ]
    ring, reference = extension.compiled.FlightRing(64), weakref.ref(run)
    executor = extension.compiled.Executor(
        code.native, calls, code.collectives, ring, 0, 0, reference, [], False, False
    )
    for bucket in data.draw(st.permutations(range(len(schedule.plan.buckets)))):
        if data.draw(st.booleans()):
            run.done.update(run.ran)
        if data.draw(st.booleans()):
            run.ready.add(bucket)
            executor(bucket)
            assert run.ran == order[: len(run.ran)]
            assert not run.may_launch(order[len(run.ran)])
    run.phase = "complete"
    executor.run(native.Phase.COMPLETE)
    while pending := sorted({*run.ran} - run.done):
        assert not run.may_launch(order[len(run.ran)])
        run.done.add(data.draw(st.sampled_from(pending)))
        executor.run(native.Phase.COMPLETE)
    assert run.ran == order[: len(run.ran)]
    assert not run.may_launch(order[len(run.ran)])
    run.phase = "free"
    executor.run(native.Phase.FREE)
    assert run.ran == order


def test_a_list_without_operations_after_the_report_reads_it() -> None:
    """Otherwise its step would end without the weights and failures of the other ranks."""
    module = extension.compiled
    word = module.Instr(
        "word", "always", False, False, bucket=-1, start=0, stop=0, waits=[], title="word"
    )
    program = module.StepProgram(
        [word],
        [],
        leaves=0,
        last_bucket=-1,
        summed_word=0,
        world_size=1,
        average=False,
        has_views=False,
        limb_bits=0,
        limbs=1,
        defers_report=False,
        compared=0,
        word_title="sum",
    )
    called: list[str] = []

    class Owner:
        """What the executor refers to weakly."""

    def note(name: str, result: Any) -> Any:
        called.append(name)
        return result

    calls = module.StepCalls(
        lambda step, position, wait_soon: note("run", None),
        lambda step, position, error: None,
        lambda step: note("write", torch.zeros(1)),
        lambda step, is_regular: note("read", ([], False)),
    )
    owner = Owner()
    executor = module.Executor(
        program,
        calls,
        module.CollectivesOfOne(),
        module.FlightRing(64),
        0,
        0,
        weakref.ref(owner),
        [],
        False,
        False,
    )
    executor.run(native.Phase.COMPLETE)
    assert called == ["write", "run"]
    executor.run(native.Phase.FREE)
    executor.run(native.Phase.FREE)
    assert called == ["write", "run", "read"]
