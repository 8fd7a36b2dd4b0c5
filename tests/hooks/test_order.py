"""Hooks keep the overlap, and all ranks issue their collectives in one order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.protocol.launch import TraceAction
from fddp.hooks import (
    AllReduce,
    Bucket,
    BucketSpec,
    Future,
    Hook,
    allreduce,
    chain,
    int8,
    power_sgd,
    top_k,
)
from fddp.transport.loopback import LoopbackTransport
from tests.support.hook_models import Same
from tests.support.models import rand

LAYERS = 4
ONE_EACH = {"bucket_cap_mb": 0.0002, "first_bucket_mb": 0.0001}  # a leaf a bucket


def params(layers: int = LAYERS) -> dict[str, Tensor]:
    """The last one is used last, so that its gradient comes first, and its bucket is 0."""
    return {f"w{i}": rand(8, 8, seed=i) for i in range(layers)}


def loss_fn(p: dict[str, Tensor], x: Tensor, on_gradient: Any) -> Tensor:
    for i, leaf in enumerate(p.values()):
        leaf.register_hook(lambda grad, i=i: on_gradient(i))
        x = torch.tanh(x @ leaf)
    return x.square().mean()


@dataclass(frozen=True)
class Staged(Hook[tuple[()]]):
    """Sums a marker in each stage, then the buffer; stages that start are noted."""

    count: int
    note: Any

    name = "staged"

    @property
    def stages(self) -> int:
        return self.count

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        def stage(number: int) -> Future[Tensor]:
            self.note((bucket.spec.index, number))
            if number == self.count - 1:
                return all_reduce(bucket.buffer)
            marker = torch.full((1 + bucket.spec.index,), float(number))
            return all_reduce(marker).then(lambda _: stage(number + 1))

        return stage(0).map(lambda total: (total, state))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_run_during_backward(stages: int) -> None:
    """On one rank, where no stage has to be waited for."""
    log: list[Any] = []

    def run(group: Any) -> Any:
        hook = Staged(stages, log.append)
        with fddp.GradSync(params(), group=group, hook=hook, **ONE_EACH) as sync:
            step = sync.value_and_grad(loss_fn, with_info=True)
            *_, info = step(params(), rand(3, 8, seed=9), lambda i: log.append(f"w{i}"))
            return info.trace.events

    (events,) = fddp.loopback(1, run)
    expected: list[Any] = []
    for bucket in range(LAYERS):
        # The gradient is seen by the test before its bucket is: the first stage comes after it.
        expected += [f"w{LAYERS - 1 - bucket}", (bucket, 0)]
        expected += [(bucket - n, n) for n in range(1, stages) if bucket >= n]
    # Then rounds of the remaining stages, so that stages of different buckets overlap.
    for done in range(stages):
        expected += [(b, LAYERS - b + done) for b in range(LAYERS) if LAYERS - b + done < stages]
    assert log == expected
    # The trace has the same: bucket 0 is on its way before the last gradient comes.
    assert events.index(TraceAction("launch", 0)) < events.index(0)


def test_backward_does_not_wait_for_a_stage() -> None:
    """Rank 1 gives its first gradient when rank 0's backward has seen its last: no stage of rank 0
    has had an answer by then."""
    ended = threading.Event()
    log: dict[int, list[Any]] = defaultdict(list)

    def run(group: Any) -> None:
        def on_gradient(leaf: int) -> None:
            if group.rank == 0 and leaf == 0:
                ended.set()
            if group.rank == 1 and leaf == LAYERS - 1:
                assert ended.wait(30), "rank 0 waits within backward"
            log[group.rank].append(f"w{leaf}")

        hook = Staged(2, log[group.rank].append)
        with fddp.GradSync(params(), group=group, hook=hook, **ONE_EACH) as sync:
            sync.value_and_grad(loss_fn)(params(), rand(3, 8, seed=9), on_gradient)

    fddp.loopback(2, run)
    # The line of rank 0 stops at the second stage of bucket 0, which is due after bucket 1 left.
    assert log[0][:6] == ["w3", (0, 0), "w2", (1, 0), "w1", "w0"]
    stages = [[entry for entry in log[rank] if isinstance(entry, tuple)] for rank in range(2)]
    assert stages[0] == stages[1]


def issued(world_size: int, hook: Hook[Any], delays_ms: list[list[int]], **options: Any) -> Any:
    """The operations that each rank issues, where gradients come with these delays."""
    log: dict[int, list[str]] = defaultdict(list)
    start = LoopbackTransport._start

    def note(self: Any, operation: Any) -> Any:
        log[self.rank].append(f"{operation} among {len(operation.ranks)}")
        return start(self, operation)

    def run(group: Any) -> Any:
        def on_gradient(leaf: int) -> None:
            time.sleep(delays_ms[group.rank][leaf] * 1e-3)

        with fddp.GradSync(params(), group=group, hook=hook, **ONE_EACH, **options) as sync:
            log[group.rank].clear()
            step, state = sync.value_and_grad(loss_fn), sync.init_state()
            for n in range(2):
                x = rand(3, 8, seed=10 * n + group.rank)
                _, mean, state = step(params(), x, on_gradient, hook_state=state)
            return {name: leaf.tolist() for name, leaf in mean.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackTransport, "_start", note)
        means = fddp.loopback(world_size, run)
    assert all(mean == means[0] for mean in means)
    return [log[rank] for rank in range(world_size)]


MANY_STAGES = [
    allreduce,
    chain(power_sgd(2), int8(4)),
    Staged(4, lambda entry: None),
    pytest.param(power_sgd(1), marks=pytest.mark.nightly),
    pytest.param(chain(power_sgd(2), power_sgd(1)), marks=pytest.mark.nightly),
    pytest.param(chain(power_sgd(1), top_k(0.3)), marks=pytest.mark.nightly),
]
DELAYS = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 4]), min_size=LAYERS, max_size=LAYERS),
    min_size=2,
    max_size=2,
)


@pytest.mark.slow
@pytest.mark.parametrize("hook", MANY_STAGES, ids=lambda hook: hook.name)
@settings(max_examples=12, deadline=None)
@given(delays_ms=DELAYS)
def test_ranks_of_any_speed_issue_the_same(hook: Hook[Any], delays_ms: list[list[int]]) -> None:
    at_once = issued(2, hook, [[0] * LAYERS] * 2)
    assert at_once[0] == at_once[1]
    delayed = issued(2, hook, delays_ms)
    # Not only alike on all ranks, but one order, whatever the speed.
    assert delayed == at_once


@pytest.mark.parametrize("hook", [allreduce, power_sgd(1), Staged(4, lambda entry: None)])
def test_ranks_of_any_speed_issue_the_same_between_hosts(hook: Hook[Any]) -> None:
    options: dict[str, Any] = {"mesh": fddp.Topology(host=2, local=2), "algorithm": "hierarchical"}
    at_once = issued(4, hook, [[0] * LAYERS] * 4, **options)
    assert at_once == [at_once[0]] * 4
    for slow in range(4):
        delays = [[5 if rank == slow else 0] * LAYERS for rank in range(4)]
        assert issued(4, hook, delays, **options) == at_once


def test_the_control_word_does_not_wait_for_stages() -> None:
    operations = issued(2, Staged(3, lambda entry: None), [[0] * LAYERS] * 2)[0]
    step = operations[: len(operations) // 2]
    control = next(i for i, text in enumerate(step) if "float64 (1" in text or "float64 (2" in text)
    last_first_stage = step.index(f"all_reduce of torch.float32 ({LAYERS},) among 2")
    assert control == last_first_stage + 1


def test_results_are_correct_for_any_number_of_stages() -> None:
    def run(group: Any, hook: Hook[Any]) -> Any:
        with fddp.GradSync(params(), group=group, hook=hook, **ONE_EACH) as sync:
            x = rand(3, 8, seed=group.rank)
            return sync.value_and_grad(loss_fn)(params(), x, lambda i: None)[1]

    plain = fddp.loopback(3, run, Same())
    for stages in (1, 2, 5):
        staged = fddp.loopback(3, run, Staged(stages, lambda entry: None))
        for one, other in zip(plain, staged, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_nothing_is_launched_after_a_hook_has_failed() -> None:
    """Within backward, where later buckets still become ready."""
    log: list[Any] = []

    def note(entry: Any) -> None:
        log.append(entry)
        raise ValueError("no")

    def run(group: Any) -> None:
        with fddp.GradSync(params(), group=group, hook=Staged(1, note), **ONE_EACH) as sync:
            sync.value_and_grad(loss_fn)(params(), rand(3, 8, seed=9), lambda i: None)

    with pytest.raises(ValueError, match="no"):
        fddp.loopback(1, run)
    assert log == [(0, 0)]
