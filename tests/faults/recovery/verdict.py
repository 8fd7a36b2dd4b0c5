"""What the logs of a run must say: no step lost, none counted twice, one history for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tests.faults.recovery.scenario import STEPS, Scenario
from tests.support.polling import PROMPT_S

Entry = Mapping[str, Any]


class Run(NamedTuple):
    """Logs and exit codes, by rank; None for a rank that hung."""

    logs: Sequence[Sequence[Entry]]
    exitcodes: Sequence[int | None]


def problems(scenario: Scenario, run: Run, undisturbed: Mapping[int, str]) -> list[str]:
    """Return what the logs of a run contradict.

    Args:
        scenario: the scenario.
        run: what was seen.
        undisturbed: digests of a run without losses, by number of steps from 1, if this one must
            have the same bits.
    """
    found: list[str] = []
    digests: dict[int, dict[str, int]] = {}  # first rank with each, by number of steps
    sizes: dict[int, dict[int, int]] = {}
    lost = {loss.rank: loss for loss in scenario.losses}
    killed_ranks = {rank for rank, loss in lost.items() if loss.after_s >= 0.0}
    # Steps that those left have taken again, as only killed ranks had finished them.
    again = {
        entry["number"] + 1
        for rank, log in enumerate(run.logs)
        for entry in log
        if rank not in killed_ranks and entry["what"] == "rebuilt"
    }
    for rank, (log, exitcode) in enumerate(zip(run.logs, run.exitcodes, strict=True)):
        number = 0
        for entry in log:
            what = entry["what"]
            if what == "crash":
                found.append(f"rank {rank} raised: {entry['text']}")
            if what == "took" and entry["seconds"] > PROMPT_S:
                found.append(f"rank {rank} rebuilt for {entry['seconds']:.1f} s")
            if what == "step" and entry["number"] != number + 1:
                found.append(f"rank {rank} went from step {number} to {entry['number']}")
            is_lost = rank in killed_ranks and what == "step" and entry is log[-1]
            if is_lost and entry["number"] in again:
                if undisturbed.get(entry["number"], entry["digest"]) != entry["digest"]:
                    found.append(f"rank {rank} has other bits in its last step")
                continue
            if what == "step":
                sizes.setdefault(entry["number"], {}).setdefault(entry["size"], rank)
            if what == "rebuilt" and entry["number"] < number:
                found.append(f"rank {rank} fell back from step {number} to {entry['number']}")
            if what in ("step", "rebuilt"):
                number = entry["number"]
                if entry["digest"]:
                    digests.setdefault(number, {}).setdefault(entry["digest"], rank)
        last = log[-1]["what"] if log else "nothing"
        ends = ("left", "end") if rank in lost else ("end",)
        if exitcode is None:
            found.append(f"rank {rank} hung after {last!r} at step {number}")
        elif rank not in killed_ranks and (exitcode != 0 or last not in ends):
            found.append(f"rank {rank} ended by {exitcode} after {last!r} at step {number}")
        elif last == "end" and number != STEPS:
            found.append(f"rank {rank} ended at step {number} of {STEPS}")
    for number, held in digests.items():
        if len(held) > 1:
            found.append(f"states of step {number} differ between ranks {[*held.values()]}")
        if number in undisturbed and {*held} != {undisturbed[number]}:
            found.append(f"step {number} has other bits than without losses")
    for number, of in sizes.items():
        if len(of) > 1:
            found.append(f"step {number} was taken by {sorted(of)} ranks")
    return found
