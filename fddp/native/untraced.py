"""A decorator like `torch.compiler.disable` that does not import dynamo.

`torch.compiler.disable` imports `torch._dynamo`, which takes about as long as the rest of torch.
The decorator here sets the attributes that dynamo reads when it traces a call of the function, and
the strategy of the code object that its frame hook reads when the function runs between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fddp.core.entrance import CALL_CODE
from fddp.native.torch_private import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT

# Dynamo would compile the code that all entrances share once for each of them.
eval_frame.set_code_exec_strategy(CALL_CODE, eval_frame._FrameExecStrategy(_SKIP, _DEFAULT))


def untraced_beneath(fn: Function) -> Function:
    """Exclude what a function calls in eager mode from tracing by dynamo.

    The function itself may be traced.

    Example:
        >>> @untraced_beneath
        ... def f(x):
        ...     return x + 1
        >>> f(1)
        2
    """
    return _with_strategy(fn, _DEFAULT)


def traced_inline(fn: Function) -> Function:
    """Let dynamo trace a function within its caller only: called after a graph break, it runs in
    eager mode, with all that it calls.

    Example:
        >>> @traced_inline
        ... def f(x):
        ...     return x + 1
        >>> f(1)
        2
    """
    return _with_strategy(fn, _SKIP)


def _with_strategy(fn: Function, own: Any) -> Function:
    """Set dynamo's action for the frames of a function, and skip those that it calls."""
    strategy = eval_frame._FrameExecStrategy(own, _SKIP)
    eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    return fn


def untraced(instead: str = "", *, callees: bool = True) -> Callable[[Function], Function]:
    """Exclude a function from tracing by dynamo, without any cost when it is called.

    In a compiled function a call of it is a graph break; with `fullgraph=True`, an error of torch
    with `instead` in its text. Compiled functions that it calls stay compiled.

    Args:
        instead: advice for callers that need a full graph.
        callees: True to also exclude the functions that it calls.

    Example:
        >>> @untraced("call g")
        ... def f(x):
        ...     return x + 1
        >>> f(1)
        2
    """
    # As `torch._dynamo.skip`, which only skips the frame of the function itself.
    strategy = eval_frame._FrameExecStrategy(_SKIP, _SKIP if callees else _DEFAULT)

    def mark(fn: Function) -> Function:
        eval_frame.set_code_exec_strategy(fn.__code__, strategy)
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = instead  # type: ignore[attr-defined]
        return fn

    return mark
