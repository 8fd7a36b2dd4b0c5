"""Adapter for communication hooks of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.flat import real, restored, split_views
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook, HookError, allreduce
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.telemetry.waits import note_wait


class GradBucket:
    """A bucket with the interface of `torch.distributed.GradBucket`.

    The buffer holds the contiguous gradients back to back; complex numbers as pairs of real ones,
    as in torch. Or it is one sparse gradient.
    """

    def __init__(self, spec: BucketSpec, buffer: Tensor, parameters: Mapping[str, Tensor]) -> None:
        self._spec = spec
        self._buffer = buffer
        self._parameters = parameters

    @property  # type: ignore[misc]  # that of `object` can be assigned
    def __class__(self) -> type:
        """torch's class, which has no constructor: hooks may test for it."""
        return dist.GradBucket

    def index(self) -> int:
        """Number of the bucket in launch order."""
        return self._spec.index

    def buffer(self) -> Tensor:
        """Gradients of all parameters, shape `(n,)`, of a real dtype; or a sparse tensor."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Gradient of each parameter, as a view of the buffer; none of a sparse buffer."""
        flat = self._buffer
        if flat.is_sparse:
            return []
        if self._spec.dtype.is_complex:
            flat = torch.view_as_complex(flat.view(-1, 2))
        return split_views(flat, self._spec.shapes)

    def parameters(self) -> list[Tensor]:
        """Parameters in the order of `gradients`."""
        return [self._parameters[path] for path in self._spec.paths]

    def is_last(self) -> bool:
        """Return True if this is the last bucket in launch order."""
        return self._spec.is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer


@dataclass(frozen=True)
class TorchHook(Hook[tuple[()]]):
    """A communication hook of torch's DistributedDataParallel, as a hook of fddp.

    Such a hook communicates on its own process group, and divides by the number of ranks itself.
    So it gets unweighted gradients, its result is not scaled, and weights that differ between ranks
    raise `WeightError`. fddp neither saves the hook's own state nor restores it if a step fails.

    Attributes:
        state: first argument of the hook.
        hook: `hook(state, bucket) -> torch.futures.Future` of a tensor with as many elements as the
            bucket's buffer; see `torch.nn.parallel.DistributedDataParallel.register_comm_hook`.
        params: parameters by path, for `bucket.parameters()`.

    Example:
        >>> import torch, fddp
        >>> from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
        >>> def own(group):
        ...     grads = {"w": torch.tensor([1.0 + group.rank])}
        ...     hook = fddp.hooks.TorchHook(None, noop_hook)
        ...     with fddp.GradSync(grads, group=group, hook=hook) as sync:
        ...         return sync(grads)["w"].item()
        >>> fddp.loopback(2, own)
        [1.0, 2.0]
    """

    state: Any
    hook: Callable[[Any, Any], torch.futures.Future[Any]]
    params: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    raw = takes_sparse = True

    @property
    def name(self) -> str:
        return f"TorchHook({getattr(self.hook, '__name__', type(self.hook).__name__)})"

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        spec, grads = bucket.spec, bucket.gradients()
        is_contiguous = all(grad.is_contiguous() for grad in grads)
        flat = bucket.buffer if is_contiguous else torch.cat([grad.reshape(-1) for grad in grads])
        grad_bucket = GradBucket(spec, real(flat), self.params)
        numel = grad_bucket.buffer().numel()
        future = self.hook(self.state, grad_bucket)
        # Process groups return a class of which torch.futures.Future is a subclass.
        if not callable(getattr(future, "wait", None)):
            raise HookError(
                f"{self.name}: callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__}"
            )

        def take() -> tuple[Tensor, tuple[()]]:
            start_s = perf_counter()
            value = future.wait()
            note_wait(start_s, perf_counter())
            result = restored(self._single(value, spec, numel), spec.dtype)
            if is_contiguous:
                return result, state
            for grad, value in zip(grads, split_views(result, spec.shapes), strict=True):
                grad.copy_(value)
            return bucket.buffer, state

        return Future.started(future.done, take)

    def _single(self, value: object, spec: BucketSpec, numel: int) -> Tensor:
        """The tensor in the result of a future, shape `(numel,)` or sparse."""
        # Futures of torch's process groups hold lists.
        if isinstance(value, (list, tuple)) and len(value) == 1:
            (value,) = value
        if not isinstance(value, Tensor):
            raise HookError(
                f"{self.name}: the future of bucket {spec.index} must hold a tensor, got "
                f"{type(value).__name__}; return the reduced bucket.buffer()"
            )
        kind = wrapper_kind(value)
        if kind:
            raise HookError(
                f"{self.name}: the future of bucket {spec.index} holds a {kind}, whose memory does "
                f"not hold its values; {PLAIN_INSTEAD}"
            )
        if value.numel() != numel:
            raise HookError(
                f"{self.name}: the future of bucket {spec.index} holds {value.numel()} elements "
                f"where the bucket has {numel}; return all of bucket.buffer()"
            )
        return value if value.is_sparse else value.reshape(-1)


@dataclass(frozen=True)
class BuiltinFloat16(Hook[tuple[()]]):
    """torch's built-in FP16_COMPRESS, with its bits: gradients are rounded to float16 and then
    divided by the number of ranks, where `fp16_compress` divides first."""

    raw = True

    @property
    def name(self) -> str:
        return "FP16_COMPRESS"

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        share = real(bucket.buffer).to(torch.float16, copy=True).div_(all_reduce.world_size)
        return all_reduce(share).map(lambda total: (restored(total, bucket.spec.dtype), state))


@entrance
def builtin(kind: dist.BuiltinCommHookType) -> Hook[tuple[()]]:
    """The fddp hook for a built-in hook of torch.

    Args:
        kind: `ALLREDUCE` or `FP16_COMPRESS`.

    Raises:
        ValueError: another kind.

    Example:
        >>> import torch.distributed as dist
        >>> builtin(dist.BuiltinCommHookType.FP16_COMPRESS).name
        'FP16_COMPRESS'
    """
    if kind == dist.BuiltinCommHookType.ALLREDUCE:
        return allreduce
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return BuiltinFloat16()
    raise ValueError(f"{kind!r} is not a built-in hook; pass ALLREDUCE or FP16_COMPRESS")
