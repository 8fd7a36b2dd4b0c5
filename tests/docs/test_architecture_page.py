"""The list of operations on the architecture page is that of a program."""

from __future__ import annotations

import re

import torch

import fddp
from fddp.runtime.program import Program
from tests.support.rooms import PACKAGE

PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = r"^(\d+) +(\w+) (\d) +\w+ ([\d, ]*)(always|late|unless idle|if used)\b"


def test_the_list_on_the_page_is_that_of_a_program() -> None:
    tree = {"a": torch.ones(2), "b": torch.ones(2)}
    plan = fddp.plan_buckets(tree, bucket_cap_mb=[8e-6])
    schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
    waits = Program(schedule, rank=0, with_order=False).waits
    ops = enumerate(schedule.ops)
    expected = [(i, op.kind, op.bucket, {*waits[i]}, op.when == "late") for i, op in ops]
    rows = re.findall(ROW, PAGE, re.MULTILINE)
    shown = [
        (int(i), kind, int(bucket), {*map(int, re.findall(r"\d+", waited))}, guard == "late")
        for i, kind, bucket, waited, guard in rows
    ]
    assert shown == expected
