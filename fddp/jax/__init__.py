"""fddp for JAX: conversion of arrays, and reductions over ranks inside `jax.jit`."""

from __future__ import annotations

from fddp.extend import to_array as to_array
from fddp.extend import to_tensor as to_tensor
from fddp.jax.errors import named_errors as named_errors
from fddp.jax.operators import grad_sync as grad_sync
from fddp.jax.operators import pmean as pmean
from fddp.jax.operators import psum as psum
