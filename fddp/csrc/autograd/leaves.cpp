// Autograd leaves of one differentiated call: they announce their gradients as these arrive.
//
// [Note: fresh leaves]
// Each call differentiates with respect to leaves of its own, made here in one pass over the
// parameters. Leaves kept across steps would save their construction (about a quarter of a
// microsecond each), but data swapped under a graph that is still alive gives silently wrong gradients, and
// every guard against that costs what the construction does.

#include <Python.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "arrivals.h"
#include "tensor/checks.h"
#include "tree/pointers.h"

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace fddp {
namespace {

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

  // The first leaf with derivatives that a result without any would cut off, or -1: a tangent of forward mode,
  // or a graph behind it if those count. Leaves that are no tensors have none.
  int64_t first_differentiated(const py::list& leaves, bool graphs) const {
    for (size_t i = 0; i < leaves.size(); ++i) {
      PyObject* leaf = PyList_GET_ITEM(leaves.ptr(), i);
      if (!THPVariable_Check(leaf)) continue;
      const at::Tensor& tensor = THPVariable_Unpack(leaf);
      if (graphs && tensor.requires_grad() && !tensor.is_leaf()) return static_cast<int64_t>(i);
      if (tensor._fw_grad(/*level=*/0).defined()) return static_cast<int64_t>(i);
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

// Compared by name because the type is not exported from libtorch_python.
bool is_python_node(const Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Nodes written in Python that are known to run no graph of their own: compiled functions, custom
// operators, fddp's own, and the bookkeeping of checkpoints that are not re-entrant.
bool runs_no_graph(const std::string& name) {
  return name.rfind("Fddp", 0) == 0 || name == "CompiledFunctionBackward" || name == "_NoopSaveInputsBackward" ||
      name.rfind("GeneratedBackwardFor_", 0) == 0;
}

// Re-entrant checkpoints, torch's and others', refuse to be told which leaves to serve.
bool is_checkpoint(const std::string& name) { return name.find("Checkpoint") != std::string::npos; }

class LeafSet : public Arrivals, public std::enable_shared_from_this<LeafSet> {
 public:
  explicit LeafSet(std::vector<at::Tensor> leaves) : Arrivals(std::move(leaves)), index_(size()) {
    for (size_t i = 0; i < leaves_.size(); ++i) index_.add(leaves_[i].unsafeGetTensorImpl(), i);
  }

  static std::shared_ptr<LeafSet> make(const std::vector<at::Tensor>& params);

  void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
           std::vector<EagerSlot> eager, py::object on_bucket) {
    for (auto& leaf : leaves_) leaf.mutable_grad().reset();
    hook_leaves();
    Arrivals::arm(std::move(members), std::move(expected), std::move(eager), std::move(on_bucket));
  }

  // Whether any gradient came for each leaf. Not read from the counts alone: a hook that the caller
  // puts on a leaf replaces ours.
  std::vector<bool> used() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<bool> used = had_;
    for (size_t i = 0; i < size(); ++i) used[i] = used[i] || counts_[i] > 0;
    return used;
  }

  GraphView inspect(const at::Tensor& loss) const {
    GraphView view;
    view.used.resize(size(), false);
    std::vector<Node*> stack;
    PointerTable seen(4 * size());  // a leaf's own node, and some that lead to it
    const auto push = [&](Node* node) {
      if (node != nullptr && seen.add(node)) stack.push_back(node);
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

 private:
  friend class ArrivalHook;

  // Sees to it that every leaf announces its gradients, also where the caller has put a hook of its
  // own on it since, which takes the place of ours.
  void hook_leaves();

  bool leads_to_own(const Node* start) const {
    std::vector<const Node*> stack{start};
    PointerTable seen(size());
    seen.add(start);
    while (!stack.empty()) {
      const Node* node = stack.back();
      stack.pop_back();
      if (const auto* sink = dynamic_cast<const AccumulateGrad*>(node)) {
        if (index_.find(sink->variable.unsafeGetTensorImpl()) != nullptr) return true;
      }
      for (const auto& edge : node->next_edges()) {
        const Node* next = edge.function.get();
        if (next != nullptr && seen.add(next)) stack.push_back(next);
      }
    }
    return false;
  }

  void note_sink(const at::Tensor& variable, GraphView& view) const {
    const size_t* const found = index_.find(variable.unsafeGetTensorImpl());
    if (found == nullptr) {
      view.foreign.push_back(variable);
    } else {
      view.used[*found] = true;
    }
  }

  PointerTable index_;  // of the leaves' implementations
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

// What `detach` gives, with the parameter's version counter; plain tensors need no dispatch for it.
at::Tensor leaf_over(const at::Tensor& param) {
  const bool is_plain = param.layout() == at::kStrided && !param.key_set().has_any(kWrapperKeys);
  at::Tensor leaf =
      is_plain ? torch::autograd::make_variable_non_differentiable_view(param, param) : param.detach();
  return leaf.set_requires_grad(true);
}

std::shared_ptr<LeafSet> LeafSet::make(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(params.size());
  for (const auto& param : params) leaves.push_back(leaf_over(param));
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
      .def("first_misfit", &LeafTypes::first_misfit, py::arg("leaves"), py::arg("differentiable"))
      .def("first_differentiated", &LeafTypes::first_differentiated, py::arg("leaves"), py::arg("graphs"));
  py::class_<LeafSet, Arrivals, std::shared_ptr<LeafSet>>(m, "LeafSet")
      .def(py::init(&LeafSet::make), py::arg("params"))
      .def("arm", &LeafSet::arm, py::arg("members"), py::arg("expected"), py::arg("eager"),
           py::arg("on_bucket"))
      .def("used", &LeafSet::used)
      .def("inspect", &LeafSet::inspect, py::arg("loss"));
}
