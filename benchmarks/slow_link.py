"""Step times over a link of 100 Mbit/s beside the simulator's.

    sudo python -m benchmarks.slow_link

Two processes in network namespaces of their own, joined by a veth pair whose ends `tc` limits with
a token bucket (`tbf`). A step sleeps for 50 ms in place of the compute, so that the cores of this
machine play no part; then it averages a million float32 parameters, or not, as its schedule says.
Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import fddp
from fddp import periodic
from fddp.core.tables import plain_table

STEP_S = 0.05
LINK = fddp.CostModel(5e-4, 8e-8 * 1514 / 1448)
"""Of each frame of 1514 bytes, 1448 are payload. The latency is that of two processes and gloo."""

_SPACES = ("fddp_slow_0", "fddp_slow_1")
_ADDRESS = "10.77.0.{}"
_PORT = 29511
_FLOATS = 250_000  # of each of four layers


def schedules(tree: Any) -> dict[str, tuple[periodic.PeriodicSchedule, int]]:
    """Return the schedules to compare, each with a number of steps."""
    streaming = periodic.streaming_diloco
    return {
        "every step": (periodic.local_sgd(tree, 1), 30),
        "DiLoCo, H=20": (periodic.diloco(tree, 20), 100),
        "streaming, H=20": (streaming(tree, 20, fragments=4, delay=0), 100),
        "streaming, delay 2": (streaming(tree, 20, fragments=4, delay=2), 100),
    }


def run_rank() -> None:
    """Measure all schedules on this rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    params = {"layers": [torch.zeros(_FLOATS) for _ in range(4)]}
    rows = []
    for name, (schedule, steps) in schedules(params).items():
        own: Any = params
        with periodic.PeriodicSync(params, schedule, transport="c10d") as sync:
            state = sync.init(params)
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(steps):
                time.sleep(STEP_S)
                own, state = sync.step(own, state)
            measured_s = (time.perf_counter() - start_s) / steps
        simulated = periodic.simulate_periodic(schedule, LINK, ranks=2, step_s=STEP_S, steps=steps)
        simulated_s = simulated.total_s / steps
        row = (f"{measured_s * 1e3:.1f}", f"{simulated_s * 1e3:.1f}")
        rows.append((name, *row, f"{measured_s / simulated_s - 1:+.1%}"))
    if dist.get_rank() == 0:
        header = ("averages", "measured ms", "simulated ms", "deviation")
        print(plain_table(header, rows, numeric=(1, 2, 3)))
    dist.destroy_process_group()


@contextlib.contextmanager
def linked(rate: str, burst: str) -> Iterator[None]:
    """Two network namespaces with a link between them, limited as `tc` writes it."""
    with contextlib.ExitStack() as stack:
        for space in _SPACES:
            _call("ip", "netns", "add", space)
            stack.callback(_call, "ip", "netns", "del", space)
        one, two = _SPACES
        ends = ("type", "veth", "peer", "name", "slow1", "netns", two)
        _call("ip", "link", "add", "slow0", "netns", one, *ends)
        for number, space in enumerate(_SPACES):
            device = f"slow{number}"
            address = f"{_ADDRESS.format(number + 1)}/24"
            _call("ip", "-n", space, "addr", "add", address, "dev", device)
            for name in (device, "lo"):
                _call("ip", "-n", space, "link", "set", name, "up")
            limit = ("tbf", "rate", rate, "burst", burst, "latency", "400ms")
            _call("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", *limit)
        yield


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def run_ranks(module: str, rate: str, burst: str, *args: str) -> int:
    """Run `python -m MODULE rank ARGS` on two ranks with a link between them; the exit code."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        print(f"{module}: skipped, because it needs root, ip and tc")
        return 0
    with linked(rate, burst):
        ranks = []
        for number, space in enumerate(_SPACES):
            env = {
                **os.environ,
                "MASTER_ADDR": _ADDRESS.format(1),
                "MASTER_PORT": str(_PORT),
                "WORLD_SIZE": "2",
                "RANK": str(number),
                "GLOO_SOCKET_IFNAME": f"slow{number}",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", module, "rank", *args]
            ranks.append(subprocess.Popen(["ip", "netns", "exec", space, *command], env=env))
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        run_rank()
    else:
        sys.exit(run_ranks("benchmarks.slow_link", "100mbit", "32kb"))
