"""Makes schedules: flat, hierarchical, and sharded."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.op import CONTROL_REGION, Buffer, Kind, Op, Region, When
from fddp.core.schedule.piggyback import with_piggybacked_word
from fddp.core.schedule.schedule import RETAINED_DTYPES, Result, Scaling, Schedule
from fddp.core.schedule.topology import Topology

Algorithm = Literal["all_reduce", "hierarchical", "reduce_scatter", "all_gather"]

_RESULTS: dict[Algorithm, Result] = {
    "all_reduce": "replicated_mean",
    "hierarchical": "replicated_mean",
    "reduce_scatter": "sharded_mean",
}


class _Stage(NamedTuple):
    """One collective of the chain that every piece of a bucket goes through."""

    kind: Kind
    axes: tuple[str, ...]
    shard: tuple[str, ...]  # of the region before it


class _Chain(NamedTuple):
    """What happens to each piece."""

    first: tuple[str, ...]  # axes that divide what is packed
    stages: tuple[_Stage, ...]
    last: tuple[str, ...]  # axes that divide what is unpacked


def make_schedule(
    plan: BucketPlan,
    topology: Topology,
    *,
    algorithm: Algorithm = "all_reduce",
    scaling: Scaling = "before",
    reduce_dtype: str | None = None,
    split_mb: float | None = None,
    deterministic: bool = False,
    ride: bool = True,
) -> Schedule:
    """The schedule that takes the plan's buckets to their mean over all ranks of the topology.

    Dense buckets are packed in plan order, each when it is full, and the chain of collectives of
    one overlaps with those of the next: while its second collective runs, the next bucket's first
    one does. The control word rides in the tail of the last bucket's all-reduce where it can (see
    `with_piggybacked_word`); else it follows the first collective of the last bucket. Then
    come the repairs, should the control word ask for any, and the sparse buckets, whose gradients
    (embeddings, as a rule) arrive last anyway.

    Args:
        plan: the bucket plan.
        topology: the ranks.
        algorithm: "all_reduce" (flat); "hierarchical": reduce-scatter along the inner axes,
            innermost first, all-reduce along the outermost, all-gather back, so that what crosses
            between hosts is divided by the ranks of a host; "reduce_scatter": each rank ends with
            its shard of the mean; "all_gather": its counterpart, from shards to whole leaves.
            Axes of one place are passed over.
        scaling: where the division by the number of ranks happens.
        reduce_dtype: dtype in which float16 and bfloat16 buckets are reduced ("float32" or
            "float64"); None reduces each bucket in its own dtype.
        split_mb: MiB at which the buffer of a bucket, or of a single large leaf, is cut into
            pieces that travel one after the other; None cuts none.
        deterministic: whether sums have the one association that follows from the topology, so that
            the bits of the mean depend on nothing else: neither on buckets nor on the algorithm,
            the transport or the order of arrival. All-reduces become reduce-scatters, which add up
            in rank order within the innermost axis and then across, and all-gathers; 16-bit buckets
            are reduced in float32 (or `reduce_dtype`); every bucket's contributions are kept until
            the control word is in, and one that was late is reduced again as a whole.
        ride: whether the control word may ride; without, it always has a collective of its own.

    Raises:
        ValueError: an unknown algorithm, scaling or reduce_dtype, a split_mb that is not above 0,
            "hierarchical" with a single axis, sparse buckets that are to be sharded, or
            deterministic sums that are averaged on the way, or of nothing.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> plan = plan_leaves([LeafSpec("w", (6,), "float32")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(host=2, local=3), algorithm="hierarchical")
        >>> [(op.kind, *op.axes) for op in schedule.ops if op.when == "always"]
        ... # doctest: +NORMALIZE_WHITESPACE
        [('pack',), ('reduce_scatter', 'local'), ('control', 'host', 'local'),
         ('all_reduce', 'host'), ('all_gather', 'local'), ('unpack',)]
    """
    _check(plan, topology, algorithm, scaling, reduce_dtype, split_mb)
    if deterministic:
        _check_deterministic(algorithm, scaling)
        reduce_dtype = reduce_dtype or "float32"
    if algorithm == "all_gather":
        return make_all_gather_schedule(
            make_schedule(plan, topology, algorithm="reduce_scatter", split_mb=split_mb)
        )
    wire_dtypes = tuple(_wire_dtype(bucket.dtype, reduce_dtype) for bucket in plan.buckets)
    chain = _ordered_chain(algorithm, topology) if deterministic else _chain(algorithm, topology)
    divisor = topology.size({a for stage in chain.stages for a in stage.shard} | {*chain.last})
    pieces = {
        b: _cut(b, bucket.numel, divisor, ITEM_BYTES[wire_dtypes[b]], split_mb)
        for b, bucket in enumerate(plan.buckets)
        if not bucket.sparse
    }
    builder = _Builder(plan, topology, chain, pieces)
    builder.append_chains()
    for b in pieces:
        builder.append_repair(b, again=deterministic or wire_dtypes[b] in RETAINED_DTYPES)
    builder.append_gathers()
    builder.append_unpacks()
    schedule = Schedule(
        plan, topology, builder.ops, wire_dtypes, scaling, _RESULTS[algorithm], deterministic
    )
    return with_piggybacked_word(schedule) if ride else schedule


def make_all_gather_schedule(schedule: Schedule) -> Schedule:
    """The counterpart of a schedule that leaves shards: from these to whole leaves on every rank.

    Args:
        schedule: one whose result is "sharded_mean", all its shards cut along the same axes.

    Raises:
        ValueError: it leaves no shards, or cuts them in several ways.

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
            f"only a schedule whose result is 'sharded_mean', with shards cut along the same axes, "
            f"has such a counterpart; got the result {schedule.result!r} and cuts {sorted(cuts)}"
        )
    (cut,) = cuts or {()}
    stages = [_Stage("all_gather", (cut[i],), cut[: i + 1]) for i in reversed(range(len(cut)))]
    pieces: dict[int, list[_Piece]] = {}
    for op in ends:
        pieces.setdefault(op.bucket, []).append(_Piece(op.bucket, op.region.start, op.region.stop))
    for own in pieces.values():
        own.sort()
    builder = _Builder(schedule.plan, schedule.topology, _Chain(cut, tuple(stages), ()), pieces)
    builder.append_chains()
    builder.append_unpacks()
    wire_dtypes = tuple(bucket.dtype for bucket in schedule.plan.buckets)
    return Schedule(schedule.plan, schedule.topology, builder.ops, wire_dtypes, result="replicated")


def _check(
    plan: BucketPlan,
    topology: Topology,
    algorithm: str,
    scaling: str,
    reduce_dtype: str | None,
    split_mb: float | None,
) -> None:
    for name, value, choice in (
        ("algorithm", algorithm, Algorithm),
        ("scaling", scaling, Scaling),
    ):
        if value not in get_args(choice):
            raise ValueError(f"{name} must be one of {', '.join(get_args(choice))}, got {value!r}")
    if reduce_dtype not in (None, "float32", "float64"):
        raise ValueError(f"reduce_dtype must be float32 or float64, got {reduce_dtype!r}")
    if split_mb is not None and not 0 < split_mb < float("inf"):
        raise ValueError(f"split_mb must be a number of MiB above 0, got {split_mb!r}")
    if algorithm == "hierarchical" and len(topology.axes) < 2:
        raise ValueError(
            f"'hierarchical' needs a topology of at least two axes, such as "
            f"Topology(host=4, local=8), got {topology}"
        )
    sparse = [bucket for bucket in plan.buckets if bucket.sparse]
    if sparse and algorithm in ("reduce_scatter", "all_gather"):
        path = plan.paths[sparse[0].leaves[0]]
        raise ValueError(
            f"{algorithm!r} can't divide the sparse leaf {path!r}; plan it as a dense one, or "
            f"leave it out with select="
        )


def _check_deterministic(algorithm: str, scaling: str) -> None:
    if algorithm == "all_gather":
        raise ValueError("'all_gather' sums nothing; leave deterministic out")
    if scaling == "average":
        raise ValueError(
            "an average along each axis rounds otherwise than one along all; give scaling='before' "
            "or 'after' with deterministic=True"
        )


def _chain(algorithm: Algorithm, topology: Topology) -> _Chain:
    axes = tuple(name for name, size in topology.axes if size > 1)
    inward = tuple(reversed(axes))
    if algorithm == "all_reduce" or (algorithm == "hierarchical" and not axes):
        return _Chain((), (_Stage("all_reduce", topology.names, ()),), ())
    if algorithm == "hierarchical":
        inner = inward[:-1]
        scatter = [_Stage("reduce_scatter", (a,), inner[:i]) for i, a in enumerate(inner)]
        gather = [_Stage("all_gather", (a,), inner[: i + 1]) for i, a in enumerate(inner)]
        across = _Stage("all_reduce", axes[:1], inner)
        return _Chain((), (*scatter, across, *reversed(gather)), ())
    stages = [_Stage("reduce_scatter", (a,), inward[:i]) for i, a in enumerate(inward)]
    return _Chain((), tuple(stages), inward)


def _ordered_chain(algorithm: Algorithm, topology: Topology) -> _Chain:
    """The same with a reduce-scatter and an all-gather in place of each all-reduce: the sum of a
    reduce-scatter has an order."""
    free = _chain(algorithm, topology)
    stages: list[_Stage] = []
    for kind, axes, shard in free.stages:
        if kind == "all_reduce":
            stages += [
                _Stage("reduce_scatter", axes, shard),
                _Stage("all_gather", axes, (*shard, *axes)),
            ]
        else:
            stages.append(_Stage(kind, axes, shard))
    return free._replace(stages=tuple(stages))


class _Piece(NamedTuple):
    """Elements of a bucket that travel together."""

    bucket: int
    start: int
    stop: int


def _cut(
    bucket: int, numel: int, divisor: int, item_bytes: int, split_mb: float | None
) -> list[_Piece]:
    """Pieces that differ by one divisible unit at most, no larger than the split where that can
    be."""
    units = -(-numel // divisor)
    count = 1
    if split_mb is not None:
        units_each = int(split_mb * 2**20) // (divisor * item_bytes)
        count = max(1, -(-units // max(1, units_each)))
    edges = [units * i // count * divisor for i in range(count + 1)]
    return [_Piece(bucket, edges[i], edges[i + 1]) for i in range(count)]


class _Builder:
    """Appends operations, and keeps track of which must follow which."""

    def __init__(
        self,
        plan: BucketPlan,
        topology: Topology,
        chain: _Chain,
        pieces: dict[int, list[_Piece]],
    ) -> None:
        self._plan = plan
        self._axes = topology.names
        self._chain = chain
        self._pieces = pieces
        self._ops: list[Op] = []
        self._ends: dict[_Piece, int] = {}  # the last operation so far on each piece
        self._control = -1

    @property
    def ops(self) -> tuple[Op, ...]:
        """What has been appended."""
        return tuple(self._ops)

    def append_chains(self) -> None:
        """The chains of all pieces, each a stage behind the one after it, and the control word."""
        order = [piece for pieces in self._pieces.values() for piece in pieces]
        if not order:
            self._append_control(-1)
        depth = max(1, len(self._chain.stages))
        for slot in range(len(order) + depth - 1):
            for stage in range(depth):
                if 0 <= slot - stage < len(order):
                    self._append_stage(order[slot - stage], stage)
                if stage == 0 and slot == len(order) - 1:
                    self._append_control(order[-1].bucket)

    def append_repair(self, bucket: int, *, again: bool) -> None:
        """The conditional operations that mend a late bucket."""
        pieces = self._pieces[bucket]
        buffer: Buffer = "bucket" if again else "repair"
        when: When = "again" if again else "late"
        deps = (*self._ends_of(pieces), self._control)
        packed = self._append("pack", _whole(pieces), (), deps, buffer=buffer, when=when)
        for piece in pieces:
            self._ends[piece] = packed
            for stage in self._chain.stages:
                self._append_collective(piece, stage, buffer, when)
            if not again:
                end = (self._ends[piece],)
                shard = self._chain.last
                self._ends[piece] = self._append("add", piece, (), end, shard=shard, when=when)

    def append_gathers(self) -> None:
        """Sparse buckets, whose sizes ranks have yet to exchange."""
        for b, bucket in enumerate(self._plan.buckets):
            if bucket.sparse:
                whole = _Piece(b, 0, bucket.numel)
                self._pieces[b] = [whole]
                self._ends[whole] = self._append("gather", whole, self._axes, (self._control,))

    def append_unpacks(self) -> None:
        """For each bucket, one; or one for each piece of which ranks keep their shards.

        All of them look into the control word, also where nothing before them does.
        """
        for b in range(len(self._plan.buckets)):
            pieces = self._pieces[b]
            if self._chain.last:
                for piece in pieces:
                    end = (self._ends[piece], self._control)
                    self._append("unpack", piece, (), end, shard=self._chain.last)
            else:
                ends = (*self._ends_of(pieces), self._control)
                self._append("unpack", _whole(pieces), (), ends)

    def _append_stage(self, piece: _Piece, stage: int) -> None:
        """A piece's next collective, after packing if it is the first."""
        if stage == 0:
            self._append_pack(piece)
        if stage < len(self._chain.stages):
            self._append_collective(piece, self._chain.stages[stage], "bucket", "always")

    def _append_pack(self, piece: _Piece) -> None:
        if self._chain.first:
            self._ends[piece] = self._append("pack", piece, (), (), shard=self._chain.first)
        elif piece.start == 0:
            pieces = self._pieces[piece.bucket]
            packed = self._append("pack", _whole(pieces), (), ())
            self._ends.update(dict.fromkeys(pieces, packed))

    def _append_collective(self, piece: _Piece, stage: _Stage, buffer: Buffer, when: When) -> None:
        deps = (self._ends[piece],)
        self._ends[piece] = self._append(
            stage.kind, piece, stage.axes, deps, shard=stage.shard, buffer=buffer, when=when
        )

    def _append_control(self, last_bucket: int) -> None:
        """Beside the last bucket: once that is packed, all that this rank has to tell is known."""
        packs = [
            i for i, op in enumerate(self._ops) if op.kind == "pack" and op.bucket == last_bucket
        ]
        self._control = len(self._ops)
        self._ops.append(Op("control", -1, self._axes, CONTROL_REGION, tuple(packs)))

    def _ends_of(self, pieces: list[_Piece]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._ends[piece] for piece in pieces))

    def _append(
        self,
        kind: Kind,
        piece: _Piece,
        axes: tuple[str, ...],
        deps: tuple[int, ...],
        *,
        shard: tuple[str, ...] = (),
        buffer: Buffer = "bucket",
        when: When = "always",
    ) -> int:
        region = Region(buffer, piece.start, piece.stop, shard)
        self._ops.append(Op(kind, piece.bucket, axes, region, deps, when))
        return len(self._ops) - 1


def _whole(pieces: list[_Piece]) -> _Piece:
    return _Piece(pieces[0].bucket, pieces[0].start, pieces[-1].stop)


def _wire_dtype(dtype: str, reduce_dtype: str | None) -> str:
    return reduce_dtype if reduce_dtype and dtype in ("float16", "bfloat16") else dtype
