"""Process that runs pytest in forks of itself, which have the slow imports behind them.

It reads lines of JSON from standard input, a list of arguments each, and answers each with a line:
the exit status and what was printed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress

import hypothesis
import pytest
import torch.distributed

assert hypothesis is not None
assert torch.distributed is not None

_PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")


def serve(limit_s: float) -> None:
    """Answer until standard input ends. A run that takes longer than the limit is killed."""
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = pytest.main([*_PLUGINS, *json.loads(line)])
                sys.stdout.flush()
                os._exit(int(code))
            status = _awaited(pid, time.monotonic() + limit_s)
            output.seek(0)
            print(json.dumps([status, output.read()]), flush=True)


def _awaited(pid: int, until_s: float) -> int:
    """Return the exit status of a process, or that of a kill; then kill what it has left."""
    status = None
    while status is None and time.monotonic() < until_s:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if found else None
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, 9)
    if status is None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    serve(float(sys.argv[1]))
