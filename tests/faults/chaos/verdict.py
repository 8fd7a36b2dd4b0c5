"""Observations of a run, as a value, and the promises that they break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.faults.chaos.faults import Fault

GRACE_S = 5.0  # that a survivor may take beyond the timeout

#: promises: all continue as if nothing had happened; the rank is lost; the rank is late; the rank's
#: error is reported to all, who continue; a connection is gone, but no rank
CONTINUES, LOST, LATE, REPORTED, CUT = "continues", "lost", "late", "reported", "cut"


@dataclass(frozen=True)
class Error:
    """An error as a rank caught it; `at_step` is the step that the rank was in, -1 before."""

    kinds: tuple[str, ...]
    text: str
    ranks: tuple[int, ...] | None
    bucket: int | None
    paths: tuple[str, ...] | None
    step: int | None
    at_step: int
    at_s: float
    before: str
    after: str


@dataclass(frozen=True)
class Seen:
    """Observations of one rank.

    Attributes:
        exitcode: of its process; below 0: the signal that ended it.
        fault_s: when the fault struck there, on the clock of the host; None elsewhere.
        errors: what it caught, in order.
        digest: of parameters and optimizer state at its end; None if it did not get there.
        left: what was left after it had closed, in words; None if it did not get there.
        stderr: what it printed.
        crash: a traceback that it did not expect.
    """

    exitcode: int | None
    fault_s: float | None = None
    errors: tuple[Error, ...] = ()
    digest: str | None = None
    left: tuple[str, ...] | None = None
    stderr: str = ""
    crash: str = ""


@dataclass(frozen=True)
class Run:
    """Observations of all ranks; `hung` lists those that had to be killed."""

    ranks: tuple[Seen, ...]
    hung: tuple[int, ...] = ()
    children: int = 0  # that were left behind


def promise(fault: Fault) -> str:
    """Return the promise that holds under a fault."""
    kept = _promise(fault)
    in_backward = fault.kind in ("no bucket memory", "error in hook")
    if fault.way == "module" and kept == REPORTED and not in_backward:
        return LOST  # outside of backward nothing of a wrapped module runs; the program ends
    return kept


def _promise(fault: Fault) -> str:
    if fault.kind in ("interrupt", "huge tensor"):
        # Elsewhere it ends the program, or comes in the middle of a step's operations.
        return REPORTED if fault.stage == "forward" else LOST
    if fault.kind == "closed socket":
        # Shared memory has no connection that a step would use.
        return CUT if fault.transport == "c10d" else CONTINUES
    if fault.kind == "error in hook":
        # The plan is rebuilt after the first step. The first step of a plan knows no collectives.
        return REPORTED if fault.step > 1 else LOST
    return {
        **dict.fromkeys(ENDS, LOST),
        "long stop": LATE,
        "error in loss": REPORTED,
        "error in data": REPORTED,
        "address space": REPORTED,
        "no bucket memory": REPORTED,
        "no bucket memory at all": LOST,
    }.get(fault.kind, CONTINUES)


#: with these all ranks are alive, at one step, and continue with a new GradSync on the same group
_BUILD_ANEW = ("error in hook", "no bucket memory at all")
#: exit codes of the rank that a fault ends; None for the usual one
ENDS = {"kill": -9, "exec": 0, "exit": None, "error at start": None}
#: what a rank itself ends with
OWN = {
    "error in loss": "BoomError",
    "error in hook": "BoomError",
    "error in data": "BoomError",
    "interrupt": "KeyboardInterrupt",
    "huge tensor": "RuntimeError",
    "address space": "RuntimeError",
    "no bucket memory": "RuntimeError",
    "no bucket memory at all": "RuntimeError",
}


def builds_anew(fault: Fault) -> bool:
    return fault.kind in _BUILD_ANEW and promise(fault) == LOST


def exitcode(rank: int) -> int:
    """With which a rank's program ends, however it went."""
    return 40 + rank


def problems(fault: Fault, run: Run, undisturbed: str) -> list[str]:
    """Return the broken promises; `undisturbed` is the digest of a run without the fault."""
    kept = promise(fault)
    found = [f"rank {rank} hung" for rank in run.hung]
    if run.children:
        found.append(f"{run.children} processes were left behind")
    if run.ranks[fault.rank].fault_s is None and fault.kind != "none":
        return [*found, "the fault never struck", run.ranks[fault.rank].crash]
    for rank, seen in enumerate(run.ranks):
        if rank == fault.rank and fault.kind in ENDS:
            expected = ENDS[fault.kind]
            right = exitcode(rank) if expected is None else expected
            found += [] if seen.exitcode == right else [f"rank {rank} outlived its end"]
            continue
        says = _ending(rank, seen)
        if not seen.crash:
            says += _of_rank(fault, kept, rank, seen, run, undisturbed)
        found += [f"rank {rank}: {problem}" for problem in says]
    return found


def _ending(rank: int, seen: Seen) -> list[str]:
    found = []
    if seen.exitcode != exitcode(rank):
        found.append(f"exit code {seen.exitcode} instead of {exitcode(rank)}: {seen.stderr[-600:]}")
    if seen.crash:
        found.append(seen.crash)
    elif seen.left is None:
        found.append("it did not get to its end")
    elif seen.left:
        found.append(f"left behind: {'; '.join(seen.left)}")
    return found


def _of_rank(
    fault: Fault, kept: str, rank: int, seen: Seen, run: Run, undisturbed: str
) -> list[str]:
    struck = rank == fault.rank
    found = [
        f"state changed in a step that failed: {error.kinds[0]}"
        for error in seen.errors
        if error.before != error.after
    ]
    continues = kept in (CONTINUES, REPORTED) or builds_anew(fault)
    # A new plan, or a hook, may sum in another order.
    expected = run.ranks[0].digest if fault.kind in _BUILD_ANEW else undisturbed
    if continues and seen.digest != expected:
        found.append("its result is not that of an undisturbed run")
    if kept == CONTINUES:
        return found + [f"unexpected {error.text}" for error in seen.errors]
    if not seen.errors:
        return [*found, "no error"]
    if continues and len(seen.errors) > 1:
        found.append(f"a further error: {seen.errors[1].text}")
    error = seen.errors[0]
    fault_s = run.ranks[fault.rank].fault_s or 0.0
    late_s = error.at_s - fault_s - (fault.duration_s if struck else 0.0)
    if late_s > fault.timeout_s + GRACE_S:
        found.append(f"its error came after {late_s:.1f} s")
    if struck:
        return found + _own(fault, error)
    return found + _others(fault, kept, error)


def _own(fault: Fault, error: Error) -> list[str]:
    expected = {OWN.get(fault.kind, "FddpError")}
    return [] if expected & set(error.kinds) else [f"{error.kinds[0]}: {error.text}"]


def _others(fault: Fault, kept: str, error: Error) -> list[str]:
    lost = (fault.rank,)
    if kept == REPORTED:
        named = f"rank {fault.rank} failed at step {error.at_step}" in error.text
        right = error.kinds[0] == "PeerError" and named
        return [] if right else [f"no PeerError that names it: {error.kinds[0]}: {error.text}"]
    if fault.stage == "construction" and error.kinds[0] == "PeerError":
        # What leaves the constructor of a rank is reported to the others, which open theirs.
        named = f"rank {fault.rank} failed: " in error.text
        return [] if named else [f"a PeerError that does not name it: {error.text}"]
    if error.at_step < 0 and fault.kind not in ENDS:  # what lives and is not there yet may come
        kinds: Sequence[str] = ("RankLostError", "SyncTimeoutError")
    else:
        kinds = ("SyncTimeoutError",) if kept == LATE else ("RankLostError",)
    found = [] if error.kinds[0] in kinds else [f"{error.kinds[0]} instead of {kinds}"]
    if error.ranks != (() if kept == CUT else lost):
        found.append(f"ranks={error.ranks}")
    if kept != CUT and f"rank {fault.rank}" not in error.text.replace("on rank", ""):
        found.append("the text does not name the rank")
    if error.step != error.at_step:
        found.append(f"step={error.step} in step {error.at_step}")
    if error.at_step >= 0:
        found += _place(error)
    return [f"{problem}: {error.text}" for problem in found]


def _place(error: Error) -> list[str]:
    found = []
    if f"step {error.at_step}" not in error.text:
        found.append("the text does not name the step")
    if error.bucket is None or error.paths is None:
        return [*found, "no bucket or paths"]
    if error.bucket < 0:
        return found if "control word" in error.text else [*found, "neither bucket nor word"]
    if f"bucket {error.bucket} (" not in error.text:
        found.append(f"the text does not name bucket {error.bucket}")
    ends = error.paths[:1] + error.paths[-1:]
    if not ends or not all(path in error.text for path in ends):
        found.append(f"the text does not name {error.paths}")
    return found


def counts(results: Mapping[Fault, list[str]]) -> list[tuple[str, str, int, int]]:
    """By kind and transport: how many faults there were, and how many broke a promise."""
    rows: dict[tuple[str, str], list[int]] = {}
    for fault, found in results.items():
        row = rows.setdefault((fault.kind, fault.transport), [0, 0])
        row[0] += 1
        row[1] += bool(found)
    return [(*key, *row) for key, row in sorted(rows.items())]
