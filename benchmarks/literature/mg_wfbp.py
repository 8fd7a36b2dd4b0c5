"""MG-WFBP: its greedy merging of gradients beside `plan_optimal`.

S. Shi, X. Chu and B. Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD
Algorithms", IEEE INFOCOM 2019, arXiv 1811.11141; extended in IEEE TPDS 32(8), 2021. An all-reduce
of m bytes takes alpha + beta * m seconds. The fitted alpha and beta are constants in
`distributed_optimizer.py` of github.com/HKBU-HPML/MG-WFBP.

The baseline is written anew. It makes one pass over the gradients in the order in which they become
ready: a bucket waits for the next gradient if that gradient is ready before the bucket's all-reduce
could have got through its startup time alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.literature.models import (
    Profile,
    bert,
    densenet201,
    inception_v4,
    profile,
    resnet,
)
from benchmarks.literature.tables import Result, Row
from fddp.core.plan.bucket import Bucket
from fddp.core.plan.leaf import LeafSpec
from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CostModel
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import simulate
from fddp.core.text import counted

ROUNDING = 1e-9
"""Relative tolerance of simulated times."""


@dataclass(frozen=True)
class Link:
    """Published cost of an all-reduce.

    Attributes:
        name: of the link and of the number of ranks.
        ranks: number of ranks.
        alpha_s: seconds of an empty all-reduce.
        beta_s_per_byte: further seconds for each byte.
        overlap: as in `CostModel`.

    Example:
        >>> link = Link("56 Gbit/s", 16, 2.358e-4, 4.059e-10)
        >>> f"{link.cost.time_s('all_reduce', 1e8, 16):.6f}", f"{2.358e-4 + 4.059e-10 * 1e8:.6f}"
        ('0.040826', '0.040826')
    """

    name: str
    ranks: int
    alpha_s: float
    beta_s_per_byte: float
    overlap: float = 1.0

    @property
    def cost(self) -> CostModel:
        """Cost of one step of a ring of `ranks`, whose all-reduce takes the published time."""
        steps = 2 * (self.ranks - 1)
        return CostModel(
            self.alpha_s / steps,
            self.beta_s_per_byte * self.ranks / steps,
            overlap=self.overlap,
        )


LINKS = (
    Link("56 Gbit/s, 16 ranks", 16, 2.3583677659915685e-4, 4.0594787739537565e-10),
    Link("10GbE, 8 ranks", 8, 5.230272768511732e-4, 8.570746975492128e-10),
    Link("10GbE, 16 ranks", 16, 9.080981007148093e-4, 7.395651186836712e-10),
)
"""Constants of the published code, which names them by bandwidth and number of workers."""

COMPUTE_S = {
    "ResNet-50": 0.097,
    "ResNet-152": 0.273738238,
    "DenseNet-201": 0.218878249,
    "Inception-v4": 0.18946122,
    "BERT-base": 0.30548926,
}
"""Seconds of forward and backward. ResNet-50: V100, batch 32, without DDP, of PyTorch's
`benchmarks/distributed/ddp/README.md`. The others: the compute seconds of `asc_wfbp`."""


def profiles() -> dict[str, Profile]:
    """Return the five models. BERT-base has 128 tokens in a sample, as in the authors' benchmark,
    `bert_benchmark.py` of github.com/HKBU-HPML/ddl-benchmarks."""
    layers = {
        "ResNet-50": resnet(50),
        "ResNet-152": resnet(152),
        "DenseNet-201": densenet201(),
        "Inception-v4": inception_v4(),
        "BERT-base": bert(12, 768, tokens=128),
    }
    return {name: profile(name, found, COMPUTE_S[name]) for name, found in layers.items()}


def one_by_one(model: Profile) -> BucketPlan:
    """Return the plan of wait-free backpropagation (WFBP): a bucket for each tensor."""
    return _plan(model, range(1, len(model.order) + 1))


def merged_greedily(model: Profile, link: Link) -> BucketPlan:
    """Return the plan of MG-WFBP's greedy merging.

    Example:
        >>> leaves = tuple(LeafSpec(name, (250,), "float32") for name in "abc")
        >>> model = Profile("tiny", leaves, (0.012, 0.003, 0.002))
        >>> plan = merged_greedily(model, Link("slow", 2, alpha_s=0.005, beta_s_per_byte=1e-6))
        >>> [bucket.leaves for bucket in plan.buckets]
        [(2, 1), (0,)]
    """
    ready_s = [model.ready_s[leaf] for leaf in model.order]
    ends = []
    free_s, nbytes = 0.0, 0
    for place, leaf in enumerate(model.order):
        nbytes += model.leaves[leaf].nbytes
        start_s = max(free_s, ready_s[place])
        is_last = place + 1 == len(ready_s)
        if not is_last and ready_s[place + 1] < start_s + link.alpha_s:
            continue
        ends.append(place + 1)
        free_s, nbytes = start_s + link.alpha_s + link.beta_s_per_byte * nbytes, 0
    return _plan(model, ends)


def optimal(model: Profile, link: Link) -> BucketPlan:
    """Return the plan of `fddp.plan_optimal`."""
    target = Target(link.cost, Topology(world=link.ranks))
    return optimal_plan(model.leaves, model.order, model.ready_s, target)


def step_s(model: Profile, plan: BucketPlan, link: Link) -> float:
    """Return the simulated seconds of a step."""
    return simulate(make_schedule(plan, link.ranks), link.cost, model.ready_s).step_s


def generated(seed: int) -> tuple[Profile, Link]:
    """Return a random model and a random link, over several orders of magnitude.

    Sizes are log-normal. Some gradients become ready at the same time, and some have no elements.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    sizes = rng.lognormal(rng.uniform(2.0, 12.0), rng.uniform(0.1, 3.0), count).astype(int)
    sizes[rng.random(count) < 0.05] = 0
    waits_s = rng.exponential(10.0 ** rng.uniform(-5.0, -2.0), count)
    waits_s[rng.random(count) < 0.3] = 0.0
    ready_s = (rng.exponential(waits_s.sum() + 1e-6) + waits_s.cumsum())[::-1]
    leaves = tuple(LeafSpec(f"leaf{i:02}", (int(n),), "float32") for i, n in enumerate(sizes))
    link = Link(
        "generated",
        int(rng.integers(2, 65)),
        10.0 ** rng.uniform(-6.0, -2.0),
        10.0 ** rng.uniform(-11.0, -7.0),
        overlap=float(rng.choice([1.0, 0.7])),
    )
    return Profile("generated", leaves, tuple(ready_s.tolist())), link


def against_greedy(model: Profile, link: Link) -> tuple[float, float]:
    """Return the simulated seconds of a step: merged greedily, and of `plan_optimal`."""
    greedy_s = step_s(model, merged_greedily(model, link), link)
    return greedy_s, step_s(model, optimal(model, link), link)


def result(models: int = 1000) -> Result:
    """Compare on the published models and links, and on generated ones.

    Args:
        models: number of generated models.
    """
    rows = []
    for model in profiles().values():
        for link in LINKS:
            greedy_s, optimal_s = against_greedy(model, link)
            name = f"{model.name}, {link.name}: step, s"
            rows.append(Row(name, greedy_s, optimal_s, "github.com/HKBU-HPML/MG-WFBP"))
    ratios = []
    for seed in range(models):
        greedy_s, optimal_s = against_greedy(*generated(seed))
        ratios.append(optimal_s / greedy_s)
    worse = sum(ratio > 1.0 + ROUNDING for ratio in [*ratios, *(1 + row.deviation for row in rows)])
    found = np.array(ratios)
    notes = (
        "Both plans are simulated with the published alpha and beta. Shapes are from the "
        "architectures; published seconds of a step are divided by the work of layers.",
        f"On {counted(models, 'generated model')}, optimal / greedy: median "
        f"{np.median(found):.4f}, lowest {found.min():.4f}, highest {found.max():.4f}; optimal is "
        f"shorter on {int((found < 1.0 - ROUNDING).sum())}.",
        f"plan_optimal is worse than greedy merging in {counted(worse, 'case')}.",
    )
    headings = ("greedy", "plan_optimal")
    return Result("MG-WFBP (arXiv 1811.11141)", rows, notes, headings)


def _plan(model: Profile, ends: Sequence[int]) -> BucketPlan:
    """Return the plan whose buckets end before these places of the order."""
    members = [model.order[start:end] for start, end in pairwise((0, *ends))]
    caps = [max(1, sum(model.leaves[leaf].nbytes for leaf in bucket)) for bucket in members]
    buckets = [
        Bucket.of(model.leaves, bucket, cap) for bucket, cap in zip(members, caps, strict=True)
    ]
    return BucketPlan(model.leaves, tuple(buckets), (max(caps),), model.order)
