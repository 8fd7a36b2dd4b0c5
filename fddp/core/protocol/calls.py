"""The calls of a `GradSync` that synchronise, which are told apart when ranks meet."""

from __future__ import annotations

from enum import IntEnum


class Method(IntEnum):
    """Which call a step belongs to; the number travels in the control word.

    Two ranks that call different ones have swapped two calls, or one has left one out, while their
    step numbers and plans are the same. The sums would be of things that have nothing to do with
    each other. Arrays of JAX are brought to `sync(grads)`, whatever ranks of torch call.

    Example:
        >>> Method.CALL.text
        'sync(grads)'
    """

    NOTHING = 0  # a rank that brings nothing, or arrays of JAX, may meet any call
    VALUE_AND_GRAD = 1
    CALL = 2
    UPDATE = 3
    REDUCE = 4
    REDUCE_SCATTER = 5
    ALL_GATHER = 6
    MODULE = 7

    @property
    def text(self) -> str:
        """The call in words; empty for none."""
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
