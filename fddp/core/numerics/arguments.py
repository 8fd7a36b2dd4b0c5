"""Whether numbers that callers pass are of the kind that is wanted."""

from __future__ import annotations


def check_real(**values: object) -> None:
    """Raises a TypeError where one of these is no real number.

    >>> check_real(growth=2, backoff=0.5)
    >>> check_real(growth="2")
    Traceback (most recent call last):
    TypeError: growth is a real number, got '2'
    """
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} is a real number, got {value!r}")


def check_counts(of: str, **values: object) -> None:
    """Raises a TypeError where one of these is no whole number of what is counted.

    >>> check_counts("steps", every=2000)
    >>> check_counts("steps", every=True)
    Traceback (most recent call last):
    TypeError: every is a number of steps, an int, got True
    """
    for name, value in values.items():
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} is a number of {of}, an int, got {value!r}")
