// Interpreter of schedules for the usual step: dense buckets on the CPU, no hook, no failure, no
// late gradient, equal weights on all ranks.
//
// [Note: usual steps]
// The reference is the interpreter in Python (runtime/interpreter.py), which can do everything. The one
// here executes a prefix of the same operations in the same order. It stops before an operation
// that it does not know, and wherever something unusual shows: a gradient that can't be packed, one
// that is missing or late, a control word that is not that of a usual step on all ranks, a
// collective that fails or takes long. From there on Python continues with the state that is
// reached.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "autograd/gradient_counter.h"
#include "step/bucket_listener.h"
#include "step/collectives.h"
#include "step/flight_ring.h"
#include "tensor/layout.h"
#include "tensor/python_lists.h"

namespace fddp {

enum class StepOpKind : int { kPack, kAllReduce, kControl, kUnpack, kOther };

// An operation of the schedule.
struct StepOp {
  StepOpKind kind;
  int64_t position;  // in the schedule
  int64_t bucket;    // -1 for a separate control word
  int64_t start;     // elements of the buffer that a collective works on
  int64_t stop;
  std::vector<std::pair<int64_t, int64_t>> awaited;  // positions of collectives, and their buckets
  bool needs_report;                                 // reads the reduced control word, or follows it
};

struct StepBucket {
  std::vector<int64_t> leaves;  // in the plan
  Layout layout;
  std::shared_ptr<const BucketPacking> packing;
  int64_t padded_numel;  // elements that collectives work on
  double max_safe_magnitude;
  bool keep;  // gradients are retained for a second reduction
  std::string text;
};

// Schedule, prepared for one rank. Shared by the steps that run it.
struct StepProgram {
  std::vector<StepOp> ops;
  std::vector<StepBucket> buckets;
  int64_t positions;     // operations of the whole schedule
  int64_t leaves;        // of the plan
  int64_t carrier_op;    // position of the collective that carries the control word
  int64_t last_bucket;   // not sent during backward, because the control word follows it
  int64_t world_size;
  bool average;          // the collectives divide the sum
  int64_t limb_bits;     // of the fingerprint in the control word; 0 if it is one element
  int64_t limbs;         // elements of the fingerprint
};

// What the steps of a program have in common.
struct StepSetup {
  std::shared_ptr<const StepProgram> program;
  std::shared_ptr<Collectives> collectives;
  double factor;  // on gradients before the reduction
};

// Number of the step, its fingerprint, and the number of the schedule in the ring.
using StepMoment = std::tuple<int64_t, uint32_t, int64_t>;

class UsualStep : public BucketListener {
 public:
  // `word`: control word of a usual step, with any fingerprint. `buffers`: memory of the buckets.
  // `interpreter` is a weak reference to the object whose
  // `bucket_ready` is called with each bucket that becomes ready after Python has taken over.
  UsualStep(const StepSetup& setup, const StepMoment& moment, std::shared_ptr<FlightRing> ring,
            std::vector<at::Tensor> buffers, at::Tensor word, pybind11::object interpreter);
  ~UsualStep() override;
  UsualStep(const UsualStep&) = delete;
  UsualStep& operator=(const UsualStep&) = delete;

  // Set whole gradients by leaf of the plan. Return false if one is missing.
  bool set_leaves(const pybind11::list& leaves);

  // Set the counter that collects the gradients.
  void set_counter(std::shared_ptr<GradientCounter> counter);

  void bucket_ready(int64_t bucket) override;

  // Run to the end after backward. Return false if Python has to continue.
  bool finish();

  // Return the results by leaf, undefined for leaves in no bucket, once `finish` has returned true.
  std::vector<at::Tensor> results() const;

  // Times at which `finish` waited for a collective, if they matter.
  const std::vector<std::pair<double, double>>& waits() const { return waits_; }

  // State for Python, which executes everything from here on.
  struct Launch {
    int64_t position;
    int64_t bucket;
    std::shared_ptr<PendingCollective> pending;  // null if there is nothing to wait for
    int64_t record;                              // number in the ring
    bool is_waited = false;
  };
  struct State {
    int64_t cursor;                 // next operation
    std::vector<bool> ready;        // by bucket
    std::vector<Launch> in_flight;  // collectives that were not waited for
    std::vector<int64_t> unpacked;  // operations before the cursor whose results Python has to make
    std::optional<at::Tensor> word; // this rank's control word or the sum, once it was written
    bool is_finite;
    bool may_overflow;
    int64_t failed_op;              // operation before the cursor that raised `error`, or -1
    std::exception_ptr error;
  };
  State take_over();

 private:
  void advance();
  bool may_run(const StepOp& op) const;
  bool execute(const StepOp& op);
  void pack(const StepOp& op);
  bool write_word(const StepOp& op);
  void* word_data() const;
  const Launch* launch_at(int64_t position) const;
  bool wait_for(int64_t position);
  std::string text_of(const Launch& launch) const;
  bool is_usual_sum();
  void launch(const StepOp& op, const at::Tensor& tensor, bool average);

  const std::shared_ptr<const StepProgram> program_;
  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<FlightRing> ring_;
  const int64_t source_;
  const std::vector<at::Tensor> buffers_;
  const at::Tensor template_;
  const uint32_t fingerprint_;
  const double factor_;
  const int64_t number_;
  pybind11::object interpreter_;

  // Recursive, because packing may release tensors whose finalizers
  // call Python. Never acquired with the GIL held, because its holder may need the GIL.
  std::recursive_mutex mutex_;
  pybind11::object leaves_;               // owns the sources
  std::vector<BorrowedTensors> sources_;  // by bucket
  std::shared_ptr<GradientCounter> counter_;
  size_t cursor_ = 0;
  std::vector<bool> ready_;
  bool runs_freely_ = false;  // backward has ended
  bool is_usual_ = true;      // false once Python has to continue
  bool has_report_ = false;
  bool is_finite_ = true;
  bool may_overflow_ = false;
  std::optional<int64_t> word_bucket_;  // as StepOp::bucket, once the control word is written
  at::Tensor separate_word_;
  std::vector<Launch> launches_;
  std::vector<int64_t> launch_of_;  // by position in the schedule: number of the launch, or -1
  std::vector<int64_t> unpacked_;  // positions in the schedule
  std::vector<std::pair<double, double>> waits_;
  int64_t failed_op_ = -1;
  std::exception_ptr error_;
};

}  // namespace fddp
