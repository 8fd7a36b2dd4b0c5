// Pack and unpack by torch's multi-tensor operations, for devices other than the CPU: a few kernel
// launches for a bucket. Arguments, written values and errors are those of pack.h. Nothing is
// measured, because reading it would wait for the device.

#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"
#include "layout.h"

namespace fddp {

void foreach_pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale);

void foreach_pack_add_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale);

void foreach_unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale);

}  // namespace fddp
