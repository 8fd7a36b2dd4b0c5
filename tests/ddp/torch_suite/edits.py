"""The few changes to torch's tests: what takes the place of a text in a function's source.

docs/ddp.md lists them.
"""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    function: str  # a test, or a method that tests call
    old: str
    new: str
    reason: str


_LOW_PRECISION = [
    "_test_ddp_native_mixed_precision",
    "test_ddp_native_mixed_precision_ignored_params",
]
_PROFILING = "_test_ddp_profiling"
_CAST = "Parameters are cast within forward, and hold no copies of themselves in other dtypes."

EDITS = [
    Edit(
        "test_ddp_uneven_inputs",
        "dim = 1000",
        "dim = 32",
        "126 runs of a convolution over 1000 x 1000 would take hours on a CPU.",
    ),
    *(
        Edit(function, f"({kept}, p.{copy}.dtype)", "(torch.float32, p.dtype)", _CAST)
        for function in _LOW_PRECISION
        for kept, copy in [("mp_config.param_dtype", "_mp_param"), ("torch.float32", "_fp_param")]
    ),
    Edit(
        "test_different_graph_across_ranks",
        "assertFalse",
        "assertTrue",
        "Plans are rebuilt whatever `find_unused_parameters` says.",
    ),
    Edit(
        _PROFILING,
        'f"{dist.get_backend()}:all_reduce"',
        '"fddp::all_reduce bucket 0: 400 bytes of float32"',
        "Collectives have a name of their own in a profile, with bucket, bytes and dtype.",
    ),
    Edit(
        _PROFILING,
        "assertGreaterEqual(event_count, 1)",
        "assertEqual(event_count, 0)",
        "Rank 0's order of arrival is not broadcast: the control word carries it.",
    ),
    Edit(
        _PROFILING,
        "assertEqual(len(events), 1)",
        "assertEqual(len(events), 0)",
        "The graph is not searched for unused parameters.",
    ),
    Edit(
        "_run_ddp_update_process_group",
        "torch.compile(ddp)",
        "ddp",
        "It counts Dynamo's recompilations, of which torch's own class has too many.",
    ),
]
