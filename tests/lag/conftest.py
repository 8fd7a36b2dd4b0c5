"""The device that lags, built once.

Only processes of their own load it: it would stay an accelerator of the process, and autograd knows
only devices from before its first backward pass.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def lagging() -> str:
    """Type of the device."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler to build the device")
    subprocess.run([sys.executable, "-c", "from tests import lag; lag.load()"], check=True)
    return "lag"
