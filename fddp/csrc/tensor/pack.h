// Pack: many leaves into one buffer. Unpack: a buffer into many leaves. In CPU memory.
//
// Each checks all of its arguments before it writes the first element. None needs the GIL, and
// none may be called from within parallel_for.

#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "kernels.h"
#include "layout.h"

namespace fddp {

// buffer[slot] = cast(source * scale). A missing source, or a scale of zero, gives exact zeros.
// The largest magnitude that was read times that of the scale, which bounds what was written but for
// rounding; infinity if a value that was read is not finite, else finite.
double pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale);

// buffer[slot] += cast(source * scale). A missing source leaves its slot as it is.
double pack_add_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale);

// buffer *= scale, with the stats of the result. A scale of one writes nothing.
Stats scale_(const at::Tensor& buffer, double scale);

// output = cast(buffer[slot] * scale), with the stats of what was written. A missing output is
// skipped. Outputs must not overlap each other.
Stats unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale);

}  // namespace fddp
