"""Errors of compiled programs, raised where the caller waits for their results.

XLA passes on the text of an error, but not its type: a program raises
`jax.errors.JaxRuntimeError`, whose text contains the text of fddp's error. `named_errors` raises
fddp's own error instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock

import jax

from fddp.extend import entrance
from fddp.jax import internals

_KEPT = 64

_numbers = count(1)
_lock = Lock()
_raised: dict[int, Exception] = {}


def keep(error: Exception) -> str:
    """Store an error, and return the text that identifies it in XLA."""
    # Frames refer to tensors over memory that XLA reuses once the program has ended.
    part: BaseException | None = error
    while part is not None:
        part.__traceback__ = None
        part = part.__cause__ or part.__context__
    with _lock:
        number = next(_numbers)
        _raised[number] = error
        while len(_raised) > _KEPT:
            del _raised[next(iter(_raised))]
    return f"{type(error).__name__}: {error} [fddp error {number}]"


@contextmanager
@entrance
def named_errors() -> Iterator[None]:
    """Raise fddp's own errors if programs that are started in the block fail.

    The end of the block waits for the reductions that were started in it, as
    `jax.effects_barrier()` does. After an error, the tokens of this thread's reductions are reset:
    JAX would otherwise fail all later programs with the same error.

    Raises:
        FddpError: the error that the eager operator would raise, on every rank; its cause is the
            error of XLA.

    Example:
        >>> import fddp, jax, jax.numpy as jnp
        >>> from fddp.jax import named_errors, psum
        >>> def differ(group):
        ...     try:
        ...         with named_errors():
        ...             jax.jit(lambda x: psum(x, group))(jnp.ones(1 + group.rank))
        ...     except fddp.DesyncError:
        ...         return "desync"
        >>> fddp.loopback(2, differ)
        ['desync', 'desync']
    """
    try:
        yield
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"\[fddp error (\d+)\]", str(error))
        original = _raised.get(int(found[1])) if found else None
        if original is None:
            raise
        internals.forget_tokens()
        raise original from error
