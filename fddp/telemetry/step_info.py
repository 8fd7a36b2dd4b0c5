"""What `with_info=True` tells of a step."""

from __future__ import annotations

from dataclasses import dataclass

from fddp.core.protocol.readiness import Action
from fddp.core.timeline import StepTimes


@dataclass(frozen=True)
class Trace:
    """What the runtime did, in order, in the terms of `fddp.core.protocol.readiness`.

    Attributes:
        sequence: buckets in launch order.
        bucket_of: for each differentiated leaf its bucket, or -1.
        expected: for each differentiated leaf, how many gradients were waited for.
        events: a leaf's number where a gradient arrived, an `Action` where the runtime acted.
    """

    sequence: tuple[int, ...]
    bucket_of: tuple[int, ...]
    expected: tuple[int, ...]
    events: tuple[int | Action, ...]


@dataclass(frozen=True)
class SyncInfo:
    """One synchronisation as all ranks saw it. All but `timeline` and `trace` agree on all ranks.

    Where ranks hold different results, `grad_norm` is of this rank's, and so is what `all_finite`
    tells of results: of shards (`reduce_scatter`), and under a `fddp.hooks.TorchHook` that does not
    give all ranks the same. With `nonfinite="skip"` or "raise" all ranks agree on `all_finite` in
    any case.

    Attributes:
        step: number of this synchronisation, from 0.
        world_size: number of ranks in the group.
        active: number of ranks that contributed (weight above zero).
        total_weight: sum of weights over ranks.
        used: paths of the leaves that at least one rank used, in canonical order.
        unused: paths of the reduced leaves that no rank used; their gradients are None.
        grad_norm: L2 norm of the synchronised gradients (leaves kept local are left out).
        all_finite: whether every contribution and the result are free of NaN and infinity.
        repaired: buckets that were reduced a second time.
        transport: name of the transport.
        transport_reason: why it is this one.
        timeline: when each bucket was ready, launched and done on this rank.
        trace: what the runtime did on this rank; empty for `sync(grads)`.
        skipped: whether all ranks left the step out, because a number was not finite and
            `nonfinite="skip"` was asked for; `grad_norm` is then NaN.
    """

    step: int
    world_size: int
    active: int
    total_weight: float
    used: tuple[str, ...]
    unused: tuple[str, ...]
    grad_norm: float
    all_finite: bool
    repaired: tuple[int, ...]
    transport: str
    transport_reason: str
    timeline: StepTimes
    trace: Trace
    skipped: bool = False
