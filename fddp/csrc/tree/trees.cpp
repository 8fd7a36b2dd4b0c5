// Trees of a structure that has been seen before, taken apart in one pass.
//
// Training loops hand in the same containers step by step. optree, which knows all kinds of nodes,
// sorts the keys of each dict anew to see that. Here what was seen is compared entry by entry, in
// the order in which it was filled; anything that differs is left to optree.

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

// Keys that are told apart without running anybody's code, and whose text follows from type and value.
bool is_plain_key(PyObject* key) { return PyUnicode_CheckExact(key) || PyLong_CheckExact(key); }

bool same_key(PyObject* known, PyObject* key) {
  if (known == key) return true;
  if (Py_TYPE(known) != Py_TYPE(key)) return false;
  if (PyUnicode_CheckExact(key)) return PyUnicode_Compare(known, key) == 0;
  return PyLong_CheckExact(key) && PyObject_RichCompareBool(known, key, Py_EQ) == 1;
}

class KnownTree {
 public:
  // Remembers the containers of `tree`, whose i-th leaf, as they are filled, is number `numbers[i]`.
  KnownTree(const py::object& tree, std::vector<int64_t> numbers) : numbers_(std::move(numbers)) {
    std::vector<bool> met(numbers_.size(), false);
    for (const int64_t number : numbers_) {
      TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(met.size()) && !met[number],
                        "leaves are numbered from 0 to ", met.size(), ", each once");
      met[number] = true;
    }
    is_known_ = note(tree.ptr(), 0) && leaves_ == numbers_.size();
  }

  // Whether its containers are of the kinds that can be remembered: dicts with strings or integers
  // as keys, lists and tuples, around plain tensors and None.
  bool is_known() const { return is_known_; }

  // The leaves of a tree like it, by number; None for any other tree.
  py::object flatten(const py::object& tree) const {
    if (!is_known_) return py::none();
    py::list leaves(numbers_.size());
    // An entry that is not set is allowed in a list that nobody has seen.
    Walk walk{leaves.ptr(), 0, 0};
    if (!take(tree.ptr(), walk)) return py::none();
    return leaves;
  }

 private:
  enum class Kind : uint8_t { kLeaf, kDict, kList, kTuple };
  struct Node {
    Kind kind;
    Py_ssize_t size;             // entries
    std::vector<py::object> keys;  // of a dict
  };
  struct Walk {
    PyObject* leaves;
    size_t node;
    size_t leaf;
  };
  static constexpr int kDeepest = 200;

  // Other classes of tensors may be ones that are taken apart.
  static bool is_leaf(PyObject* value) { return value == Py_None || THPVariable_CheckExact(value); }

  // Remembers a node and what is below it, in the order of a walk.
  bool note(PyObject* value, int depth) {
    if (is_leaf(value)) {
      ++leaves_;
      nodes_.push_back({Kind::kLeaf, 0, {}});
      return true;
    }
    if (depth == kDeepest) return false;
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
        if (!note(entry, depth + 1)) return false;
      }
      return true;
    }
    const bool is_list = PyList_CheckExact(value);
    if (!is_list && !PyTuple_CheckExact(value)) return false;
    nodes_.push_back({is_list ? Kind::kList : Kind::kTuple, PySequence_Fast_GET_SIZE(value), {}});
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!note(PySequence_Fast_GET_ITEM(value, i), depth + 1)) return false;
    }
    return true;
  }

  // Whether a value is like the node that the walk has reached; its leaves are taken.
  bool take(PyObject* value, Walk& walk) const {
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
        for (const py::object& known : node.keys) {
          if (!PyDict_Next(value, &position, &key, &entry) || !same_key(known.ptr(), key)) return false;
          if (!take(entry, walk)) return false;
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
      if (!take(PySequence_Fast_GET_ITEM(value, i), walk)) return false;
    }
    return true;
  }

  std::vector<int64_t> numbers_;
  std::vector<Node> nodes_;  // as a walk meets them
  size_t leaves_ = 0;
  bool is_known_ = false;
};

// What some dictionaries hold, compared by identity.
class KnownEntries {
 public:
  explicit KnownEntries(std::vector<py::dict> tables) : tables_(std::move(tables)) {
    for (const py::dict& table : tables_) {
      PyObject *key = nullptr, *entry = nullptr;
      Py_ssize_t position = 0;
      // Kept alive, so that no other takes its identity.
      while (PyDict_Next(table.ptr(), &position, &key, &entry)) {
        entries_.push_back(py::reinterpret_borrow<py::object>(entry));
      }
    }
  }

  // Whether they hold the same objects as at first, in the same order.
  bool are_there() const {
    size_t met = 0;
    for (const py::dict& table : tables_) {
      PyObject *key = nullptr, *entry = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(table.ptr(), &position, &key, &entry)) {
        if (met == entries_.size() || entries_[met].ptr() != entry) return false;
        ++met;
      }
    }
    return met == entries_.size();
  }

 private:
  std::vector<py::dict> tables_;
  std::vector<py::object> entries_;
};

}  // namespace
}  // namespace fddp

void bind_trees(py::module_& m) {
  using fddp::KnownTree;
  py::class_<KnownTree>(m, "KnownTree")
      .def(py::init(torch::wrap_pybind_function([](const py::object& tree, std::vector<int64_t> numbers) {
             return KnownTree(tree, std::move(numbers));
           })),
           py::arg("tree"), py::arg("numbers"))
      .def_property_readonly("is_known", &KnownTree::is_known)
      .def("flatten", &KnownTree::flatten, py::arg("tree"));
  py::class_<fddp::KnownEntries>(m, "KnownEntries")
      .def(py::init<std::vector<py::dict>>(), py::arg("tables"))
      .def("are_there", &fddp::KnownEntries::are_there);
}
