// Observer of the backward passes through a module, for its driver in Python; see
// [Note: the end of backward] in fddp/ddp/steps.py.
//
// The usual backward pass enters Python twice: at its first gradient and at its end. An output that it
// reaches is taken here, and the driver learns of it later, from `take_news`. This is the only event
// of fddp/core/protocol/lifecycle.py that is acted on without the driver, and only where it leads to
// "queue end" at most.

#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace fddp {

class EndOfBackward;

// All state but `awaits_gradients` and `reports_local` is read and written with the GIL. So are the
// references to this object dropped.
class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // The driver is held weakly. `gate` has an attribute `is_on`, and `lock` is the driver's
  // threading.RLock. `on_output` is called with a gradient if the driver has to decide.
  // `reports` has methods `report` and `refuse_early_use`, for gradients that are in no step.
  BackwardWatch(const py::object& driver, py::object gate, const py::object& lock, py::object on_output,
                py::object reports);

  // Note that a forward pass begins in this thread, which `expect_outputs` ends if it takes a step. Forget
  // earlier ones, unless `keep`.
  void begin_forward(bool keep);

  // Hook outputs of a forward pass. Return those outputs that are leaves. They are not hooked, because
  // the caller has to remove their hooks.
  py::list expect_outputs(const py::list& outputs);

  // Hook outputs of a forward pass within `no_sync`, so that gradients that come through them are not
  // reported as local. Return those outputs that are leaves.
  py::list allow_outputs(const py::list& outputs);

  // Follow the driver's state: `awaits_gradients` enables calls of its `on_first_grad`, and
  // `takes_outputs` allows to take outputs without it.
  void follow(bool awaits_gradients, bool takes_outputs);
  bool awaits_gradients() const { return awaits_gradients_; }

  // Return what happened without the driver since the last call, as a sum of `News`.
  enum News { kNothing = 0, kOutputReached = 1, kPassAborted = 2 };
  int take_news() { return std::exchange(news_, kNothing); }

  // Queue a call of the driver's `on_end` at the end of the running graph task, unless one is queued
  // already.
  void queue_end() { queue_end(driver()); }

  // Forget the queued end, which then does nothing.
  void forget_end() { end_ = nullptr; }
  bool is_queued() const { return end_ != nullptr; }

  // Note that the running backward pass has reached an output.
  void note_output();

  // Time at which the last pass reached an output, in seconds of perf_counter; infinity if it did not.
  double reached_s() const { return reached_s_; }

  // Report passes that leave gradients to parameters without a step; see [Note: local gradients] in
  // fddp/ddp/local_gradients.py.
  std::atomic<bool> reports_local{false};

  // Note that a parameter received a gradient that is in no step.
  void note_local(size_t leaf);

  // Note that a hook of the user's has used a gradient that is in no step.
  void note_early_use(size_t leaf) const;

  // Note that the running pass brings these gradients to outputs of `allow_outputs`.
  void reach_allowed_output(const torch::autograd::variable_list& grads);
  void reach_output();
  void reach_first_grad() const;

  // Take the running pass as one that has reached an output, if it runs nodes that a forward pass made: the
  // module may have kept a tensor that leads there.
  void reach_kept_tensors();

  // Return true if `reach_kept_tensors` may have an effect, which it has once in a pass.
  bool may_reach_kept_tensors() const;
  const py::object& on_output() const { return on_output_; }

 private:
  friend class EndOfBackward;

  py::object driver() const { return driver_(); }  // or None
  void queue_end(py::object driver);
  void report_local(const std::vector<size_t>& leaves);
  bool runs_forward_nodes() const;
  bool is_usual() const;
  bool is_unlocked() const;

  py::weakref driver_;
  py::object gate_;
  py::object acquire_;
  py::object release_;
  py::object on_output_;
  py::object reports_;
  std::atomic<bool> awaits_gradients_{false};
  bool takes_outputs_ = true;
  int news_ = kNothing;
  double reached_s_ = std::numeric_limits<double>::infinity();
  EndOfBackward* end_ = nullptr;  // queued, and owned by the graph task
  // Nodes are numbered by thread in the order in which they are made.
  using NodeNumber = std::pair<uint64_t, uint64_t>;  // thread, number
  static NodeNumber next_node();
  NodeNumber forward_begin_{};                // of the running forward pass
  std::map<NodeNumber, uint64_t> forwards_;  // first node of each forward pass, and the number after its last
  std::atomic<bool> has_forwards_{false};
  std::atomic<int> examined_pass_{-1};  // graph task that `reach_kept_tensors` has examined
  // Owned by the graph task of a pass.
  std::weak_ptr<const bool> allowed_pass_;            // it has reached an output of `allow_outputs`
  std::weak_ptr<std::vector<size_t>> local_leaves_;  // they have local gradients
};

}  // namespace fddp
