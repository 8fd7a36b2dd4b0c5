// Pack copies many leaves into one buffer; unpack copies a buffer into many leaves. Packing on other
// devices than the CPU is that of foreach_pack.h; the rest is for the CPU only.
//
// Each function validates all arguments before it writes the first element. None needs the GIL.
// None may be called within parallel_for.

#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "kernels.h"
#include "layout.h"

namespace fddp {

// buffer[slot] = cast(source * scale). A missing source, or a scale of zero, writes exact zeros.
//
// Return the largest magnitude read times the magnitude of the scale. This bounds the written
// values up to rounding. Infinity if a value that was read is not finite, else finite. NaN on other
// devices than the CPU, as reading it would wait for the device.
//
// `squares`, unless null, receives the sum of squares of each slot that is written, of its elements
// afterwards. Not on other devices than the CPU.
double pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale,
             double* squares = nullptr);

// buffer[slot] += cast(source * scale). The slot of a missing source stays unchanged.
double pack_add_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale,
                 double* squares = nullptr);

// Return the memory of a float64 tensor for `squares` of some leaves.
double* squares_of(const at::Tensor& squares, size_t leaves);

// buffer *= scale, with the stats of the result. A scale of one writes nothing.
Stats scale_(const at::Tensor& buffer, double scale);

// output = cast(buffer[slot] * scale), with the stats of the written values. A missing output is
// skipped. Outputs must not overlap each other.
Stats unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale);

}  // namespace fddp
