"""What needs one process: planning 100,000 leaves, and packing. `python -m fddp.bench.alone`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fddp.bench.measure import Series, ratio
from fddp.layout import Layout
from fddp.pack import pack_, unpack_
from fddp.plan import BucketPlan, assign_buckets
from fddp.planning import plan_buckets
from fddp.progress import Stages

_LEAVES = 100_000
_CAPS_BYTES = (1 << 20, 25 << 20)
_ROUNDS = 9

Calls = Mapping[str, Callable[[], object]]


def main() -> None:
    """Measures and prints; about half a minute."""
    torch.set_num_threads(1)
    cases = {
        f"planning {_LEAVES} leaves": _planning(),
        "packing 10,000 leaves of 32 floats, scaled": _small(),
        "packing 64 MiB in 16 leaves, scaled": _large(),
    }
    results = {}
    with Stages(shown=True) as stages:
        for title, calls in cases.items():
            stages.begin(title, _ROUNDS)
            results[title] = _in_turn(calls, stages.advance)
    for title, series in results.items():
        Console().print(_table(title, series))


def _planning() -> Calls:
    tensors = [torch.empty(3, 4, device="meta") for _ in range(_LEAVES)]
    order = list(range(_LEAVES))
    flat = {f"layers.{i}.weight": tensor for i, tensor in enumerate(tensors)}
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    nested = {f"layer{i}": {"weight": w, "bias": b} for i, (w, b) in enumerate(pairs)}
    leaves = plan_buckets(flat).leaves
    text = plan_buckets(dict(list(flat.items())[:10_000])).to_json()
    sparse = [False] * _LEAVES
    return {
        "torch's assignment, C++": lambda: dist._compute_bucket_assignment_by_size(
            tensors, list(_CAPS_BYTES), sparse, order
        ),
        "assign_buckets": lambda: assign_buckets(leaves, order, _CAPS_BYTES),
        "plan_buckets, flat dict": lambda: plan_buckets(flat),
        "plan_buckets, 50,000 dicts of 2": lambda: plan_buckets(nested),
        "JSON both ways, 10,000 leaves": lambda: BucketPlan.from_json(text).to_json(),
    }


def _small() -> Calls:
    sources, layout, buffer, views = _bucket(10_000, 32)

    def foreach() -> None:
        torch._foreach_copy_(views, sources)
        torch._foreach_mul_(views, 0.5)

    return {
        "torch._foreach copy and mul": foreach,
        "pack_": lambda: pack_(buffer, layout, sources, 0.5),
        "unpack_": lambda: unpack_(sources, layout, buffer, 0.5),
    }


def _large() -> Calls:
    sources, layout, buffer, _ = _bucket(16, 1 << 20)
    flat = torch.randn(buffer.numel())
    return {
        "one copy": lambda: buffer.copy_(flat),
        "pack_": lambda: pack_(buffer, layout, sources, 0.5),
        "unpack_": lambda: unpack_(sources, layout, buffer, 0.5),
    }


def _bucket(count: int, numel: int) -> tuple[list[Tensor], Layout, Tensor, list[Tensor]]:
    layout = Layout(
        offsets=tuple(range(0, count * numel, numel)),
        shapes=((numel,),) * count,
        strides=((1,),) * count,
        numel=count * numel,
    )
    buffer = torch.empty(count * numel)
    sources = [torch.randn(numel) for _ in range(count)]
    return sources, layout, buffer, list(torch.split(buffer, numel))


def _in_turn(calls: Calls, after_round: Callable[[], None]) -> dict[str, Series]:
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            call()
            times_s[name].append(statistics.median(_timed(call) for _ in range(3)))
        after_round()
    return {name: Series(tuple(rounds_s)) for name, rounds_s in times_s.items()}


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _table(title: str, series: dict[str, Series]) -> Table:
    base = next(iter(series))
    table = Table(title=title, caption="median of rounds; ratio round by round (lowest-highest)")
    for heading in ("", "ms", f"/ {base}"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, times in series.items():
        median, low, high = ratio(times, series[base])
        table.add_row(name, f"{times.median_s * 1e3:.3g}", f"{median:.2f} ({low:.2f}-{high:.2f})")
    return table


if __name__ == "__main__":
    main()
