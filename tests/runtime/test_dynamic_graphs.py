"""Right without flags: whatever each rank's graph looks like, the result is the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.core.protocol.launch import TraceAction, replay
from tests.support.backward_calls import call_in_backward
from tests.support.branches import (
    LEAVES,
    WIDTH,
    Branch,
    branch_loss,
    branch_params,
    mean_of_branches,
    train_branches,
)
from tests.support.models import (
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    rand,
    same_bits,
)

SMALL = {"bucket_cap_mb": 0.0002, "first_bucket_mb": 0.0001}  # one or two leaves a bucket


def gradients_of_branches(group: Any, steps: list[list[Branch]]) -> list[tuple[Any, fddp.SyncInfo]]:
    with fddp.GradSync(branch_params(), group=group, **SMALL) as sync:
        return list(train_branches(sync, steps))


def check(steps: list[list[Branch]]) -> list[list[tuple[Any, fddp.SyncInfo]]]:
    """Runs the steps and holds every rank's gradients against one process's mean."""
    runs = fddp.loopback(len(steps[0]), gradients_of_branches, steps)
    for number, branches in enumerate(steps):
        expected = mean_of_branches(number, branches)
        for run in runs:
            assert largest_difference(run[number][0], expected) < 1e-12
        assert same_bits([run[number][0] for run in runs])
    return runs


HOW = st.sampled_from(["plain", "plain", "reentrant", "checkpoint"])
BRANCHES = st.lists(st.tuples(st.integers(0, LEAVES - 1), HOW), max_size=5).map(Branch)


@st.composite
def programs(draw: st.DrawFn) -> list[list[Branch]]:
    world_size = draw(st.integers(1, 4))
    step = st.lists(BRANCHES, min_size=world_size, max_size=world_size)
    return draw(st.lists(step, min_size=1, max_size=4))


@pytest.fixture(params=["packed together", "packed on arrival"])
def _packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second way is for large leaves; here it is taken by all."""
    if request.param == "packed on arrival":
        monkeypatch.setattr("fddp.runtime.program._EAGER_BYTES", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("_packing")
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(programs())
def test_random_graphs(steps: list[list[Branch]]) -> None:
    check(steps)


def infos_of_branches(
    group: Any, steps: list[list[Branch]]
) -> list[tuple[fddp.Schedule, fddp.SyncInfo]]:
    found = []
    with fddp.GradSync(branch_params(), group=group, **SMALL) as sync:
        trained = train_branches(sync, steps)
        for _ in steps:
            schedule = sync.schedule
            found.append((schedule, next(trained)[1]))
    return found


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_the_trace_is_that_of_the_launch_rule(steps: list[list[Branch]]) -> None:
    world_size = len(steps[0])
    runs = fddp.loopback(world_size, infos_of_branches, steps)
    for number in range(len(steps)):
        repairs = [TraceAction("repair", bucket) for bucket in runs[0][number][1].repaired]
        late = set[int]()
        traces = []
        for schedule, info in (run[number] for run in runs):
            traces.append(trace := info.trace)
            if not trace.bucket_of:
                continue
            arrivals = [event for event in trace.events if isinstance(event, int)]
            replayed = replay(schedule, arrivals, trace.expected)
            late |= replayed.late
            assert list(trace.events) == [*replayed.events, *repairs, TraceAction("finish")]
        assert late == {repair.bucket for repair in repairs}
        collectives = [[e for e in trace.events if isinstance(e, TraceAction)] for trace in traces]
        assert all(actions == collectives[0] for actions in collectives)


def test_a_late_gradient_is_repaired_then_expected() -> None:
    # One leaf in two checkpoints gets two gradients, with another bucket's leaf between them.
    branch = Branch([(5, "reentrant"), (0, "reentrant"), (5, "reentrant")])
    runs = check([[branch, branch]] * 3)
    repairs = [info.repaired for _, info in runs[0]]
    assert repairs[0], "the second gradient of w5 comes after its bucket has left"
    assert not repairs[2], "from then on both are waited for"


def test_a_late_gradient_in_a_step_that_is_usual_otherwise() -> None:
    """Every leaf is used, and nothing is measured: only the late gradient makes the control word
    differ from the regular one."""
    first = [(i, "plain") for i in (1, 2, 3)]
    usual = Branch([*first, *((i, "reentrant") for i in (0, 4, 5))])
    late = Branch([*first, *((i, "reentrant") for i in (5, 0, 4, 5))])

    def run(group: Any, with_info: bool) -> Any:
        x = batch(group.rank, 0, width=WIDTH)
        with fddp.GradSync(branch_params(), group=group, **SMALL) as sync:
            step = sync.value_and_grad(branch_loss, with_info=with_info)
            return [step(branch_params(), x, branch)[1:] for branch in (usual, usual, late)][-1]

    for _, info in fddp.loopback(2, run, True):
        assert info.repaired
        assert not info.unused
    inputs = [(batch(rank, 0, width=WIDTH), late) for rank in range(2)]
    expected = mean_gradients(branch_loss, branch_params(), inputs, [1.0, 1.0])
    for (grads,) in fddp.loopback(2, run, False):
        assert largest_difference(grads, expected) < 1e-12


@pytest.mark.parametrize("used", [LEAVES - 1, LEAVES])
def test_first_bucket_is_launched_before_the_last_gradient_exists(used: int) -> None:
    """An unused head does not stop the overlap."""
    branch = Branch((i, "plain") for i in range(used))
    for _, info in check([[branch, branch]] * 3)[0]:
        assert info.unused == (("w5",) if used < LEAVES else ())
        events = info.trace.events
        last_arrival = max(i for i, event in enumerate(events) if isinstance(event, int))
        assert events.index(TraceAction("launch", info.trace.sequence[0])) < last_arrival


def test_nested_calls_are_right() -> None:
    """A step inside the loss function of a step of the same GradSync."""
    p, inputs = mlp(), [(batch(rank, 0),) for rank in range(2)]

    def moved_loss(q: Any, x: Tensor, grads: Any) -> Tensor:
        return mlp_loss(fddp.tree_map(lambda a, g: a - 0.1 * g, q, grads), x)

    def run(group: Any) -> tuple[Any, Any]:
        with fddp.GradSync(p, group=group, **SMALL) as sync:
            inner = sync.value_and_grad(mlp_loss)
            step = sync.value_and_grad(lambda q, x: moved_loss(q, x, inner(p, 2 * x)[1]))
            x = batch(sync.rank, 0)
            return step(p, x)[1], inner(p, 2 * x)[1]

    inner = mean_gradients(mlp_loss, p, [(2 * x,) for (x,) in inputs], [1.0, 1.0])
    outer = mean_gradients(lambda q, x: moved_loss(q, x, inner), p, inputs, [1.0, 1.0])
    for outer_grads, inner_grads in fddp.loopback(2, run):
        assert largest_difference(outer_grads, outer) < 1e-12
        assert largest_difference(inner_grads, inner) < 1e-12


@pytest.mark.usefixtures("_packing")
def test_the_callers_own_hooks_on_leaves_run_and_hide_nothing() -> None:
    def run(group: Any) -> tuple[list[Any], int]:
        calls = 0

        def count(leaf: Tensor) -> None:
            nonlocal calls
            calls += 1

        def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
            for leaf in p.values():
                leaf.register_post_accumulate_grad_hook(count)
            return branch_loss(p, x, Branch((i, "plain") for i in range(LEAVES)))

        with fddp.GradSync(fddp.plan_buckets(branch_params(), **SMALL), group=group) as sync:
            step = sync.value_and_grad(loss_fn)
            x = batch(sync.rank, 0, width=WIDTH)
            return [step(branch_params(), x)[1] for _ in range(3)], calls

    inputs = [(batch(rank, 0, width=WIDTH),) for rank in range(2)]
    every = Branch((i, "plain") for i in range(LEAVES))
    expected = mean_gradients(
        lambda p, x: branch_loss(p, x, every), branch_params(), inputs, [1.0, 1.0]
    )
    for results, calls in fddp.loopback(2, run):
        assert calls == 3 * LEAVES
        for grads in results:
            assert largest_difference(grads, expected) < 1e-12


class _Nothing(torch.autograd.Function):
    """The identity, with no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:  # type: ignore[override]
        return None


def test_a_custom_function_without_a_gradient_uses_nothing() -> None:
    def run(group: Any) -> None:
        p = {"a": torch.ones(2), "b": torch.ones(2)}
        with fddp.GradSync(p, group=group) as sync:
            step = sync.value_and_grad(
                lambda q: (_Nothing.apply(q["a"]) * q["b"]).sum(), with_info=True
            )
            for _ in range(3):
                _, grads, info = step(p)
                assert grads["a"] is None
                assert grads["b"].tolist() == [1.0, 1.0]
                assert info.unused == ("a",)

    fddp.loopback(2, run)


def test_graphs_of_others_can_still_be_used() -> None:
    def run(group: Any) -> None:
        outside = torch.ones(2, requires_grad=True)
        h = outside.exp()
        h.retain_grad()
        p = {"w": torch.ones(2)}
        with fddp.GradSync(p, group=group) as sync:
            sync.value_and_grad(lambda q: (call_in_backward(q["w"], lambda: None) * h).sum())(p)
        assert h.grad is None
        assert outside.grad is None
        h.sum().backward()

    fddp.loopback(2, run)


def test_compiled_functions_in_checkpoints_are_compiled_once() -> None:
    compilations = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    p = {"w": rand(4, 4, seed=0)}
    torch._dynamo.reset()
    layer = torch.compile(lambda x, w: torch.tanh(x @ w), backend=backend)

    def loss_fn(q: dict[str, Tensor], x: Tensor) -> Tensor:
        return checkpoint(layer, x, q["w"], use_reentrant=False).square().mean()

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(p, group=group) as sync:
            step = sync.value_and_grad(loss_fn)
            return [step(p, batch(0, n, width=4))[1] for n in range(4)]

    (results,) = fddp.loopback(1, run)
    for n, grads in enumerate(results):
        expected = mean_gradients(
            lambda q, x: torch.tanh(x @ q["w"]).square().mean(), p, [(batch(0, n, width=4),)], [1.0]
        )
        assert largest_difference(grads, expected) < 1e-12
    assert compilations == 1
