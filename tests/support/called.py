"""Which collectives were called, on all ranks of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fddp.transport.base import Transport


def collectives_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes down the name of each collective that a transport is asked for from now on."""
    calls: list[str] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather_in_place", "exchange"):
        method: Callable[..., Any] = getattr(Transport, name)

        def counted(self: Any, *args: Any, _name: str = name, _do: Any = method, **kw: Any) -> Any:
            calls.append(_name)
            return _do(self, *args, **kw)

        monkeypatch.setattr(Transport, name, counted)
    return calls
