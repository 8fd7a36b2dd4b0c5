"""Synchronising calls of a `GradSync`, numbered so that ranks can compare them."""

from __future__ import annotations

from enum import IntEnum


class Method(IntEnum):
    """The call that a step belongs to. Its number travels in the control word.

    If two ranks make different calls in the same step, one of them has swapped or omitted a call.
    Their step numbers and plans may still agree, so the number is what detects it. JAX arrays are
    always reduced through `sync(grads)`, whatever the ranks that use torch call.

    Example:
        >>> Method.CALL.text
        'sync(grads)'
    """

    NOTHING = 0  # a rank without a contribution, or with JAX arrays; compatible with any call
    VALUE_AND_GRAD = 1
    CALL = 2
    UPDATE = 3
    REDUCE = 4
    REDUCE_SCATTER = 5
    ALL_GATHER = 6
    MODULE = 7

    @property
    def text(self) -> str:
        """The call as text, for error messages."""
        return _TEXTS[self]


_TEXTS = {
    Method.NOTHING: "",
    Method.VALUE_AND_GRAD: "a step of value_and_grad",
    Method.CALL: "sync(grads)",
    Method.UPDATE: "update(grads, state)",
    Method.REDUCE: "reduce_(grads)",
    Method.REDUCE_SCATTER: "reduce_scatter(grads)",
    Method.ALL_GATHER: "all_gather(shards)",
    Method.MODULE: "a backward pass of the wrapped module",
}
