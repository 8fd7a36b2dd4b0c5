"""Functions that torch.compile leaves alone, without loading its tracer.

`torch.compiler.disable` imports `torch._dynamo`, which takes about as long as the rest of torch.
Dynamo itself asks a function for the attributes that are set here when it traces a call of it, and
the interpreter's hook asks the code object when the function runs between two graphs. Neither asks
anything of a process that compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(instead: str) -> Callable[[Function], Function]:
    """Decorates a function so that dynamo traces neither it nor what it calls.

    In a compiled function a call of it is a graph break; with `fullgraph=True` it is torch's error,
    with `instead` in its text. What is compiled by itself, and called by the function, stays
    compiled.

    Args:
        instead: what to write where a graph must not break.

    Example:
        >>> @untraced("call g")
        ... def f(x):
        ...     return x + 1
        >>> f(1)
        2
    """
    # As `torch._dynamo.skip` does, which keeps to the function's own frame.
    hook = torch._C._dynamo.eval_frame
    skip = hook._FrameAction.SKIP

    def mark(fn: Function) -> Function:
        hook.set_code_exec_strategy(fn.__code__, hook._FrameExecStrategy(skip, skip))
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = instead  # type: ignore[attr-defined]
        return fn

    return mark
