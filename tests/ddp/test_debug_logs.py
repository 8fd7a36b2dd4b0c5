"""Messages of the reducer, as torch logs them under TORCH_DISTRIBUTED_DEBUG."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import fddp
from tests.support.wrapped_net import DDP, TINY_CAP_MB, batch, net

REBUILT = "Reducer buckets have been rebuilt in this iteration."


@pytest.fixture
def debug(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    caplog.set_level("INFO", "fddp")
    yield caplog
    dist.set_debug_level(before)


def steps(group: Any, through: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    ddp = DDP(net(), process_group=group, bucket_cap_mb=TINY_CAP_MB, **options)
    for layers in through:
        ddp(batch(0), through=layers).sum().backward()


def test_steps_of_a_static_graph_are_logged(debug: pytest.LogCaptureFixture) -> None:
    fddp.loopback(1, steps, [(0, 2), (0, 2)], {"static_graph": True})
    cap = int(TINY_CAP_MB * 2**20)
    assert debug.messages == [
        f"Reducer initialized with bucket_bytes_cap: {cap} first_bucket_bytes_cap: {cap}",
        REBUILT,
        f"3 buckets rebuilt with size limits: {cap}, {cap}, {cap} bytes.",
        "[Rank 0]: Parameter(s) (in the format of {param_name, index}): {layers.l1.weight,2}"
        "{layers.l1.bias,3} is(are) unused during first iteration. Since static_graph=True is "
        "enabled for DDP, we expect this set of unused parameters to remain consistent on this "
        "rank throughout the training.",
        "[Rank 0]: Parameter layers.l1.weight at index 2 is marked as unused.",
        "[Rank 0]: Parameter layers.l1.bias at index 3 is marked as unused.",
    ]


def test_unused_parameters_are_logged(debug: pytest.LogCaptureFixture) -> None:
    fddp.loopback(1, steps, [(0, 1, 2), (0, 2)], {"find_unused_parameters": False})
    assert debug.messages[-2:] == [
        "[Rank 0]: Parameter layers.l1.weight at index 2 is marked as unused.",
        "[Rank 0]: Parameter layers.l1.bias at index 3 is marked as unused.",
    ]


def test_without_debugging_only_the_rebuild_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fddp")
    fddp.loopback(1, steps, [(0, 2)], {})
    assert caplog.messages == [REBUILT]


def test_a_built_in_hook_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def register(group: Any) -> None:
        ddp = DDP(net(), process_group=group)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    caplog.set_level("INFO", "fddp")
    fddp.loopback(1, register)
    assert caplog.messages[-1] == "Built-in communication hook FP16_COMPRESS is registered."


def test_unneeded_detection_is_warned_of_once() -> None:
    """At the first forward pass after a step of all parameters, unless the graph is static."""

    def warned(group: Any, through: list[tuple[int, ...]], options: dict[str, Any]) -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            steps(group, through, {"find_unused_parameters": True, **options})
        return sum("did not find any unused parameters" in str(one.message) for one in found)

    some, all_of_them = (0, 2), (0, 1, 2)
    assert fddp.loopback(1, warned, [some, all_of_them, some, all_of_them, some], {}) == [1]
    assert fddp.loopback(1, warned, [some, some], {}) == [0]
    assert fddp.loopback(1, warned, [all_of_them] * 3, {"static_graph": True}) == [0]
