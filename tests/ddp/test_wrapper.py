"""`fddp.DistributedDataParallel`: gradients of a wrapped module, its hooks, what it shows."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from fddp.core.timeline import Timeline
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    WIDTH,
    Net,
    net,
    run_backward,
)


def test_plan_and_timeline_can_be_looked_at() -> None:
    def run(group: Any) -> int:
        ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB)
        with pytest.raises(ValueError, match="no step"):
            ddp.timeline()
        run_backward(ddp, group)
        run_backward(ddp, group)
        assert isinstance(ddp.timeline(), Timeline)
        data = ddp._get_ddp_logging_data()
        assert (data["iteration"], data["world_size"]) == (1, 2)
        return len(ddp.plan.buckets)

    first, second = fddp.loopback(2, run)
    assert first == second > 1


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


def test_state_of_a_hook_is_saved_and_resumed_to_the_same_bits() -> None:
    straight = fddp.loopback(2, resumed, False)
    assert straight[0] == straight[1]
    assert fddp.loopback(2, resumed, True) == straight


def _annotated_bucket(state: Any, bucket: int) -> Any: ...


def _annotated_result(state: Any, bucket: Any) -> Tensor: ...


def test_invalid_comm_hooks_are_refused() -> None:
    def run(group: Any) -> None:
        ddp = DDP(net(), process_group=group)
        ddp.register_comm_hook(None, fddp.hooks.fp16_compress)
        for hook, text in (
            (fddp.hooks.allreduce, "can only be called once"),
            (len, "must take a state and a bucket"),
            (5, "must be callable"),
            (_annotated_bucket, "bucket annotation should be dist.GradBucket"),
            (_annotated_result, "return annotation should be"),
        ):
            with pytest.raises((RuntimeError, TypeError, ValueError), match=text):
                ddp.register_comm_hook(None, hook)
        with pytest.raises(fddp.TreeMismatchError):
            ddp.comm_hook_state = (torch.zeros(3),)

    fddp.loopback(2, run)


def test_an_overflow_does_not_stay_in_the_state_of_a_hook() -> None:
    def run(group: Any) -> list[bool]:
        model = nn.Linear(WIDTH, 1)
        ddp = DDP(model, process_group=group)
        ddp.register_comm_hook(None, fddp.hooks.error_feedback(fddp.hooks.fp16_compress))
        finite = []
        for scale in (1.0, 1e6, 1.0, 1.0):  # the second is too large for float16
            ddp.zero_grad()
            (ddp(torch.ones(1, WIDTH)).sum() * scale).backward()
            finite.append(bool(torch.isfinite(model.weight.grad).all()))
        return finite

    assert fddp.loopback(2, run) == [[True, False, True, True]] * 2


def test_no_deadlock_of_lock_and_interpreter() -> None:
    """Gradients that Python references are released while another thread waits for the lock."""

    def run(group: Any) -> int:
        model = nn.Linear(512, 512)
        ddp = DDP(model, process_group=group)
        seen: list[int] = []
        model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(id(p.grad)))
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                ddp.steps.parameters.hooks.arrival_count()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for _ in range(20):
                ddp.zero_grad()
                ddp(torch.ones(1, 512)).sum().backward()
        finally:
            stop.set()
            thread.join()
        return len(seen)

    assert fddp.loopback(1, run) == [20]
