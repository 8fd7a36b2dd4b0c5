"""Execution of the reductions of compiled programs, which XLA starts by a callback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fddp.errors import SyncTimeoutError
from fddp.extend import Reduction, run_operator
from fddp.jax.communicators import communicator_by_id
from fddp.jax.errors import keep
from fddp.jax.primitives import Call


def execute(call: Call, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Reduce the operands of a call. XLA calls this on one of its threads.

    Raises:
        RuntimeError: the reduction failed; its text identifies the error, see `errors.keep`.
    """
    try:
        sums = run_operator(
            communicator_by_id(call.channel).communicator,
            Reduction(call.operator, call.paths, call.site, call.axes, call.roles),
            [_tensor(operand) for operand in operands],
        )
    except Exception as error:
        text = keep(_with_way_out(error, call))
    else:
        return [_array(total, operand) for total, operand in zip(sums, operands, strict=True)]
    raise RuntimeError(text)


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor over an array's memory, by its bytes, because DLPack has no bfloat16 of NumPy."""
    dtype = getattr(torch, array.dtype.name)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return from_dlpack(array.reshape(-1).view(np.uint8)).view(dtype).view(array.shape)


def _array(tensor: Tensor, like: np.ndarray) -> np.ndarray:
    """An array of the same dtype as `like` over a tensor's memory."""
    return tensor.view(-1).view(torch.uint8).numpy().view(like.dtype).reshape(like.shape)


def _with_way_out(error: Exception, call: Call) -> Exception:
    """Add a hint to a timeout if ranks are threads: XLA may not have a thread for each of them."""
    if isinstance(error, SyncTimeoutError) and communicator_by_id(call.channel).threads:
        hint = (
            "; ranks that are threads share XLA's thread pool, one thread for each core: call "
            'jax.config.update("jax_cpu_enable_async_dispatch", False) before JAX is used, so that '
            "each rank's thread runs its own programs, or run ranks as processes"
        )
        error.args = (f"{error.args[0]}{hint}", *error.args[1:])
    return error
