"""The device that lags, as a fixture."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests import lag


@pytest.fixture
def lagging() -> torch.device:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler to build the device")
    lag.load()
    return torch.device("lag", 0)
