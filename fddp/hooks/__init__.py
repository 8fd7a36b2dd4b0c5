"""Communication hooks: how buckets are reduced, as values."""

from fddp.hooks.casting import bf16_compress as bf16_compress
from fddp.hooks.casting import cast as cast
from fddp.hooks.casting import fp16_compress as fp16_compress
from fddp.hooks.chaining import chain as chain
from fddp.hooks.compression import Compressed as Compressed
from fddp.hooks.compression import Compressor as Compressor
from fddp.hooks.compression import error_feedback as error_feedback
from fddp.hooks.future import Future as Future
from fddp.hooks.hook import AllReduce as AllReduce
from fddp.hooks.hook import Bucket as Bucket
from fddp.hooks.hook import BucketSpec as BucketSpec
from fddp.hooks.hook import Hook as Hook
from fddp.hooks.hook import HookError as HookError
from fddp.hooks.hook import allreduce as allreduce
from fddp.hooks.power_sgd import power_sgd as power_sgd
from fddp.hooks.quantization import int8 as int8
from fddp.hooks.top_k import top_k as top_k
from fddp.hooks.torch_adapter import TorchHook as TorchHook
from fddp.hooks.torch_adapter import builtin as builtin
