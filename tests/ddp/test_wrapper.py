"""`fddp.DistributedDataParallel`: gradients of a wrapped module, its hooks, what it shows."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.ranks import Launch, RankPool
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    Net,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
    run_backward,
)


def one_step(group: Any, options: dict[str, Any]) -> dict[str, Any]:
    ddp = DDP(net(), process_group=group, **options)
    run_backward(ddp, group)
    return grads(ddp.module)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": TINY_CAP_MB},
        {"bucket_cap_mb": TINY_CAP_MB, "find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"init_sync": False},
        {"bucket_cap_mb_list": [TINY_CAP_MB, 1.0]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
def test_gradients_are_the_mean(launch: Launch, options: dict[str, Any]) -> None:
    wanted = mean_of(2, lambda model, rank: model(batch(rank)).square().mean())
    for found in launch(2, one_step, options):
        assert_close(found, wanted)


def keeps_tensors(group: Any, as_view: bool) -> tuple[bool, bool, dict[str, Any]]:
    ddp = DDP(net(), process_group=group, gradient_as_bucket_view=as_view)
    weight = ddp.module.layers["l0"].weight
    run_backward(ddp, group)
    before = weight.grad
    seen = before.clone()
    run_backward(ddp, group, 1)
    return weight.grad is before, torch.equal(before, seen), grads(ddp.module)


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_accumulate_where_there_were_some(launch: Launch, as_view: bool) -> None:
    def loss(model: Net, rank: int) -> Tensor:
        first = model(batch(rank)).square().mean()
        return first + model(batch(rank, 1)).square().mean()

    for same, _, found in launch(2, keeps_tensors, as_view):
        assert same is not as_view
        assert_close(found, mean_of(2, loss))


def let_go(group: Any) -> list[bool]:
    # The first forward of a process imports dynamo, and what that raises keeps its frames.
    run_backward(DDP(net(), process_group=group), group)
    model = net()
    ddp = DDP(model, process_group=group)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            run_backward(ddp, group, step)
        grad = weakref.ref(model.layers["l0"].weight.grad)
        wrapper, steps = weakref.ref(ddp), weakref.ref(ddp.steps)
        ddp.zero_grad()
        freed = [grad() is None]
        del ddp
        return [*freed, wrapper() is None, steps() is None]
    finally:
        gc.enable()


def test_wrapper_is_freed_without_the_garbage_collector(launch: Launch) -> None:
    assert launch(2, let_go) == [[True] * 3] * 2


def observed(group: Any) -> list[Any]:
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB)
    with pytest.raises(ValueError, match="no step"):
        ddp.timeline()
    run_backward(ddp, group)
    run_backward(ddp, group)
    timeline = ddp.timeline()
    data = ddp._get_ddp_logging_data()
    return [len(ddp.plan.buckets), type(timeline).__name__, data["iteration"], data["world_size"]]


def test_plan_and_timeline_can_be_looked_at(launch: Launch) -> None:
    found = launch(2, observed)
    assert found[0] == found[1]
    assert found[0][0] > 1
    assert found[0][1:] == ["Timeline", 1, 2]


def is_torchs(rank: int, world_size: int) -> list[Any]:
    ddp = DDP(net())
    twin = copy.deepcopy(ddp)
    for wrapper in (ddp, twin):
        wrapper(batch(rank)).square().mean().backward()
    return [
        isinstance(ddp, StockDDP),
        list(ddp.state_dict()) == [f"module.{n}" for n in net().state_dict()],
        str(grads(ddp.module)) == str(grads(twin.module)),
    ]


def test_wrapper_is_an_instance_of_torchs_class(ranks: RankPool) -> None:
    assert ranks.run(2, is_torchs) == [[True] * 3] * 2


def resumed(group: Any, interrupted: bool) -> list[Any]:
    """Steps under a hook with state; `interrupted` saves all after three, and resumes from that."""

    def wrapped(model: Net) -> Any:
        ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
        ddp.register_comm_hook(None, fddp.hooks.power_sgd(2))
        return ddp

    ddp = wrapped(net())
    for number in range(6):
        if interrupted and number == 3:
            file = io.BytesIO()
            torch.save([ddp.module.state_dict(), ddp.comm_hook_state], file)
            file.seek(0)
            weights, states = torch.load(file, weights_only=True)
            model = Net()
            model.load_state_dict(weights)
            ddp = wrapped(model)
            ddp.comm_hook_state = states
        ddp.zero_grad()
        run_backward(ddp, group, number)
        with torch.no_grad():
            for param in ddp.module.parameters():
                param -= 0.1 * param.grad
    return [p.tolist() for p in ddp.module.parameters()]


def test_state_of_a_hook_is_saved_and_resumed_to_the_same_bits(launch: Launch) -> None:
    straight = launch(2, resumed, False)
    assert straight[0] == straight[1]
    assert launch(2, resumed, True) == straight


def _annotated_bucket(state: Any, bucket: int) -> Any: ...


def _annotated_result(state: Any, bucket: Any) -> Tensor: ...


def hooks_once(group: Any) -> list[str]:
    ddp = DDP(net(), process_group=group)
    ddp.register_comm_hook(None, fddp.hooks.fp16_compress)
    said = []
    for hook in (fddp.hooks.allreduce, len, 5, _annotated_bucket, _annotated_result):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            ddp.register_comm_hook(None, hook)
        said.append(str(caught.value))
    with pytest.raises(fddp.TreeMismatchError):
        ddp.comm_hook_state = (torch.zeros(3),)
    return said


def test_invalid_comm_hooks_are_refused(launch: Launch) -> None:
    for once, no_bucket, uncallable, bucket, result in launch(2, hooks_once):
        assert "can only be called once" in once
        assert "must take a state and a bucket" in no_bucket
        assert "must be callable" in uncallable
        assert "bucket annotation should be dist.GradBucket" in bucket
        assert "return annotation should be" in result


class Wide(nn.Module):
    """Of layers that are a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def compiled(rank: int, world_size: int) -> dict[str, list[int]]:
    """Operations in each graph that dynamo makes of a wrapped module."""
    graphs: dict[str, list[int]] = {}
    model = Wide()
    for name, wrapper in (("stock", StockDDP), ("fddp", DDP)):
        sizes = graphs[name] = []

        def backend(graph: Any, _: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len([node for node in graph.graph.nodes if node.op == "call_module"]))
            return graph

        torch._dynamo.reset()
        ddp = torch.compile(wrapper(copy.deepcopy(model), bucket_cap_mb=1.3), backend=backend)
        ddp(torch.ones(2, 600)).sum().backward()
    return graphs


def test_dynamo_splits_graphs_at_buckets_as_for_stock(ranks: RankPool) -> None:
    for graphs in ranks.run(2, compiled):
        assert len(graphs["stock"]) == 3
        assert graphs["fddp"] == graphs["stock"]


def overflow(group: Any) -> list[bool]:
    model = nn.Linear(WIDTH, 1)
    ddp = DDP(model, process_group=group)
    ddp.register_comm_hook(None, fddp.hooks.error_feedback(fddp.hooks.fp16_compress))
    finite = []
    for scale in (1.0, 1e6, 1.0, 1.0):  # the second is too large for float16
        ddp.zero_grad()
        (ddp(torch.ones(1, WIDTH)).sum() * scale).backward()
        finite.append(bool(torch.isfinite(model.weight.grad).all()))
    return finite


def test_an_overflow_does_not_stay_in_the_state_of_a_hook(launch: Launch) -> None:
    assert launch(2, overflow) == [[True, False, True, True]] * 2


def frees_under_lock(group: Any) -> bool:
    """Gradients that Python references are released while another thread waits for the lock."""
    model = nn.Linear(512, 512)
    ddp = DDP(model, process_group=group)
    seen: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(id(p.grad)))
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            ddp.steps.runner.parameters.hooks.arrival_count()

    ddp(torch.ones(1, 512)).sum().backward()
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            ddp.zero_grad()
            ddp(torch.ones(1, 512)).sum().backward()
    finally:
        stop.set()
        thread.join()
    return len(seen) == 21


def test_no_deadlock_of_lock_and_interpreter(launch: Launch) -> None:
    assert launch(1, frees_under_lock) == [True]
