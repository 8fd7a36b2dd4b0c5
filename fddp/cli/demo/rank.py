"""Program of each rank of the demo."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

import fddp
from fddp.cli.demo.compare import ROUNDS, difference, difference_between_ranks, step_times
from fddp.cli.demo.data import load, own_batches
from fddp.cli.demo.model import Params, init_params, score
from fddp.cli.demo.report import Report
from fddp.cli.demo.train import Trained, train, train_alone
from fddp.cli.progress import Stages

_FIRST_STEPS = 2  # the buckets are not yet in their final order


class Options(NamedTuple):
    """Options of the command line."""

    ranks: int
    epochs: int
    bucket_cap_mb: float  # also of the first bucket
    train: Callable[..., Trained] = train  # tests pass a faulty one


def run_rank(options: Options) -> Report | None:
    """Train, compare, and return the report on rank 0. A collective call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cap_mb = options.bucket_cap_mb
    data, held_out = load()
    initial = fddp.broadcast(init_params(seed=rank))
    with (
        fddp.GradSync(initial, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb) as sync,
        Stages(shown=rank == 0) as stages,
    ):
        stages.begin("training on all ranks", options.epochs)

        def after_epoch(params: Params) -> None:
            if rank == 0:
                loss, accuracy = score(params, held_out)
                stages.advance()
                stages.note(f"loss {loss:.4f}, accuracy {accuracy:.1%}")

        params, infos = options.train(initial, data, sync, options.epochs, after_epoch)
        between_ranks = difference_between_ranks(params)

        stages.begin("timing steps beside DDP", ROUNDS)
        batch = next(own_batches(data, 0, rank, ranks))
        times = step_times(params, batch, sync, cap_mb, stages.advance)
        # No collectives follow, so the other ranks need not wait.
        if rank != 0:
            return None

        stages.begin("training in one process", options.epochs)
        alone = train_alone(initial, data, ranks, options.epochs, stages.advance)

        hidden = [info.timeline.hidden_fraction for info in infos[_FIRST_STEPS:] or infos]
        return Report(
            ranks=ranks,
            epochs=options.epochs,
            images=data.size,
            steps=len(infos),
            transport=sync.transport,
            score=score(params, held_out),
            between_ranks=between_ranks,
            from_one_process=difference(params, alone),
            times=times,
            bucket_bytes=tuple(bucket.nbytes for bucket in infos[-1].timeline.buckets),
            hidden=statistics.median(hidden),
        )
