"""Plan, times and logging data of a wrapped module."""

from __future__ import annotations

from typing import Any

from fddp.core.plan.plan import BucketPlan
from fddp.core.timeline import Timeline
from fddp.ddp.state import WrapperState
from fddp.telemetry.step_info import SyncInfo


class Introspection(WrapperState):
    """A wrapped module that exposes its plan, step times and DDP's logging data."""

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self.steps.engine.program.plan

    @property
    def skipped(self) -> bool:
        """True if all ranks left out the last step, under `nonfinite="skip"`."""
        return self._steps is not None and self._steps.runner.skipped

    def keep_sync_info(self) -> None:
        """Measure every step from now on, at the cost of `with_info=True`; see `sync_info`.

        A `Monitor` on the wrapped module calls it.
        """
        self._recorder.keeps_all = True

    @property
    def sync_info(self) -> SyncInfo | None:
        """Measurements of the last measured step, or None before the first.

        Every step is measured after `keep_sync_info()`, otherwise the steps listed at `timeline`.
        The forward pass begins with the last call of the wrapped module. Backward begins when a
        gradient reaches one of its outputs.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     model = torch.nn.Linear(2, 1, bias=False)
            ...     ddp = fddp.DistributedDataParallel(model, process_group=group)
            ...     ddp(torch.tensor([[3.0, 4.0]])).sum().backward()
            ...     return ddp.sync_info.step, ddp.sync_info.grad_norm
            >>> fddp.loopback(2, train)
            [(0, 5.0), (0, 5.0)]
        """
        return self._recorder.info

    def timeline(self) -> Timeline:
        """Return the times of the last measured step: number 0 to 10, then one in a hundred.

        `_set_ddp_runtime_logging_sample_rate` changes the rate.

        Raises:
            ValueError: no step has been measured yet.
        """
        if self._recorder.info is None:
            raise ValueError("no step has been taken yet; call backward first")
        return self._recorder.info.timeline.to_timeline()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return DDP's logging data under DDP's keys; sizes in bytes, times in nanoseconds."""
        usage, log = self.steps.runner.usage, self._recorder.log
        data: dict[str, Any] = {} if log is None else dict(log.data)
        if usage.last is not None:
            data["can_set_static_graph"] = int(usage.is_static)
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record one in `sample_rate` steps, after the first ten."""
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                f"DDP runtime logging sample rate should be equal or greater than 1, "
                f"got {sample_rate}",
            )
        self._recorder.sample_rate = sample_rate

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if the plan follows the order in which gradients arrived."""
        return self._steps is not None and not self._steps.engine.program.control.with_order
