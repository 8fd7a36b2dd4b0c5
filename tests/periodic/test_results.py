"""Low-communication training: results, state, and the same bits on all ranks."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from fddp import periodic
from fddp.averaging import Averager
from fddp.extend import tree_flatten
from fddp.hooks import bf16_compress, error_feedback, int4, int8, power_sgd
from tests.support.groups import rank_of
from tests.support.models import rand, same_bits
from tests.support.ranks import Launch, launch_fixture

everywhere = launch_fixture("c10d", "shm", "loopback")

STEPS = 12
Params = dict[str, Tensor]


def test_nan_in_flight_is_the_same_after_a_copy_of_the_state() -> None:
    """Only bits tell that a contribution is the one in flight: NaN differs from itself."""

    def run(group: Any) -> list[Any]:
        params, log = {"w": torch.tensor([1.0 + group.rank, -0.0])}, []
        schedule = periodic.local_sgd(params, 4, delay=2)
        with periodic.PeriodicSync(params, schedule, group=group, timeout_s=20) as sync:
            state = sync.init(params)
            for step in range(8):
                if step == 3 and group.rank == 1:
                    params = {"w": params["w"] * torch.tensor([float("nan"), 1.0])}
                params, state = sync.step(params, state)
                state = copy.deepcopy(state)
                log.append(params["w"].tolist())
        return [str(values) for values in log[5:]]

    assert fddp.loopback(2, run) == [["[nan, -0.0]"] * 3] * 2


def initial() -> Any:
    return {
        "layers": [{"w": rand(4, 3, seed=n), "b": rand(3, seed=10 + n)} for n in range(3)],
        "seen": torch.tensor(7),
    }


def inner(params: Any, rank: int, step: int, lr: float = 0.1) -> Any:
    """A step of SGD on a quadratic loss of this rank."""

    def stepped(p: Tensor) -> Tensor:
        if not p.is_floating_point():
            return p + rank
        return p - lr * (p - rand(*p.shape, seed=1000 * step + rank))

    return fddp.tree_map(stepped, params)


def trained(
    group: Any, schedule: Callable[[Any], Any], steps: int = STEPS, **options: Any
) -> list[Any]:
    """Parameters after each step."""
    params, seen = initial(), []
    with periodic.PeriodicSync(params, schedule, group=group, **options) as sync:
        state = sync.init(params)
        for step in range(steps):
            params, state = sync.step(inner(params, rank_of(group), step), state)
            seen.append(params)
        assert state["step"] == steps
    return seen


def reference(
    schedule: Any, world_size: int, outer: Any = None, steps: int = STEPS
) -> list[list[Any]]:
    """The same in one process, by the definitions: parameters after each step, by rank."""
    ranks = [initial() for _ in range(world_size)]
    shared = dict(zip(_paths(ranks[0]), tree_flatten(ranks[0])[0], strict=True))
    states = [outer and outer.init(_part(shared, schedule, n)) for n in range(_count(schedule))]
    sent: dict[int, list[Params]] = {}
    seen: list[list[Any]] = [[] for _ in range(world_size)]
    for step in range(steps):
        ranks = [inner(params, rank, step) for rank, params in enumerate(ranks)]
        for event in schedule.due(step):
            number = event.fragment
            own = [_part(_by_path(params), schedule, number) for params in ranks]
            old = _part(shared, schedule, number)
            if event.kind == "start":
                sent[number] = [
                    {path: old[path] - leaf if outer else leaf for path, leaf in one.items()}
                    for one in own
                ]
                continue
            rows = sent.pop(number)
            mean = {path: sum(row[path] for row in rows) / world_size for path in rows[0]}
            if outer:
                updates, states[number] = outer.update(mean, states[number], old)
                mean = {path: old[path] + updates[path] for path in mean}
                shared.update(mean)
            alpha = schedule.fragments[number].mixing
            for rank in range(world_size):
                new = {p: alpha * own[rank][p] + (1 - alpha) * mean[p] for p in mean}
                ranks[rank] = _replaced(ranks[rank], new)
        for rank, params in enumerate(ranks):
            seen[rank].append(params)
    return seen


def _paths(tree: Any) -> tuple[str, ...]:
    return tree_flatten(tree)[1].paths


def _count(schedule: Any) -> int:
    return len(schedule.fragments)


def _by_path(tree: Any) -> Params:
    return dict(zip(_paths(tree), tree_flatten(tree)[0], strict=True))


def _part(leaves: Params, schedule: Any, number: int) -> Params:
    return {path: leaves[path] for path in schedule.fragments[number].paths}


def _replaced(tree: Any, new: Params) -> Any:
    leaves, treedef = tree_flatten(tree)
    pairs = zip(treedef.paths, leaves, strict=True)
    return treedef.unflatten([new.get(path, leaf) for path, leaf in pairs])


def local_sgd(tree: Any) -> Any:
    return periodic.local_sgd(tree, 4)


def delayed_local_sgd(tree: Any) -> Any:
    return periodic.local_sgd(tree, 3, delay=3, mixing=0.25)


def diloco(tree: Any) -> Any:
    return periodic.diloco(tree, 3)


def streaming(tree: Any) -> Any:
    return periodic.streaming_diloco(tree, 5, fragments=3, delay=2)


def without_mixing(tree: Any) -> Any:
    return periodic.streaming_diloco(tree, 4, fragments=2, delay=4, mixing=0)


METHODS = [
    (local_sgd, None),
    (delayed_local_sgd, None),
    (diloco, periodic.sgd()),
    (streaming, periodic.sgd(0.7, momentum=0.5)),
    (without_mixing, periodic.sgd(1.0, momentum=0.5, nesterov=False)),
]
IDS = [method.__name__ for method, _ in METHODS]


@pytest.mark.parametrize("number", range(len(METHODS)), ids=IDS)
def test_results_are_those_of_the_definitions(everywhere: Launch, number: int) -> None:
    schedule, outer = METHODS[number]
    expected = reference(schedule(initial()), 2, outer)
    for found, wanted in zip(everywhere(2, by_number, number), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def by_number(group: Any, number: int) -> list[Any]:
    schedule, outer = METHODS[number]
    return trained(group, schedule, outer=outer)


def test_three_ranks_agree_to_the_bit() -> None:
    expected = reference(streaming(initial()), 3, METHODS[3][1])
    results = fddp.loopback(3, by_number, 3)
    for found, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    results = fddp.loopback(3, by_number, 2)
    last = [_by_path(found[2]) for found in results]  # after the first outer step
    assert same_bits([{p: leaf for p, leaf in one.items() if p != "seen"} for one in last])


def test_outer_optimizer_is_that_of_torch() -> None:
    for nesterov in (False, True):
        ours = {"w": rand(5, seed=0)}
        weight = nn.Parameter(ours["w"].clone())
        stock = torch.optim.SGD([weight], lr=0.3, momentum=0.8, nesterov=nesterov)
        outer = periodic.sgd(0.3, momentum=0.8, nesterov=nesterov)
        state = outer.init(ours)
        for step in range(5):
            grads = {"w": rand(5, seed=step + 1)}
            weight.grad = grads["w"].clone()
            stock.step()
            updates, state = outer.update(grads, state, ours)
            ours = {"w": ours["w"] + updates["w"]}
        torch.testing.assert_close(ours["w"], weight.detach(), rtol=1e-12, atol=1e-12)


# Special cases agree


def test_diloco_of_period_1_is_averaging_is_ddp(launch: Launch) -> None:
    for averaged, outer, ddp in launch(2, special_cases):
        torch.testing.assert_close(outer, averaged, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ddp, averaged, rtol=1e-12, atol=1e-12)


def special_cases(group: Any) -> tuple[Any, Any, Any]:
    def every_step(tree: Any) -> Any:
        return periodic.diloco(tree, 1)

    averaged = trained(group, every_step)[-1]
    outer = trained(group, every_step, outer=periodic.sgd(1.0, momentum=0.0))[-1]
    ddp = initial()
    with fddp.GradSync(ddp, group=group) as sync:
        for step in range(STEPS):
            stepped = inner(ddp, rank_of(group), step)
            deltas = sync(fddp.tree_map(lambda p, new: new - p, ddp, stepped))
            ddp = {
                "layers": fddp.tree_map(torch.add, ddp["layers"], deltas["layers"]),
                "seen": stepped["seen"],
            }
    return averaged, outer, ddp


def test_local_sgd_is_averaging_is_the_mean_of_parameters_to_the_bit(everywhere: Launch) -> None:
    for found, averaged, means in everywhere(2, three_ways):
        assert same_bits([found, averaged, means])


def three_ways(group: Any) -> tuple[Any, Any, Any]:
    found = trained(group, local_sgd)
    averaged, means = [], []
    params = initial()
    when = periodic.Periodic(4, warmup_steps=3)
    with Averager(params, when, group=group) as averager:
        for step in range(STEPS):
            params = averager.average(inner(params, rank_of(group), step), step)
            averaged.append(params)
    params = initial()
    with fddp.GradSync(params, group=group) as sync:
        for step in range(STEPS):
            params = inner(params, rank_of(group), step)
            if when.due(step):
                layers = fddp.tree_map(torch.clone, sync(params)["layers"])
                params = {"layers": layers, "seen": params["seen"]}
            means.append(params)
    return found, averaged, means


# Wire formats


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_wire_formats(launch: Launch, name: str) -> None:
    """Close to the exact run, with the same shared parameters on all ranks."""
    runs = launch(2, compressed, name)
    shared = [state["fragments"][0]["params"] for _, state in runs]
    assert same_bits(shared)
    exact = reference(diloco(initial()), 2, periodic.sgd())
    for (params, _), wanted in zip(runs, exact, strict=True):
        torch.testing.assert_close(params, wanted[-1], rtol=0.05, atol=0.02)


HOOKS = {"bf16": bf16_compress, "int8": error_feedback(int8()), "int4": error_feedback(int4(2))}


def compressed(group: Any, name: str) -> Any:
    params = initial()
    options = {"outer": periodic.sgd(), "hook": HOOKS[name], "group": group}
    with periodic.PeriodicSync(params, diloco, **options) as sync:
        state = sync.init(params)
        for step in range(STEPS):
            params, state = sync.step(inner(params, rank_of(group), step), state)
    if name == "int8":
        residual = state["fragments"][0]["hook"][0]["residual"]
        assert 0 < residual.abs().max() < 0.1
    return params, state


def test_hooks_of_several_stages_overlap_with_steps(everywhere: Launch) -> None:
    """Ranks advance them at different times, and receive the same bits."""
    runs = everywhere(2, in_stages)
    shared = [[fragment["params"] for fragment in state["fragments"]] for state in runs]
    assert same_bits(shared)


def in_stages(group: Any) -> Any:
    params, hook = initial(), power_sgd(1)
    with periodic.PeriodicSync(
        params, streaming, outer=periodic.sgd(), hook=hook, group=group
    ) as sync:
        state = sync.init(params)
        for step in range(STEPS):
            time.sleep(0.01 * (step % 2 == rank_of(group)))
            params, state = sync.step(inner(params, rank_of(group), step), state)
    return state


# State


@pytest.mark.parametrize(
    "stop", [3, 8, *(pytest.param(stop, marks=pytest.mark.nightly) for stop in range(4, 8))]
)
def test_a_checkpoint_continues_to_the_bit(launch: Launch, stop: int) -> None:
    """Also while collectives are in flight."""
    for continued, whole, in_flight in launch(2, interrupted, stop):
        assert same_bits([continued, whole])
        assert in_flight == any(0 <= stop - 1 - start < 2 for start in (0, 2, 4, 5, 7, 9))


def interrupted(group: Any, stop: int) -> tuple[Any, Any, bool]:
    options = {"outer": periodic.sgd(), "hook": HOOKS["int8"], "group": group}
    whole = trained(group, streaming, **{k: v for k, v in options.items() if k != "group"})
    params = initial()
    with periodic.PeriodicSync(params, streaming, **options) as sync:
        state = sync.init(params)
        for step in range(stop):
            params, state = sync.step(inner(params, rank_of(group), step), state)
        file = io.BytesIO()
        torch.save((params, state), file)
        in_flight = any(fragment["sent"] for fragment in state["fragments"])
    file.seek(0)
    params, state = torch.load(file, weights_only=True)
    with periodic.PeriodicSync(params, streaming, **options) as sync:
        for step in range(stop, STEPS):
            params, state = sync.step(inner(params, rank_of(group), step), state)
    return params, whole[-1], in_flight


def test_an_earlier_state_can_be_continued(launch: Launch) -> None:
    """On all ranks, with the same object, after later steps; also if these have left a mean of the
    same fragment in flight."""
    for first, second in launch(2, twice):
        assert same_bits([first, second])


def twice(group: Any) -> tuple[Any, Any]:
    results = []
    params = initial()
    with periodic.PeriodicSync(params, streaming, outer=periodic.sgd(), group=group) as sync:
        state = sync.init(params)
        for step in range(4):
            params, state = sync.step(inner(params, rank_of(group), step), state)
        kept = params, state
        for stop in (STEPS - 4, STEPS - 2, STEPS):
            params, state = kept
            results = results[-1:]
            for step in range(4, stop):
                params, state = sync.step(inner(params, rank_of(group), step), state)
                if step == STEPS - 3:
                    results.append(params)
    first, second = results
    return first, second


def test_arguments_are_not_written() -> None:
    assert all(fddp.loopback(2, unwritten))


def unwritten(group: Any) -> bool:
    params = initial()
    with periodic.PeriodicSync(params, streaming, outer=periodic.sgd(), group=group) as sync:
        state = sync.init(params)
        for step in range(STEPS):
            params = inner(params, group.rank, step)
            before = fddp.tree_map(torch.clone, params), repr(state)
            new_params, new_state = sync.step(params, state)
            if not sync.schedule.due(step):
                assert new_params is params
            assert same_bits([params, before[0]])
            assert repr(state) == before[1]
            params, state = new_params, new_state
    return True


@pytest.mark.parametrize("outer", [None, periodic.sgd()], ids=["average", "outer"])
def test_states_do_not_share_memory_with_parameters(outer: Any) -> None:
    """The caller may write parameters in place, also during a collective in flight."""

    def run(group: Any) -> list[bool]:
        params, unchanged = initial(), []

        def schedule(tree: Any) -> Any:
            return periodic.local_sgd(tree, 3, delay=2)

        with periodic.PeriodicSync(params, schedule, outer=outer, group=group) as sync:
            state = sync.init(params)
            for _ in range(6):
                before = repr(state)
                fddp.tree_map(lambda p: p.add_(1), params)
                unchanged.append(repr(state) == before)
                params, state = sync.step(params, state)
        return unchanged

    assert fddp.loopback(2, run) == [[True] * 6] * 2


def test_frozen_parameters_of_a_module_stay_local() -> None:
    def run(group: Any) -> dict[str, Any]:
        module = nn.Linear(1, 1)
        for param in module.parameters():
            nn.init.constant_(param, group.rank)
        module.bias.requires_grad_(False)
        with periodic.PeriodicSync(module, periodic.local_sgd, group=group) as sync:
            state = {**sync.init(module), "step": 99}
            averaged, _ = sync.step(module, state)
        return {name: param.item() for name, param in averaged.items()}

    assert fddp.loopback(2, run) == [{"weight": 0.5}] * 2


def test_parameters_written_in_place(launch: Launch) -> None:
    """By an optimizer of torch, during collectives in flight; the same as functionally."""
    for in_place, functional in launch(2, module_and_tree):
        torch.testing.assert_close(in_place, functional, rtol=1e-12, atol=1e-12)


def module_and_tree(group: Any) -> tuple[Any, Any]:
    def schedule(tree: Any) -> Any:
        return periodic.streaming_diloco(tree, 4, fragments=2, delay=2)

    def targets(step: int) -> Tensor:
        return rand(5, 2, seed=100 * step + rank_of(group))

    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for seed, param in enumerate(module.parameters()):  # ranks are threads with one generator
        param.data = rand(*param.shape, seed=seed)
    inputs, outer = rand(5, 3, seed=1), periodic.sgd(0.7, momentum=0.5)
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    named = dict(module.named_parameters())
    with periodic.PeriodicSync(module, schedule, outer=outer, group=group) as sync:
        state = sync.init(named)
        for step in range(STEPS):
            optimizer.zero_grad()
            (module(inputs) - targets(step)).square().mean().backward()
            optimizer.step()
            state = sync.step_(named, state)

    def gradients(params: Params, step: int) -> Params:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        outputs = torch.func.functional_call(module, leaves, inputs)
        (outputs - targets(step)).square().mean().backward()
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    with periodic.PeriodicSync(params, schedule, outer=outer, group=group) as sync:
        state = sync.init(params)
        for step in range(STEPS):
            params = fddp.tree_map(lambda p, g: p - 0.1 * g, params, gradients(params, step))
            params, state = sync.step(params, state)
    return {name: p.detach() for name, p in named.items()}, params


# Weights, and other optimizers


@pytest.mark.parametrize(
    "changed",
    [{"lr": 0.6}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": False}, {"momentum": 0.0}],
)
def test_outer_optimizers_are_compared(changed: dict[str, Any]) -> None:
    def refused(group: Any) -> str:
        usual = {"nesterov": False} if "nesterov" in changed else {}
        outer = periodic.sgd(**(changed if group.rank == 1 else usual))
        params = initial()
        with (
            periodic.PeriodicSync(params, streaming, outer=outer, group=group) as sync,
            pytest.raises(fddp.DesyncError) as caught,
        ):
            sync.init(params)
        return str(caught.value)

    for text in fddp.loopback(3, refused):
        assert "'outer optimizer.0." in text
        assert "rank 1" in text


def test_ranks_count_by_their_weight(launch: Launch) -> None:
    for value in launch(2, weighted):
        assert value == 0.75


def weighted(group: Any) -> float:
    rank = rank_of(group)
    params = {"w": torch.tensor(0.0)}
    with periodic.PeriodicSync(params, lambda tree: periodic.diloco(tree, 1), group=group) as sync:
        state = sync.init(params)
        params, _ = sync.step({"w": torch.tensor(float(rank))}, state, weight=1.0 + 2.0 * rank)
    return params["w"].item()


def test_gradient_transformations_of_torchopt(launch: Launch) -> None:
    pytest.importorskip("torchopt")
    for theirs, ours in launch(2, with_torchopt):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)


def with_torchopt(group: Any) -> tuple[Any, Any]:
    import torchopt

    outer = torchopt.sgd(0.5, momentum=0.9, nesterov=False)
    theirs = trained(group, diloco, outer=outer)
    return theirs, trained(group, diloco, outer=periodic.sgd(0.5, nesterov=False))


def test_gradient_transformations_of_optax() -> None:
    pytest.importorskip("optax")
    for theirs, ours in fddp.loopback(2, with_optax):
        assert theirs == pytest.approx(ours, rel=1e-6)


def with_optax(group: Any) -> tuple[float, float]:
    import jax.numpy as jnp
    import optax

    results = []
    for outer in (optax.sgd(0.5, momentum=0.9, nesterov=True), periodic.sgd(0.5)):
        params: Any = {"w": jnp.full((3,), 4.0)}
        with periodic.PeriodicSync(params, diloco, outer=outer, group=group) as sync:
            state = sync.init(params)
            for _ in range(6):
                params = {"w": params["w"] * 0.9 - group.rank}
                params, state = sync.step(params, state)
        results.append(float(params["w"][0]))
    return results[0], results[1]
