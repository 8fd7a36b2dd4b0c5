"""The tests that do not run over the backend "fddp", by reason."""

from __future__ import annotations

LEFT_OUT: dict[str, set[str]] = {}
