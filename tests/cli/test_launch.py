"""Starting ranks leaves the process that starts them as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from fddp.cli import launch


def test_handlers_of_signals_are_the_callers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def elastic_launch(config: Any, entrypoint: Any) -> Callable[..., dict[int, int]]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torch's launcher does, with its own
        return lambda backend, fn, *args: {0: fn(*args)}

    monkeypatch.setattr(launch, "elastic_launch", elastic_launch)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert launch.launch(1, os.getpid) == [os.getpid()]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
