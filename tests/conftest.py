"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["ranks", "hosts"]

# Ranks share the cores, so that the time one example takes says nothing about it.
settings.register_profile("fddp", deadline=None)
settings.load_profile("fddp")
