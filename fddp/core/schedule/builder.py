"""Construction of schedules from the collectives of one bucket.

An algorithm is a pure function from a bucket to its *chains*. The bucket is cut into as many parts
of equal size as there are chains, and a chain lists the collectives of one part, each as its kind
and its axes. The builder adds everything else: packing and padding, the order across buckets, the
control word, repairs, dependencies and unpacking. Built-in algorithms have the same chain for each
bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast, get_args

from fddp.core.entrance import entrance, suggest_keywords
from fddp.core.plan.defaults import MIB
from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.plan.plan import Bucket, BucketPlan
from fddp.core.schedule.op import CONTROL_REGION, Buffer, Kind, Op, Region, When, is_texts
from fddp.core.schedule.piggyback import piggyback_problem
from fddp.core.schedule.schedule import RETAINED_DTYPES, Result, Scaling, Schedule
from fddp.core.schedule.topology import Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.core.text import choice_text, leaf_text

Algorithm = Literal["all_reduce", "hierarchical", "reduce_scatter", "all_gather"]

Chain = Sequence[tuple[str, ...]]
"""Collectives of one part of a bucket, one after the other: kind and axes of each."""

Chains = Callable[[Bucket], Sequence[Chain]]
"""The chains of a bucket, one for each of its parts."""

_COLLECTIVES = ("reduce_scatter", "all_reduce", "all_gather")


class _Stage(NamedTuple):
    """One local operation or collective on a piece of a bucket."""

    kind: Kind
    axes: tuple[str, ...] = ()  # of a collective
    shard: tuple[str, ...] = ()  # axes that divide the region before the operation


class _Piece(NamedTuple):
    """Elements of a bucket on which one chain of collectives runs."""

    bucket: int
    start: int
    stop: int
    packed: tuple[str, ...] = ()  # axes that divide the packed region
    stages: tuple[_Stage, ...] = ()
    unpacked: tuple[str, ...] = ()  # axes that divide the unpacked region


@entrance
@suggest_keywords
def make_schedule(
    plan: BucketPlan,
    topology: Topology | int,
    *,
    algorithm: Algorithm | Chains = "all_reduce",
    scaling: Scaling = "before",
    reduce_dtype: str | None = None,
    split_mb: float | None = None,
    deterministic: bool = False,
    virtual_ranks: int | None = None,
    piggyback: bool = True,
) -> Schedule:
    """Build the schedule that reduces the buckets of a plan to their mean over all ranks.

    Dense buckets are packed in plan order, each when its gradients are ready. Collectives of
    consecutive buckets overlap: the second collective of a bucket runs at the same time as the
    first collective of the next. The control word is piggybacked on the all-reduce of the last
    bucket if that runs on the CPU over all ranks, in a dtype that can hold the word; else it
    follows the first collective of the last bucket. Conditional repairs follow, then sparse
    buckets, whose gradients (of embeddings) are usually ready last.

    Args:
        plan: bucket plan.
        topology: ranks and axes; or the number of ranks.
        algorithm: "all_reduce" (flat); "hierarchical": reduce-scatter along the inner axes,
            innermost first, all-reduce along the outermost axis, all-gather back, which divides the
            traffic between hosts by the ranks per host; "reduce_scatter": each rank ends with its
            shard of the mean; "all_gather": the inverse, from shards to whole leaves. Axes of size
            1 are skipped. Or a pure function from a `Bucket` to its chains: the bucket is cut into
            parts of equal size, one for each chain, and a chain lists the collectives of its part
            as tuples of kind and axes, such as `("all_reduce", "host", "local")`. A reduce-scatter
            leaves each rank a chunk, on which later collectives work; an all-gather joins the
            chunks of the last reduce-scatter. If chunks are left, ranks end with shards of the
            mean. Wrong chains make wrong schedules, which `check_schedule` refuses.
        scaling: division by the number of ranks, "before" or "after" the reduction, or "average"
            as part of the collective.
        reduce_dtype: dtype in which float16 and bfloat16 buckets are reduced ("float32" or
            "float64"); None reduces each bucket in its own dtype.
        split_mb: largest size in MiB of one collective. Larger buckets and leaves are split into
            pieces. None never splits.
        deterministic: if True, sums are associated in the one order given by the topology, so that
            the bits of the mean do not depend on buckets, algorithm, transport or order of arrival.
            All-reduces become reduce-scatters, which sum in rank order along the innermost axis and
            then along the outer ones, and all-gathers. 16-bit buckets are reduced in float32 (or
            `reduce_dtype`). Gradients of all buckets are retained until the control word is
            reduced, and a bucket with late gradients is reduced again as a whole.
        virtual_ranks: number of virtual ranks whose mean is formed, at least the number of ranks;
            None for one gradient per rank. Implies `deterministic`; the association of sums then
            depends on this number alone. See [Note: virtual ranks] in `virtual.py`.
        piggyback: if False, the control word always has its own collective.

    Raises:
        TypeError: `plan` is no plan, or `topology` neither a topology nor an int.
        ValueError: an unknown algorithm, scaling or reduce_dtype; a split_mb that is not above 0;
            a chain with an unknown collective or axis; "hierarchical" with a single axis; sparse
            buckets with a sharded algorithm; `deterministic` with scaling "average" or algorithm
            "all_gather"; `virtual_ranks` below the number of ranks, or with leaves in no bucket.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> plan = plan_leaves([LeafSpec("w", (6,), "float32")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(host=2, local=3), algorithm="hierarchical")
        >>> [(op.kind, *op.axes) for op in schedule.ops if op.when == "always"]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('pack',), ('reduce_scatter', 'local'), ('control', 'host', 'local'),
         ('all_reduce', 'host'), ('all_gather', 'local'), ('unpack',)]
        >>> def two_stages(bucket):
        ...     return [[("all_reduce", "local"), ("all_reduce", "host")]]
        >>> schedule = make_schedule(plan, Topology(host=2, local=3), algorithm=two_stages)
        >>> [(op.kind, *op.axes) for op in schedule.ops if op.when == "late"]
        [('pack',), ('all_reduce', 'local'), ('all_reduce', 'host'), ('add',)]
    """
    if not isinstance(plan, BucketPlan):
        raise TypeError(
            f"plan must be a BucketPlan, got a {type(plan).__name__}; write "
            f"make_schedule(fddp.plan_buckets(tree), topology)"
        )
    topology = Topology.of(topology)
    _check(plan, topology, algorithm, scaling, reduce_dtype, split_mb)
    virtual = None
    if virtual_ranks is not None:
        virtual = VirtualRanks.over(virtual_ranks, topology.world_size)
        _check_virtual(plan)
    deterministic = deterministic or virtual is not None
    if deterministic:
        _check_deterministic(algorithm, scaling)
        reduce_dtype = reduce_dtype or "float32"
    if algorithm == "all_gather":
        return make_all_gather_schedule(
            make_schedule(plan, topology, algorithm="reduce_scatter", split_mb=split_mb)
        )
    wire_dtypes = tuple(_wire_dtype(bucket.dtype, reduce_dtype) for bucket in plan.buckets)
    built_in = () if callable(algorithm) else (_chain(algorithm, topology),)
    pieces: dict[int, list[_Piece]] = {}
    for b, bucket in enumerate(plan.buckets):
        if not bucket.sparse:
            chains = _checked(algorithm, b, bucket, topology) if callable(algorithm) else built_in
            if deterministic:
                chains = [_ordered(chain) for chain in chains]
            pieces[b] = _cut(
                b, bucket.numel, chains, topology, ITEM_BYTES[wire_dtypes[b]], split_mb
            )
    builder = _Builder(plan, topology, pieces)
    last = next(reversed(pieces), -1)
    is_flat = last >= 0 and pieces[last][-1].stages == (_Stage("all_reduce", topology.names),)
    # On an accelerator, the host would wait for all queued device work to read the word.
    on_cpu = is_flat and plan.buckets[last].device.partition("#")[0] in ("cpu", "meta")
    can_ride = on_cpu and not piggyback_problem(plan, topology, wire_dtypes[last], scaling)
    builder.append_chains(piggyback=piggyback and can_ride)
    for b in pieces:
        builder.append_repair(b, again=deterministic or wire_dtypes[b] in RETAINED_DTYPES)
    builder.append_gathers()
    builder.append_unpacks()
    leaves_shards = any(piece.unpacked for own in pieces.values() for piece in own)
    result: Result = "replicated_mean"
    if algorithm == "reduce_scatter" or leaves_shards:
        result = "sharded_mean"
        _check_shards(plan, algorithm)
    return Schedule(
        plan, topology, builder.ops, wire_dtypes, scaling, result, deterministic, virtual
    )


def make_all_gather_schedule(schedule: Schedule) -> Schedule:
    """Build the schedule that gathers the shards of another one, which has the result
    "sharded_mean" and all shards cut along the same axes, to whole leaves.

    Raises:
        ValueError: the schedule leaves no shards, or cuts them along different axes.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> plan = plan_leaves([LeafSpec("w", (6,), "float32")], order=[0], caps_bytes=[1])
        >>> shards = make_schedule(plan, Topology(world=2), algorithm="reduce_scatter")
        >>> [op.kind for op in make_all_gather_schedule(shards).ops]
        ['pack', 'all_gather', 'control', 'unpack']
    """
    ends = [op for op in schedule.ops if op.kind == "unpack"]
    sizes = dict(schedule.topology.axes)
    cuts = {tuple(a for a in op.region.shard if sizes.get(a, 0) != 1) for op in ends}
    if schedule.result != "sharded_mean" or len(cuts) > 1:
        raise ValueError(
            f"schedule must have the result 'sharded_mean' and all shards cut along the same axes, "
            f"got the result {schedule.result!r} and cuts {sorted(cuts)}"
        )
    (cut,) = cuts or {()}
    stages = _stages([("all_gather", axis) for axis in reversed(cut)], packed=cut)
    pieces: dict[int, list[_Piece]] = {}
    for op in ends:
        piece = _Piece(op.bucket, op.region.start, op.region.stop, cut, stages)
        pieces.setdefault(op.bucket, []).append(piece)
    for own in pieces.values():
        own.sort()
    builder = _Builder(schedule.plan, schedule.topology, pieces)
    builder.append_chains()
    builder.append_unpacks()
    wire_dtypes = tuple(bucket.dtype for bucket in schedule.plan.buckets)
    return Schedule(schedule.plan, schedule.topology, builder.ops, wire_dtypes, result="replicated")


def _check(
    plan: BucketPlan,
    topology: Topology,
    algorithm: str | Chains,
    scaling: str,
    reduce_dtype: str | None,
    split_mb: float | None,
) -> None:
    for name, value, choice in ("algorithm", algorithm, Algorithm), ("scaling", scaling, Scaling):
        if value not in get_args(choice) and not (name == "algorithm" and callable(value)):
            raise ValueError(choice_text(name, value, get_args(choice)))
    if reduce_dtype not in (None, "float32", "float64"):
        raise ValueError(f"reduce_dtype must be float32 or float64, got {reduce_dtype!r}")
    if split_mb is not None and not 0 < split_mb < float("inf"):
        raise ValueError(f"split_mb must be a number of MiB above 0, got {split_mb!r}")
    if algorithm == "hierarchical" and len(topology.axes) < 2:
        raise ValueError(
            f"'hierarchical' needs a topology with at least two axes, such as "
            f"Topology(host=4, local=8), got {topology}"
        )
    if algorithm in ("reduce_scatter", "all_gather"):
        _check_shards(plan, algorithm)


def _check_shards(plan: BucketPlan, algorithm: str | Chains) -> None:
    sparse = [bucket for bucket in plan.buckets if bucket.sparse]
    if sparse:
        path = plan.paths[sparse[0].leaves[0]]
        raise ValueError(
            f"{_name(algorithm)!r} can't shard the sparse leaf {path!r}; plan it as dense, or "
            f"exclude it with select="
        )


def _check_deterministic(algorithm: str | Chains, scaling: str) -> None:
    if algorithm == "all_gather":
        raise ValueError("'all_gather' does not sum; omit deterministic=True")
    if scaling == "average":
        raise ValueError(
            "averages along each axis in turn are rounded differently from one average along all "
            "axes; use scaling='before' or 'after' with deterministic=True"
        )


def _check_virtual(plan: BucketPlan) -> None:
    if plan.local:
        raise ValueError(
            f"{leaf_text(plan.paths[plan.local[0]])} is in no bucket, and would keep the gradient "
            f"of the virtual ranks of one rank, which depend on the number of ranks; reduce it "
            f"too, or remove it from the tree"
        )


def _chain(algorithm: Algorithm, topology: Topology) -> Chain:
    """Return the chain of a built-in algorithm, the same for each bucket."""
    axes = [name for name, size in topology.axes if size > 1]
    if algorithm == "all_reduce" or (algorithm == "hierarchical" and not axes):
        return [("all_reduce", *topology.names)]
    if algorithm == "hierarchical":
        outer, *inner = axes
        scatter = [("reduce_scatter", axis) for axis in reversed(inner)]
        gather = [("all_gather", axis) for axis in inner]
        return [*scatter, ("all_reduce", outer), *gather]
    return [("reduce_scatter", axis) for axis in reversed(axes)]


def _ordered(chain: Chain) -> Chain:
    """Replace each all-reduce by a reduce-scatter, which sums in a fixed order, and an
    all-gather."""
    ordered: list[tuple[str, ...]] = []
    for kind, *axes in chain:
        if kind == "all_reduce":
            ordered += [("reduce_scatter", *axes), ("all_gather", *axes)]
        else:
            ordered.append((kind, *axes))
    return ordered


def _checked(chains_of: Chains, b: int, bucket: Bucket, topology: Topology) -> Sequence[Chain]:
    """Return the chains that a user's function gives for a bucket, if they have the right form."""
    chains = chains_of(bucket)
    at = f"algorithm {_name(chains_of)!r}, bucket {b}"
    if not isinstance(chains, (list, tuple)) or not chains:
        raise ValueError(
            f"{at}: it must return a list of one or more chains, such as "
            f"[[{('all_reduce', *topology.names)}]], got {chains!r}"
        )
    for part, chain in enumerate(chains):
        problem = _chain_problem(chain, topology)
        if problem is not None:
            raise ValueError(f"{at}: chain {part} {problem}")
    return chains


def _chain_problem(chain: Chain, topology: Topology) -> str | None:
    example = ("all_reduce", *topology.names)
    if not isinstance(chain, (list, tuple)) or any(isinstance(item, str) for item in chain):
        return f"must be a list of collectives, such as [{example}], got {chain!r}"
    for collective in chain:
        if not is_texts(collective) or len(collective) < 2:
            return f"has {collective!r}; write a kind and one or more axes, such as {example}"
        kind, *axes = collective
        if kind not in _COLLECTIVES:
            return f"has {collective!r}; {choice_text('kind', kind, _COLLECTIVES)}"
        for axis in axes:
            if axis not in topology.names:
                return f"has {collective!r}; {choice_text('axis', axis, topology.names)}"
    return None


def _name(algorithm: str | Chains) -> str:
    return algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "function")


def _stages(chain: Chain, packed: tuple[str, ...] = ()) -> tuple[_Stage, ...]:
    """Return the collectives of a chain with the shard on which each works."""
    stages, shard = [], packed
    for kind, *axes in chain:
        stages.append(_Stage(cast("Kind", kind), tuple(axes), shard))
        shard = _shard_after(stages[-1])
    return tuple(stages)


def _shard_after(stage: _Stage) -> tuple[str, ...]:
    if stage.kind == "reduce_scatter":
        return (*stage.shard, *stage.axes)
    if stage.kind == "all_gather":
        return tuple(axis for axis in stage.shard if axis not in stage.axes)
    return stage.shard


def _cut(
    bucket: int,
    numel: int,
    chains: Sequence[Chain],
    topology: Topology,
    item_bytes: int,
    split_mb: float | None,
) -> list[_Piece]:
    """Cut a bucket into a part for each chain, and each part into pieces of nearly equal size, at
    most `split_mb` if possible. Pieces can be divided along all axes that shard the bucket. Chains
    whose part would be empty are left out."""
    of_chain = [_stages(chain) for chain in chains]
    divisor = topology.size({a for stages in of_chain for s in stages for a in _shard_after(s)})
    units = -(-numel // divisor)
    of_chain = of_chain[: max(1, units)]
    edges = [units * part // len(of_chain) for part in range(len(of_chain) + 1)]
    pieces = []
    for stages, first, end in zip(of_chain, edges[:-1], edges[1:], strict=True):
        count = 1
        if split_mb is not None:
            units_each = int(split_mb * MIB) // (divisor * item_bytes)
            count = max(1, -(-(end - first) // max(1, units_each)))
        cuts = [(first + (end - first) * i // count) * divisor for i in range(count + 1)]
        unpacked = _shard_after(stages[-1]) if stages else ()
        pieces += [_Piece(bucket, cuts[i], cuts[i + 1], (), stages, unpacked) for i in range(count)]
    return pieces


class _Builder:
    """Appends operations and tracks their dependencies."""

    def __init__(
        self,
        plan: BucketPlan,
        topology: Topology,
        pieces: dict[int, list[_Piece]],
    ) -> None:
        self._plan = plan
        self._axes = topology.names
        self._pieces = pieces
        self._ops: list[Op] = []
        self._ends: dict[_Piece, int] = {}  # position of the last operation on each piece
        self._control = -1

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(self._ops)

    def append_chains(self, *, piggyback: bool = False) -> None:
        """Append the collectives of all pieces, interleaved, and the control word."""
        order = [piece for pieces in self._pieces.values() for piece in pieces]
        if not order:
            self._append_control(-1)
        depth = max([1, *(len(piece.stages) for piece in order)])
        for slot in range(len(order) + depth - 1):
            for stage in range(depth):
                if 0 <= slot - stage < len(order):
                    piece = order[slot - stage]
                    if stage == 0:
                        self._append_pack(piece)
                    if piggyback and piece == order[-1] and stage == 0:
                        self._append_carrier(piece)
                    elif stage < len(piece.stages):
                        self._extend(piece, piece.stages[stage])
                if stage == 0 and slot == len(order) - 1 and not piggyback:
                    self._append_control(order[-1].bucket)

    def append_repair(self, bucket: int, *, again: bool) -> None:
        """Append the conditional repair of a bucket: of its late gradients in a second buffer, or
        `again` of the whole bucket, which is retained."""
        pieces = self._pieces[bucket]
        when: When = "again" if again else "late"
        deps = (*self._ends_of(pieces), self._control)
        packed = self._append(_Stage("pack"), _whole(pieces), deps, when)
        for piece in pieces:
            self._ends[piece] = packed
            for stage in piece.stages:
                self._extend(piece, stage, when)
            if not again:
                self._extend(piece, _Stage("add", shard=piece.unpacked), when)

    def append_gathers(self) -> None:
        """Append the gathering of sparse buckets."""
        for b, bucket in enumerate(self._plan.buckets):
            if bucket.sparse:
                whole = _Piece(b, 0, bucket.numel)
                self._pieces[b] = [whole]
                gather = _Stage("gather", self._axes)
                self._ends[whole] = self._append(gather, whole, (self._control,))

    def append_unpacks(self) -> None:
        """Append one unpacking per bucket, or one per piece if ranks keep shards."""
        for b in range(len(self._plan.buckets)):
            self._append_unpacks(b)

    def _append_unpacks(self, bucket: int) -> None:
        pieces = self._pieces[bucket]
        has_shards = any(piece.unpacked for piece in pieces)
        for part in [[piece] for piece in pieces] if has_shards else [pieces]:
            deps = (*self._ends_of(part), self._control)
            self._append(_Stage("unpack", shard=part[0].unpacked), _whole(part), deps)

    def _append_pack(self, piece: _Piece) -> None:
        if piece.packed:
            self._ends[piece] = self._append(_Stage("pack", shard=piece.packed), piece, ())
        elif piece.start == 0:
            pieces = self._pieces[piece.bucket]
            packed = self._append(_Stage("pack"), _whole(pieces), ())
            self._ends.update(dict.fromkeys(pieces, packed))

    def _append_control(self, last_bucket: int, *, piggyback: bool = False) -> None:
        """Append the control word after the packing of the last bucket, which completes it."""
        positions = enumerate(self._ops)
        packs = tuple(i for i, op in positions if op.kind == "pack" and op.bucket == last_bucket)
        self._control = len(self._ops)
        bucket, axes = (last_bucket, ()) if piggyback else (-1, self._axes)
        self._ops.append(Op("control", bucket, axes, CONTROL_REGION, packs))

    def _append_carrier(self, piece: _Piece) -> None:
        """Append a piggybacked control word, and the all-reduce that carries it."""
        self._append_control(piece.bucket, piggyback=True)
        deps = (self._ends[piece], self._control)
        self._ends[piece] = self._control = self._append(piece.stages[0], piece, deps)

    def _ends_of(self, pieces: list[_Piece]) -> tuple[int, ...]:
        return tuple(self._ends[piece] for piece in pieces)

    def _extend(self, piece: _Piece, stage: _Stage, when: When = "always") -> None:
        """Append an operation that depends on the last one on the same piece."""
        self._ends[piece] = self._append(stage, piece, (self._ends[piece],), when)

    def _append(
        self, stage: _Stage, piece: _Piece, deps: tuple[int, ...], when: When = "always"
    ) -> int:
        buffer: Buffer = "repair" if when == "late" and stage.kind != "add" else "bucket"
        region = Region(buffer, piece.start, piece.stop, stage.shard)
        deps = tuple(dict.fromkeys(deps))
        self._ops.append(Op(stage.kind, piece.bucket, stage.axes, region, deps, when))
        return len(self._ops) - 1


def _whole(pieces: list[_Piece]) -> _Piece:
    return _Piece(pieces[0].bucket, pieces[0].start, pieces[-1].stop)


def _wire_dtype(dtype: str, reduce_dtype: str | None) -> str:
    return reduce_dtype if reduce_dtype and dtype in ("float16", "bfloat16") else dtype
