"""A process that has torch in memory and forks ranks, which end as programs do.

It reads a rank to start from each line of its input, and writes a line for each that started or
ended. What it forks returns from here, so that the interpreter ends in order, with all that torch
and the extension do then.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import time

import torch

import fddp.native.extension
from tests.faults.chaos import faults, program

_LOOK_S = 0.02
_PR_SET_PDEATHSIG = 1


def serve() -> int:
    """Starts and reaps ranks; returns in those that it started, with their exit code."""
    preload()
    asked, ask = os.pipe()
    running: dict[int, tuple[int, int]] = {}
    asleep: dict[int, float] = {}
    rest = b""
    tell("ready")
    gc.freeze()
    while True:
        readable, _, _ = select.select([0, asked], [], [], _LOOK_S)
        if asked in readable:
            for line in os.read(asked, 65536).decode().splitlines():
                pid, seconds = line.split()
                asleep[int(pid)] = time.monotonic() + float(seconds)
        if 0 in readable:
            read = os.read(0, 65536)
            if not read:
                return 0
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                run, rank, store_port, text, folder = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return become(faults.parse(text), rank, store_port, folder, ask)
                running[pid] = (run, rank)
                tell("started", run, rank, pid)
        for pid in [pid for pid, until_s in asleep.items() if time.monotonic() > until_s]:
            del asleep[pid]
            if pid in running:
                os.kill(pid, signal.SIGCONT)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                tell("ended", *running.pop(pid), os.waitstatus_to_exitcode(status))


def preload() -> None:
    """Import the modules that every rank would otherwise import at its first step."""
    fddp.native.extension.load()
    leaf = torch.zeros(1)
    leaf.grad = torch.zeros(1)
    torch.optim.Adam([leaf]).step()


def become(fault: faults.Fault, rank: int, store_port: int, folder: str, ask: int) -> int:
    """Run a rank in a forked process."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # with a driver that was ended
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    words = os.open(f"{folder}/{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(nothing, 0)
    os.dup2(words, 1)
    os.dup2(words, 2)
    log = os.open(f"{folder}/{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    return program.main(fault, rank, store_port, log, ask)


def tell(*message: object) -> None:
    """One line to the driver."""
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(serve())
