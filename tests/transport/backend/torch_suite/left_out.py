"""The tests that do not run over the backend "fddp", by reason."""

from __future__ import annotations

LEFT_OUT: dict[str, set[str]] = {
    "Needs a GPU, and no decorator skips it where there is none: it fails over gloo as well.": {
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_all_to_all_cuda",
        "test_all_to_all_cuda_complex",
        "test_all_to_all_full_group_cuda",
        "test_all_to_all_group_cuda",
        "test_batch_isend_irecv_mixed_backend_err",
        "test_batch_isend_irecv_op_err",
    },
    "Needs torchvision: it fails over gloo as well.": {
        "test_SyncBatchNorm_process_group",
    },
    "Asserts that DDP's log names the backend. torch names each backend of others 'custom'.": {
        "test_ddp_logging_data_cpu",
    },
}
