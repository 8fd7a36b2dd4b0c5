"""The device that lags sees wrong orders, memory reused too early, and accesses by the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import fddp
from fddp.native.layout import Layout
from fddp.native.pack import slices
from tests import lag
from tests.lag.rank import slow
from tests.lag.seeds import SEEDS, check_order, on_device
from tests.support.polling import soon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def on_a_side_stream(device: torch.device, *, waits: bool) -> torch.Tensor:
    side = torch.Stream(device=device)
    with side:
        total = torch.full((100,), 1.0, device=device)
        for _ in range(10):
            total = total + 1
    total.record_stream(torch.accelerator.current_stream())
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    return total * 1


def used_on(side: torch.Stream, source: torch.Tensor) -> torch.Tensor:
    """Result of slow work on a side stream, which the caller's has to await."""
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(10):
            result = source * 1
    result.record_stream(torch.accelerator.current_stream())
    return result


def freed_while_in_use(device: torch.device, *, records: bool) -> torch.Tensor:
    side = torch.Stream(device=device)
    source = torch.full((100,), 1.0, device=device)
    result = used_on(side, source)
    if records:
        source.record_stream(side)
    del source
    torch.full((100,), 5.0, device=device)
    torch.accelerator.current_stream().wait_stream(side)
    return result


def recorded_on_a_slice(device: torch.device, *, records_whole: bool) -> torch.Tensor:
    """A slice of fddp, whose memory another deleter frees than the allocator's. CUDA's allocator
    passes over such memory: `recordStream` returns where `get_deleter() != &local_raw_delete`."""
    side = torch.Stream(device=device)
    whole = torch.full((100,), 1.0, device=device)
    layout = Layout(offsets=(0,), shapes=((100,),), strides=((1,),), numel=100)
    (source,) = slices(whole, layout)
    result = used_on(side, source)
    (whole if records_whole else source).record_stream(side)
    del source, whole
    torch.full((100,), 5.0, device=device)
    torch.accelerator.current_stream().wait_stream(side)
    return result


def recorded_on_a_view(device: torch.device, *, records: bool) -> torch.Tensor:
    """A view of torch, which has the storage of the whole: recording it protects the block."""
    side = torch.Stream(device=device)
    source = torch.full((200,), 1.0, device=device)[100:]
    result = used_on(side, source)
    if records:
        source.record_stream(side)
    del source
    torch.full((200,), 5.0, device=device)
    torch.accelerator.current_stream().wait_stream(side)
    return result


def sent_from_pinned_memory(device: torch.device, *, keeps: bool) -> torch.Tensor:
    host = torch.ones(100).pin_memory()
    result = host.to(device, non_blocking=True)
    if not keeps:
        host.fill_(9.0)
    return result


def bucket_of_several_streams(device: torch.device, *, waits: bool) -> torch.Tensor:
    """A bucket that two streams fill, and a third one reduces after it has waited for the last of
    them only: https://github.com/deepspeedai/DeepSpeed/issues/8061."""
    bucket = torch.empty(200, device=device)
    first, last, reducing = (torch.Stream(device=device) for _ in range(3))
    for number, stream in enumerate((first, last)):
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            grad = torch.full((100,), 1.0, device=device)
            for _ in range(10 - 9 * number):
                grad = grad * 1
            bucket[100 * number : 100 * (number + 1)].copy_(grad)
    reducing.wait_stream(last)
    if waits:
        reducing.wait_stream(first)
    with reducing:
        total = bucket * 2
    return _settled(total)


def hook_on_another_stream(device: torch.device, *, waits: bool) -> torch.Tensor:
    """A hook that sends a gradient on a stream of its own, when the operations that accumulate it
    were issued, not done."""
    leaf = torch.full((100,), 1.0, device=device, requires_grad=True)
    sending, sent = torch.Stream(device=device), []

    def send(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        if waits:
            sending.wait_stream(torch.accelerator.current_stream())
        with sending:
            sent.append(leaf.grad * 2)

    leaf.register_post_accumulate_grad_hook(send)
    slow(leaf).sum().backward()
    return _settled(sent[0])


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another stream, once all streams are idle."""
    torch.accelerator.synchronize()
    tensor.record_stream(torch.accelerator.current_stream())
    return tensor


@pytest.mark.parametrize(
    ("run", "name", "expected"),
    [
        (bucket_of_several_streams, "waits", 400.0),
        (hook_on_another_stream, "waits", 200.0),
        (on_a_side_stream, "waits", 1100.0),
        (freed_while_in_use, "records", 100.0),
        (recorded_on_a_slice, "records_whole", 100.0),
        (recorded_on_a_view, "records", 100.0),
        (sent_from_pinned_memory, "keeps", 100.0),
    ],
)
def test_a_missing_order_is_seen(
    lagging: str, run: Callable[..., torch.Tensor], name: str, expected: float
) -> None:
    on_device(check_order, run, name, expected)


def test_the_host_cannot_access_its_memory(lagging: str) -> None:
    program = (
        "import ctypes, torch; from tests import lag; lag.load();"
        "print(ctypes.string_at(torch.ones(1, device='lag').data_ptr(), 1))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -11, ended.stderr


def test_kernels_are_those_of_the_cpu(lagging: str) -> None:
    on_device(check_kernels_are_those_of_the_cpu)


def check_kernels_are_those_of_the_cpu(lagging: torch.device) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)

    def results(x: Any) -> list[torch.Tensor]:
        y = torch.zeros(2, 2, device=x.device)
        torch.add(x[:2, :2], 1, out=y)
        return [
            *(x.t() @ x, x.sum(0), x[:, 1::2].contiguous(), x.sort(1)[1], torch.cat([x, x + 1])),
            *(x[x > 0], x.to(torch.complex64).conj() * 2, x.half().float(), y.add_(x[0, 0])),
            *torch._foreach_mul([x, x[0]], 2.0),
            torch.nn.functional.gelu(x).var(dim=1),
        ]

    for ours, expected in zip(results(x.to(lagging)), results(x), strict=True):
        assert ours.device == lagging
        assert torch.equal(ours.cpu(), expected)


def test_operations_are_counted_as_those_of_cuda(lagging: str) -> None:
    on_device(check_counts)


def check_counts(lagging: torch.device) -> None:
    x = torch.ones(100, device=lagging)
    parts = [torch.ones(1, device=lagging) for _ in range(100)]

    def counts(call: Callable[[], object]) -> dict[str, int]:
        lag.load().take_counts()
        call()
        found: dict[str, int] = lag.load().take_counts()
        return found

    assert counts(lambda: x * 2) == {"kernels": 1, "bytes": 800}
    assert counts(lambda: x.mul_(2)) == {"kernels": 1, "bytes": 800}
    assert counts(x.zero_) == {"kernels": 1, "bytes": 400}
    assert counts(lambda: torch.mul(x, 2, out=x)) == {"kernels": 1, "bytes": 800}
    assert counts(lambda: torch.ones(100, device=lagging).copy_(x)) == {
        "kernels": 1,
        "copies": 1,
        "bytes": 1200,
    }
    assert counts(lambda: x[:50].view(5, 10).t()) == {}
    # A launch of a multi-tensor operation takes at most 110 tensors of one list, or 64 of two.
    assert counts(lambda: torch._foreach_mul_(parts, 2)) == {"kernels": 1, "bytes": 800}
    assert counts(lambda: torch._foreach_copy_(parts, [*x])) == {"kernels": 2, "bytes": 800}
    side = torch.Stream(device=lagging)
    assert counts(lambda: side.wait_stream(torch.accelerator.current_stream())) == {
        "events": 1,
        "waits": 1,
    }


def test_random_numbers_of_all_devices_are_restored(lagging: str) -> None:
    on_device(check_random_numbers)


def check_random_numbers(lagging: torch.device) -> None:
    with (
        mock.patch.object(torch.random, "fork_rng", return_value=nullcontext()) as forked,
        fddp.virtual_rng(step=0, virtual_rank=0),
    ):
        pass
    assert [*forked.call_args.args[0]] == [*range(torch.accelerator.device_count())]
    assert forked.call_args.kwargs == {"device_type": lagging.type}


def test_two_devices(lagging: str) -> None:
    on_device(check_two_devices)


def check_two_devices(lagging: torch.device) -> None:
    for seed in SEEDS:
        lag.load().seed(seed)
        there = (torch.ones(100, device=lagging) * 3).to("lag:1") + 1
        assert (there.to(lagging) * 2).sum().item() == 800.0


def test_a_build_that_was_killed_delays_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, folder = tmp_path / "c++", tmp_path / "lag"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(lag, "BUILD", folder)
    compiler.write_text("#!/bin/sh\nsleep 60")
    compiler.chmod(0o755)
    program = (
        f"from pathlib import Path; from tests import lag; lag.BUILD = Path({str(folder)!r});"
        "lag.build()"
    )
    builds = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    assert soon(lambda: [*folder.glob("unfinished-*/whole.cpp")])
    os.killpg(builds.pid, signal.SIGKILL)
    builds.wait()
    compiler.write_text("#!/bin/sh\nwhile [ $1 != -o ]; do shift; done; echo built > $2")
    built = lag.build()
    assert built.read_text() == "built\n"
    assert {path.name for path in folder.iterdir()} == {built.name, "lock"}
