"""Loops over inputs of unequal length: as many rounds on every rank as on the longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from fddp.core.entrance import entrance
from fddp.sync.engine import any_rank_has_input
from fddp.sync.grad_sync import GradSync
from fddp.sync.rounds import EXHAUSTED, Round


class _Failed(NamedTuple):
    error: BaseException


@entrance
def uneven(batches: Iterable[Any], sync: GradSync, *, every: int = 1) -> Iterator[Any]:
    """Iterate over this rank's batches until the inputs of all ranks are exhausted.

    All ranks have the same number of rounds. After its last batch a rank receives `EXHAUSTED`,
    which a step made by `sync.value_and_grad` accepts as the batch: the loss is None, the rank
    contributes nothing, and the gradients are the mean of the others. Each round must synchronise
    exactly once.

    One batch is fetched ahead: the control word of each step reports if there is another. The only
    additional collective is a small all-gather before the first round.

    Args:
        batches: this rank's batches; may be empty.
        sync: `GradSync` of the steps in the loop's body.
        every: number of micro-batches in a round. With more than one, a round is a tuple of up to
            `every` of them.

    Yields:
        A batch, a tuple of batches if `every` is above 1, or `EXHAUSTED`.

    Raises:
        TypeError: `sync` is no `GradSync`.
        ValueError: `every` is below 1, or the report of a step is read after it.
        UnevenError: a round synchronised more or less often than once.
        Exception: an error of `batches`, in the round of the missing batch; the other ranks raise
            `PeerError`.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.zeros(())}
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         step = sync.value_and_grad(lambda p, x: p["w"] * x)
        ...         batches = [torch.tensor(1.0)] * (1 + group.rank)
        ...         return [step(params, b)[1]["w"].item() for b in fddp.uneven(batches, sync)]
        >>> fddp.loopback(2, train)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    if not isinstance(sync, GradSync):
        raise TypeError(
            f"fddp.uneven expected a GradSync as its second argument, got a {type(sync).__name__}; "
            f"write fddp.uneven(batches, sync)"
        )
    if sync._engine.terms.report == "next":
        raise ValueError(
            "each round of fddp.uneven ends by the report of its step, which report='next' reads "
            "later; make the GradSync with report='now'"
        )
    items = _grouped(batches, every)
    following = next(items)
    more = any_rank_has_input(sync._engine, following is not EXHAUSTED)
    number = 0
    try:
        while more:
            current = following
            following = EXHAUSTED if isinstance(current, _Failed) else next(items)
            turn = Round(number, following is not EXHAUSTED)
            sync._engine.take_round(turn)
            if isinstance(current, _Failed):
                sync._engine.fail_step(current.error)
            yield current
            if turn.synced == 0:
                sync._engine.fail_step(turn.problem())
            more = turn.any_next
            number += 1
    finally:
        sync._engine.take_round(None)


def _grouped(batches: Iterable[Any], every: int) -> Iterator[Any]:
    """Yield the items of rounds, then `EXHAUSTED` forever. An error of `batches` is yielded."""
    try:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        source = iter(batches)
        while group := tuple(islice(source, every)):
            yield group if every > 1 else group[0]
    except (Exception, KeyboardInterrupt) as error:
        yield _Failed(error)
    while True:
        yield EXHAUSTED
