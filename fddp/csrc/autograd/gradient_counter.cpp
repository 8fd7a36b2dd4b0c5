#include "gradient_counter.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "clock.h"
#include "python_entry.h"
#include "tensor/checks.h"
#include "tensor/pack.h"
#include "tensor/streams.h"

namespace py = pybind11;

namespace fddp {

double add_bounds(double bound, double amax) {
  if (std::isinf(bound) || std::isinf(amax)) return std::numeric_limits<double>::infinity();
  return std::min(bound + amax, std::numeric_limits<double>::max());
}

namespace {

// Calls a Python function. The last owner may be an autograd thread that does not hold the GIL.
class CallableListener : public BucketListener {
 public:
  explicit CallableListener(py::object function) : function_(std::move(function)) {}
  ~CallableListener() override {
    const py::gil_scoped_acquire gil;
    function_ = py::object();
  }
  CallableListener(const CallableListener&) = delete;
  CallableListener& operator=(const CallableListener&) = delete;

  void bucket_ready(int64_t bucket) override {
    const PythonEntry python;
    function_(bucket);
  }

 private:
  py::object function_;
};

std::shared_ptr<BucketListener> as_listener(py::object on_bucket) {
  if (py::isinstance<BucketListener>(on_bucket)) return on_bucket.cast<std::shared_ptr<BucketListener>>();
  return std::make_shared<CallableListener>(std::move(on_bucket));
}

}  // namespace

GradientCounter::GradientCounter(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
  counts_.resize(leaves_.size(), 0);
  found_grad_.resize(leaves_.size(), false);
  for (const at::Tensor& leaf : leaves_) {
    const at::Device device = leaf.device();
    if (device.is_cpu() || device.is_meta()) continue;
    if (std::find(accelerators_.begin(), accelerators_.end(), device) == accelerators_.end()) accelerators_.push_back(device);
  }
}

void GradientCounter::arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
                          std::vector<EagerSlot> eager, py::object on_bucket) {
  TORCH_CHECK_VALUE(expected.size() == size(), "expected ", size(), " counts, got ", expected.size());
  TORCH_CHECK_TYPE(members != nullptr, "members is None");
  const auto check_leaf = [this](int64_t leaf) {
    TORCH_CHECK_INDEX(leaf >= 0 && leaf < static_cast<int64_t>(size()), "leaf ", leaf, " is out of range for ", size(), " leaves");
  };
  for (const auto& bucket : members->leaves) std::for_each(bucket.begin(), bucket.end(), check_leaf);
  for (const EagerSlot& slot : eager) check_leaf(slot.leaf);
  std::shared_ptr<BucketListener> listener = as_listener(std::move(on_bucket));
  const std::lock_guard<std::mutex> lock(mutex_);
  members_ = std::move(members);
  expected_ = std::move(expected);
  const size_t buckets = members_->leaves.size();
  pending_.assign(buckets, 0);
  late_.assign(buckets, false);
  taken_.assign(buckets, false);
  streams_.assign(buckets, {});
  note_home_streams();
  amax_bounds_.assign(buckets, 0.0);
  eager_ = std::move(eager);
  eager_of_.assign(size(), kNotEager);
  for (size_t i = 0; i < eager_.size(); ++i) eager_of_[eager_[i].leaf] = static_cast<int64_t>(i);
  packed_on_arrival_.assign(size(), false);
  squares_.assign(size(), 0.0);
  bucket_of_.assign(size(), kNoBucket);
  for (size_t b = 0; b < buckets; ++b) {
    for (const int64_t leaf : members_->leaves[b]) {
      bucket_of_[leaf] = static_cast<int64_t>(b);
      pending_[b] += expected_[leaf];
    }
  }
  std::fill(found_grad_.begin(), found_grad_.end(), false);
  std::fill(counts_.begin(), counts_.end(), 0);
  arrivals_.clear();
  arrivals_.reserve(size());
  arrival_times_.clear();
  arrival_times_.reserve(size());
  listener_.swap(listener);
  armed_ = true;
}

void GradientCounter::disarm() {
  std::shared_ptr<BucketListener> listener;
  std::vector<EagerSlot> eager;
  const std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
  eager.swap(eager_);
  listener.swap(listener_);
}

std::vector<at::Tensor> GradientCounter::take_locked(int64_t bucket, bool keep) {
  TORCH_CHECK_VALUE(members_ != nullptr, "arm must be called before gradients can be taken");
  const auto& members = members_->leaves.at(bucket);
  wait_for(streams_[bucket]);
  std::vector<at::Tensor> grads;
  grads.reserve(members.size());
  for (const int64_t leaf : members) {
    const at::Tensor& grad = leaves_[leaf].mutable_grad();
    found_grad_[leaf] = found_grad_[leaf] || grad.defined();
    grads.push_back(grad);
    release_grad(static_cast<size_t>(leaf), keep);
  }
  taken_[bucket] = true;
  return grads;
}

std::vector<std::optional<at::Tensor>> GradientCounter::take(int64_t bucket, bool keep) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::optional<at::Tensor>> grads;
  for (at::Tensor& grad : take_locked(bucket, keep)) {
    grads.push_back(grad.defined() ? std::optional<at::Tensor>(std::move(grad)) : std::nullopt);
  }
  return grads;
}

size_t GradientCounter::leaves_of(int64_t bucket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(members_ != nullptr, "arm must be called before gradients can be packed");
  return members_->leaves.at(bucket).size();
}

double GradientCounter::pack(int64_t bucket, const at::Tensor& buffer, const BucketPacking& packing, bool keep,
                             double scale, double* squares) {
  std::vector<at::Tensor> grads;  // released without the mutex, as in `on_gradient`
  struct Separate {
    int64_t position;
    const Layout* slot;
  };
  std::vector<Separate> separate;
  double amax = 0.0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_VALUE(members_ != nullptr, "arm must be called before gradients can be packed");
    // Before they are taken, so that the caller can look for the one at fault.
    for (const int64_t leaf : members_->leaves.at(bucket)) {
      const at::Tensor& grad = leaves_[leaf].grad();
      TORCH_CHECK_TYPE(!grad.defined() || !is_wrapper(grad), "a gradient's memory does not hold its values");
    }
    grads = take_locked(bucket, keep);
    amax = amax_bounds_[bucket];
    for (const auto& [position, slot] : packing.early) {
      const int64_t leaf = members_->leaves[bucket].at(position);
      if (!packed_on_arrival_[leaf]) {
        separate.push_back({position, &slot});
      } else if (squares != nullptr) {
        squares[position] = squares_[leaf];
      }
    }
  }
  if (packing.together.size() == grads.size()) {
    amax = std::max(amax, pack_(buffer, packing.layout, grads, scale, squares));
  } else {
    std::vector<at::Tensor> together;
    together.reserve(packing.together.size());
    for (const int64_t position : packing.together) together.push_back(grads.at(position));
    std::vector<double> found(squares == nullptr ? 0 : together.size());
    amax = std::max(amax, pack_(buffer, packing.layout, together, scale, squares == nullptr ? nullptr : found.data()));
    for (size_t i = 0; i < found.size(); ++i) squares[packing.together[i]] = found[i];
  }
  for (const auto& [position, slot] : separate) {
    double* const square = squares == nullptr ? nullptr : squares + position;
    amax = std::max(amax, pack_(buffer, *slot, {grads[position]}, scale, square));
  }
  return amax;
}

void GradientCounter::release_grad(size_t leaf, bool keep) {
  if (!keep) leaves_[leaf].mutable_grad().reset();
}

bool GradientCounter::may_release(size_t) const { return true; }

std::optional<at::Tensor> GradientCounter::take_one(int64_t leaf) {
  at::Tensor grad = std::exchange(leaves_.at(leaf).mutable_grad(), {});
  return grad.defined() ? std::optional<at::Tensor>(std::move(grad)) : std::nullopt;
}

std::vector<bool> GradientCounter::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> used(size());
  for (size_t i = 0; i < size(); ++i) used[i] = was_used(i);
  return used;
}

bool GradientCounter::all_used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < size(); ++i) {
    if (!was_used(i)) return false;
  }
  return true;
}

bool GradientCounter::is_complete() const {
  if (!all_used()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::find(late_.begin(), late_.end(), true) == late_.end();
}

bool GradientCounter::is_as_expected() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_ == expected_;
}

size_t GradientCounter::arrival_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arrivals_.size();
}

void GradientCounter::on_gradient(size_t leaf, bool is_undefined) {
  int64_t complete = kNoBucket;
  at::Tensor packed;  // released without the mutex: a gradient known to Python may need the GIL
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!armed_ || !(is_undefined || leaves_[leaf].grad().defined())) return;
    ++counts_[leaf];
    arrivals_.push_back(static_cast<int64_t>(leaf));
    arrival_times_.push_back(perf_counter_s());
    const int64_t bucket = bucket_of_[leaf];
    if (!home_.empty()) note_stream(bucket, leaves_[leaf]);
    if (bucket == kNoBucket) return;
    if (!is_undefined) {
      if (taken_[bucket]) {
        late_[bucket] = true;
      } else if (eager_of_[leaf] != kNotEager && may_release(leaf) && !is_wrapper(leaves_[leaf].grad())) {
        packed = pack_on_arrival(leaf, bucket);
      }
    }
    if (counts_[leaf] <= expected_[leaf] && --pending_[bucket] == 0) complete = bucket;
  }
  // Called without the mutex: the listener may need the GIL, whose holder may wait for the mutex.
  if (complete != kNoBucket) notify_bucket(complete);
}

at::Tensor GradientCounter::pack_on_arrival(size_t leaf, int64_t bucket) {
  const EagerSlot& slot = eager_[eager_of_[leaf]];
  at::Tensor& grad = leaves_[leaf].mutable_grad();
  const auto pack = packed_on_arrival_[leaf] ? pack_add_ : pack_;
  double* const square = slot.sums_squares ? &squares_[leaf] : nullptr;
  const double amax = pack(slot.buffer, *slot.layout, {grad}, slot.scale, square);
  // The sum of two finite bounds may overflow to infinity, which would indicate a non-finite
  // gradient.
  double& bound = amax_bounds_[bucket];
  bound = packed_on_arrival_[leaf] ? add_bounds(bound, amax) : std::max(bound, amax);
  packed_on_arrival_[leaf] = true;
  return std::exchange(grad, {});
}

void GradientCounter::notify_bucket(int64_t bucket) {
  std::shared_ptr<BucketListener> listener;
  std::vector<c10::Stream> home;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    listener = listener_;
    home = home_;
  }
  const c10::MultiStreamGuard guard(home);
  if (listener) listener->bucket_ready(bucket);
}

void GradientCounter::note_home_streams() {
  home_.clear();
  for (const at::Device& device : accelerators_) {
    home_.push_back(current_stream(device));
  }
}

void GradientCounter::note_stream(int64_t bucket, const at::Tensor& leaf) {
  const c10::impl::VirtualGuardImpl guard(leaf.device().type());
  const c10::Stream stream = guard.getStream(leaf.device());
  const auto home = std::find_if(home_.begin(), home_.end(), [&](const c10::Stream& s) { return s.device() == leaf.device(); });
  if (home == home_.end() || stream == *home) return;
  if (bucket != kNoBucket) {
    auto& streams = streams_[bucket];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }
  const at::Tensor& grad = leaf.grad();
  if (!grad.defined()) return;
  const auto parts = grad.is_sparse() ? std::vector<at::Tensor>{grad._indices(), grad._values()} : std::vector<at::Tensor>{grad};
  for (const at::Tensor& part : parts) guard.recordDataPtrOnStream(part.storage().data_ptr(), *home);
}

void GradientCounter::note_home() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!armed_) note_home_streams();
}

void GradientCounter::on_home_streams(const py::object& body) {
  std::vector<c10::Stream> home;  // a copy: `body` may begin another step
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    home = home_;
  }
  try {
    const c10::MultiStreamGuard guard(home);
    body();
  } catch (...) {  // of a step that has failed, which has restored gradients
    wait_for(home);
    throw;
  }
  wait_for(home);
}

}  // namespace fddp

void bind_gradient_counter(py::module_& m) {
  using namespace fddp;
  m.def("add_bounds", &add_bounds, py::arg("bound"), py::arg("amax"));
  py::class_<BucketMembers, std::shared_ptr<BucketMembers>>(m, "BucketMembers")
      .def(py::init([](std::vector<std::vector<int64_t>> leaves) {
             return std::make_shared<BucketMembers>(BucketMembers{std::move(leaves)});
           }),
           py::arg("leaves"));
  py::class_<BucketPacking, std::shared_ptr<BucketPacking>>(m, "BucketPacking")
      .def(py::init([](std::vector<int64_t> together, const Layout& layout,
                       std::vector<std::pair<int64_t, Layout>> early) {
             return BucketPacking{std::move(together), layout, std::move(early)};
           }),
           py::arg("together"), py::arg("layout"), py::arg("early"));
  py::class_<EagerSlot>(m, "EagerSlot")
      .def(py::init([](int64_t leaf, at::Tensor buffer, std::shared_ptr<Layout> layout, double scale,
                       bool sums_squares) {
             return EagerSlot{leaf, std::move(buffer), std::move(layout), scale, sums_squares};
           }),
           py::arg("leaf"), py::arg("buffer"), py::arg("layout").none(false), py::arg("scale"),
           py::arg("sums_squares") = false);
  py::class_<BucketListener, std::shared_ptr<BucketListener>>(m, "BucketListener");
  py::class_<GradientCounter, std::shared_ptr<GradientCounter>>(m, "GradientCounter")
      .def_property_readonly("leaves", &GradientCounter::leaves)
      .def("arm", &GradientCounter::arm, py::arg("members"), py::arg("expected"), py::arg("eager"), py::arg("on_bucket"))
      .def("disarm", &GradientCounter::disarm)
      .def("note_home", &GradientCounter::note_home)
      .def("on_home_streams", &GradientCounter::on_home_streams, py::arg("body"))
      .def("take", &GradientCounter::take, py::arg("bucket"), py::arg("keep"))
      .def("pack",
           torch::wrap_pybind_function_no_gil(
               [](GradientCounter& counter, int64_t bucket, const at::Tensor& buffer,
                  const BucketPacking& packing, bool keep, double scale, const std::optional<at::Tensor>& squares) {
                 double* const written = squares ? squares_of(*squares, counter.leaves_of(bucket)) : nullptr;
                 return counter.pack(bucket, buffer, packing, keep, scale, written);
               }),
           py::arg("bucket"), py::arg("buffer"), py::arg("packing"), py::arg("keep"), py::arg("scale"),
           py::arg("squares") = py::none())
      .def("take_one", &GradientCounter::take_one, py::arg("leaf"))
      .def("arrival_count", &GradientCounter::arrival_count)
      .def("used", &GradientCounter::used)
      .def("all_used", &GradientCounter::all_used)
      .def("is_complete", &GradientCounter::is_complete)
      .def("is_as_expected", &GradientCounter::is_as_expected)
      .def("late", &GradientCounter::late)
      .def("counts", &GradientCounter::counts)
      .def("arrivals", &GradientCounter::arrivals)
      .def("arrival_times", &GradientCounter::arrival_times);
}
