// Observer of the backward passes through a module, for its driver in Python; see
// [Note: the end of backward] in fddp/ddp/steps.py.
//
// The usual backward pass enters Python twice: at its first gradient and at its end. What is unusual
// is decided by the driver, in Python.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

namespace fddp {

class EndOfBackward;

// All state but `is_watching` is read and written with the GIL. So are the references to this
// object dropped.
class BackwardWatch : public std::enable_shared_from_this<BackwardWatch> {
 public:
  // The driver is held weakly. `gate` has an attribute `is_on`, and `lock` is the driver's
  // threading.RLock. `on_output` is called with a gradient if the driver has to decide.
  // `reports` has methods `report` and `refuse_early_use`, for gradients that are in no step.
  BackwardWatch(const py::object& driver, py::object gate, const py::object& lock, py::object on_output,
                py::object reports);

  // Hook outputs of a forward pass, and expect gradients if `on`. Return those outputs that are
  // leaves. They are not hooked, because the caller has to remove their hooks.
  py::list expect_outputs(const py::list& outputs, bool on);

  // Hook outputs of a forward pass within `no_sync`, so that gradients that come through them are not
  // reported as local. Return those outputs that are leaves.
  py::list allow_outputs(const py::list& outputs);

  // Set whether gradients belong to a step that come without an output being reached.
  void expect_grads(bool on) { expects_grads_ = is_watching_ = on; }
  bool expects_grads() const { return expects_grads_; }

  // Enable or disable calls of the driver's `on_first_grad`.
  void watch(bool on) { is_watching_ = on; }
  bool is_watching() const { return is_watching_; }

  // Note that the running backward pass has reached an output.
  void note_output();

  // Expect no gradients after the running pass if it has reached an output. Return the time at
  // which it did, in seconds of perf_counter; infinity if it did not.
  double note_step();

  // Forget that an output was reached.
  void forget_output() { reached_s_ = std::numeric_limits<double>::infinity(); }

  // Queue a call of the driver's `finish` at the end of the running graph task, unless one is queued
  // already. Return false, without effect, if the last pass was aborted.
  bool queue_end(bool required) { return queue_end(driver(), required); }

  // Forget the queued end, which then does nothing, or that a pass was aborted.
  void forget_end();

  bool is_queued() const { return end_ != nullptr; }
  bool is_aborted() const { return is_aborted_; }
  bool is_required() const { return is_required_; }

  // Call `on_output` at every output.
  bool asks_driver = false;

  // Report passes that leave gradients to parameters without a step; see [Note: local gradients] in
  // fddp/ddp/local_gradients.py.
  std::atomic<bool> reports_local{false};

  // Note that a parameter received a gradient that is in no step.
  void note_local(size_t leaf);

  // Note that a hook of the user's has used a gradient that is in no step.
  void note_early_use(size_t leaf) const;

  void reach_allowed_output();
  void reach_output();
  void reach_first_grad() const;
  const py::object& on_output() const { return on_output_; }

 private:
  friend class EndOfBackward;

  py::object driver() const { return driver_(); }  // or None
  bool queue_end(py::object driver, bool required);
  void report_local(const std::vector<size_t>& leaves);
  bool is_usual() const;
  bool is_unlocked() const;

  py::weakref driver_;
  py::object gate_;
  py::object acquire_;
  py::object release_;
  py::object on_output_;
  py::object reports_;
  std::atomic<bool> is_watching_{false};
  bool expects_grads_ = false;
  double reached_s_ = std::numeric_limits<double>::infinity();
  EndOfBackward* end_ = nullptr;  // queued, and owned by the graph task
  bool is_aborted_ = false;       // the task freed it without a call
  bool is_required_ = false;      // the pass of the last end takes a step even without a gradient
  // Owned by the graph task of a pass.
  std::weak_ptr<const bool> allowed_pass_;            // it has reached an output of `allow_outputs`
  std::weak_ptr<std::vector<size_t>> local_leaves_;  // they have local gradients
};

}  // namespace fddp
