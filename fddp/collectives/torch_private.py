"""Private names of torch: Inductor, and the order of operators in the code that it generates.

Inductor keeps the order of a graph, but fuses kernels that do not depend on each other, such as the
sums over the batch that give the biases' gradients. A bucket that has one of these gradients would
then wait for those of later buckets. So the operations that give the inputs of a start depend on
the start before, unless they come before it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def keep_place(name: str) -> None:
    """Let Inductor, if it is in use, keep the order of the calls of an operator of fddp. Its first
    argument are tensors."""
    if "torch._inductor.lowering" not in sys.modules:
        return
    from torch._inductor.lowering import lowerings, register_lowering

    operator = getattr(torch.ops.fddp, name).default
    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(_Lowering(operator))


class _Lowering:
    """Lowering of one operator."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.__name__ = str(operator)

    def __call__(self, leaves: Sequence[Any], *rest: Any) -> Any:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        before = getattr(graph, "fddp_last_start", None)
        for leaf in leaves:
            if before is not None and leaf is not None:
                leaf.realize()
                _order_behind(graph, leaf.get_name(), before)
        number = len(graph.operations)
        result: Any = ir.FallbackKernel.create(self._operator, leaves, *rest)
        graph.fddp_last_start = graph.operations[number]
        return [node.wrap_for_lowering() for node in result]


def _order_behind(graph: Any, name: str, before: Any) -> None:
    """Let the operation that gives a buffer depend on `before`, if that comes first."""
    buffer = graph.try_get_buffer(name)
    giver = None if buffer is None else buffer.get_defining_op()
    if giver is not None and graph.operations.index(giver) > graph.operations.index(before):
        graph.additional_star_deps[giver.get_operation_name()].add(before.get_name())
