"""Logger of a wrapped module; also `ddp.logger`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fddp.core.plan.plan import BucketPlan
from fddp.ddp.logging_data import SAMPLE_RATE, Entry, Log, Step, is_sampled
from fddp.telemetry.step_info import SyncInfo


class Recorder:
    """Records steps, errors and settings.

    Attributes:
        log: logged data; None until a plan is known.
        sample_rate: period of recorded steps after the first ten.
        keeps_all: True if all other steps are measured, too, without logging them.
        iterations: number of forward passes that took part in synchronisation.
        forward_start_s: start of the last forward, on the clock of `time.perf_counter`.
        info: the last measured step.
    """

    def __init__(self, sample_rate: int = SAMPLE_RATE) -> None:
        self.log: Log | None = None
        self.sample_rate = sample_rate
        self.keeps_all = False
        self.iterations = 0
        self.forward_start_s = time.perf_counter()
        self.info: SyncInfo | None = None

    def wants(self, step: int) -> bool:
        """Return True if a step is measured. Steps count from 0."""
        return self.keeps_all or self._logs(step)

    def record(self, info: SyncInfo, plan: BucketPlan, *, has_rebuilt: bool, reduced: int) -> None:
        """Record a step that reduced `reduced` buckets of `plan`."""
        self.info = info
        if self.log is None or not self._logs(info.step):
            return
        self.log = self.log.recorded(
            Step(
                iteration=info.step,
                plan=plan,
                has_rebuilt=has_rebuilt,
                times=info.timeline,
                forward_start_s=self.forward_start_s,
                clock_ns=time.time_ns() - time.perf_counter_ns(),
                reduced=reduced,
            )
        )

    def _logs(self, step: int) -> bool:
        return step == 0 or is_sampled(step, self.sample_rate)

    def set_error_and_log(self, text: str) -> None:
        """Log an error. The name is that of DDP's logger."""
        if self.log is not None:
            self.log = self.log.noting_error(text, self.iterations)

    def renumber(self, names: Sequence[str]) -> None:
        """Number the parameters by these names from now on."""
        if self.log is not None:
            self.log = replace(self.log, numbers={name: i for i, name in enumerate(names)})

    def note(self, **entries: Entry) -> None:
        """Log settings."""
        if self.log is not None:
            self.log = self.log.noting(**entries)
