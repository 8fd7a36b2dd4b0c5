// Loops over contiguous elements: the performance-critical part of pack and unpack.
//
// A complex element is handled as two real ones. Arithmetic is done in double if either side is
// double, else in float, and then cast to the target's dtype, as torch.mul does. Results do not
// depend on the instruction set: sums have a fixed order, and products and sums are rounded
// separately.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fddp {

// Statistics of the values that one pass has written.
struct Stats {
  double sq_norm = 0;  // sum of squares
  bool finite = true;  // no NaN and no infinity
};

// Measurements of a copy.
struct Copied {
  double amax = 0;     // largest magnitude read; infinity if any element was NaN
  double sq_norm = 0;  // sum of squares of the elements of the target afterwards, to 2^-20; 0 unless requested
};

// Read `count` elements and write them scaled and cast. Source and target may be the same memory, but
// must not overlap otherwise.
using CopyKernel = Copied (*)(const void* source, void* target, int64_t count, double scale);

// CopyKernel that also returns the stats of the written values.
using StatsKernel = Stats (*)(const void* source, void* target, int64_t count, double scale);

// target = cast(source * scale). All dtypes are real: Half, BFloat16, Float or Double.
CopyKernel copy_kernel(c10::ScalarType source, c10::ScalarType target, bool sums_squares);

// target += cast(source * scale).
CopyKernel add_kernel(c10::ScalarType source, c10::ScalarType target, bool sums_squares);

// Measurements of the source, which is the target. Nothing is written.
CopyKernel magnitude_kernel(c10::ScalarType source, bool sums_squares);

// target = 0. The source is not read.
CopyKernel zero_kernel(c10::ScalarType target);

// target = cast(source * scale), with stats.
StatsKernel stats_kernel(c10::ScalarType source, c10::ScalarType target);

// Stats of the source. Nothing is written.
StatsKernel stats_only_kernel(c10::ScalarType dtype);

}  // namespace fddp
