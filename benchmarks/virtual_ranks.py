"""Steps over virtual ranks beside deterministic ones: `python -m benchmarks.virtual_ranks`.

With as many virtual ranks as ranks, both compute and send the same. With more, a step has several
micro-batches, and stands beside a deterministic step that accumulates as many. Bytes are those that
a rank sends of its gradients, by the schedule: partial sums to the owners of shards, and its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Ratio, Series, holding_results, measure, ratio
from benchmarks.models import WORKLOADS, Functional, Workload
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.schedule.schedule import Schedule
from fddp.core.text import counted, size_text

_MODELS = tuple(WORKLOADS[name] for name in ("mlp", "small", "transformer"))
_RANKS = (2, 3, 4)
_BOUND = 1.3
_WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """One model on some ranks, over one number of virtual ranks.

    Attributes:
        model: title of the model.
        ranks, virtual_ranks: their numbers.
        transport: transport of the gradients.
        virtual, deterministic: steps of each.
        sent_bytes, deterministic_bytes: most that a rank sends in a step.
    """

    model: str
    ranks: int
    virtual_ranks: int
    transport: str
    virtual: Series
    deterministic: Series
    sent_bytes: int
    deterministic_bytes: int

    @property
    def added(self) -> Ratio:
        """Times of steps over virtual ranks, as multiples of the deterministic ones."""
        return ratio(self.virtual, self.deterministic)


def main() -> None:
    """Measures and prints; about two minutes."""
    args = options(__doc__, rounds=7).parse_args()
    cases = [case for ranks in _RANKS for case in launch(ranks, run_rank, args.rounds)[0]]
    publish([_table(cases)], figures(cases), {"cases": _values(cases)}, args.json)


def run_rank(rounds: int, models: Sequence[Workload] = _MODELS) -> list[Case]:
    """All models on the ranks of the default group; the first also with more virtual ranks."""
    ranks = dist.get_world_size()
    cases = []
    with Stages(shown=True) as stages:
        for number, workload in enumerate(models):
            more = (2 * ranks - 1, 2 * ranks) if number == 0 else ()
            for count in (ranks, *more):
                stages.begin(f"{workload.title}, {counted(count, 'virtual rank')}", rounds)
                cases.append(_case(workload, count, rounds, stages.advance))
    return cases


def _case(workload: Workload, count: int, rounds: int, after_round: Callable[[], None]) -> Case:
    functional = workload.to_function(workload.build())
    with ExitStack() as stack:
        virtual = stack.enter_context(fddp.GradSync(functional.params, virtual_ranks=count))
        plain = stack.enter_context(fddp.GradSync(functional.params, deterministic=True))
        batches = [workload.batch(number) for number in virtual.carried_ranks]
        steps = holding_results(
            {
                "virtual": _virtual_step(virtual, functional, batches),
                "deterministic": _plain_step(plain, functional, batches),
            }
        )
        for step in steps.values():
            for _ in range(_WARM_UP):
                step()
        series = measure(steps, rounds, max(3, workload.steps // 2), after_round)
        return Case(
            workload.title,
            dist.get_world_size(),
            count,
            virtual.transport,
            series["virtual"],
            series["deterministic"],
            max(sent_bytes(virtual.schedule)),
            max(sent_bytes(plain.schedule)),
        )


def _virtual_step(
    sync: fddp.GradSync, functional: Functional, batches: list[Tensor]
) -> Callable[[], Any]:
    step, own = sync.value_and_grad(functional.loss_fn), sync.virtual_batches(batches)
    return lambda: step(functional.params, own)


def _plain_step(
    sync: fddp.GradSync, functional: Functional, batches: list[Tensor]
) -> Callable[[], Any]:
    """A step that accumulates the gradients of all batches but the last, as torch does."""
    step = sync.value_and_grad(functional.loss_fn)

    def accumulating() -> Any:
        earlier = None
        if len(batches) > 1:
            leaves = fddp.tree_map(lambda leaf: leaf.detach().requires_grad_(), functional.params)
            for batch in batches[:-1]:
                torch.autograd.backward(functional.loss_fn(leaves, batch))
            total = fddp.tree_map(lambda leaf: leaf.grad, leaves)
            earlier = (total, float(len(batches) - 1))
        return step(functional.params, batches[-1], accumulated=earlier)

    return accumulating


def sent_bytes(schedule: Schedule) -> list[int]:
    """Return the bytes of gradients that each rank sends in a step of a deterministic schedule.

    Example:
        >>> plan = fddp.plan_buckets({"w": torch.zeros(12)})
        >>> [sent_bytes(fddp.make_schedule(plan, 3, virtual_ranks=n)) for n in (3, 8)]
        [[64, 64, 64], [64, 96, 96]]
    """
    ranks = schedule.topology.world_size
    whole = sum(
        numel * ITEM_BYTES[dtype]
        for numel, dtype in zip(schedule.buffer_numels, schedule.wire_dtypes, strict=True)
    )
    sums = (1,) * ranks if schedule.virtual is None else schedule.virtual.sent
    return [whole * (ranks - 1) // ranks * (1 + own) for own in sums]


def figures(cases: list[Case]) -> list[Figure]:
    """Figures with a bound: as many virtual ranks as ranks."""
    return [
        at_most(_BOUND, "step over virtual ranks / deterministic", _where(case), case.added)
        for case in cases
        if case.virtual_ranks == case.ranks
    ]


def _where(case: Case) -> str:
    return f"{case.model}, {counted(case.ranks, 'rank')}, {case.transport}"


def _table(cases: list[Case]) -> Table:
    table = numbers_table(
        "Steps over virtual ranks",
        ("virtual ranks", "ms", "deterministic, ms", "ratio", "sends", "deterministic"),
        caption="median of rounds (lowest-highest round); most bytes that a rank sends in a step",
    )
    for case in cases:
        times_ms = (f"{s.median_s * 1e3:.1f}" for s in (case.virtual, case.deterministic))
        sizes = map(size_text, (case.sent_bytes, case.deterministic_bytes))
        table.add_row(_where(case), str(case.virtual_ranks), *times_ms, case.added.text(), *sizes)
    return table


def _values(cases: list[Case]) -> list[dict[str, Any]]:
    return [
        {
            "model": case.model,
            "ranks": case.ranks,
            "virtual_ranks": case.virtual_ranks,
            "transport": case.transport,
            "virtual_s": case.virtual.rounds_s,
            "deterministic_s": case.deterministic.rounds_s,
            "sent_bytes": case.sent_bytes,
            "deterministic_bytes": case.deterministic_bytes,
        }
        for case in cases
    ]


if __name__ == "__main__":
    main()
