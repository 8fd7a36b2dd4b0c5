"""`ddp.reducer`: the methods of torch's reducer that have a meaning here.

There is no reducer behind it. Each method calls the wrapper.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.hooks import TorchHook, allreduce
from fddp.hooks.flat import real
from fddp.hooks.torch_adapter import GradBucket
from fddp.runtime.hook_binding import BoundHook


def refused(*args: object, **kwargs: object) -> NoReturn:
    """Method of torch's class, reducer or logger without a counterpart; docs/ddp.md lists them."""
    raise NotImplementedError(
        "this method belongs to the C++ reducer of torch's class, and fddp has none; call the "
        "methods of the wrapped module, see docs/ddp.md"
    )


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

    # Of the graph, buckets and casts that fddp handles in other ways.
    _autograd_hook = _delay_all_reduce = _push_all_rebuilt_params = _reset_state = refused
    _set_forward_pass_work_handle = _set_mixed_precision_param_dtype = refused
    _set_sparse_metadata = set_logger = refused

    def prepare_for_forward(self) -> None:
        """Note the start of a forward pass, for the log."""
        self._wrapper.logger.begin_forward()

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Synchronise the next backward, even if forward was not going to.

        The outputs are ignored, because unused parameters are found without them.
        """
        self._wrapper.steps.expect([])

    def _get_local_used_map(self) -> Tensor:
        """Return the number of ranks that last used each parameter, in registration order."""
        usage = self._wrapper.steps.usage
        ranks = usage.last.ranks if usage.last else {}
        counts = [ranks.get(name, 0) for name in usage.names]
        return torch.tensor(counts, dtype=torch.int32, device=self._wrapper.device)

    def get_backward_stats(self) -> list[int]:
        """Return the nanoseconds from the start of backward to the gradient of each parameter, in
        registration order, of the last measured step; 0 without a gradient."""
        ddp = self._wrapper
        names, info = ddp.steps.usage.names, ddp.logger.info
        if info is None:
            return [0] * len(names)
        paths = ddp.steps.engine.program.plan.paths
        times_s = dict(zip(paths, info.timeline.ready_times_s, strict=False))
        ready_s = [times_s.get(name, math.nan) for name in names]
        return [0 if math.isnan(time_s) else int(time_s * 1e9) for time_s in ready_s]

    def _set_static_graph(self) -> None:
        self._wrapper._set_static_graph()

    def _update_process_group(self, new_process_group: Any) -> None:
        self._wrapper._update_process_group(new_process_group)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Wait for futures at the end of backward."""
        self._wrapper.steps.work.extend(future.wait for future in futures)

    def _ddp_graph_static(self) -> bool:
        is_static: bool = self._wrapper.steps.usage.is_static
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
        engine = ddp.steps.engine
        bound = BoundHook.of(allreduce, engine.program, engine.devices)
        return [
            GradBucket(
                spec,
                real(torch.zeros(spec.numel, dtype=spec.dtype, device=spec.device)),
                ddp._watch.latest,
            )
            for spec in bound.specs.values()
        ]

    def _run_comm_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """Start the wrapper's hook on a bucket; without one written for torch, the sum."""
        hook = self._wrapper.steps.engine.hook
        if isinstance(hook, TorchHook):
            return hook.hook(hook.state, bucket)
        return self._run_allreduce_hook(bucket)

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        """Start the sum of a bucket over the wrapper's group."""
        group = self._wrapper.process_group
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not in the group of the wrapped module")
        future: torch.futures.Future[Any] = work.get_future()
        return future
