"""Fixtures and settings of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import threading
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.examples import USUAL, examples

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = [
    "tests.support.ranks",
    "tests.support.hosts",
    "tests.support.quick",
    "tests.support.optional",
]

# Ranks and programs share the cores, so that the time an example takes says nothing about it.
settings.register_profile(
    "fddp", examples(USUAL), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fddp")


@pytest.fixture(scope="session", autouse=True)
def _folder_of_launchers() -> Iterator[None]:
    """torchrun, and processes that are killed, leave folders where temporary files go."""
    with (
        tempfile.TemporaryDirectory(prefix="fddp_", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TMPDIR=folder),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _states_of_generators_by_threads() -> Iterator[None]:
    """torch holds the lock of a generator while it makes the tensor of its state. If Python
    collects garbage then, and a callback runs (Hypothesis and JAX have one), another thread that
    asks for the state waits for that lock while it holds Python's: a deadlock."""
    get_rng_state, lock = torch.get_rng_state, threading.Lock()

    def without_collection() -> torch.Tensor:
        with lock:
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                return get_rng_state()
            finally:
                if was_enabled:
                    gc.enable()

    with mock.patch.object(torch, "get_rng_state", without_collection):
        yield


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> Iterator[None]:
    """Shells start jobs in the background with some signals ignored, and processes inherit that."""
    with contextlib.ExitStack() as stack:
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGQUIT, signal.SIG_DFL),
            (signal.SIGHUP, signal.SIG_DFL),
        ):
            if signal.getsignal(number) == signal.SIG_IGN:
                signal.signal(number, handler)
                stack.callback(signal.signal, number, signal.SIG_IGN)
        yield
