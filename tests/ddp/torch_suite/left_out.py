"""The tests that do not run, by reason. docs/ddp.md lists them."""

from __future__ import annotations

LEFT_OUT: dict[str, set[str]] = {
    "Makes no DistributedDataParallel.": {
        "test_dump_DDP_relevant_env_vars",
    },
    "Asserts that the backend is NCCL.": {
        "test_ddp_profiling_execution_trace",
    },
    "Asserts which GPU a tensor is on, or that the log names it.": {
        "test_ddp_device",
        "test_ddp_logging_data_gpu",
    },
    "Asserts that the log names the SyncBatchNorm, which wrappers refuse on the CPU; here it is "
    "hidden from them.": {
        "test_sync_bn_logged",
    },
    "Hands the wrapper's logger to a private C++ function that takes torch's only.": {
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_verify_model_across_rank_with_logger",
    },
    "Asserts that a step which one rank cannot finish leaves that rank with an error and the other "
    "without: over gloo torch's own class hangs. torch skips it, too.": {
        "test_ddp_has_finalized",
    },
}
