#include "foreach_pack.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/irange.h>

#include <map>
#include <utility>
#include <vector>

#include "plain_ops.h"

namespace fddp {
namespace {

using Tensors = std::vector<at::Tensor>;

// Tensors of at least this size are scaled and copied in one pass, in a launch of their own. A factor
// has no multi-tensor copy, and for smaller tensors a second pass takes less than another launch.
constexpr size_t kAloneBytes = size_t{1} << 20;

at::Tensor slot_of(const at::Tensor& buffer, const Slot& slot) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(buffer.storage()), buffer.key_set(), buffer.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      slot.sizes, slot.strides, buffer.storage_offset() + slot.offset);
  return view;
}

// Complex numbers as pairs. A factor is rounded to 16 bits for tensors without a dimension, so they
// get one.
at::Tensor as_real(const at::Tensor& tensor) {
  if (tensor.is_complex()) return at::view_as_real(tensor);
  return tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor;
}

at::Tensor as_dense(const at::Tensor& source) {
  const at::Tensor dense = source.layout() == at::kStrided ? source : source.to_dense();
  return dense.resolve_neg().resolve_conj();
}

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && a.const_data_ptr() == b.const_data_ptr();
}

// Copies of `source * scale` by dtypes of source and target, since a multi-tensor operation is one
// launch only if these are the same for all.
class ScaledCopies {
 public:
  explicit ScaledCopies(double scale) : scale_(scale) {}

  void add(const at::Tensor& target, const at::Tensor& source) {
    const bool is_alone = scale_ != 1.0 && source.scalar_type() == target.scalar_type() &&
        target.nbytes() >= kAloneBytes;
    if (is_alone) {
      at::Tensor out = as_real(target);
      at::mul_out(out, as_real(as_dense(source)), at::native::wrapped_scalar_tensor(scale_));
      return;
    }
    auto& [targets, sources] = groups_[{target.scalar_type(), source.scalar_type()}];
    targets.push_back(as_real(target));
    sources.push_back(as_real(as_dense(source)));
  }

  void run() const {
    for (const auto& [dtypes, tensors] : groups_) {
      const auto& [targets, sources] = tensors;
      const c10::ScalarType target = targets[0].scalar_type(), source = sources[0].scalar_type();
      const c10::ScalarType arithmetic =
          c10::promoteTypes(c10::promoteTypes(source, target), c10::ScalarType::Float);
      if (scale_ == 1.0) {
        at::_foreach_copy_(targets, sources);
      } else if (target == arithmetic) {
        at::_foreach_copy_(targets, sources);
        at::_foreach_mul_(targets, scale_);
      } else {
        // Not in place: torch would round the factor to the 16 bits of the target.
        Tensors wide = sources;
        if (source != target && source != arithmetic) {
          for (at::Tensor& each : wide) each = each.to(arithmetic);
        }
        at::_foreach_copy_(targets, at::_foreach_mul(wide, scale_));
      }
    }
  }

 private:
  double scale_;
  std::map<std::pair<c10::ScalarType, c10::ScalarType>, std::pair<Tensors, Tensors>> groups_;
};

}  // namespace

void foreach_pack_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale) {
  check_plain_buffer(buffer, layout.numel());
  check_sources(sources, layout, buffer);
  const PlainOps plain_ops;
  buffer.unsafeGetTensorImpl()->bump_version();
  ScaledCopies copies(scale);
  Tensors missing;
  for (const auto i : c10::irange(sources.size())) {
    const at::Tensor slot = slot_of(buffer, layout.slots()[i]);
    if (!sources[i].defined() || scale == 0.0) {
      missing.push_back(slot);
    } else if (scale != 1.0 || !is_same_memory(sources[i], slot)) {
      copies.add(slot, sources[i]);
    }
  }
  if (!missing.empty()) at::_foreach_zero_(missing);
  copies.run();
}

void foreach_pack_add_(const at::Tensor& buffer, const Layout& layout, const Leaves& sources, double scale) {
  check_plain_buffer(buffer, layout.numel());
  check_sources(sources, layout, buffer);
  const PlainOps plain_ops;
  buffer.unsafeGetTensorImpl()->bump_version();
  if (scale == 0.0) return;
  const at::Tensor scaled = at::empty_like(buffer);
  ScaledCopies copies(scale);
  Tensors sums, terms;
  for (const auto i : c10::irange(sources.size())) {
    if (!sources[i].defined()) continue;
    const Slot& slot = layout.slots()[i];
    sums.push_back(as_real(slot_of(buffer, slot)));
    const at::Tensor term = slot_of(scaled, slot);
    terms.push_back(as_real(term));
    copies.add(term, sources[i]);
  }
  copies.run();
  if (!sums.empty()) at::_foreach_add_(sums, terms);
}

void foreach_unpack_(const Leaves& outputs, const Layout& layout, const at::Tensor& buffer, double scale) {
  check_plain_buffer(buffer, layout.numel());
  check_outputs(outputs, layout, buffer);
  const PlainOps plain_ops;
  // Outputs that negate or conjugate what their memory holds, with their values.
  std::vector<std::pair<at::Tensor, at::Tensor>> lazy;
  ScaledCopies copies(scale);
  for (const auto i : c10::irange(outputs.size())) {
    at::Tensor output = outputs[i];
    if (!output.defined()) continue;
    output.unsafeGetTensorImpl()->bump_version();
    if (output.is_conj() || output.is_neg()) {
      lazy.emplace_back(output, at::empty_like(output));
      output = lazy.back().second;
    }
    copies.add(output, slot_of(buffer, layout.slots()[i]));
  }
  copies.run();
  for (const auto& [output, values] : lazy) output.copy_(values);
}

}  // namespace fddp
