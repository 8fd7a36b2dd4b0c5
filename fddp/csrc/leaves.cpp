// Autograd leaves of one differentiated call: they announce their gradients as these arrive.
//
// [Note: fresh leaves]
// Each call differentiates with respect to leaves of its own, made here in one pass over the
// parameters. Leaves kept across steps would save their construction (about half a microsecond
// each), but data swapped under a graph that is still alive gives silently wrong gradients, and
// every guard against that costs what the construction does.

#include <Python.h>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "layout.h"
#include "pack.h"

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace fddp {
namespace {

constexpr int64_t kNoBucket = -1;

// The leaves of each bucket; made once for a plan, shared by its steps.
struct BucketMembers {
  std::vector<std::vector<int64_t>> leaves;
};

// Where a large leaf's gradient goes as soon as it arrives: into `layout`'s only slot of `buffer`.
struct EagerSlot {
  int64_t leaf;
  at::Tensor buffer;
  const Layout* layout;  // kept alive by the caller while the set is armed
  double scale;
};

// What the leaves of a tree must be. Leaves that are not reduced (integers, None) have no gradient,
// so there only a floating type that the plan does not know of is wrong.
class LeafTypes {
 public:
  LeafTypes(std::vector<std::vector<int64_t>> shapes, std::vector<std::optional<at::ScalarType>> dtypes,
            std::vector<bool> reduced)
      : shapes_(std::move(shapes)), dtypes_(std::move(dtypes)), reduced_(std::move(reduced)) {
    TORCH_CHECK_VALUE(shapes_.size() == dtypes_.size() && shapes_.size() == reduced_.size(), shapes_.size(),
                      " shapes for ", dtypes_.size(), " dtypes and ", reduced_.size(), " flags");
  }

  // The first leaf that does not fit, or -1. None fits, unless the leaves are to be differentiated.
  int64_t first_misfit(const py::list& leaves, bool differentiable) const {
    TORCH_CHECK_VALUE(leaves.size() == shapes_.size(), "expected ", shapes_.size(), " leaves, got ", leaves.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      if (!fits(PyList_GET_ITEM(leaves.ptr(), i), i, differentiable)) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  bool fits(PyObject* leaf, size_t i, bool differentiable) const {
    if (leaf == Py_None) return !(differentiable && reduced_[i]);
    if (!THPVariable_Check(leaf)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(leaf);
    const bool has_dtype = dtypes_[i] == tensor.scalar_type();
    if (!reduced_[i]) {
      return has_dtype || !(at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
    }
    return has_dtype && !tensor.is_nested() && tensor.sizes() == at::IntArrayRef(shapes_[i]) &&
        !(differentiable && tensor.is_inference());
  }

  std::vector<std::vector<int64_t>> shapes_;
  std::vector<std::optional<at::ScalarType>> dtypes_;
  std::vector<bool> reduced_;
};

// What a walk over the graph behind a loss can tell before backward runs.
struct GraphView {
  std::vector<bool> used;           // by leaf: an AccumulateGrad of it is reachable
  std::vector<at::Tensor> foreign;  // reachable leaves that are not ours
  bool opaque = false;              // a node written in Python: it may run graphs of its own
  bool whole = false;               // such a node must run although it leads to no leaf of ours
};

// The clock of Python's time.perf_counter.
double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Compared by name because the type is not exported from libtorch_python.
bool is_python_node(const Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Nodes written in Python that are known to run no graph of their own: compiled functions, custom
// operators, and the bookkeeping of checkpoints that are not re-entrant.
bool runs_no_graph(const std::string& name) {
  return name == "CompiledFunctionBackward" || name == "_NoopSaveInputsBackward" ||
      name.rfind("GeneratedBackwardFor_", 0) == 0;
}

// Re-entrant checkpoints, torch's and others', refuse to be told which leaves to serve.
bool is_checkpoint(const std::string& name) { return name.find("Checkpoint") != std::string::npos; }

class LeafSet : public std::enable_shared_from_this<LeafSet> {
 public:
  explicit LeafSet(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
    counts_.resize(leaves_.size(), 0);
    had_.resize(leaves_.size(), false);
    bucket_of_.resize(leaves_.size(), kNoBucket);
    for (size_t i = 0; i < leaves_.size(); ++i) index_.emplace(leaves_[i].unsafeGetTensorImpl(), i);
  }

  ~LeafSet() {
    // The last owner may be an autograd thread that does not hold the GIL.
    if (callback_) {
      py::gil_scoped_acquire gil;
      callback_.reset();
    }
  }
  LeafSet(const LeafSet&) = delete;
  LeafSet& operator=(const LeafSet&) = delete;

  static std::shared_ptr<LeafSet> make(const std::vector<at::Tensor>& params);

  const std::vector<at::Tensor>& leaves() const { return leaves_; }
  size_t size() const { return leaves_.size(); }

  // Starts counting. `expected[i]` is how many gradients of leaf i its bucket waits for.
  // `on_bucket(b)` is called when the last of bucket b's has arrived. Gradients of the leaves in
  // `eager` are packed when they arrive, while they are in cache, and let go of, so that the
  // allocator hands the same warm memory to the next.
  void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
           std::vector<EagerSlot> eager, py::object on_bucket) {
    TORCH_CHECK_VALUE(expected.size() == size(), "expected ", size(), " counts, got ", expected.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    members_ = std::move(members);
    expected_ = std::move(expected);
    const size_t buckets = members_->leaves.size();
    pending_.assign(buckets, 0);
    late_.assign(buckets, false);
    packed_.assign(buckets, false);
    streams_.assign(buckets, {});
    finite_.assign(buckets, true);
    eager_ = std::move(eager);
    eager_of_.assign(size(), kNotEager);
    for (size_t i = 0; i < eager_.size(); ++i) eager_of_.at(eager_[i].leaf) = static_cast<int64_t>(i);
    written_.assign(size(), false);
    for (size_t b = 0; b < buckets; ++b) {
      for (const int64_t leaf : members_->leaves[b]) {
        TORCH_CHECK_INDEX(leaf >= 0 && leaf < static_cast<int64_t>(size()), "leaf ", leaf, " of bucket ", b,
                          " is not one of ", size());
        bucket_of_[leaf] = static_cast<int64_t>(b);
        pending_[b] += expected_[leaf];
      }
    }
    for (auto& leaf : leaves_) leaf.mutable_grad().reset();
    hook_leaves();
    std::fill(counts_.begin(), counts_.end(), 0);
    arrivals_.clear();
    arrival_times_.clear();
    callback_ = std::make_unique<py::object>(std::move(on_bucket));
    armed_ = true;
  }

  // Sees to it that every leaf announces its gradients, also where the caller has put a hook of its
  // own on it since, which takes the place of ours.
  void hook_leaves();

  // Stops counting and lets go of the callback, which would otherwise close a reference cycle.
  void disarm() {
    std::unique_ptr<py::object> callback;
    const std::lock_guard<std::mutex> lock(mutex_);
    armed_ = false;
    eager_.clear();
    callback.swap(callback_);
  }

  // Hands over the gradients of one bucket; with `keep` the leaves go on accumulating into them.
  // What arrives from now on is late.
  std::vector<std::optional<at::Tensor>> take(int64_t bucket, bool keep) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto& members = members_->leaves.at(bucket);
    wait_for_streams(bucket);
    std::vector<std::optional<at::Tensor>> grads;
    grads.reserve(members.size());
    for (const int64_t leaf : members) {
      at::Tensor& grad = leaves_[leaf].mutable_grad();
      had_[leaf] = had_[leaf] || grad.defined();
      grads.emplace_back(grad.defined() ? std::optional<at::Tensor>(grad) : std::nullopt);
      if (!keep) grad.reset();
    }
    packed_[bucket] = true;
    return grads;
  }

  // Whether the leaf's gradient is in its bucket already.
  bool written(int64_t leaf) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return written_.at(leaf);
  }
  // Whether all gradients that were packed as they arrived are finite.
  bool finite(int64_t bucket) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return finite_.at(bucket);
  }
  // Whether any gradient came for each leaf. Not read from the counts alone: a hook that the caller
  // puts on a leaf replaces ours.
  std::vector<bool> used() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<bool> used = had_;
    for (size_t i = 0; i < size(); ++i) used[i] = used[i] || counts_[i] > 0;
    return used;
  }
  // Hands over one leaf's gradient; the leaf forgets it, so that nothing is added to it later.
  std::optional<at::Tensor> take_one(int64_t leaf) {
    at::Tensor grad = std::exchange(leaves_.at(leaf).mutable_grad(), {});
    return grad.defined() ? std::optional<at::Tensor>(std::move(grad)) : std::nullopt;
  }
  size_t arrival_count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrivals_.size();
  }
  std::vector<bool> late() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return late_;
  }
  std::vector<int64_t> counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }
  std::vector<int64_t> arrivals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrivals_;
  }
  std::vector<double> arrival_times() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return arrival_times_;
  }

  GraphView inspect(const at::Tensor& loss) const {
    GraphView view;
    view.used.resize(size(), false);
    std::vector<Node*> stack;
    std::unordered_set<Node*> seen;
    const auto push = [&](Node* node) {
      if (node != nullptr && seen.insert(node).second) stack.push_back(node);
    };
    // A loss that is itself a leaf has no grad_fn; gradient_edge covers both cases.
    const auto root = torch::autograd::impl::gradient_edge(loss);
    push(root.function.get());
    std::vector<const Node*> opaque;
    while (!stack.empty()) {
      Node* node = stack.back();
      stack.pop_back();
      if (node->next_edges().empty()) {
        if (auto* sink = dynamic_cast<AccumulateGrad*>(node)) note_sink(sink->variable, view);
        // A custom function of no differentiable input can't be reached by backward.
        continue;
      }
      if (is_python_node(*node)) {
        const std::string name = node->name();
        if (!runs_no_graph(name)) opaque.push_back(node);
        view.whole = view.whole || is_checkpoint(name);
      }
      for (const auto& edge : node->next_edges()) push(edge.function.get());
    }
    view.opaque = !opaque.empty();
    if (!view.foreign.empty()) {
      for (const Node* node : opaque) view.whole = view.whole || !leads_to_own(node);
    }
    return view;
  }

  void arrived(size_t leaf) {
    int64_t complete = kNoBucket;
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
      } else if (eager_of_[leaf] != kNotEager) {
        write(leaf, bucket);
      }
      if (counts_[leaf] <= expected_[leaf] && --pending_[bucket] == 0) complete = bucket;
    }
    // The mutex is free again: the callback needs the GIL, whose holder may want the mutex.
    if (complete != kNoBucket) announce(complete);
  }

 private:
  static constexpr int64_t kNotEager = -1;

  void write(size_t leaf, int64_t bucket) {
    const EagerSlot& slot = eager_[eager_of_[leaf]];
    at::Tensor& grad = leaves_[leaf].mutable_grad();
    const auto pack = written_[leaf] ? pack_add_ : pack_;
    finite_[bucket] = pack(slot.buffer, *slot.layout, {grad}, slot.scale) && finite_[bucket];
    written_[leaf] = true;
    grad.reset();
  }

  bool leads_to_own(const Node* start) const {
    std::vector<const Node*> stack{start};
    std::unordered_set<const Node*> seen{start};
    while (!stack.empty()) {
      const Node* node = stack.back();
      stack.pop_back();
      if (const auto* sink = dynamic_cast<const AccumulateGrad*>(node)) {
        if (index_.count(sink->variable.unsafeGetTensorImpl()) != 0) return true;
      }
      for (const auto& edge : node->next_edges()) {
        const Node* next = edge.function.get();
        if (next != nullptr && seen.insert(next).second) stack.push_back(next);
      }
    }
    return false;
  }

  void note_sink(const at::Tensor& variable, GraphView& view) const {
    const auto found = index_.find(variable.unsafeGetTensorImpl());
    if (found == index_.end()) {
      view.foreign.push_back(variable);
    } else {
      view.used[found->second] = true;
    }
  }

  void announce(int64_t bucket) {
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
  void note_stream(int64_t bucket, at::Device device) {
    if (device.is_cpu() || device.is_meta()) return;
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    auto& streams = streams_[bucket];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
  }

  void wait_for_streams(int64_t bucket) {
    for (const c10::Stream& stream : streams_[bucket]) {
      const c10::impl::VirtualGuardImpl guard(stream.device_type());
      const c10::Stream current = guard.getStream(stream.device());
      if (current == stream) continue;
      c10::Event event(stream.device_type());
      event.record(stream);
      event.block(current);
    }
  }

  mutable std::mutex mutex_;
  std::vector<at::Tensor> leaves_;
  std::unordered_map<c10::TensorImpl*, size_t> index_;
  std::shared_ptr<const BucketMembers> members_;
  std::vector<bool> had_;                         // by leaf: take() found a gradient
  std::vector<int64_t> bucket_of_;                // by leaf
  std::vector<int64_t> expected_;                 // by leaf: gradients its bucket waits for
  std::vector<int64_t> counts_;                   // by leaf: gradients arrived
  std::vector<int64_t> arrivals_;                 // leaves in order of arrival, repeats included
  std::vector<double> arrival_times_;             // of arrivals_: seconds, as time.perf_counter
  std::vector<int64_t> pending_;                  // by bucket: gradients still awaited
  std::vector<EagerSlot> eager_;
  std::vector<int64_t> eager_of_;                 // by leaf: position in eager_, or kNotEager
  std::vector<bool> written_;                     // by leaf: packed on arrival
  std::vector<bool> finite_;                      // by bucket: of what was packed on arrival
  std::vector<bool> late_;                        // by bucket: a gradient came after take()
  std::vector<bool> packed_;                      // by bucket: take() was called
  std::vector<std::vector<c10::Stream>> streams_;  // by bucket: where its gradients were made
  std::unique_ptr<py::object> callback_;
  bool armed_ = false;
};

// Sits on a leaf and holds the set weakly: the set owns the leaves.
class ArrivalHook : public torch::autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::weak_ptr<LeafSet> set, size_t leaf, std::unique_ptr<PostAccumulateGradHook> callers)
      : set_(std::move(set)), leaf_(leaf), callers_(std::move(callers)) {}

  void operator()(const at::Tensor& leaf) override {
    if (callers_) (*callers_)(leaf);
    if (const auto set = set_.lock()) set->arrived(leaf_);
  }

 private:
  std::weak_ptr<LeafSet> set_;
  size_t leaf_;
  std::unique_ptr<PostAccumulateGradHook> callers_;  // the caller's own hook, which runs first
};

void LeafSet::hook_leaves() {
  for (size_t i = 0; i < size(); ++i) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaves_[i]);
    if (dynamic_cast<ArrivalHook*>(hook.get()) != nullptr) continue;
    auto ours = std::make_unique<ArrivalHook>(weak_from_this(), i, std::move(hook));
    torch::autograd::impl::set_post_acc_grad_hooks(leaves_[i], std::move(ours));
  }
}

std::shared_ptr<LeafSet> LeafSet::make(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(params.size());
  for (const auto& param : params) leaves.push_back(param.detach().set_requires_grad(true));
  return std::make_shared<LeafSet>(std::move(leaves));
}

}  // namespace

}  // namespace fddp

void bind_leaves(py::module_& m) {
  using namespace fddp;
  py::class_<GraphView>(m, "GraphView")
      .def_readonly("used", &GraphView::used)
      .def_readonly("foreign", &GraphView::foreign)
      .def_readonly("opaque", &GraphView::opaque)
      .def_readonly("whole", &GraphView::whole);
  py::class_<LeafTypes>(m, "LeafTypes")
      .def(py::init<std::vector<std::vector<int64_t>>, std::vector<std::optional<at::ScalarType>>, std::vector<bool>>(),
           py::arg("shapes"), py::arg("dtypes"), py::arg("reduced"))
      .def("first_misfit", &LeafTypes::first_misfit, py::arg("leaves"), py::arg("differentiable"));
  py::class_<BucketMembers, std::shared_ptr<BucketMembers>>(m, "BucketMembers")
      .def(py::init([](std::vector<std::vector<int64_t>> leaves) {
             return std::make_shared<BucketMembers>(BucketMembers{std::move(leaves)});
           }),
           py::arg("leaves"));
  py::class_<EagerSlot>(m, "EagerSlot")
      .def(py::init([](int64_t leaf, at::Tensor buffer, const Layout& layout, double scale) {
             return EagerSlot{leaf, std::move(buffer), &layout, scale};
           }),
           py::arg("leaf"), py::arg("buffer"), py::arg("layout"), py::arg("scale"),
           py::keep_alive<1, 4>());
  py::class_<LeafSet, std::shared_ptr<LeafSet>>(m, "LeafSet")
      .def(py::init(&LeafSet::make), py::arg("params"))
      .def_property_readonly("leaves", &LeafSet::leaves)
      .def("arm", &LeafSet::arm, py::arg("members"), py::arg("expected"), py::arg("eager"),
           py::arg("on_bucket"))
      .def("disarm", &LeafSet::disarm)
      .def("take", &LeafSet::take, py::arg("bucket"), py::arg("keep"))
      .def("written", &LeafSet::written, py::arg("leaf"))
      .def("finite", &LeafSet::finite, py::arg("bucket"))
      .def("used", &LeafSet::used)
      .def("take_one", &LeafSet::take_one, py::arg("leaf"))
      .def("arrival_count", &LeafSet::arrival_count)
      .def("late", &LeafSet::late)
      .def("counts", &LeafSet::counts)
      .def("arrivals", &LeafSet::arrivals)
      .def("arrival_times", &LeafSet::arrival_times)
      .def("inspect", &LeafSet::inspect, py::arg("loss"));
}
