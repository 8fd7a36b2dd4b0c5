"""Graphs of the device that lags replay what was captured, and forbid what CUDA's forbid."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests import lag
from tests.lag.rank import on_two_ranks
from tests.lag.seeds import check_order, on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def capture(device: torch.device, mode: Any = "default") -> Iterator[torch.accelerator.Graph]:
    graph = torch.accelerator.Graph(capture_error_mode=mode)
    with torch.Stream(device=device):
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


def on_a_side_stream(device: torch.device, *, waits: bool) -> torch.Tensor:
    """A captured fork, which only its end joins if it does not wait."""
    x, side = torch.ones(100, device=device), torch.Stream(device=device)
    late = torch.zeros(100, device=device)
    with capture(device) as graph:
        stream = torch.accelerator.current_stream()
        side.wait_stream(stream)
        with side:
            for _ in range(10):
                x.add_(1)
        if waits:
            stream.wait_stream(side)
        late.copy_(x)
        stream.wait_stream(side)
    graph.replay()
    graph.replay()
    return late


def freed_in_a_capture(device: torch.device, *, keeps: bool) -> torch.Tensor:
    """Memory of a capture, which serves nobody else. A tensor that was freed is overwritten."""
    x = torch.ones(100, device=device)
    with capture(device) as graph:
        y = x * 2
        z = y * 3
        if not keeps:
            del y
    graph.replay()
    others = [torch.full((100,), 7.0, device=device) for _ in range(8)]
    graph.replay()
    assert all((other == 7).all() for other in others)
    result = y if keeps else z * float("nan")
    result.record_stream(torch.accelerator.current_stream())
    return result


@pytest.mark.parametrize(
    ("run", "name", "expected"),
    [(on_a_side_stream, "waits", 2100.0), (freed_in_a_capture, "keeps", 200.0)],
)
def test_a_missing_order_is_seen(
    lagging: str, run: Callable[..., torch.Tensor], name: str, expected: float
) -> None:
    on_device(check_order, run, name, expected)


def test_memory_of_a_graph_that_has_ended_serves_others_after_its_last_replay(lagging: str) -> None:
    on_device(check_ended)


def check_ended(lagging: torch.device) -> None:
    for seed in range(20):
        lag.load().seed(seed)
        stream = torch.Stream(device=lagging)
        x = torch.ones(100, device=lagging)
        torch.accelerator.synchronize()
        graph = torch.accelerator.Graph()
        with stream:
            graph.capture_begin()
            y = x * 2
            for _ in range(10):
                y = y * 1
            graph.capture_end()
        graph.replay()
        del y, graph
        with stream:
            others = [torch.full((100,), 7.0, device=lagging) for _ in range(20)]
            assert all((other == 7).all() for other in others)


def outside(device: torch.device) -> None:
    event = torch.Event(device)
    event.record()
    with capture(device):
        torch.accelerator.current_stream().wait_event(event)


def unjoined(device: torch.device) -> None:
    side = torch.Stream(device=device)
    with capture(device):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            torch.ones(3, device=device)


def by_default_stream(device: torch.device) -> None:
    default = torch.accelerator.current_stream()
    with capture(device):
        default.wait_stream(torch.accelerator.current_stream())


def after_capture(device: torch.device) -> None:
    event = torch.Event(device)
    with capture(device):
        event.record()
    event.wait()


def in_capture(call: Callable[[torch.Tensor], object], mode: str, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with capture(device, mode):
        call(x)


def query(x: torch.Tensor) -> None:
    event = torch.Event(x.device)
    with torch.Stream(device=x.device):
        event.record()
    event.query()


def query_of_a_captured_event(x: torch.Tensor) -> None:
    event = torch.Event(x.device)
    event.record()
    event.query()


REFUSED: dict[str, tuple[Callable[[torch.device], None], str]] = {
    "outside": (outside, "an event from outside of the capture"),
    "unjoined": (unjoined, "work that was not joined"),
    "default stream": (by_default_stream, "the default stream can't be captured"),
    "after": (after_capture, "an event that was recorded in a capture"),
}
HOST: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "item is not permitted"),
    "copy": (lambda x: x.cpu(), "copy to the host is not permitted"),
    "pageable": (lambda x: torch.ones(3).to(x.device), "not pinned"),
    "synchronize": (lambda x: torch.accelerator.synchronize(), "is not permitted"),
    "query": (query, "query of an event is not permitted"),
    "random": (lambda x: x.normal_(), "is not permitted"),
}


def test_a_capture_forbids_what_cuda_forbids(lagging: str) -> None:
    on_device(check_forbidden)


def check_forbidden(lagging: torch.device) -> None:
    for run, text in REFUSED.values():
        with pytest.raises(RuntimeError, match=text):
            run(lagging)
    for call, text in HOST.values():
        with pytest.raises(RuntimeError, match=f"the capture has failed: .*{text}"):
            in_capture(call, "default", lagging)
    # Of streams outside of the capture, "relaxed" permits it.
    in_capture(query, "relaxed", lagging)
    with pytest.raises(RuntimeError, match="recorded in a capture"):
        in_capture(query_of_a_captured_event, "relaxed", lagging)
    with capture(lagging) as graph:
        pass
    graph.replay()


def collectives_on_rank(rank: int, world_size: int, backend: str) -> None:
    lag.load()
    device = torch.device("lag", 0)
    group = dist.new_group(backend=backend)
    x, eager = (torch.full((50,), 1.0 + rank, device=device) for _ in range(2))
    dist.all_reduce(eager, group=group)
    with capture(device) as graph:
        y = x * 2
        dist.all_reduce(y, group=group)
        y += 1
    for number in range(3):
        x.fill_(rank + number)
        eager.fill_(number)
        dist.all_reduce(eager, group=group)
        graph.replay()
        assert (y == 4 * number + 3).all()
        assert (eager == 2 * number).all()
    with pytest.raises(RuntimeError, match="query of an event"), capture(device):
        dist.all_reduce(x, group=group, async_op=True).is_completed()


@pytest.mark.parametrize("backend", ["lag:lag", "lag:nccl"])
def test_collectives_are_replayed_in_the_order_of_others(lagging: str, backend: str) -> None:
    on_two_ranks(collectives_on_rank, backend)
