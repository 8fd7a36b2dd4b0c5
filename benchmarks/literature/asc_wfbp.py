"""ASC-WFBP: seconds of compute and of communication at 10GbE.

S. Shi, X. Chu and B. Li, "Exploiting Simultaneous Communications to Accelerate Data Parallel
Distributed Deep Learning", IEEE INFOCOM 2021. The seconds are those of its figure of iteration
times, from the authors' plotting script (`timebreakdown`): the bar of an iteration is the compute,
and upon it the communication that is not hidden. The link is their fit of NCCL's all-reduce on 8
nodes, in the same script.

WFBP sends each tensor alone, MG-WFBP merges, and ASC-WFBP also sends several buckets at the same
time. The simulator has one channel for each group of ranks, so ASC-WFBP is not simulated. Its
seconds are compared with those of `plan_optimal`.
"""

from __future__ import annotations

from benchmarks.literature.mg_wfbp import (
    Link,
    merged_greedily,
    one_by_one,
    optimal,
    profiles,
    step_s,
)
from benchmarks.literature.models import BACKWARD_SHARE
from benchmarks.literature.tables import Result, Row

LINK = Link("10GbE, 8 nodes", 8, 1.368709228921283e-3, 1.6569786551462448e-09)

EXPOSED_S = {
    "ResNet-152": (0.682199029, 0.436140445, 0.250556473),
    "DenseNet-201": (0.559296384, 0.156268293, 0.094818409),
    "Inception-v4": (0.529135272, 0.320422762, 0.187633238),
    "BERT-base": (0.704721365, 0.756861606, 0.618740173),
}
"""Seconds of communication upon the compute: WFBP, MG-WFBP, ASC-WFBP. The compute seconds are in
`mg_wfbp.COMPUTE_S`; they are inputs."""

METHODS = ("WFBP", "MG-WFBP", "ASC-WFBP")
NEAR = 0.25
"""Relative deviation up to which a number counts as reproduced."""


def exposed_s(model: str) -> tuple[float, float, float]:
    """Return the simulated seconds that are not hidden: of a bucket for each tensor, of greedy
    merging, and of `plan_optimal`."""
    found = profiles()[model]
    plans = (one_by_one(found), merged_greedily(found, LINK), optimal(found, LINK))
    one_by_one_s, greedy_s, optimal_s = (
        step_s(found, plan, LINK) - found.compute_s for plan in plans
    )
    return one_by_one_s, greedy_s, optimal_s


def startup_s(model: str) -> float:
    """Return the most that a tensor's startup can have taken in the published step of WFBP.

    All communication fits between the end of forward and the end of the step.
    """
    found = profiles()[model]
    nbytes = sum(leaf.nbytes for leaf in found.leaves)
    after_forward_s = BACKWARD_SHARE * found.compute_s + EXPOSED_S[model][0]
    return (after_forward_s - LINK.beta_s_per_byte * nbytes) / len(found.leaves)


def result() -> Result:
    """Compare the exposed communication of all models and methods."""
    rows = []
    for model, published_s in EXPOSED_S.items():
        for method, theirs_s, ours_s in zip(METHODS, published_s, exposed_s(model), strict=True):
            name = f"{model}, {method}: exposed, s"
            missed = abs(ours_s / theirs_s - 1.0) > NEAR
            rows.append(Row(name, theirs_s, ours_s, "INFOCOM 2021, iteration times", missed))
    reached = sum(not row.missed for row in rows)
    startups_ms = [startup_s(model) * 1e3 for model in EXPOSED_S]
    notes = (
        "Compute seconds, alpha and beta are published; work of layers is from the architectures.",
        f"{reached} of {len(rows)} numbers are within {NEAR:.0%}.",
        "WFBP is too slow in simulation: the published seconds leave at most "
        f"{min(startups_ms):.2f} to {max(startups_ms):.2f} ms of startup for a tensor, and alpha "
        f"is {LINK.alpha_s * 1e3:.2f} ms.",
        "MG-WFBP is too fast in simulation, which merges by an exact profile, and puts it before "
        "WFBP on BERT-base, where the published order is the reverse.",
        "ASC-WFBP is another algorithm than plan_optimal: a comparison, not a simulation.",
        "DenseNet-201's communication fits into backward in simulation; measured, it did not.",
    )
    return Result("ASC-WFBP (IEEE INFOCOM 2021), 10GbE", rows, notes)
