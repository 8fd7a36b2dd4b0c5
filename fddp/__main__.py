"""Entry point of `python -m fddp`."""

from __future__ import annotations

import sys

from fddp.cli.main import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m fddp"))
