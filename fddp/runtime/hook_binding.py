"""Binding of a communication hook to the buckets of a program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fddp.core.schedule.stages import count_stages, with_stages
from fddp.core.text import leaf_text
from fddp.errors import TreeMismatchError
from fddp.hooks.hook import BucketSpec, Hook
from fddp.native.memory import wrapper_kind
from fddp.runtime.hook_collectives import Issued
from fddp.runtime.program import Program
from fddp.runtime.results import Devices
from fddp.tree.pytree import TreeDef, flatten


@dataclass(frozen=True)
class BoundHook:
    """A hook that replaces the all-reduces of a program, or its last reduce-scatters.

    Attributes:
        hook: the hook.
        positions: for each bucket that the hook reduces, the position of the operation in the
            schedule: the dense ones, and the sparse ones if the hook takes them.
        specs: specification of each of these buckets.
        whole: True if these operations are over all ranks.
        stateful: True if any state has a tensor or number.
        issued: by bucket, the collectives of the hook in earlier steps, by stage; None if they
            differ, or belong to stages that it has not declared.
    """

    hook: Hook[Any]
    positions: Mapping[int, int]
    specs: Mapping[int, BucketSpec]
    whole: bool
    stateful: bool
    _schemas: tuple[_StateSchema, ...]
    issued: dict[int, Sequence[Sequence[Issued]] | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, hook: Hook[Any], program: Program, devices: Mapping[str, torch.device]
    ) -> BoundHook:
        """Bind a hook to a program. `devices` are those of the leaves by label, as known.

        Raises:
            ValueError: the schedule has not exactly one all-reduce of each bucket, or leaves shards
                and the hook can't; the hook requires flat all-reduces; or the hook rejects a
                bucket.
            TypeError: the state is no tree of tensors, numbers and None.
        """
        positions = _positions(hook, program)
        groups = {program.schedule.ops[position].axes for position in positions.values()}
        whole = all(_is_everyone(program, axes) for axes in groups)
        if hook.raw and not whole:
            raise ValueError(
                f"{hook.name} reduces over all ranks by itself, so that it needs "
                f"algorithm='all_reduce'"
            )
        if hook.takes_sparse:
            gathers = enumerate(program.schedule.ops)
            positions |= {op.bucket: i for i, op in gathers if op.kind == "gather"}
        last = next(reversed(positions), -1)
        known = Devices(devices)
        specs = {b: _spec(program, b, i, known, is_last=b == last) for b, i in positions.items()}
        what, states = f"the state of {hook.name}", _init(hook, program, specs)
        schemas = tuple(_StateSchema.of(state, what) for state in states)
        stateful = any(schema.kinds for schema in schemas)
        return cls(hook, positions, specs, whole, stateful, schemas)

    def init_states(self, program: Program) -> tuple[Any, ...]:
        """State of each bucket before the first step; () if the hook is stateless."""
        return _init(self.hook, program, self.specs) if self.stateful else ()

    def learn(self, bucket: int, issued: Sequence[Sequence[Issued]] | None) -> None:
        """Note the collectives of a step for `expected`; None if they can't be repeated."""
        known = self.issued.setdefault(bucket, issued)
        self.issued[bucket] = known if known == issued else None

    def expected(
        self, bucket: int, issued: Sequence[Sequence[Issued]]
    ) -> Sequence[Sequence[Issued]] | None:
        """Return the collectives, by stage, that other ranks expect from this one, whose hook has
        raised after those `issued`; None if they are not known. A raw hook has none of the
        step's."""
        known = [[]] if self.hook.raw else self.issued.get(bucket)
        if known is None:
            return None
        stage = len(issued) - 1
        begun = [*known[:stage], *[ops[: len(issued[-1])] for ops in known[stage : stage + 1]]]
        return known if begun == [*issued] else None

    def checked(self, states: Any) -> tuple[Any, ...]:
        """Return the caller's states.

        Raises:
            TreeMismatchError: they differ in form from those of `init_states`.
        """
        advice = "pass the state that init_state or the last update returned, under the same plan"
        if not isinstance(states, tuple) or len(states) != len(self._schemas):
            found = len(states) if isinstance(states, tuple) else f"a {type(states).__name__}"
            raise TreeMismatchError(
                f"the state of {self.hook.name} is a tuple of {len(self._schemas)}, one for each "
                f"bucket, got {found}; {advice}"
            )
        for bucket, (state, form) in enumerate(zip(states, self._schemas, strict=True)):
            problem = form.difference(state)
            if problem is not None:
                raise TreeMismatchError(
                    f"the state of {self.hook.name} for bucket {bucket} {problem}; {advice}"
                )
        return states


def staged(program: Program, hook: Hook[Any]) -> Program:
    """Return the program with the stages of a hook; see [Note: stages in one order].

    Raises:
        ValueError: as `BoundHook.of`; or the schedule has the stages of another hook.
    """
    given = count_stages(program.schedule)
    if given:
        if given != hook.stages:
            raise ValueError(
                f"the schedule reduces each bucket in {given} stages, and {hook.name} has "
                f"{hook.stages}; pass the schedule of this hook, or one without stages"
            )
        return program
    reductions = _positions(hook, program)
    schedule = with_stages(program.schedule, reductions, hook.stages, in_turn=hook.raw)
    return replace(program, schedule=schedule)


@dataclass(frozen=True)
class _StateSchema:
    treedef: TreeDef
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, state: Any, what: str) -> _StateSchema:
        leaves, treedef = flatten(state)
        for leaf, path in zip(leaves, treedef.paths, strict=True):
            if leaf is not None and not isinstance(leaf, (Tensor, int, float)):
                raise TypeError(
                    f"{what} must be a tree of tensors, numbers and None; {leaf_text(path)} is a "
                    f"{type(leaf).__name__}"
                )
        return cls(treedef, tuple(map(_kind, leaves)))

    def difference(self, state: Any) -> str | None:
        """Describe the first difference of a state from the schema, or return None."""
        leaves, treedef = flatten(state)
        if treedef != self.treedef:
            found, expected = list(treedef.paths), list(self.treedef.paths)
            return f"has the leaves {found}, expected {expected}"
        for leaf, kind, path in zip(leaves, self.kinds, treedef.paths, strict=True):
            if _kind(leaf) != kind:
                return f"has a {_kind(leaf)} as {leaf_text(path)}, expected a {kind}"
        return None


def _kind(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    dtype = str(leaf.dtype).removeprefix("torch.")
    kind = wrapper_kind(leaf) or ("zero tensor" if leaf._is_zerotensor() else "")
    if kind:
        return f"{kind} of {dtype}"
    return f"{dtype} tensor of shape {tuple(leaf.shape)} on {leaf.device}"


def _init(hook: Hook[Any], program: Program, specs: Mapping[int, BucketSpec]) -> tuple[Any, ...]:
    return tuple(
        hook.init(specs[b]) if b in specs else () for b in range(len(program.plan.buckets))
    )


def _positions(hook: Hook[Any], program: Program) -> dict[int, int]:
    if hook.scatters and program.schedule.result == "sharded_mean":
        return _last_reduce_scatters(hook, program)
    found: dict[int, list[int]] = {b: [] for b in program.schedule.sequence}
    for position, op in enumerate(program.schedule.ops):
        if op.kind == "all_reduce" and op.when == "always":
            found[op.bucket].append(position)
    for bucket, positions in found.items():
        if len(positions) != 1:
            raise ValueError(
                f"{hook.name} replaces the single all_reduce of each bucket, and the schedule has "
                f"{len(positions)} for {program.buckets[bucket].text}; use "
                f"algorithm='all_reduce' or 'hierarchical', and no split_mb"
            )
    return {bucket: positions[0] for bucket, positions in found.items()}


def _last_reduce_scatters(hook: Hook[Any], program: Program) -> dict[int, int]:
    """Positions of the reduce-scatters along the outermost axis by bucket; none on one rank."""
    found: dict[int, int] = {}
    for position, op in enumerate(program.schedule.ops):
        if op.kind == "reduce_scatter" and op.when == "always":
            earlier = program.schedule.ops[found.get(op.bucket, position)].region
            if (earlier.start, earlier.stop) != (op.region.start, op.region.stop):
                raise ValueError(
                    f"{hook.name} replaces the last reduce_scatter of each bucket, and the "
                    f"schedule divides {program.buckets[op.bucket].text} into several; use no "
                    f"split_mb"
                )
            found[op.bucket] = position
    return found


def _is_everyone(program: Program, axes: tuple[str, ...]) -> bool:
    return all(size == 1 or name in axes for name, (size, _) in program.places.items())


def _spec(
    program: Program, bucket: int, position: int, devices: Devices, *, is_last: bool
) -> BucketSpec:
    """Specification of the part of a bucket that its all-reduce works on, on this rank."""
    start, stop = program.extents[position]
    planned, layout = program.plan.buckets[bucket], program.layouts[bucket]
    paths, shapes, strides, offsets = [], [], [], []
    for leaf, shape, stride, offset in zip(
        planned.leaves, layout.shapes, layout.strides, layout.offsets, strict=True
    ):
        end = offset + math.prod(shape)
        low, high = max(offset, start), min(end, stop)
        if low > high or (low == high and offset < end):
            continue
        is_cut = (low, high) != (offset, end)
        paths.append(program.plan.paths[leaf])
        shapes.append((high - low,) if is_cut else shape)
        strides.append((1,) if is_cut else stride)
        offsets.append(low - start)
    return BucketSpec(
        index=bucket,
        count=len(program.plan.buckets),
        is_last=is_last,
        numel=stop - start,
        dtype=getattr(torch, program.schedule.wire_dtypes[bucket]),
        device=devices[planned.device],
        paths=tuple(paths),
        shapes=tuple(shapes),
        strides=tuple(strides),
        offsets=tuple(offsets),
        is_scattered=program.schedule.ops[position].kind == "reduce_scatter",
    )
