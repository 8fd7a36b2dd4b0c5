"""These modules hold no doctests, and `on_rank.py` changes torch's flags when it is imported."""

from __future__ import annotations

collect_ignore_glob = ["*.py"]
