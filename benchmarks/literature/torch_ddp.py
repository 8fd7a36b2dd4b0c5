"""PyTorch's DistributedDataParallel: published seconds of a step, and the best bucket sizes.

Seconds: `benchmarks/distributed/ddp/README.md` of github.com/pytorch/pytorch, medians (p50) of
torch 1.4 on machines of 8 V100, each machine with four links of 100 Gbit/s. The seconds without DDP
are the input; those with DDP are simulated with DDP's own plan. The second table of that page
compares caps of 1 MB and 25 MB.

Bucket sizes: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", arXiv 2006.15704, section 5.2, on 16 V100 in two machines with a link of 100 Gbit/s each:
best near 10 to 25 MB for ResNet-50 over NCCL, 50 MB for BERT over NCCL, 5 MB for ResNet-50 over
gloo. Its BERT has 15 times the parameters of ResNet-50, which is nearest to BERT-large. These
statements are quoted from notes on the paper, and were not checked against its text.

Links are nominal, as in `fddp.PRESETS`: a V100 has 150 GB/s of NVLink one way (NVIDIA's data
sheet). gloo's cost over that network was not published; the preset "gloo-loopback", which this
project measured on one host, stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.literature.models import Profile, bert, profile, resnet
from benchmarks.literature.tables import Result, Row
from fddp.core.plan.defaults import MIB
from fddp.core.plan.plan import BucketPlan, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import PRESETS
from fddp.core.sim.simulator import Cost, simulate

NVLINK_V100 = replace(PRESETS["nvlink4"], beta_s_per_byte=1 / 150e9)
FOUR_LINKS = replace(PRESETS["ethernet-100g"], beta_s_per_byte=1 / 50e9)

TOPOLOGIES = {
    gpus: Topology(host=max(1, gpus // 8), local=min(gpus, 8)) for gpus in (1, 2, 4, 8, 16)
}

WITHOUT_DDP_S = {"ResNet-50": 0.097, "ResNet-101": 0.162}
WITH_DDP_S = {
    "ResNet-50": (0.100, 0.103, 0.103, 0.104, 0.104),
    "ResNet-101": (0.171, 0.176, 0.176, 0.179, 0.179),
}
"""Seconds of a step on 1, 2, 4, 8 and 16 GPUs."""

SLOWER_WITH_1_MB = {2: 0.010, 4: 0.016, 8: 0.026, 16: 0.038}
"""Loss of throughput (p75) of ResNet-50 with a cap of 1 MB instead of 25 MB, by number of GPUs."""

CAPS_MB = (0, 5, 10, 25, 50, 100, 200)
"""Caps compared; 0 is a bucket for each tensor."""

NEAR = 0.05
"""Relative deviation up to which seconds count as reproduced."""

_README = "pytorch, ddp/README.md"
_PAPER = "arXiv 2006.15704, section 5.2"


class Case(NamedTuple):
    """One figure of bucket sizes.

    Attributes:
        name: model and backend.
        model: the model.
        cost: of the links.
        best_mb: lowest and highest of the published best caps.
    """

    name: str
    model: Profile
    cost: Cost
    best_mb: tuple[int, int]


def ddp_plan(model: Profile, cap_bytes: int = 25 * MIB) -> BucketPlan:
    """Return DDP's plan: a first bucket of at most 1 MiB, then `cap_bytes`, in reverse order."""
    caps_bytes = (min(MIB, cap_bytes), cap_bytes)
    return plan_leaves(model.leaves, order=model.order, caps_bytes=caps_bytes)


def step_s(model: Profile, plan: BucketPlan, topology: Topology, cost: Cost) -> float:
    """Return the simulated seconds of a step."""
    return simulate(make_schedule(plan, topology), cost, model.ready_s).step_s


def best_cap_mb(case: Case) -> tuple[int, Mapping[int, float]]:
    """Return the best of `CAPS_MB` for 16 GPUs, and the simulated seconds of all."""
    steps_s = {
        cap: step_s(case.model, ddp_plan(case.model, cap * MIB or 1), TOPOLOGIES[16], case.cost)
        for cap in CAPS_MB
    }
    return min(steps_s, key=lambda cap: steps_s[cap]), steps_s


def cases() -> list[Case]:
    """Return the three figures.

    BERT-large: 49 samples of 128 tokens a second in batches of 8 on one GPU without communication
    (`results/2020-05-29` of github.com/HKBU-HPML/ddl-benchmarks, on another GPU than the paper's).
    """
    resnet50 = profile("ResNet-50", resnet(50), WITHOUT_DDP_S["ResNet-50"])
    bert_large = profile("BERT-large", bert(24, 1024, tokens=128), 8 / 49)
    nccl = {"host": PRESETS["ethernet-100g"], "local": NVLINK_V100}
    return [
        Case("ResNet-50, NCCL", resnet50, nccl, (10, 25)),
        Case("BERT-large, NCCL", bert_large, nccl, (50, 50)),
        Case("ResNet-50, gloo", resnet50, PRESETS["gloo-loopback"], (5, 5)),
    ]


def step_rows() -> list[Row]:
    """Return the seconds of a step by number of GPUs, then the slowdown with small buckets."""
    cost = {"host": FOUR_LINKS, "local": NVLINK_V100}
    depths = {"ResNet-50": 50, "ResNet-101": 101}
    rows = []
    for name, published_s in WITH_DDP_S.items():
        model = profile(name, resnet(depths[name]), WITHOUT_DDP_S[name])
        steps_s = [step_s(model, ddp_plan(model), over, cost) for over in TOPOLOGIES.values()]
        for gpus, theirs_s, ours_s in zip(TOPOLOGIES, published_s, steps_s, strict=True):
            missed = abs(ours_s / theirs_s - 1.0) > NEAR
            rows.append(Row(f"{name}, {_gpus(gpus)}: step, s", theirs_s, ours_s, _README, missed))
        theirs, ours = (times_s[-1] / times_s[0] for times_s in (published_s, steps_s))
        rows.append(Row(f"{name}: step, 16 GPUs / 1 GPU", theirs, ours, _README))
    model = profile("ResNet-50", resnet(50), WITHOUT_DDP_S["ResNet-50"])
    for gpus, loss in SLOWER_WITH_1_MB.items():
        small_s, large_s = (
            step_s(model, ddp_plan(model, cap * MIB), TOPOLOGIES[gpus], cost) for cap in (1, 25)
        )
        name = f"ResNet-50, {_gpus(gpus)}: step, 1 MB / 25 MB"
        is_slower = small_s > large_s
        rows.append(Row(name, 1 / (1 - loss), small_s / large_s, _README, missed=not is_slower))
    return rows


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def cap_rows(found: Sequence[Case]) -> tuple[list[Row], list[str]]:
    """Return the best caps, and for each a note on the simulated step with the published cap."""
    rows, notes = [], []
    for case in found:
        lowest, highest = case.best_mb
        best, steps_s = best_cap_mb(case)
        missed = not lowest <= best <= highest
        caps = f"{lowest} to {highest}" if lowest < highest else str(highest)
        rows.append(Row(f"{case.name}: best cap, MB", highest, best, _PAPER, missed=missed))
        above = min(steps_s[cap] for cap in (lowest, highest)) / steps_s[best] - 1.0
        notes.append(
            f"{case.name}: with {caps} MB the simulated step is {above:.1%} above the best."
        )
    return rows, notes


def result() -> Result:
    """Compare seconds and bucket sizes."""
    steps = step_rows()
    caps, notes = cap_rows(cases())
    missed = sum(row.missed for row in steps)
    notes = [
        "Inputs: seconds without DDP, nominal bandwidths, NCCL's latencies.",
        "The simulation is too fast. It leaves out the copies into buckets and the slowdown of "
        "backward by NCCL's kernels: on one GPU, where nothing is sent, DDP adds 3% to 6%.",
        "It sees no harm in buckets of 1 MB, which cost up to 4% when measured: a missed sign.",
        f"{missed} of {len(steps)} seconds and ratios are missed: seconds by more than {NEAR:.0%}, "
        "ratios of caps by their sign.",
        *notes,
    ]
    return Result("DistributedDataParallel on V100", [*steps, *caps], notes)
