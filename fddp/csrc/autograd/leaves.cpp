// Autograd leaves of one differentiated call. They notify a callback when the gradients of a bucket
// have arrived.
//
// [Note: fresh leaves]
// Each call differentiates with respect to new leaves, created here in one pass over the
// parameters. Reusing leaves across steps would save their construction (about a quarter of a
// microsecond each). But replacing the data of a leaf whose graph is still alive gives silently
// wrong gradients, and every guard against that costs as much as construction.

#include <Python.h>

#include <ATen/core/Tensor.h>
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
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "gradient_counter.h"
#include "tensor/checks.h"
#include "tensor/python_lists.h"

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace fddp {
namespace {

// Expected types of the leaves of a tree. Leaves that are not reduced (integers, None) have no
// gradient. For them the only mismatch is a floating dtype other than that of the plan.
class LeafTypes {
 public:
  LeafTypes(std::vector<std::vector<int64_t>> shapes, std::vector<std::optional<at::ScalarType>> dtypes,
            std::vector<bool> reduced)
      : shapes_(std::move(shapes)), dtypes_(std::move(dtypes)), reduced_(std::move(reduced)) {
    TORCH_CHECK_VALUE(shapes_.size() == dtypes_.size() && shapes_.size() == reduced_.size(), shapes_.size(),
                      " shapes for ", dtypes_.size(), " dtypes and ", reduced_.size(), " flags");
  }

  // Return the first leaf that does not match, or -1. None matches, unless the leaves are to be
  // differentiated.
  int64_t first_mismatch(const py::list& leaves, bool differentiable) const {
    TORCH_CHECK_VALUE(leaves.size() == shapes_.size(), "expected ", shapes_.size(), " leaves, got ", leaves.size());
    for (size_t i = 0; i < shapes_.size(); ++i) {
      if (!fits(PyList_GET_ITEM(leaves.ptr(), i), i, differentiable)) return static_cast<int64_t>(i);
    }
    return -1;
  }

  // Return the first leaf with derivatives that a detached result would drop, or -1: a forward-mode
  // tangent or, with `graphs`, an autograd graph. Leaves that are not tensors have no derivatives.
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
    // A parameter may be of a class of its own, whose gradients are plain. A gradient may not.
    const bool is_readable = !tensor.key_set().has_any(differentiable ? kTransformKeys : kWrapperKeys);
    return has_dtype && is_readable && !tensor.is_nested() && tensor.sizes() == at::IntArrayRef(shapes_[i]) &&
        !(differentiable && tensor.is_inference());
  }

  std::vector<std::vector<int64_t>> shapes_;
  std::vector<std::optional<at::ScalarType>> dtypes_;
  std::vector<bool> reduced_;
};

// Properties of the graph of a loss, found by a traversal before backward.
struct GraphView {
  std::vector<bool> used;           // by leaf: its AccumulateGrad node is reachable
  std::vector<at::Tensor> foreign;  // reachable leaves outside of this set
  bool opaque = false;              // the graph has a Python node that may run backward passes of its own
  bool whole = false;               // such a node must run although it does not reach the set
};

// Compared by name, because libtorch_python does not export the type.
bool is_python_node(const Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Python nodes that run no backward pass of their own: compiled functions, custom operators, fddp's
// own nodes, and bookkeeping of non-reentrant checkpoints.
bool runs_no_graph(const std::string& name) {
  return name.rfind("Fddp", 0) == 0 || name == "CompiledFunctionBackward" || name == "_NoopSaveInputsBackward" ||
      name.rfind("GeneratedBackwardFor_", 0) == 0;
}

// Reentrant checkpoints, of torch and of other libraries, reject backward(inputs=...).
bool is_checkpoint(const std::string& name) { return name.find("Checkpoint") != std::string::npos; }

class LeafSet : public GradientCounter, public std::enable_shared_from_this<LeafSet> {
 public:
  explicit LeafSet(std::vector<at::Tensor> leaves) : GradientCounter(std::move(leaves)), index_(size()) {
    for (size_t i = 0; i < leaves_.size(); ++i) index_.emplace(leaves_[i].unsafeGetTensorImpl(), i);
  }

  static std::shared_ptr<LeafSet> make(const py::list& params);

  void arm(std::shared_ptr<const BucketMembers> members, std::vector<int64_t> expected,
           std::vector<EagerSlot> eager, py::object on_bucket) override {
    for (auto& leaf : leaves_) leaf.mutable_grad().reset();
    hook_leaves();
    GradientCounter::arm(std::move(members), std::move(expected), std::move(eager), std::move(on_bucket));
  }

  GraphView inspect(const at::Tensor& loss) const {
    GraphView view;
    view.used.resize(size(), false);
    std::vector<Node*> stack;
    std::unordered_set<const Node*> seen;
    seen.reserve(4 * size());  // each leaf has a node, and further nodes lead to it
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
        if (auto* accumulator = dynamic_cast<AccumulateGrad*>(node)) record_accumulator(accumulator->variable, view);
        // A custom function without differentiable inputs is not reachable by backward.
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
      for (const Node* node : opaque) view.whole = view.whole || !reaches_own_leaf(node);
    }
    return view;
  }

 private:
  friend class ArrivalHook;

  // The counts alone are not sufficient, because a hook of the caller replaces ours.
  bool was_used(size_t leaf) const override { return found_grad_[leaf] || counts_[leaf] > 0; }

  // Install a hook on every leaf. A hook that the caller has installed in place of ours is kept and
  // chained.
  void hook_leaves();

  bool reaches_own_leaf(const Node* start) const {
    std::vector<const Node*> stack{start};
    std::unordered_set<const Node*> seen{start};
    while (!stack.empty()) {
      const Node* node = stack.back();
      stack.pop_back();
      if (const auto* accumulator = dynamic_cast<const AccumulateGrad*>(node)) {
        if (index_.count(accumulator->variable.unsafeGetTensorImpl()) > 0) return true;
      }
      for (const auto& edge : node->next_edges()) {
        const Node* next = edge.function.get();
        if (next != nullptr && seen.insert(next).second) stack.push_back(next);
      }
    }
    return false;
  }

  void record_accumulator(const at::Tensor& variable, GraphView& view) const {
    const auto found = index_.find(variable.unsafeGetTensorImpl());
    if (found == index_.end()) {
      view.foreign.push_back(variable);
    } else {
      view.used[found->second] = true;
    }
  }

  std::unordered_map<const at::TensorImpl*, size_t> index_;
};

// Hook on a leaf. Holds the set weakly, because the set owns the leaves.
class ArrivalHook : public torch::autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::weak_ptr<LeafSet> set, size_t leaf, std::unique_ptr<PostAccumulateGradHook> callers_hook)
      : set_(std::move(set)), leaf_(leaf), callers_hook_(std::move(callers_hook)) {}

  void operator()(const at::Tensor& leaf) override {
    if (callers_hook_) (*callers_hook_)(leaf);
    if (const auto set = set_.lock()) set->on_gradient(leaf_);
  }

 private:
  std::weak_ptr<LeafSet> set_;
  size_t leaf_;
  std::unique_ptr<PostAccumulateGradHook> callers_hook_;  // hook of the caller, which runs first
};

void LeafSet::hook_leaves() {
  for (size_t i = 0; i < size(); ++i) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaves_[i]);
    if (dynamic_cast<ArrivalHook*>(hook.get()) != nullptr) continue;
    auto own_hook = std::make_unique<ArrivalHook>(weak_from_this(), i, std::move(hook));
    torch::autograd::impl::set_post_acc_grad_hooks(leaves_[i], std::move(own_hook));
  }
}

// Equivalent of `detach`, with the parameter's version counter. Plain tensors need no dispatch.
at::Tensor leaf_over(const at::Tensor& param) {
  const bool is_plain = param.layout() == at::kStrided && !param.key_set().has_any(kWrapperKeys);
  at::Tensor leaf =
      is_plain ? torch::autograd::make_variable_non_differentiable_view(param, param) : param.detach();
  return leaf.set_requires_grad(true);
}

std::shared_ptr<LeafSet> LeafSet::make(const py::list& params) {
  std::vector<at::Tensor> leaves;
  leaves.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) leaves.push_back(leaf_over(tensor_at(params, i)));
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
      .def("first_mismatch", &LeafTypes::first_mismatch, py::arg("leaves"), py::arg("differentiable"))
      .def("first_differentiated", &LeafTypes::first_differentiated, py::arg("leaves"), py::arg("graphs"));
  py::class_<LeafSet, GradientCounter, std::shared_ptr<LeafSet>>(m, "LeafSet")
      .def(py::init(&LeafSet::make), py::arg("params"))
      .def("inspect", &LeafSet::inspect, py::arg("loss"));
}
