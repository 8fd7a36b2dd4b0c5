"""Choice of a compressor for each bucket, by its error beside the noise of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import TypedDict  # as in compression.py

from fddp.core.entrance import entrance
from fddp.core.numerics.compression_choice import (
    CompressionErrors,
    cheapest,
    is_measured,
    next_errors,
)
from fddp.core.numerics.noise_scale import NoiseScale, SquaredNorms
from fddp.core.plan.plan import BucketPlan
from fddp.core.tables import plain_table
from fddp.core.text import size_text
from fddp.hooks.casting import bf16_compress
from fddp.hooks.compression import (
    Compressed,
    Compressor,
    ErrorFeedback,
    ErrorFeedbackState,
    Stateless,
)
from fddp.hooks.flat import padded, real, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook, Plain
from fddp.hooks.quantization import int4, int8
from fddp.hooks.top_k import block_top_k

HookOrAuto: TypeAlias = "Hook[Any] | Literal['auto'] | None"

_WIDTH = 256  # of a sketch: its squared norm has a relative deviation of (2 / 256) ** 0.5, or 9%
_DECAY = 0.5  # of estimates, from one measured step to the next


@dataclass(frozen=True)
class Exact(Stateless):
    """Plain sum over ranks, as a compressor."""

    name = "allreduce"

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        return all_reduce(bucket.buffer.clone()).map(
            lambda total: Compressed(total, lambda: bucket.buffer, state)
        )


class AutoState(TypedDict):
    """State of a bucket. All but `residual` is the same on all ranks that reduce it together.

    Attributes:
        residual: as in `ErrorFeedbackState`.
        inner: state of each compressor.
        step: number of steps taken.
        choice: number of the compressor of the next step.
        variance, signal, share: those of a `NoiseScale`.
        noise: squared norm of the noise of the mean.
        errors: squared norm of the error of the mean, by compressor.
        nbytes: bytes that a rank sends in a step, by compressor; 0.0 before the first measured
            step.
    """

    residual: Tensor
    inner: tuple[Any, ...]
    step: int
    choice: int
    variance: float
    signal: float
    share: float
    noise: float
    errors: tuple[float, ...]
    nbytes: tuple[float, ...]


@dataclass(frozen=True)
class Auto(Hook[AutoState]):
    """Hook that chooses a compressor for each bucket; see `auto`. The first one is exact."""

    compressors: tuple[Compressor[Any], ...]
    tolerance: float
    every: int
    smallest: int

    @property
    def name(self) -> str:
        names = [compressor.name for compressor in self.compressors[1:]]
        options = f"every={self.every}, smallest={self.smallest}"
        return f"auto({', '.join([*names, f'tolerance={self.tolerance}', options])})"

    @property
    def stages(self) -> int:
        return max(compressor.stages for compressor in self.compressors)

    @property
    def narrow(self) -> bool:
        return any(compressor.narrow for compressor in self.compressors)

    def init(self, spec: BucketSpec) -> AutoState:
        zeros = (0.0,) * len(self.compressors)
        return {
            "residual": torch.zeros(spec.numel, dtype=wide(spec.dtype), device=spec.device),
            "inner": tuple(compressor.init(spec) for compressor in self.compressors),
            "step": 0,
            "choice": 0,
            "variance": 0.0,
            "signal": 0.0,
            "share": 0.0,
            "noise": 0.0,
            "errors": zeros,
            "nbytes": zeros,
        }

    def apply(
        self, state: AutoState, bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, AutoState]]:
        choice, inner = state["choice"], state["inner"]
        fed_back: ErrorFeedbackState[Any] = {"residual": state["residual"], "inner": inner[choice]}
        reduction = ErrorFeedback(self.compressors[choice]).apply(fed_back, bucket, all_reduce)
        sketches, nbytes = None, state["nbytes"]
        can_measure = bucket.spec.numel >= self.smallest and all_reduce.world_size > 1
        if can_measure and is_measured(state["step"], self.every):
            own, nbytes = self._measured(state, bucket, all_reduce)
            sketches = all_reduce(own)

        def finish(end: tuple[Tensor, ErrorFeedbackState[Any]]) -> tuple[Tensor, AutoState]:
            total, left = end
            new: AutoState = {
                **state,
                "residual": left["residual"],
                "inner": (*inner[:choice], left["inner"], *inner[choice + 1 :]),
                "step": state["step"] + 1,
                "nbytes": nbytes,
            }
            return total, new if sketches is None else self._chosen(new, sketches.wait())

        return reduction.map(finish)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()

    def _measured(
        self, state: AutoState, bucket: Bucket, all_reduce: AllReduce
    ) -> tuple[Tensor, tuple[float, ...]]:
        """Sketches of this rank's weighted gradients and of the errors of the compressors but the
        exact one, and behind them 1 for a weight above 0, the weight, and the squared norm of the
        gradients times the weight; and the bytes of each compressor."""
        dtype = wide(bucket.spec.dtype)
        exact = real(bucket.buffer).to(dtype.to_real() if dtype.is_complex else dtype)
        # The same on all ranks, and new ones in each step, so that estimates are independent.
        generator = torch.Generator().manual_seed((state["step"] << 16) + bucket.spec.index)
        signs = torch.randint(0, 2, exact.shape, generator=generator, dtype=torch.int8)
        signs = signs.mul_(2).sub_(1).to(exact.device)
        sketches, costs = [sketch(exact, signs)], []
        for compressor, inner in zip(self.compressors, state["inner"], strict=True):
            tally = _Tally(all_reduce.rank, all_reduce.world_size)
            sent = compressor.compress(inner, bucket, tally).wait().sent()
            costs.append(tally.nbytes)
            if len(costs) > 1:
                sketches.append(sketch(exact - real(sent), signs))
        weight = bucket.weight
        square = float((sketches[0].double() * bucket.reference).square().sum())
        figures = [float(weight > 0.0), weight, square / weight if weight else 0.0]
        weighted = torch.cat(sketches) * bucket.reference
        return torch.cat([weighted, exact.new_tensor(figures)]), tuple(costs)

    def _chosen(self, state: AutoState, summed: Tensor) -> AutoState:
        """The state with the estimates and the choice that follow from sketches of all ranks."""
        # Not by torch, whose order of additions depends on the processor: ranks could differ.
        numbers = summed[:-3].double().view(-1, _WIDTH).tolist()
        squares = [sum(each * each for each in part) for part in numbers]
        active, weight, total = summed[-3:].double().tolist()
        if not weight > 0.0:
            return state
        mean, *errors = (square / weight**2 for square in squares)
        norms = SquaredNorms(math.nan, total, mean, round(active), weight)
        before = CompressionErrors(
            NoiseScale(state["variance"], state["signal"], state["share"]), state["errors"]
        )
        after = next_errors(before, norms, [0.0, *errors], decay=_DECAY)
        if after == before:
            return state
        noise = after.noise.variance / weight
        return {
            **state,
            "choice": cheapest(state["nbytes"], after.errors, self.tolerance * noise),
            "variance": after.noise.variance,
            "signal": after.noise.signal,
            "share": after.noise.share,
            "noise": noise,
            "errors": after.errors,
        }


class _Tally(AllReduce):
    """Collectives without the other ranks, which count the bytes that a rank sends in a ring.

    Values of this rank stand for those of others: a sum is that of one rank, and the rows that
    arrive are those that it would have sent, so that sums of them are of different values.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.nbytes = 0.0

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        self.nbytes += 2 * tensor.nbytes * (self.world_size - 1) / self.world_size
        return Future.of(tensor)

    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        self.nbytes += tensor.nbytes * (self.world_size - 1)
        return Future.of(tensor.expand(self.world_size, *tensor.shape))

    def all_to_all(self, tensor: Tensor) -> Future[Tensor]:
        self.nbytes += tensor.nbytes * (self.world_size - 1) / self.world_size
        return Future.of(tensor)


def sketch(values: Tensor, signs: Tensor, width: int = _WIDTH) -> Tensor:
    """Sums of values with signs, shape `(width,)`: of each `width`-th one.

    A linear function, so that the sketch of a sum is the sum of sketches. With random signs, the
    squared norm of a sketch is that of the values in expectation (M. Charikar et al., "Finding
    frequent items in data streams", ICALP 2002; here with groups in place of hashes).

    Example:
        >>> sketch(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, -1, 1]), width=2)
        tensor([ 4., -2.])
    """
    signed = values * signs
    return padded(signed, -len(signed) % width).view(-1, width).sum(0)


_DEFAULTS: tuple[Hook[Any], ...] = (
    bf16_compress,
    int8(),
    int4(),
    *(block_top_k(count / 256) for count in (26, 13, 5, 3, 1)),
)


@entrance
def auto(
    candidates: Sequence[Hook[Any]] = _DEFAULTS,
    *,
    tolerance: float = 0.2,
    every: int = 32,
    smallest: int = 16 * _WIDTH,
) -> Hook[AutoState]:
    """A compressor for each bucket: the cheapest whose error is below the noise of the gradients.

    In steps 0, 1, 2, 4, ..., and then every `every` steps, ranks measure the noise of the mean
    gradient (the squared norm of its random part, from the differences between ranks) and the error
    of each candidate, and all choose the candidate that sends the fewest bytes among those with an
    error of at most `tolerance` times the noise; without one, the exact sum. The choice holds from
    the next step on. Errors of all steps are fed back, as by `error_feedback`. `hook="auto"` stands
    for `auto()`.

    A measurement runs all candidates on this rank's gradients, and sums 256 numbers for each. Step
    0 is an exact sum. A single rank can't measure the noise, and compresses nothing.

    Args:
        candidates: compressors, with or without `error_feedback`, whose residual they then share.
            `allreduce` is always one.
        tolerance: squared norm of the accepted error of the mean gradient, as a multiple of that
            of its noise.
        every: steps between measurements.
        smallest: number of elements below which a bucket is summed exactly.

    Raises:
        TypeError: a candidate is no compressor.
        ValueError: another argument is out of range.

    Example:
        >>> import fddp, torch
        >>> from fddp.hooks import auto, choices_table, int4, int8
        >>> def choices(group):
        ...     params, hook = {"w": torch.zeros(5000)}, auto([int8(), int4()])
        ...     noise = torch.Generator().manual_seed(group.rank)
        ...     with fddp.GradSync(params, group=group, hook=hook) as sync:
        ...         grads = {"w": 1.0 + torch.randn(5000, generator=noise)}
        ...         _, state = sync.update(grads, sync.init_state())
        ...         return choices_table(sync.plan, hook, state)
        >>> print(fddp.loopback(2, choices)[0])
        bucket  leaves  first leaf  last leaf       size  hook                 sent   error
             0       1  w           w          19.53 KiB  Int4(block=64)  2.754 KiB  0.0151
    """
    if not isinstance(tolerance, (int, float)) or not tolerance >= 0.0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance!r}")
    for name, number in (("every", every), ("smallest", smallest)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {number!r}")
    compressors: list[Compressor[Any]] = [Exact()]
    if isinstance(candidates, (Hook, str)):
        raise TypeError(f"candidates must be a sequence of compressors, got {candidates!r}")
    for hook in candidates:
        own = hook.compressor if isinstance(hook, ErrorFeedback) else hook
        if isinstance(own, Plain):
            continue
        if not isinstance(own, Compressor):
            raise TypeError(
                f"candidates must be compressors, such as int8() or top_k(0.01), got {own!r}"
            )
        compressors.append(own)
    return Auto(tuple(compressors), float(tolerance), every, smallest)


def named_hook(hook: Any) -> Any:
    """Return the hook that an argument stands for: `auto()` for "auto"."""
    return auto() if isinstance(hook, str) and hook == "auto" else hook


_HEADER = ("bucket", "leaves", "first leaf", "last leaf", "size", "hook", "sent", "error")


@entrance
def choices_table(
    plan: BucketPlan, hook: Hook[Any] | Literal["auto"], states: Sequence[Any]
) -> str:
    """The buckets of a plan, with the compressor that `auto` has chosen for the next step.

    `sent` is in bytes a rank and step, "-" before the first measurement; `error` is the squared
    norm of the error of the mean, as a multiple of that of its noise in the last step that was
    measured. The same on all ranks; with "hierarchical", on those at the same place in their host.

    Args:
        plan: the plan of the buckets, `sync.plan`.
        hook: the hook, from `auto`, or "auto".
        states: states by bucket, from `sync.init_state` or `sync.update`.

    Raises:
        TypeError: the hook is not one of `auto`.
        ValueError: the states are not those of the plan.
    """
    chosen = named_hook(hook)
    if not isinstance(chosen, Auto):
        raise TypeError(f"hook must be a result of fddp.hooks.auto, got {hook!r}")
    if len(states) != len(plan.buckets):
        raise ValueError(
            f"states must have one for each of the {len(plan.buckets)} buckets of the plan, got "
            f"{len(states)}; pass those of a GradSync with sync.plan"
        )
    rows = []
    for number, (bucket, state) in enumerate(zip(plan.buckets, states, strict=True)):
        first, last = (plan.paths[bucket.leaves[i]] for i in (0, -1))
        name, sent, error = "allreduce", "-", "-"
        if state:  # else the bucket is sparse
            choice = state["choice"]
            name, noise = chosen.compressors[choice].name, state["noise"]
            sent = size_text(state["nbytes"][choice]) if state["share"] else "-"
            if choice:
                error = f"{state['errors'][choice] / noise if noise else 0.0:.3g}"
        size = size_text(bucket.nbytes)
        rows.append((str(number), str(len(bucket.leaves)), first, last, size, name, sent, error))
    return plain_table(_HEADER, rows, (0, 1, 4, 6, 7))
