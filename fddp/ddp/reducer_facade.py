"""`ddp.reducer`: the methods that DDP's tests, hooks and popular trainers use.

There is no reducer behind it. Each method calls the wrapper.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.hooks import allreduce
from fddp.hooks.flat import real
from fddp.hooks.torch_adapter import GradBucket
from fddp.runtime.hook_binding import BoundHook


class Reducer:
    """Substitute for DDP's C++ reducer. Holds the wrapper weakly."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.ref(ddp)

    @property
    def _wrapper(self) -> Any:
        ddp = self._ddp()
        if ddp is None:
            raise RuntimeError("the wrapped module of this reducer has been freed")
        return ddp

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Synchronise the next backward, even if forward was not going to.

        The outputs are ignored, because unused parameters are found without them.
        """
        self._wrapper.steps.expect([])

    def _get_local_used_map(self) -> Tensor:
        """Return the number of ranks that last used each parameter, in registration order."""
        usage = self._wrapper.steps.runner.usage
        ranks = usage.last.ranks if usage.last else {}
        counts = [ranks.get(name, 0) for name in usage.names]
        return torch.tensor(counts, dtype=torch.int32, device=self._wrapper.device)

    def _ddp_graph_static(self) -> bool:
        is_static: bool = self._wrapper.steps.runner.usage.is_static
        return is_static

    def _check_reducer_finalized(self) -> None:
        self._wrapper._raise_pending()

    def _rebuild_buckets(self) -> bool:
        """No-op. The plan is rebuilt at the end of the first step."""
        return False

    def _remove_autograd_hooks(self) -> None:
        self._wrapper._remove_autograd_hooks()

    def _set_optimizer_in_backward(self) -> None:
        """No-op. The hook that consumes gradients sets them to None at the end of backward."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._wrapper._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """Return the buckets in launch order, with zeros for gradients."""
        ddp = self._wrapper
        bound = BoundHook.of(allreduce, ddp.steps.engine.program)
        return [
            GradBucket(
                spec,
                real(torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)),
                ddp._watch.latest,
            )
            for spec in bound.specs.values()
        ]

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """Start the sum of a bucket over the wrapper's group."""
        group = self._wrapper.process_group
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in the group of the wrapped module")
        future: torch.futures.Future[Any] = work.get_future()
        return future
