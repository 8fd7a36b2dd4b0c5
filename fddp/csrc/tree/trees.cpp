// Fast flattening of trees whose structure was seen before.
//
// Training loops pass the same containers in each step. optree supports all kinds of nodes and
// sorts the keys of each dict in each call. The code here compares a tree with the cached structure
// entry by entry, in insertion order. Trees that differ are left to optree.

#include <Python.h>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace fddp {
namespace {

// Keys that can be compared without running user code, and whose text follows from type and value.
bool is_plain_key(PyObject* key) { return PyUnicode_CheckExact(key) || PyLong_CheckExact(key); }

bool same_key(PyObject* cached_key, PyObject* key) {
  if (cached_key == key) return true;
  if (Py_TYPE(cached_key) != Py_TYPE(key)) return false;
  if (PyUnicode_CheckExact(key)) return PyUnicode_Compare(cached_key, key) == 0;
  return PyLong_CheckExact(key) && PyObject_RichCompareBool(cached_key, key, Py_EQ) == 1;
}

class CachedTree {
 public:
  // Cache the containers of `tree`. `numbers[i]` is the number of its i-th leaf in insertion order.
  CachedTree(const py::object& tree, std::vector<int64_t> numbers) : numbers_(std::move(numbers)) {
    std::vector<bool> seen(numbers_.size(), false);
    for (const int64_t number : numbers_) {
      TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(seen.size()) && !seen[number],
                        "numbers must be a permutation of range(", seen.size(), ")");
      seen[number] = true;
    }
    is_cacheable_ = record(tree.ptr(), 0) && leaves_ == numbers_.size();
  }

  // Return true if all containers can be cached: dicts with strings or integers as keys, lists and
  // tuples, around plain tensors and None.
  bool is_cacheable() const { return is_cacheable_; }

  // Return the leaves of a tree with the cached structure, ordered by number; None for any other
  // tree.
  py::object flatten(const py::object& tree) const {
    if (!is_cacheable_) return py::none();
    py::list leaves(numbers_.size());
    // Unset entries are allowed in a list that is not visible to Python yet.
    Walk walk{leaves.ptr(), 0, 0};
    if (!match(tree.ptr(), walk)) return py::none();
    return leaves;
  }

 private:
  enum class Kind : uint8_t { kLeaf, kDict, kList, kTuple };
  struct Node {
    Kind kind;
    Py_ssize_t size;               // number of entries
    std::vector<py::object> keys;  // of a dict
  };
  struct Walk {
    PyObject* leaves;
    size_t node;
    size_t leaf;
  };
  static constexpr int kMaxDepth = 200;

  // Subclasses of Tensor may be registered as containers.
  static bool is_leaf(PyObject* value) { return value == Py_None || THPVariable_CheckExact(value); }

  // Record a node and its descendants in traversal order.
  bool record(PyObject* value, int depth) {
    if (is_leaf(value)) {
      ++leaves_;
      nodes_.push_back({Kind::kLeaf, 0, {}});
      return true;
    }
    if (depth == kMaxDepth) return false;
    if (PyDict_CheckExact(value)) {
      Node node{Kind::kDict, PyDict_GET_SIZE(value), {}};
      PyObject *key = nullptr, *entry = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(value, &position, &key, &entry)) {
        if (!is_plain_key(key)) return false;
        node.keys.push_back(py::reinterpret_borrow<py::object>(key));
      }
      nodes_.push_back(std::move(node));
      position = 0;
      while (PyDict_Next(value, &position, &key, &entry)) {
        if (!record(entry, depth + 1)) return false;
      }
      return true;
    }
    const bool is_list = PyList_CheckExact(value);
    if (!is_list && !PyTuple_CheckExact(value)) return false;
    nodes_.push_back({is_list ? Kind::kList : Kind::kTuple, PySequence_Fast_GET_SIZE(value), {}});
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!record(PySequence_Fast_GET_ITEM(value, i), depth + 1)) return false;
    }
    return true;
  }

  // Return true if a value matches the next recorded node. Store its leaves.
  bool match(PyObject* value, Walk& walk) const {
    const Node& node = nodes_[walk.node++];
    switch (node.kind) {
      case Kind::kLeaf:
        if (!is_leaf(value)) return false;
        Py_INCREF(value);
        PyList_SET_ITEM(walk.leaves, numbers_[walk.leaf++], value);
        return true;
      case Kind::kDict: {
        if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != node.size) return false;
        PyObject *key = nullptr, *entry = nullptr;
        Py_ssize_t position = 0;
        for (const py::object& cached_key : node.keys) {
          if (!PyDict_Next(value, &position, &key, &entry) || !same_key(cached_key.ptr(), key)) return false;
          if (!match(entry, walk)) return false;
        }
        return true;
      }
      case Kind::kList:
        if (!PyList_CheckExact(value)) return false;
        break;
      case Kind::kTuple:
        if (!PyTuple_CheckExact(value)) return false;
        break;
    }
    if (PySequence_Fast_GET_SIZE(value) != node.size) return false;
    for (Py_ssize_t i = 0; i < node.size; ++i) {
      if (!match(PySequence_Fast_GET_ITEM(value, i), walk)) return false;
    }
    return true;
  }

  std::vector<int64_t> numbers_;
  std::vector<Node> nodes_;  // in traversal order
  size_t leaves_ = 0;
  bool is_cacheable_ = false;
};

// Values of some dictionaries, compared by identity.
class CachedStructure {
 public:
  explicit CachedStructure(std::vector<py::dict> tables) : tables_(std::move(tables)) {
    for (const py::dict& table : tables_) {
      PyObject *key = nullptr, *entry = nullptr;
      Py_ssize_t position = 0;
      // Kept alive, so that no other object gets the same identity.
      while (PyDict_Next(table.ptr(), &position, &key, &entry)) {
        entries_.push_back(py::reinterpret_borrow<py::object>(entry));
      }
    }
  }

  // Return true if the dictionaries hold the same objects in the same order.
  bool matches() const {
    size_t seen = 0;
    for (const py::dict& table : tables_) {
      PyObject *key = nullptr, *entry = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(table.ptr(), &position, &key, &entry)) {
        if (seen == entries_.size() || entries_[seen].ptr() != entry) return false;
        ++seen;
      }
    }
    return seen == entries_.size();
  }

 private:
  std::vector<py::dict> tables_;
  std::vector<py::object> entries_;
};

}  // namespace
}  // namespace fddp

void bind_trees(py::module_& m) {
  using fddp::CachedTree;
  py::class_<CachedTree>(m, "CachedTree")
      .def(py::init(torch::wrap_pybind_function([](const py::object& tree, std::vector<int64_t> numbers) {
             return CachedTree(tree, std::move(numbers));
           })),
           py::arg("tree"), py::arg("numbers"))
      .def_property_readonly("is_cacheable", &CachedTree::is_cacheable)
      .def("flatten", &CachedTree::flatten, py::arg("tree"));
  py::class_<fddp::CachedStructure>(m, "CachedStructure")
      .def(py::init<std::vector<py::dict>>(), py::arg("tables"))
      .def("matches", &fddp::CachedStructure::matches);
}
