"""Cost models of collectives: time as a function of size and number of ranks.

In Hockney's model, a message of m bytes over a link takes alpha + beta * m seconds. The algorithm
of a collective determines its number of messages in sequence (steps) and the share of the buffer
that each rank sends in total:

| algorithm | steps of an all-reduce | share of the buffer | source |
| --- | --- | --- | --- |
| "ring" | 2(n - 1) | 2(n - 1)/n | Patarasuk and Yuan 2009 |
| "tree" | 2 ceil(log2 n) | 2(n - 1)/n | Thakur, Rabenseifner and Gropp 2005 |
| "direct" | 2 | 2(n - 1)/n | all peers at once, over links without contention |

A reduce-scatter or an all-gather has half of both. A single rank takes no time.

R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel
Computing 20(3), 1994. P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", J. Parallel Distrib. Comput. 69(2), 2009. R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of collective communication operations in MPICH", Int. J. High Perform.
Comput. Appl. 19(1), 2005.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from fddp.core.entrance import entrance
from fddp.core.protocol.messages import decode
from fddp.core.text import counted, size_text, suggestion, time_text

LinkAlgorithm = Literal["ring", "tree", "direct"]
CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "control"]

FloatArray = npt.NDArray[np.float64]

MOST_S = 1e9
"""Longest time in seconds of a step, of a byte, and of backward. Products stay finite."""


class Sample(NamedTuple):
    """One measured collective.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather" or "control".
        nbytes: bytes of the group's whole buffer, as in `CostModel.time_s`.
        ranks: number of ranks in the group.
        time_s: measured time in seconds.
        busy: True if backward ran at the same time.
    """

    kind: CollectiveKind
    nbytes: int
    ranks: int
    time_s: float
    busy: bool = False

    def __repr__(self) -> str:
        return (
            f"Sample({self.kind} of {size_text(self.nbytes)} on {counted(self.ranks, 'rank')}, "
            f"{'in' if self.busy else 'outside of'} backward: {time_text(self.time_s)})"
        )


class Factors(NamedTuple):
    """Factors of alpha and beta in the cost of a collective."""

    steps: float  # number of messages in sequence; each costs alpha
    share: float  # fraction of the group's buffer that each rank sends; each byte costs beta


@dataclass(frozen=True, repr=False)
class CostModel:
    """Cost of collectives over one kind of link.

    Attributes:
        alpha_s: latency of a step in seconds.
        beta_s_per_byte: seconds per byte; the inverse of the one-way bandwidth of a rank.
        algorithm: "ring", "tree" (recursive halving and doubling), or "direct" (shared memory, or a
            switch of full bandwidth).
        overlap: speed of a collective during backward relative to its speed alone: 1 if backward
            does not slow it down, 0.5 if it takes twice as long because both use the same cores.

    Raises:
        ValueError: seconds below 0 or above 1e9, an overlap outside [1e-9, 1], or an unknown
            algorithm.

    Example:
        >>> cost = CostModel(alpha_s=1e-5, beta_s_per_byte=1e-9)
        >>> f"{cost.time_s('all_reduce', 4_000_000, ranks=4):.5f}"
        '0.00606'
        >>> CostModel.from_json(cost.to_json()) == cost
        True
        >>> cost
        CostModel(ring, 10 us a step, 1 GB/s, overlap 1)
    """

    alpha_s: float
    beta_s_per_byte: float
    algorithm: LinkAlgorithm = "ring"
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte"):
            value = getattr(self, name)
            if not _is_number(value) or not 0.0 <= value <= MOST_S:
                raise ValueError(f"{name} must be a number from 0 to {MOST_S:.0e}, got {value!r}")
        if not _is_number(self.overlap) or not 1 / MOST_S <= self.overlap <= 1.0:
            raise ValueError(
                f"overlap must be a number from {1 / MOST_S:.0e} to 1, got {self.overlap!r}"
            )
        _check_algorithm(self.algorithm)

    def __repr__(self) -> str:
        beta = self.beta_s_per_byte
        rate = f"{1e-9 / beta:.3g} GB/s" if beta else "unlimited bandwidth"
        step = f"{time_text(self.alpha_s)} a step"
        return f"CostModel({self.algorithm}, {step}, {rate}, overlap {self.overlap:.3g})"

    def time_s(self, kind: CollectiveKind, nbytes: float, ranks: int) -> float:
        """Return the time in seconds of a collective outside of backward.

        Args:
            kind: "all_reduce", "reduce_scatter", "all_gather" or "control" (an all-reduce).
            nbytes: bytes of the group's whole buffer: of the input of a reduce-scatter and the
                output of an all-gather.
            ranks: number of ranks in the group.

        Raises:
            ValueError: an unknown kind, less than one rank, or bytes that are negative or NaN.
        """
        steps, share = factors(kind, ranks, self.algorithm)
        if not nbytes >= 0:
            raise ValueError(f"nbytes must be at least 0, got {nbytes!r}")
        return steps * self.alpha_s + share * self.beta_s_per_byte * nbytes

    @classmethod
    def worst(cls, models: Sequence[CostModel]) -> CostModel:
        """Return the model of a group that spans several kinds of links, limited by the slowest.

        There is one model per axis, outermost first. The result has the first one's algorithm.

        Example:
            >>> CostModel.worst([CostModel(1e-5, 1e-9), CostModel(1e-6, 1e-8, overlap=0.5)])
            CostModel(ring, 10 us a step, 0.1 GB/s, overlap 0.5)
        """
        return cls(
            max(model.alpha_s for model in models),
            max(model.beta_s_per_byte for model in models),
            models[0].algorithm,
            min(model.overlap for model in models),
        )

    @classmethod
    @entrance
    def fit(cls, samples: Iterable[Sample], *, algorithm: LinkAlgorithm = "ring") -> CostModel:
        """Fit a model to measured times.

        Repeated samples of one kind, size and number of ranks are reduced to their lower quartile:
        disturbances only slow a collective down, and on some backends small collectives take up to
        five times as long on an idle machine, which does not occur within a step. Alpha and beta,
        both at least 0, minimise the squared *relative* error, so that small sizes count as much as
        large ones. `overlap` is the median over sizes of idle time divided by busy time, or 1
        without busy samples.

        Args:
            samples: measured collectives of at least two sizes, on at least 2 ranks.
            algorithm: algorithm of the collectives.

        Raises:
            ValueError: invalid times or sizes, or fewer than two sizes.

        Example:
            >>> true = CostModel(1e-5, 1e-9)
            >>> sizes = (1_000, 1_000_000)
            >>> found = CostModel.fit(
            ...     Sample("all_reduce", n, 2, true.time_s("all_reduce", n, 2)) for n in sizes)
            >>> f"{found.alpha_s:.3g} {found.beta_s_per_byte:.3g}"
            '1e-05 1e-09'
        """
        _check_algorithm(algorithm)
        idle_s, busy_s = _quartiles(samples)
        alpha_s, beta_s_per_byte = _least_relative(idle_s, algorithm)
        return cls(alpha_s, beta_s_per_byte, algorithm, _overlap(idle_s, busy_s))

    def to_json(self) -> str:
        """Return the model as one line of JSON. `from_json` restores an equal model."""
        return json.dumps(asdict(self))

    @classmethod
    @entrance
    def from_json(cls, text: str) -> CostModel:
        """Restore a model from `to_json`.

        Raises:
            ValueError: the text is malformed; the message names the field.
        """
        return cls(**decode(text, dict.fromkeys(cls.__dataclass_fields__, object), "cost JSON"))


def factors(kind: CollectiveKind, ranks: int, algorithm: LinkAlgorithm) -> Factors:
    """Return steps and share of a collective; see the table at the top of this file.

    Raises:
        ValueError: an unknown kind, or less than one rank.

    Example:
        >>> factors("all_reduce", 4, "ring"), factors("all_gather", 4, "tree")
        (Factors(steps=6, share=1.5), Factors(steps=2, share=0.75))
    """
    if kind not in get_args(CollectiveKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(CollectiveKind))}, got {kind!r}")
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"a collective needs at least 1 rank, got {ranks!r}")
    steps = {"ring": ranks - 1, "tree": (ranks - 1).bit_length(), "direct": min(ranks - 1, 1)}
    halves = 1 if kind in ("reduce_scatter", "all_gather") else 2
    return Factors(halves * steps[algorithm], halves * (ranks - 1) / ranks)


_QUANTILE = 0.25  # of repeated samples

_Measured = dict[tuple[CollectiveKind, int, int], float]  # seconds by kind, bytes, ranks


def _quartiles(samples: Iterable[Sample]) -> tuple[_Measured, _Measured]:
    """Return the lower quartiles of idle samples and of samples during backward."""
    times: dict[bool, dict[tuple[CollectiveKind, int, int], list[float]]] = {False: {}, True: {}}
    for sample in samples:
        kind, nbytes, ranks, time_s, busy = sample
        if not 0.0 < time_s < math.inf or nbytes < 0 or ranks < 2:
            raise ValueError(
                f"a sample needs a positive, finite time_s, nbytes of at least 0 and at least 2 "
                f"ranks, got {sample}"
            )
        times[bool(busy)].setdefault((kind, nbytes, ranks), []).append(time_s)
    idle_s, busy_s = (
        {key: float(np.quantile(repeats, _QUANTILE)) for key, repeats in times[busy].items()}
        for busy in (False, True)
    )
    return idle_s, busy_s


def _least_relative(measured: _Measured, algorithm: LinkAlgorithm) -> tuple[float, float]:
    """Return the alpha and beta that minimise the squared relative error."""
    of_samples = [factors(kind, ranks, algorithm) for kind, _, ranks in measured]
    nbytes = [size for _, size, _ in measured]
    rows = [(of.steps, of.share * size) for of, size in zip(of_samples, nbytes, strict=True)]
    times_s = np.array([*measured.values()])
    matrix = np.array(rows, dtype=np.float64).reshape(-1, 2) / times_s.reshape(-1, 1)
    lengths = np.linalg.norm(matrix, axis=0)
    sizes = sorted(set(nbytes))
    if len(sizes) < 2 or not lengths.all() or np.linalg.matrix_rank(matrix / lengths) < 2:
        raise ValueError(
            "a fit of latency and bandwidth needs idle samples of at least two sizes, "
            f"got {len(measured)} kinds of samples, of {sizes} bytes"
        )
    ones = np.ones(len(matrix))
    best = np.linalg.lstsq(matrix / lengths, ones, rcond=None)[0] / lengths
    if (best < 0.0).any():
        # The constrained optimum has one of the two at 0: choose the one with the smaller error.
        alone = np.diag(matrix.sum(axis=0) / lengths**2)
        errors = np.square(matrix @ alone - 1.0).sum(axis=0)
        best = alone[:, np.argmin(errors)]
    return float(best[0]), float(best[1])


def _overlap(idle_s: _Measured, busy_s: _Measured) -> float:
    for key in busy_s:
        if key not in idle_s:
            raise ValueError(
                f"the busy sample of {key} (kind, nbytes, ranks) needs a sample with the same key "
                f"and busy=False"
            )
    if not busy_s:
        return 1.0
    return min(1.0, float(np.median([idle_s[key] / time_s for key, time_s in busy_s.items()])))


def _check_algorithm(algorithm: str) -> None:
    choices = get_args(LinkAlgorithm)
    if algorithm not in choices:
        raise ValueError(f"algorithm must be one of {', '.join(choices)}, got {algorithm!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Presets(dict[str, CostModel]):
    """Models by name, whose error about an unknown name suggests a similar one."""

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"there is no preset {name!r}{suggestion(name, self)}")


_MODELS = {
    # Between sites: nominal rate; alpha is a one-way delay of 20 ms, as over some 3,000 km with
    # routers (light in glass takes 15 ms for 3,000 km).
    "internet-100m": CostModel(20e-3, 1 / 12.5e6),
    "internet-1g": CostModel(20e-3, 1 / 125e6),
    # Alpha: as for 10 Gbit/s; the same software sends it.
    "ethernet-1g": CostModel(35e-6, 1 / 125e6),
    # 10 Gbit/s. Alpha: Shi et al. fitted 0.52 ms for 8 ranks and 0.91 ms for 16 (constants in
    # the code published with MG-WFBP), which is 30 to 37 us for each step of a ring.
    "ethernet-10g": CostModel(35e-6, 1 / 1.25e9),
    # 25 Gbit/s. Alpha: as for 100 Gbit/s.
    "ethernet-25g": CostModel(9.6e-6, 1 / 3.125e9),
    # 100 Gbit/s. Alpha: NCCL's figure for a network step.
    "ethernet-100g": CostModel(9.6e-6, 1 / 12.5e9),
    # 400 Gbit/s. Alpha: as for 10 Gbit/s, but of the 56 Gbit/s InfiniBand measured there: 0.10
    # ms for 8 ranks and 0.24 ms for 16, 7 to 8 us a step.
    "infiniband-ndr400": CostModel(8e-6, 1 / 50e9),
    # NVIDIA H100: 18 links, 900 GB/s both ways together. Alpha: NCCL, NVLink.
    "nvlink4": CostModel(3.4e-6, 1 / 450e9),
    # 16 lanes of 16 GT/s at 128b/130b. Alpha: NCCL, PCI.
    "pcie4-x16": CostModel(5.7e-6, 1 / 31.5e9),
    # Measured with torch 2.13 for fddp's design, 2 ranks on a 2-core CPU: 1.3 to 2.6 ms for any
    # small all-reduce, which is two steps, and 1.4 to 1.9 GB/s for large ones.
    "gloo-loopback": CostModel(0.95e-3, 1 / 1.65e9),
}
PRESETS: Mapping[str, CostModel] = MappingProxyType(_Presets(_MODELS))
"""Models by name, for links that can't be measured. `CostModel.fit` gives better ones.

All but "gloo-loopback" use the nominal one-way rate of the link, an upper bound that no collective
reaches. All assume `overlap=1`; on a CPU, measure it. NCCL's figures are those of its choice of
algorithms (`src/graph/tuning.cc`: ring, protocol Simple, microseconds per step). S. Shi, X. Chu and
B. Li, "MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms", IEEE
INFOCOM 2019.
"""


def preset_or_model(cost: CostModel | str) -> CostModel:
    """Return a model unchanged, or the preset of a name.

    Raises:
        ValueError: `cost` is neither.

    Example:
        >>> preset_or_model("nvlink4") is PRESETS["nvlink4"]
        True
    """
    if isinstance(cost, CostModel):
        return cost
    if isinstance(cost, str) and cost in PRESETS:
        return PRESETS[cost]
    raise ValueError(
        f"cost must be a CostModel or one of the presets {', '.join(PRESETS)}, got {cost!r}"
        f"{suggestion(cost, PRESETS)}"
    )
