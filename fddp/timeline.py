"""When the buckets of one step became ready, left, and were done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of one step; seconds on the clock of `time.perf_counter`.

    Attributes:
        bucket: index in the plan that the step ran with.
        nbytes: bytes that the bucket holds on the wire.
        ready_s: all its gradients were there (or backward had ended).
        launch_s: its collective was handed to the transport.
        done_s: its collective had finished.
    """

    bucket: int
    nbytes: int
    ready_s: float
    launch_s: float
    done_s: float


@dataclass(frozen=True)
class StepTimes:
    """One step; seconds on the clock of `time.perf_counter`.

    Attributes:
        buckets: one record for each bucket, in plan order.
        backward_start_s: backward began.
        backward_end_s: backward ended; what runs after it is exposed.
        end_s: the synchronised gradients were there.
    """

    buckets: tuple[BucketTimes, ...]
    backward_start_s: float
    backward_end_s: float
    end_s: float

    @property
    def exposed_s(self) -> float:
        """Time between the end of backward and the synchronised gradients."""
        return self.end_s - self.backward_end_s

    @property
    def hidden_fraction(self) -> float:
        """Share of the time with a collective in flight that lies within backward; 0 with none.

        Example:
            >>> times = BucketTimes(0, 4, ready_s=1.0, launch_s=1.0, done_s=3.0)
            >>> StepTimes((times,), 0.0, backward_end_s=2.5, end_s=3.0).hidden_fraction
            0.75
        """
        total = hidden = 0.0
        for start_s, end_s in _union([(b.launch_s, b.done_s) for b in self.buckets]):
            total += end_s - start_s
            hidden += max(0.0, min(end_s, self.backward_end_s) - start_s)
        return hidden / total if total > 0.0 else 0.0


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged
