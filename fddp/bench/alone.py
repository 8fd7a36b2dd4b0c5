"""What needs one process: planning, proving, simulating, packing. `python -m fddp.bench.alone`."""

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
from fddp.build import make_schedule
from fddp.check import check_schedule
from fddp.cost import CostModel
from fddp.layout import Layout
from fddp.optimal import Target, optimal_plan
from fddp.pack import pack_, unpack_
from fddp.plan import BucketPlan, LeafSpec, assign_buckets, plan_leaves
from fddp.planning import plan_buckets
from fddp.progress import Stages
from fddp.simulate import Jitter, simulate
from fddp.topology import Topology

_LEAVES = 100_000
_CAPS_BYTES = (1 << 20, 25 << 20)
_ROUNDS = 9

Calls = Mapping[str, Callable[[], object]]


def main() -> None:
    """Measures and prints; about half a minute."""
    torch.set_num_threads(1)
    cases = {
        f"planning {_LEAVES} leaves": _planning(),
        "1,000 buckets: proving, simulating, planning": _schedules(),
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


def _schedules() -> Calls:
    leaves = [LeafSpec(f"p{i:04}", (1000,), "float32") for i in range(2000)]
    plan = plan_leaves(leaves, order=range(2000), caps_bytes=[5000])
    near, far = Topology(host=2, local=4), Topology(host=12_500, local=8)
    many = Topology(host=1250, local=8)
    on_near, on_far, on_many = (
        make_schedule(plan, topology, algorithm="hierarchical") for topology in (near, far, many)
    )
    flat = make_schedule(plan, Topology(world=10_000))
    cost, jitter = CostModel(1e-6, 1e-10, "tree"), Jitter(spread=0.05)
    ready_s = [1e-4 * (i + 1) for i in range(2000)]
    return {
        "check_schedule, 8 ranks": lambda: check_schedule(on_near),
        "check_schedule, 100,000 ranks": lambda: check_schedule(on_far),
        "simulate 10,000 ranks, jitter, flat": lambda: simulate(flat, cost, ready_s, jitter=jitter),
        "simulate 10,000 ranks, jitter, two axes": lambda: simulate(
            on_many, cost, ready_s, jitter=jitter
        ),
        "optimal plan, 2,000 leaves": lambda: optimal_plan(
            tuple(leaves), range(2000), ready_s, Target(cost, many)
        ),
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
