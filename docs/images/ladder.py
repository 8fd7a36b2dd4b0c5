"""Simulate a step of each script in examples/ladder, and draw them as an SVG.

Two ranks over 10 Gbit/s; backward takes 6 ms for each of eight layers of 1024 x 1024. Nothing is
measured, so the picture is the same on every machine: `python docs/images/ladder.py
docs/images/ladder.svg`.
"""

import sys
from pathlib import Path

import torch
from timelines import draw

import fddp
from fddp.core.timeline import Timeline

CAP_MB = 8.0  # as in the scripts
LAYERS, LAYER_S = 8, 6e-3
TINY_MB = 2**-20  # each leaf is a bucket


def steps() -> dict[str, Timeline]:
    """Return the simulated step of each script."""
    names = [f"{number}.{name}" for number in range(LAYERS) for name in ("weight", "bias")]
    model = {
        name: torch.empty(1024, *([1024] if name.endswith("weight") else []), device="meta")
        for name in names
    }
    overlapped = {name: (LAYERS - int(name.partition(".")[0])) * LAYER_S for name in names}
    after = dict.fromkeys(names, LAYERS * LAYER_S)
    runs = {
        "1_naive.py, an all-reduce a parameter": (TINY_MB, TINY_MB, after),
        "2_buckets.py, buckets in backward": (CAP_MB, CAP_MB, overlapped),
        "3_fddp.py, a small first bucket": (CAP_MB, 1.0, overlapped),
    }
    return {
        title: fddp.simulate(
            fddp.make_schedule(
                fddp.plan_buckets(model, bucket_cap_mb=cap_mb, first_bucket_mb=first_mb), 2
            ),
            "ethernet-10g",
            ready_s,
        )
        for title, (cap_mb, first_mb, ready_s) in runs.items()
    }


if __name__ == "__main__":
    draw(steps(), Path(sys.argv[1]))
