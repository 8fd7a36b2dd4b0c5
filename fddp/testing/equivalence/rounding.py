"""Differences between values of two runs, and those that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fddp.testing.equivalence.trials import Values
from fddp.testing.replication.leaves import input_of
from fddp.testing.replication.values import is_same

_UNITS, _SPREADS = 16, 32
_MOST_ROUNDING = 1e-3  # of the change


def differing(one: Values, other: Values, spread: Values) -> list[str]:
    """Paths of values that differ by more than rounding explains.

    Args:
        one, other: the values.
        spread: see `spread_of`.
    """
    paths = [*one, *(path for path in other if path not in one)]
    return [
        path
        for path in paths
        if difference(one.get(path), other.get(path))
        > rounding(one.get(path)) + _SPREADS * spread.get(path, 0.0)
    ]


def with_other_bits(one: Values, other: Values) -> list[str]:
    """Paths of values that do not have the same bits."""
    paths = [*one, *(path for path in other if path not in one)]
    return [path for path in paths if not is_same(one.get(path), other.get(path))]


class FewerBits(TorchFunctionMode):
    """Notices numbers of less precision than float64, which functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.unit = torch.finfo(torch.float32).eps
        return result

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that is watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return step(*args, **kwargs)

        return watched


def spread_of(before: Values, after: Values, others: Iterable[Values], unit: float) -> Values:
    """Differences by path between runs with the same rows in other orders, which are rounding: it
    may be amplified, as by Adam's division, or come from sums in float32. Larger ones are not
    rounding, and do not count. A count that the step itself rounds to float32, such as a third,
    does not depend on the order: `unit` of each change is rounding in any case."""
    changes: dict[str, float] = {}
    for path, value in after.items():
        name, change = input_of(path), difference(before.get(path), value)
        changes[name] = max(changes.get(name, 0.0), change if math.isfinite(change) else 0.0)
    spreads: Values = {path: unit * changes[input_of(path)] for path in after}
    for other in others:
        for path, value in after.items():
            found = difference(value, other.get(path))
            if found <= _MOST_ROUNDING * (changes[input_of(path)] or largest(value)):
                spreads[path] = max(spreads[path], found)
    return spreads


def difference(one: Any, other: Any) -> float:
    """Largest difference of two values; infinite if they are no numbers of the same kind."""
    a, b = floats(one), floats(other)
    if a is None or b is None or type(one) is not type(other):
        return 0.0 if is_same(one, other) else math.inf
    if isinstance(one, Tensor) and (one.dtype != other.dtype or one.shape != other.shape):
        return math.inf
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0


def floats(value: Any) -> Tensor | None:
    """Real numbers of a value in float64, flat; None if it has none."""
    if isinstance(value, float | complex):
        value = torch.tensor(value, dtype=torch.complex128)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.reshape(-1).double()


def largest(value: Any) -> float:
    """Largest finite magnitude of a value."""
    numbers = floats(value)
    finite = None if numbers is None else numbers[numbers.isfinite()].abs()
    return float(finite.max()) if finite is not None and finite.numel() else 0.0


def rounding(value: Any) -> float:
    """Difference that rounding of a few operations makes."""
    is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    unit = torch.finfo(value.dtype if is_floating else torch.float64).eps
    return _UNITS * unit * largest(value)
