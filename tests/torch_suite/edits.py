"""The few changes to torch's tests: what takes the place of a text in a function's source."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    function: str  # a test, or a method that tests call
    old: str
    new: str


_PROFILING = "_test_ddp_profiling"
_UPDATE = "_run_ddp_update_process_group"

EDITS = [
    # 126 runs of a convolution over 1000 x 1000 would take hours on a CPU.
    Edit("test_ddp_uneven_inputs", "dim = 1000", "dim = 32"),
    # The control word is one all-reduce more a step; rank 0's order of arrival rides in it.
    Edit(_PROFILING, "(event_count, num_iters)", "(event_count, 2 * num_iters)"),
    Edit(_PROFILING, "assertGreaterEqual(event_count, 1)", "assertEqual(event_count, 0)"),
    # It counts Dynamo's recompilations, of which torch's own class has too many.
    Edit(_UPDATE, "torch.compile(ddp)", "ddp"),
]
