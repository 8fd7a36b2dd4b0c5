"""Type checks of numeric arguments."""

from __future__ import annotations


def check_real(**values: object) -> None:
    """Raise a TypeError if a value is not a real number.

    >>> check_real(growth=2, backoff=0.5)
    >>> check_real(growth="2")
    Traceback (most recent call last):
    TypeError: growth must be a real number, got '2'
    """
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a real number, got {value!r}")


def check_counts(of: str, **values: object) -> None:
    """Raise a TypeError if a value is not an integer. `of` names the unit.

    >>> check_counts("steps", every=2000)
    >>> check_counts("steps", every=True)
    Traceback (most recent call last):
    TypeError: every must be a number of steps, an int, got True
    """
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a number of {of}, an int, got {value!r}")
