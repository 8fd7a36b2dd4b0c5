"""Comparison of trees and periodic schedules over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from fddp.core.check import check_schedule
from fddp.core.protocol.differences import LEAVES, check_equal, leaf_difference
from fddp.core.protocol.messages import Schema
from fddp.core.schedule.periodic import PeriodicSchedule
from fddp.core.schedule.periods import WORLD
from fddp.errors import InternalError, TreeMismatchError, error_text
from fddp.runtime.agreement import check_equal_leaves, check_no_failure, exchange
from fddp.sync.periodic.averaged_tree import AveragedTree
from fddp.transport import Group, open_transport
from fddp.transport.mesh import resolve_mesh

#: a schedule, or a function that makes one for a tree
ScheduleSource: TypeAlias = "PeriodicSchedule | Callable[[Any], PeriodicSchedule]"

_SUMMARY: Schema = (str, str, str)  # error, digest, outer optimizer
_TERMS: Schema = [(str, str)]
_WAY_OUT = "pass the same schedule on every rank"


def agreed(
    tree: Any,
    source: ScheduleSource,
    outer: str,
    place: tuple[Group | None, DeviceMesh | None],
    timeout_s: float | None,
    title: str,
) -> tuple[AveragedTree, PeriodicSchedule]:
    """Describe a tree and check its schedule, and compare both over ranks; a collective call.

    Args:
        tree: parameters.
        source: schedule.
        outer: name of the outer optimizer.
        place: group and mesh.
        timeout_s: limit of each operation.
        title: purpose of the caller, which must be the same on all ranks.

    Raises:
        PlanMismatchError: trees or schedules differ, or another rank has an error.
        Exception: an error of this rank.
    """
    span = resolve_mesh(*place)
    problem = span.problem
    described: tuple[AveragedTree, PeriodicSchedule] | None = None
    with open_transport(span.group, "auto", timeout_s, title) as transport:
        try:
            described = _described(tree, source, place[1])
        except Exception as error:
            problem = problem or error
        digest = "" if described is None else described[1].digest
        received = exchange(
            transport, [error_text(problem) if problem else "", digest, outer], _SUMMARY
        )
        check_no_failure([text for text, *_ in received], "can't average its tree", problem)
        if described is None:
            raise InternalError("a rank has neither a schedule nor a failure")
        schedule = described[1]
        if any(other != digest for _, other, _ in received):
            check_equal_leaves(exchange(transport, schedule.leaves, LEAVES))
            _check_equal_terms(exchange(transport, _terms(schedule), _TERMS))
        check_equal("the outer optimizer", [name for *_, name in received], "pass one to all")
    return described


def _described(
    tree: Any, source: ScheduleSource, mesh: DeviceMesh | None
) -> tuple[AveragedTree, PeriodicSchedule]:
    described = AveragedTree.of(tree)
    schedule = source if isinstance(source, PeriodicSchedule) else source(tree)
    check_schedule(schedule)
    difference = leaf_difference(0, described.specs, 1, schedule.leaves)
    if difference is not None:
        difference = difference.replace("rank 0", "the tree").replace("rank 1", "the schedule")
        raise TreeMismatchError(f"{difference}; make the schedule for this tree")
    everyone = schedule.fragments[0].when.axes
    for number, fragment in enumerate(schedule.fragments):
        if fragment.when.axes != everyone:
            raise ValueError(
                f"fragment 0 has periods for the axes {everyone}, and fragment {number} for "
                f"{fragment.when.axes}; give all fragments periods for the same axes"
            )
    spans_of(everyone, mesh)
    return described, schedule


def _terms(schedule: PeriodicSchedule) -> list[tuple[str, str]]:
    """Return the parts of a schedule by name, for errors."""
    terms = [
        ("the number of fragments", str(len(schedule.fragments))),
        ("the number of events", str(len(schedule.events))),
    ]
    for number, fragment in enumerate(schedule.fragments):
        terms += [
            (f"the period of fragment {number}", str(fragment.when)),
            (f"the delay of fragment {number}", str(fragment.delay)),
            (f"the mixing of fragment {number}", str(fragment.mixing)),
            (f"the leaves of fragment {number}", str(schedule.paths(number))),
        ]
    events = (tuple(event) for event in schedule.events)
    return terms + [(f"event {number}", str(event)) for number, event in enumerate(events)]


def _check_equal_terms(received: list[list[tuple[str, str]]]) -> None:
    # Lists that differ in length differ in a number before.
    for column in zip(*received, strict=False):
        check_equal(column[0][0], [value for _, value in column], _WAY_OUT)


def spans_of(
    names: tuple[str, ...], mesh: DeviceMesh | None
) -> dict[tuple[str, ...], DeviceMesh | None]:
    """Return the submesh of each set of axes that can be due together.

    Args:
        names: axes that have periods, outermost first.
        mesh: the mesh of the ranks.

    Raises:
        ValueError: the mesh has other axes.
    """
    if mesh is None:
        if names != (WORLD,):
            raise ValueError(
                f"there are periods for the axes {names}; pass a DeviceMesh that has them"
            )
        return {names: None}
    if names == (WORLD,):
        return {names: mesh}
    if names != mesh.mesh_dim_names:
        raise ValueError(
            f"there are periods for the axes {names}, and the mesh has {mesh.mesh_dim_names}; "
            f"give each axis a period, or slice the mesh: mesh[{names}]"
        )
    return {names[i:]: mesh[names[i:]] if i else mesh for i in range(len(names))}
