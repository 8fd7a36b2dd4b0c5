"""`ddp.reducer`: what DDP's tests, hooks and popular trainers touch of it.

There is no reducer behind it: each method asks, or tells, the wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.ddp.state import WrapperState


class Reducer:
    """Stands where DDP has its C++ reducer. Holds the wrapper weakly."""

    def __init__(self, ddp: WrapperState) -> None:
        self._ddp = weakref.ref(ddp)

    @property
    def _wrapper(self) -> WrapperState:
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError("the wrapped module that this reducer belongs to is gone")
        return ddp

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Has the next backward synchronise, also where forward was not to. The outputs are of no
        interest: unused parameters are found without them."""
        self._wrapper.steps.expect(())

    def _get_local_used_map(self) -> Tensor:
        """For each parameter, in the order of registration, how many ranks used it last."""
        usage = self._wrapper.steps.usage
        ranks = usage.last.ranks if usage.last else {}
        counts = [ranks.get(name, 0) for name in usage.names]
        return torch.tensor(counts, dtype=torch.int32, device=self._wrapper.device)

    def _ddp_graph_static(self) -> bool:
        """Whether all steps so far used the same parameters."""
        return self._wrapper.steps.usage.is_static

    def _check_reducer_finalized(self) -> None:
        """Raises the error that the next forward would raise."""
        self._wrapper._raise_pending()

    def _rebuild_buckets(self) -> bool:
        """The plan is rebuilt at the end of the first step; there is nothing to do."""
        return False

    def _remove_autograd_hooks(self) -> None:
        self._wrapper._remove_autograd_hooks()

    def _set_optimizer_in_backward(self) -> None:
        """Nothing to do: the hook that takes gradients makes them None at the end of backward."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._wrapper._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """Starts summing a bucket over the wrapper's group."""
        group = self._wrapper.process_group
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in the group of the wrapped module")
        future: torch.futures.Future[Any] = work.get_future()
        return future
