"""fddp for JAX: arrays and trees of JAX, and reductions over ranks inside `jax.jit`."""

from __future__ import annotations

from fddp.interop.jax.arrays import to_array as to_array
from fddp.interop.jax.arrays import to_tensor as to_tensor
from fddp.interop.jax.failures import named_errors as named_errors
from fddp.interop.jax.operators import grad_sync as grad_sync
from fddp.interop.jax.operators import pmean as pmean
from fddp.interop.jax.operators import psum as psum
