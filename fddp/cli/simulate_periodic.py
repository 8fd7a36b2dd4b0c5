"""`python -m fddp simulate` for periodic schedules."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

from fddp.cli import common
from fddp.cli.link_arguments import cost_of
from fddp.cli.sources import is_plan_file, load, read
from fddp.core.check import check_schedule
from fddp.core.schedule.periodic import Fragment, PeriodicSchedule, make_periodic_schedule
from fddp.core.schedule.periods import Periodic
from fddp.core.sim.cost import CostModel, preset_or_model
from fddp.core.sim.periodic import PeriodicTimeline, simulate_periodic
from fddp.core.text import size_text
from fddp.errors import FddpError
from fddp.sync.periodic.schedules import local_sgd, streaming_diloco


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options of periodic schedules, apart from --step-ms."""
    parser.add_argument(
        "--period",
        type=common.whole(1),
        metavar="STEPS",
        help="simulate averages of parameters once in this number of inner steps",
    )
    common.add_value(parser, "--fragments", common.whole(1), 1, "fragments that are sent in turn")
    common.add_value(
        parser, "--delay", common.whole(0), 0, "inner steps that overlap with a fragment's average"
    )
    common.add_value(parser, "--bits", common.whole(1), 32, "bits of a float32 value on the wire")


def is_periodic(args: argparse.Namespace) -> bool:
    """Return True if the arguments are for a periodic schedule."""
    return args.step_ms is not None


def run(args: argparse.Namespace) -> int:
    """Simulate a periodic schedule beside averages after every step."""
    try:
        schedule = _schedule(args)
        check_schedule(schedule)
        links = cost_of(args.cost, args.topology)
        models = links.values() if isinstance(links, Mapping) else [links]
        link = CostModel.worst([preset_or_model(model) for model in models])
        every = [Fragment(f.leaves, Periodic(1)) for f in schedule.fragments]
        found = {
            "every step": _simulated(
                make_periodic_schedule(schedule.leaves, every), link, args, 32
            ),
            "as given": _simulated(schedule, link, args, args.bits),
        }
    except (FddpError, TypeError, ValueError) as error:
        raise common.CallError(f"{args.source}: {error}") from error
    printer = common.Printer(args.json)
    printer.show(f"{schedule}\n\n{_table(found, args)}")
    printer.write_text(args.json, _json(schedule, found))
    if args.png:
        from fddp.viz import plot_periodic

        printer.write_png(args.png, plot_periodic(schedule))
    return 0


def _schedule(args: argparse.Namespace) -> PeriodicSchedule:
    if is_plan_file(args.source):
        if args.period is not None:
            raise ValueError("--period is for a tree; the file has a schedule")
        return PeriodicSchedule.from_json(read(args.source))
    if args.period is None:
        raise ValueError("--step-ms needs --period, or a file with a periodic schedule")
    tree = load(args.source)
    if args.fragments == 1:
        return local_sgd(tree, args.period, delay=args.delay)
    return streaming_diloco(tree, args.period, fragments=args.fragments, delay=args.delay)


def _simulated(
    schedule: PeriodicSchedule, link: CostModel, args: argparse.Namespace, bits: int
) -> PeriodicTimeline:
    return simulate_periodic(
        schedule, link, ranks=args.topology.world_size, step_s=args.step_ms / 1e3, bits=bits
    )


def _table(found: Mapping[str, PeriodicTimeline], args: argparse.Namespace) -> str:
    columns = ("averages", "sent a step", "wait a step ms", "step ms", "utilisation")
    rows = [
        (
            name,
            size_text(timeline.sent_bytes / timeline.steps),
            f"{timeline.waited_s / timeline.steps * 1e3:.3f}",
            f"{timeline.total_s / timeline.steps * 1e3:.3f}",
            f"{timeline.utilisation:.1%}",
        )
        for name, timeline in found.items()
    ]
    title = f"{args.topology}; inner steps of {args.step_ms:g} ms"
    caption = f"{args.bits} bits a value on the wire; every step: 32, and no overlap"
    return common.titled_table(title, caption, columns, rows, left=("averages",))


def _json(schedule: PeriodicSchedule, found: Mapping[str, PeriodicTimeline]) -> str:
    results = [
        {
            "averages": name,
            "steps": timeline.steps,
            "total_s": timeline.total_s,
            "waited_s": timeline.waited_s,
            "sent_bytes": timeline.sent_bytes,
            "utilisation": timeline.utilisation,
            "spans": [asdict(span) for span in timeline.spans],
        }
        for name, timeline in found.items()
    ]
    document = {"results": results, "schedule": json.loads(schedule.to_json())}
    return json.dumps(document, indent=2)
