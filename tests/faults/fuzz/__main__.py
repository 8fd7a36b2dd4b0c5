"""`python -m tests.faults.fuzz`: feeds the extension's functions hostile arguments for some time.

    python -m tests.faults.fuzz --seconds 600 --seed 1

`--extension DIR` takes the extension from a directory where it was built, with sanitizers as a rule
(see the Makefile). With atheris installed, `--atheris` has it choose the inputs; without, they are
drawn at random and mutated. The input that is being tried is in the file `fuzz-input`, which a
crash leaves behind; `--replay FILE` tries it again.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import importlib
import importlib.util
import mmap
import random
import sys
import time
from pathlib import Path

from fddp.native import extension
from tests.faults.fuzz.targets import one_input

_LONGEST = 256
_RECORD = Path("fuzz-input")
_REPORT_S = 30.0


class Record:
    """The current input, in a file that outlives the process."""

    def __init__(self) -> None:
        _RECORD.write_bytes(bytes(_LONGEST + 8))
        with _RECORD.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LONGEST + 8)

    def put(self, data: bytes) -> None:
        self._memory[: 8 + len(data)] = len(data).to_bytes(8, "little") + data


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true", help="have atheris choose the inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE")
    parser.add_argument("--extension", type=Path, metavar="DIR", help="of another build of it")
    args = parser.parse_args()
    if args.extension is None:
        faulthandler.enable()
    else:  # sanitizers report more about a crash
        _take_extension(args.extension)
    print(f"the extension is {extension.load().__file__}", flush=True)
    if args.replay is not None:
        record = args.replay.read_bytes()
        print(one_input(record[8 : 8 + int.from_bytes(record[:8], "little")]))
    elif args.atheris:
        _by_atheris(args.seconds, args.seed)
    else:
        _by_chance(args.seconds, args.seed)


def _take_extension(folder: Path) -> None:
    """Has fddp use the build of its extension that lies in a directory."""
    (library,) = folder.glob("_C.*.so")
    spec = importlib.util.spec_from_file_location("fddp._C", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fddp._C"] = module
    spec.loader.exec_module(module)


def _by_atheris(seconds: float, seed: int) -> None:
    import atheris  # no dependency of fddp

    # What it sees of the code decides which inputs it keeps: which functions are called, and how.
    for name in ("tests.faults.fuzz.targets", "tests.faults.fuzz.drawing"):
        sys.modules.pop(name)
    with atheris.instrument_imports(include=["tests.faults.fuzz"]):
        targets = importlib.import_module("tests.faults.fuzz.targets")
    record = Record()

    def target(data: bytes) -> None:
        record.put(data[:_LONGEST])
        targets.one_input(data[:_LONGEST])

    options = [f"-max_total_time={int(seconds)}", f"-seed={seed}", f"-max_len={_LONGEST}"]
    atheris.Setup([sys.argv[0], *options, "-timeout=60", "-rss_limit_mb=4096"], target)
    atheris.Fuzz()


def _by_chance(seconds: float, seed: int) -> None:
    chance = random.Random(seed)
    record = Record()
    tried: collections.Counter[str] = collections.Counter()
    end_s = time.monotonic() + seconds
    report_s = time.monotonic() + _REPORT_S
    while time.monotonic() < end_s:
        data = chance.randbytes(chance.randrange(1, _LONGEST))
        record.put(data)
        tried[one_input(data)] += 1
        if time.monotonic() > report_s:
            report_s += _REPORT_S
            print(f"{tried.total()} inputs tried", flush=True)
    _RECORD.unlink()
    print(f"{tried.total()} inputs tried, all well: {dict(tried)}")


if __name__ == "__main__":
    main()
