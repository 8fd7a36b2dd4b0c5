"""The device that lags, built before the first test where `make` has not built it.

Only processes of their own load it: it would stay an accelerator of the process, and autograd knows
only devices from before its first backward pass.
"""

from __future__ import annotations

import shutil

import pytest

from tests import lag


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build it outside of the time limit of a test."""
    runs = not session.config.option.collectonly
    needed = any("lagging" in getattr(item, "fixturenames", ()) for item in session.items)
    if runs and needed and shutil.which("c++"):
        lag.build()


@pytest.fixture(scope="session")
def lagging() -> str:
    """Type of the device."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler to build the device")
    return "lag"
