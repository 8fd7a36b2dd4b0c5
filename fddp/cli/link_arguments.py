"""Topologies and cost models as arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

from fddp import PRESETS, CostModel, Topology
from fddp.cli.common import CallError
from fddp.extend import Cost, LinkAlgorithm, suggestion

COST_HELP = (
    "cost of a collective: a preset "
    f"({', '.join(PRESETS)}), ALPHA,BETA in seconds and seconds per byte, or FILE.json of a "
    "CostModel; followed by ,tree or ,direct if it is no ring; AXIS=... for one axis of the "
    "topology, once for each"
)


class AxisCost(NamedTuple):
    """A cost model and its axis; "" for all axes."""

    axis: str
    model: CostModel


def topology(text: str) -> Topology:
    """Parse a topology such as `host=4,local=8`."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name.isidentifier() or name in axes or not size.isdecimal() or len(size) > 10:
            raise argparse.ArgumentTypeError(
                f"must be sizes of named axes, outermost first, such as host=4,local=8; "
                f"got {text!r}"
            )
        axes[name] = int(size)
    try:
        return Topology(**axes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def axis_cost(text: str) -> AxisCost:
    """Parse `[AXIS=]PRESET`, `[AXIS=]ALPHA,BETA` or `[AXIS=]FILE.json`, and `,ALGORITHM`."""
    axis, equals, rest = text.partition("=")
    if not equals:
        axis, rest = "", text
    try:
        return AxisCost(axis, _model(rest))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{rest!r}: {error}") from error


def _model(text: str) -> CostModel:
    given, _, last = text.rpartition(",")
    if last in get_args(LinkAlgorithm):
        return replace(_link(given), algorithm=last)  # type: ignore[arg-type]  # one of them
    return _link(text)


def _link(text: str) -> CostModel:
    if text in PRESETS:
        return PRESETS[text]
    if text.endswith(".json"):
        return CostModel.from_json(Path(text).read_text(encoding="utf-8"))
    try:
        alpha_s, beta_s_per_byte = map(float, text.split(","))
    except ValueError:
        raise ValueError(
            f"must be one of {', '.join(PRESETS)}, or ALPHA,BETA, or FILE.json"
            f"{suggestion(text, PRESETS)}"
        ) from None
    return CostModel(alpha_s, beta_s_per_byte)


def cost_of(given: Sequence[AxisCost], ranks: Topology) -> Cost:
    """Return one model for all axes, or one for each.

    Raises:
        CallError: the models do not fit the topology.
    """
    axes = [one.axis for one in given]
    if axes == [""]:
        return given[0].model
    needed = [name for name, size in ranks.axes if size > 1]
    if len(set(axes)) < len(axes) or not set(needed) <= set(axes) <= set(ranks.names):
        raise CallError(
            f"--cost must be given once, or once for each axis as AXIS=...: {', '.join(needed)}; "
            f"got it for {', '.join(axis or 'all' for axis in axes)}"
        )
    return {one.axis: one.model for one in given}
