"""What a collective costs: time from its size and the number of ranks, with two parameters.

The model is Hockney's: a message of m bytes over a link takes alpha + beta * m seconds. A
collective is a number of such steps, by its algorithm, and each rank sends some share of the buffer
in all:

| algorithm | steps of an all-reduce | share of the buffer | source |
| --- | --- | --- | --- |
| "ring" | 2(n - 1) | 2(n - 1)/n | Patarasuk and Yuan 2009 |
| "tree" | 2 ceil(log2 n) | 2(n - 1)/n | Thakur, Rabenseifner and Gropp 2005 |
| "direct" | 2 | 2(n - 1)/n | all peers at once, where nothing stands between them |

A reduce-scatter and an all-gather are half of it each. One rank alone takes no time.

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
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
import numpy.typing as npt

LinkAlgorithm = Literal["ring", "tree", "direct"]
CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "control"]

FloatArray = npt.NDArray[np.float64]

MOST_S = 1e9
"""Longest time of a step, of a byte, of backward: so that no product of them is beyond floats."""


class Sample(NamedTuple):
    """One measured collective.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather" or "control".
        nbytes: bytes of the group's whole buffer, as in `CostModel.time_s`.
        ranks: number of ranks in the group.
        time_s: seconds that it took.
        busy: whether backward ran meanwhile.
    """

    kind: CollectiveKind
    nbytes: int
    ranks: int
    time_s: float
    busy: bool = False


class Factors(NamedTuple):
    """What a collective is made of.

    Attributes:
        steps: messages one after the other; each costs alpha.
        share: part of the group's buffer that each rank sends; each byte costs beta.
    """

    steps: float
    share: float


@dataclass(frozen=True)
class CostModel:
    """The cost of collectives over one kind of link.

    Attributes:
        alpha_s: seconds a step takes beside what its bytes take.
        beta_s_per_byte: seconds a byte takes; the inverse of the bandwidth of one rank, one way.
        algorithm: "ring", "tree" (recursive halving and doubling), or "direct" (shared memory, or a
            switch of full bandwidth).
        overlap: how fast a collective is while backward runs, against alone: 1 if backward does not
            disturb it, 0.5 if it takes twice as long, as where both need the same cores.

    Raises:
        ValueError: seconds below 0 or above 1e9, an overlap that is not in [1e-9, 1], or an unknown
            algorithm.

    Example:
        >>> cost = CostModel(alpha_s=1e-5, beta_s_per_byte=1e-9)
        >>> f"{cost.time_s('all_reduce', 4_000_000, ranks=4):.5f}"
        '0.00606'
        >>> CostModel.from_json(cost.to_json()) == cost
        True
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

    @overload
    def time_s(self, kind: CollectiveKind, nbytes: float, ranks: int) -> float: ...

    @overload
    def time_s(self, kind: CollectiveKind, nbytes: npt.NDArray[Any], ranks: int) -> FloatArray: ...

    def time_s(
        self, kind: CollectiveKind, nbytes: float | npt.NDArray[Any], ranks: int
    ) -> float | FloatArray:
        """Seconds that a collective takes while nothing disturbs it.

        Args:
            kind: "all_reduce", "reduce_scatter", "all_gather"; "control" is an all-reduce.
            nbytes: bytes of the whole buffer that the group works on: of what each rank has before
                a reduce-scatter and after an all-gather. An array gives an array of its shape.
            ranks: number of ranks in the group.

        Raises:
            ValueError: an unknown kind, less than one rank, or bytes that are negative or NaN.
        """
        steps, share = factors(kind, ranks, self.algorithm)
        if not np.all(np.asarray(nbytes) >= 0):
            raise ValueError(f"nbytes must be at least 0, got {nbytes!r}")
        return steps * self.alpha_s + share * self.beta_s_per_byte * nbytes

    @classmethod
    def worst(cls, models: Sequence[CostModel]) -> CostModel:
        """The model of a group that spans several kinds of links: each step waits for the slowest.

        Args:
            models: one for each axis, outermost first, whose algorithm is the result's.

        Example:
            >>> CostModel.worst([CostModel(1e-5, 1e-9), CostModel(1e-6, 1e-8, overlap=0.5)])
            CostModel(alpha_s=1e-05, beta_s_per_byte=1e-08, algorithm='ring', overlap=0.5)
        """
        return cls(
            max(model.alpha_s for model in models),
            max(model.beta_s_per_byte for model in models),
            models[0].algorithm,
            min(model.overlap for model in models),
        )

    @classmethod
    def fit(cls, samples: Iterable[Sample], *, algorithm: LinkAlgorithm = "ring") -> CostModel:
        """The model that comes nearest to measured times.

        Of repeated samples of one kind, size and number of ranks the lower quartile counts: what
        disturbs a collective only makes it longer, and small ones on a machine that has gone idle
        in between, which it does not within a step, take up to five times as long on some backends.
        Then alpha and beta, neither below 0, minimise the squared *relative* error, so that small
        sizes count as much as large ones. `overlap` is the median over sizes of idle over busy time
        where both were measured; without busy samples it is 1.

        Args:
            samples: measured collectives, of at least two sizes and on at least 2 ranks.
            algorithm: what to attribute the times to.

        Raises:
            ValueError: times or sizes that make no sense, or too few different ones.

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
        """The model as one line of JSON, from which `from_json` makes an equal one."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The model that `to_json` wrote.

        Raises:
            ValueError: the text is no such document; the message names the field.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise ValueError(f"cost JSON: not a JSON document: {error}") from error
        fields = set(cls.__dataclass_fields__)
        if not isinstance(document, dict) or document.keys() != fields:
            raise ValueError(
                f"cost JSON: must be an object with the fields {', '.join(sorted(fields))}, "
                f"got {sorted(document) if isinstance(document, dict) else document!r}"
            )
        return cls(**document)


def factors(kind: CollectiveKind, ranks: int, algorithm: LinkAlgorithm) -> Factors:
    """Steps and share of the buffer of a collective; see the table at the top of this file.

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
    """Of the samples taken while idle, and of those taken during backward."""
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
    """Alpha and beta of the least squared relative error."""
    rows = [
        (steps, share * nbytes)
        for kind, nbytes, ranks in measured
        for steps, share in [factors(kind, ranks, algorithm)]
    ]
    times_s = np.array([*measured.values()])[:, None]
    matrix = np.array(rows, dtype=np.float64).reshape(-1, 2) / times_s.reshape(-1, 1)
    lengths = np.linalg.norm(matrix, axis=0)
    sizes = sorted({nbytes for _, nbytes, _ in measured})
    if len(sizes) < 2 or not lengths.all() or np.linalg.matrix_rank(matrix / lengths) < 2:
        raise ValueError(
            "latency and bandwidth can be told apart only by idle samples of at least two sizes, "
            f"got {len(measured)} kinds of samples, of {sizes} bytes"
        )
    ones = np.ones(len(matrix))
    best = np.linalg.lstsq(matrix / lengths, ones, rcond=None)[0] / lengths
    if (best < 0.0).any():
        # The optimum lies on the border: one of them is 0, whichever errs less.
        alone = np.diag(matrix.sum(axis=0) / lengths**2)
        errors = np.square(matrix @ alone - 1.0).sum(axis=0)
        best = alone[:, np.argmin(errors)]
    return float(best[0]), float(best[1])


def _overlap(idle_s: _Measured, busy_s: _Measured) -> float:
    for key in busy_s:
        if key not in idle_s:
            raise ValueError(
                f"the busy sample of {key} (kind, nbytes, ranks) needs one with busy=False to be "
                f"compared with"
            )
    if not busy_s:
        return 1.0
    return min(1.0, float(np.median([idle_s[key] / time_s for key, time_s in busy_s.items()])))


def _check_algorithm(algorithm: str) -> None:
    if algorithm not in get_args(LinkAlgorithm):
        raise ValueError(
            f"algorithm must be one of {', '.join(get_args(LinkAlgorithm))}, got {algorithm!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        # 10 Gbit/s. Alpha: Shi et al. fitted 0.52 ms for 8 ranks and 0.91 ms for 16 (constants in
        # the code published with MG-WFBP), which is 30 to 37 us for each step of a ring.
        "ethernet-10g": CostModel(35e-6, 1 / 1.25e9),
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
)
"""Models to start from where nothing can be measured; `CostModel.fit` makes better ones.

All but "gloo-loopback" have the link's nominal rate, one way, which is an upper bound that no
collective reaches, and all have `overlap=1`, which is an assumption: on a CPU, measure it. NCCL's
figures are those by which it chooses between its algorithms (`src/graph/tuning.cc`: ring, protocol
Simple, microseconds a step). S. Shi, X. Chu and B. Li, "MG-WFBP: Efficient data communication for
distributed synchronous SGD algorithms", IEEE INFOCOM 2019.
"""
