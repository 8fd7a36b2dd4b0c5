// Loops over contiguous stretches of elements: the part of pack and unpack that costs time.
//
// Complex elements are two real ones here. Arithmetic is done in double if either side is double,
// in float otherwise, then cast to the target's dtype: what torch.mul does. Results do not depend
// on the instruction set: sums have a fixed order, and products and sums round separately.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fddp {

// What one pass found out about the values it wrote.
struct Stats {
  double sq_norm = 0;  // sum of squares
  bool finite = true;  // no NaN, no infinity
};

// Reads `count` elements, writes them scaled and cast; gives the largest magnitude that was read,
// infinity if any element was NaN. Source and target may be the same memory, but not overlap
// otherwise.
using CopyKernel = double (*)(const void* source, void* target, int64_t count, double scale);

// As a CopyKernel that writes, with the stats of what was written.
using StatsKernel = Stats (*)(const void* source, void* target, int64_t count, double scale);

// target = cast(source * scale). All dtypes are real: Half, BFloat16, Float or Double.
CopyKernel copy_kernel(c10::ScalarType source, c10::ScalarType target);

// target += cast(source * scale).
CopyKernel add_kernel(c10::ScalarType source, c10::ScalarType target);

// target = 0; reads nothing.
CopyKernel zero_kernel(c10::ScalarType target);

// target = cast(source * scale), with stats.
StatsKernel stats_kernel(c10::ScalarType source, c10::ScalarType target);

// Stats alone: writes nothing.
StatsKernel measure_kernel(c10::ScalarType dtype);

}  // namespace fddp
