#include "arrivals.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "tensor/pack.h"

namespace py = pybind11;

namespace fddp {
namespace {

// The clock of Python's time.perf_counter.
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

double plus(double bound, double peak) {
  if (std::isinf(bound) || std::isinf(peak)) return std::numeric_limits<double>::infinity();
  return std::min(bound + peak, std::numeric_limits<double>::max());
}

Arrivals::Arrivals(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
  counts_.resize(leaves_.size(), 0);
  had_.resize(leaves_.size(), false);
}

Arrivals::~Arrivals() {
  // The last owner may be an autograd thread that does not hold the GIL.
  if (callback_) {
    py::gil_scoped_acquire gil;
    callback_.reset();
  }
}

void Arrivals::arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
                   std::vector<EagerSlot> eager, py::object on_bucket) {
  TORCH_CHECK_VALUE(expected.size() == size(), "expected ", size(), " counts, got ", expected.size());
  TORCH_CHECK_TYPE(members != nullptr, "the members of buckets are None");
  const auto check_leaf = [this](int64_t leaf) {
    TORCH_CHECK_INDEX(leaf >= 0 && leaf < static_cast<int64_t>(size()), "there is no leaf ", leaf, " among ", size());
  };
  for (const auto& bucket : members->leaves) std::for_each(bucket.begin(), bucket.end(), check_leaf);
  for (const EagerSlot& slot : eager) check_leaf(slot.leaf);
  const std::lock_guard<std::mutex> lock(mutex_);
  members_ = std::move(members);
  expected_ = std::move(expected);
  const size_t buckets = members_->leaves.size();
  pending_.assign(buckets, 0);
  late_.assign(buckets, false);
  packed_.assign(buckets, false);
  streams_.assign(buckets, {});
  peaks_.assign(buckets, 0.0);
  eager_ = std::move(eager);
  eager_of_.assign(size(), kNotEager);
  for (size_t i = 0; i < eager_.size(); ++i) eager_of_[eager_[i].leaf] = static_cast<int64_t>(i);
  written_.assign(size(), false);
  bucket_of_.assign(size(), kNoBucket);
  for (size_t b = 0; b < buckets; ++b) {
    for (const int64_t leaf : members_->leaves[b]) {
      bucket_of_[leaf] = static_cast<int64_t>(b);
      pending_[b] += expected_[leaf];
    }
  }
  std::fill(had_.begin(), had_.end(), false);
  std::fill(counts_.begin(), counts_.end(), 0);
  arrivals_.clear();
  arrivals_.reserve(size());
  arrival_times_.clear();
  arrival_times_.reserve(size());
  callback_ = std::make_unique<py::object>(std::move(on_bucket));
  armed_ = true;
}

void Arrivals::disarm() {
  std::unique_ptr<py::object> callback;
  std::vector<EagerSlot> eager;
  const std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
  eager.swap(eager_);
  callback.swap(callback_);
}

std::vector<at::Tensor> Arrivals::taken(int64_t bucket, bool keep) {
  TORCH_CHECK_VALUE(members_ != nullptr, "no buckets are known before the first step");
  const auto& members = members_->leaves.at(bucket);
  wait_for_streams(bucket);
  std::vector<at::Tensor> grads;
  grads.reserve(members.size());
  for (const int64_t leaf : members) {
    const at::Tensor& grad = leaves_[leaf].mutable_grad();
    had_[leaf] = had_[leaf] || grad.defined();
    grads.push_back(grad);
    let_go(static_cast<size_t>(leaf), keep);
  }
  packed_[bucket] = true;
  return grads;
}

std::vector<std::optional<at::Tensor>> Arrivals::take(int64_t bucket, bool keep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::optional<at::Tensor>> grads;
  for (at::Tensor& grad : taken(bucket, keep)) {
    grads.push_back(grad.defined() ? std::optional<at::Tensor>(std::move(grad)) : std::nullopt);
  }
  return grads;
}

double Arrivals::pack(int64_t bucket, const at::Tensor& buffer, const BucketPacking& packing, bool keep,
                    double scale) {
  std::vector<at::Tensor> grads;  // let go of outside of the mutex, as in `arrived`
  std::vector<std::pair<at::Tensor, const Layout*>> alone;
  double peak = 0.0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    grads = taken(bucket, keep);
    peak = peaks_[bucket];
    for (const auto& [position, slot] : packing.early) {
      if (!written_[members_->leaves[bucket].at(position)]) alone.emplace_back(grads[position], &slot);
    }
  }
  if (packing.together.size() == grads.size()) {
    peak = std::max(peak, pack_(buffer, packing.layout, grads, scale));
  } else {
    std::vector<at::Tensor> together;
    together.reserve(packing.together.size());
    for (const int64_t position : packing.together) together.push_back(grads.at(position));
    peak = std::max(peak, pack_(buffer, packing.layout, together, scale));
  }
  for (const auto& [grad, slot] : alone) peak = std::max(peak, pack_(buffer, *slot, {grad}, scale));
  return peak;
}

void Arrivals::let_go(size_t leaf, bool keep) {
  if (!keep) leaves_[leaf].mutable_grad().reset();
}

bool Arrivals::may_drop(size_t) const { return true; }

bool Arrivals::written(int64_t leaf) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return written_.at(leaf);
}

std::optional<at::Tensor> Arrivals::take_one(int64_t leaf) {
  at::Tensor grad = std::exchange(leaves_.at(leaf).mutable_grad(), {});
  return grad.defined() ? std::optional<at::Tensor>(std::move(grad)) : std::nullopt;
}

size_t Arrivals::arrival_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrivals_.size();
}

std::vector<bool> Arrivals::late() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return late_;
}

std::vector<int64_t> Arrivals::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::vector<int64_t> Arrivals::arrivals() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrivals_;
}

std::vector<double> Arrivals::arrival_times() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrival_times_;
}

void Arrivals::arrived(size_t leaf) {
  int64_t complete = kNoBucket;
  at::Tensor packed;  // let go of outside of the mutex: a gradient that Python knows asks for the GIL
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!armed_ || !leaves_[leaf].grad().defined()) return;
    ++counts_[leaf];
    arrivals_.push_back(static_cast<int64_t>(leaf));
    arrival_times_.push_back(now_s());
    const int64_t bucket = bucket_of_[leaf];
    if (bucket == kNoBucket) return;
    note_stream(bucket, leaves_[leaf].device());
    if (packed_[bucket]) {
      late_[bucket] = true;
    } else if (eager_of_[leaf] != kNotEager && may_drop(leaf)) {
      packed = write(leaf, bucket);
    }
    if (counts_[leaf] <= expected_[leaf] && --pending_[bucket] == 0) complete = bucket;
  }
  // The mutex is free again: the callback needs the GIL, whose holder may want the mutex.
  if (complete != kNoBucket) announce(complete);
}

at::Tensor Arrivals::write(size_t leaf, int64_t bucket) {
  const EagerSlot& slot = eager_[eager_of_[leaf]];
  at::Tensor& grad = leaves_[leaf].mutable_grad();
  const auto pack = written_[leaf] ? pack_add_ : pack_;
  const double peak = pack(slot.buffer, *slot.layout, {grad}, slot.scale);
  // Two finite bounds may add up to infinity, which would speak of a gradient.
  const double bound = written_[leaf] ? plus(peaks_[bucket], peak) : std::max(peaks_[bucket], peak);
  peaks_[bucket] = bound;
  written_[leaf] = true;
  return std::exchange(grad, {});
}

void Arrivals::announce(int64_t bucket) {
  py::gil_scoped_acquire gil;
  py::object callback;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (callback_) callback = *callback_;
  }
  if (callback) callback(bucket);
}

// Backward may run parts of a graph on several streams of an accelerator, while a bucket is packed
// on the stream of its last gradient.
void Arrivals::note_stream(int64_t bucket, at::Device device) {
  if (device.is_cpu() || device.is_meta()) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  auto& streams = streams_[bucket];
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

void Arrivals::wait_for_streams(int64_t bucket) {
  for (const c10::Stream& stream : streams_[bucket]) {
    const c10::impl::VirtualGuardImpl guard(stream.device_type());
    const c10::Stream current = guard.getStream(stream.device());
    if (current == stream) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    event.block(current);
  }
}

}  // namespace fddp

void bind_arrivals(py::module_& m) {
  using namespace fddp;
  m.def("plus", &plus, py::arg("bound"), py::arg("peak"));
  py::class_<BucketMembers, std::shared_ptr<BucketMembers>>(m, "BucketMembers")
      .def(py::init([](std::vector<std::vector<int64_t>> leaves) {
             return std::make_shared<BucketMembers>(BucketMembers{std::move(leaves)});
           }),
           py::arg("leaves"));
  py::class_<BucketPacking>(m, "BucketPacking")
      .def(py::init([](std::vector<int64_t> together, const Layout& layout,
                       std::vector<std::pair<int64_t, Layout>> early) {
             return BucketPacking{std::move(together), layout, std::move(early)};
           }),
           py::arg("together"), py::arg("layout"), py::arg("early"));
  py::class_<EagerSlot>(m, "EagerSlot")
      .def(py::init([](int64_t leaf, at::Tensor buffer, std::shared_ptr<Layout> layout, double scale) {
             return EagerSlot{leaf, std::move(buffer), std::move(layout), scale};
           }),
           py::arg("leaf"), py::arg("buffer"), py::arg("layout").none(false), py::arg("scale"));
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def_property_readonly("leaves", &Arrivals::leaves)
      .def("disarm", &Arrivals::disarm)
      .def("take", &Arrivals::take, py::arg("bucket"), py::arg("keep"))
      .def("pack",
           torch::wrap_pybind_function_no_gil(
               [](Arrivals& arrivals, int64_t bucket, const at::Tensor& buffer,
                  const BucketPacking& packing, bool keep, double scale) {
                 return arrivals.pack(bucket, buffer, packing, keep, scale);
               }),
           py::arg("bucket"), py::arg("buffer"), py::arg("packing"), py::arg("keep"), py::arg("scale"))
      .def("written", &Arrivals::written, py::arg("leaf"))
      .def("take_one", &Arrivals::take_one, py::arg("leaf"))
      .def("arrival_count", &Arrivals::arrival_count)
      .def("late", &Arrivals::late)
      .def("counts", &Arrivals::counts)
      .def("arrivals", &Arrivals::arrivals)
      .def("arrival_times", &Arrivals::arrival_times);
}
