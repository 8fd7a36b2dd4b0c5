"""Check of communication hooks for torch's DDP."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor


def hook_error(hook: Any) -> Exception | None:
    """Return DDP's error if a signature is not that of a hook, else None."""
    if not callable(hook):
        return TypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
    try:
        names = list(inspect.signature(hook).bind(None, None).arguments)
    except (TypeError, ValueError) as error:
        return TypeError(f"Communication hook must take a state and a bucket: {error}")
    bucket, result = _annotation(hook, names[-1]), _annotation(hook, "return")
    if bucket not in (Any, dist.GradBucket):
        return ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, got {bucket}."
        )
    if result not in (Any, torch.futures.Future, torch.futures.Future[Tensor]):
        return ValueError(
            f"Communication hook: return annotation should be "
            f"torch.futures.Future[torch.Tensor], got {result}."
        )
    return None


def _annotation(hook: Any, name: str) -> Any:
    try:
        return get_type_hints(hook).get(name, Any)
    except Exception:  # quoted annotations may refer to unknown names
        return Any
