// Executor of the operations of one step on one rank.
//
// [Note: one executor]
// A program lists instructions in the order in which every rank runs them. The executor runs them
// as far as the launch rule allows (core/protocol/launch.py states it in Python). An instruction is
// native, and then runs without the GIL, or a function of the step in Python. The executor decides
// nothing else: Python divides a program into lists (before the control word, up to its sum, after
// it), and chooses the list to run next. A regular control word, that of a rank which contributes all
// gradients with the agreed weight, is written and compared here; others in Python.

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
#include <utility>
#include <vector>

#include "autograd/gradient_counter.h"
#include "step/bucket_listener.h"
#include "step/collectives.h"
#include "step/flight_ring.h"
#include "tensor/layout.h"
#include "tensor/python_lists.h"

namespace fddp {

enum class InstrKind : int {
  kPack,    // write a bucket's gradients into its buffer
  kReduce,  // start an all-reduce of a range of a buffer over all ranks, or of the control word
  kStart,   // start a collective by a function of Python, which returns its work
  kAwait,   // wait for the awaited collectives only
  kCall,    // call a function of Python
};

struct Instr {
  InstrKind kind;
  int64_t position;  // in the schedule
  int64_t bucket;    // -1 for a control word that travels by itself
  int64_t start;     // range of the buffer that an all-reduce works on
  int64_t stop;
  std::vector<int64_t> awaited;  // positions of collectives that must have finished
  // Function of the step. kStart: also of a bool, true if the caller waits next. kPack: packs the
  // bucket where the source is not native; or with a function that raises the error of packing it
  // natively.
  pybind11::object call;
};

struct Instrs {
  std::vector<Instr> items;
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

// Constants of a program on one rank.
struct StepConstants {
  std::vector<StepBucket> buckets;
  int64_t positions;    // operations of the schedule
  int64_t leaves;       // of the plan
  int64_t last_bucket;  // not sent during backward, because the control word follows it
  int64_t world_size;   // summands of the control word
  bool average;         // the collectives divide the sum
  int64_t limb_bits;    // of the fingerprint in the control word; 0 if it is one element
  int64_t limbs;        // elements of the fingerprint
};

// Phases of the launch rule.
enum class Phase : int {
  kBackward,  // gradients arrive: ready buckets are sent, and nothing blocks
  kComplete,  // all gradients have arrived: nothing blocks
  kFree,      // operations wait for each other
};

class Executor : public BucketListener {
 public:
  // `step` is a weak reference to the step in Python, because hooks of gradients keep the executor
  // alive. `source` is the number of the schedule in the ring. `list` is the first to run.
  Executor(std::shared_ptr<const StepConstants> constants, std::shared_ptr<Collectives> collectives,
           std::shared_ptr<FlightRing> ring, int64_t source, int64_t number, pybind11::object step,
           std::shared_ptr<const Instrs> list);
  ~Executor() override;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Pack gradients by leaf of the plan, None for missing ones, times `factor`. Return true if none
  // is missing.
  bool pack_leaves(const pybind11::list& leaves, double factor);
  // Pack the gradients that a counter collects, times `factor`.
  void pack_counted(std::shared_ptr<GradientCounter> counter, double factor);
  // Pack by the functions of the instructions from now on.
  void pack_in_python();

  void set_buffer(int64_t bucket, at::Tensor buffer);
  std::optional<at::Tensor> buffer(int64_t bucket) const;
  const std::vector<at::Tensor>& buffers() const { return buffers_; }  // undefined before use

  void bucket_ready(int64_t bucket) override;
  // Run the list as far as the rule allows in this phase. Return true if it has ended. Throws the
  // error that an instruction has raised, now or during backward.
  bool run(Phase phase);
  // Run the next list, the one before which has ended.
  bool run_list(std::shared_ptr<const Instrs> list, Phase phase);
  // Wait for all collectives in flight, in the order of the schedule.
  void drain();
  // Wait for the collective at a position, if there is one.
  void wait_at(int64_t position);

  // Write the control word `values` with a fingerprint into memory of its own, or behind a bucket,
  // and run the next list, which sends it.
  void send_word(const at::Tensor& values, uint32_t fingerprint, int64_t bucket,
                 std::shared_ptr<const Instrs> list, Phase phase);
  // As above, for a control word that Python has written.
  void send_written_word(at::Tensor word, std::shared_ptr<const Instrs> list, Phase phase);
  std::optional<at::Tensor> word() const;
  // Wait for the collective at a position, which brings the sum. Return true if the sum is that of
  // words that equal `values` with the fingerprint on all ranks.
  bool read_word(int64_t position, const at::Tensor& values, uint32_t fingerprint);

  // Return by leaf the slices of the buffers, undefined for leaves in no bucket.
  std::vector<at::Tensor> results() const;

  // Results of packing: a bucket with large or unknown numbers, or with one that is not finite.
  bool is_finite() const { return is_finite_; }
  bool may_overflow() const { return may_overflow_; }
  void note_magnitude(bool is_finite);

  // Position of the instruction or wait under way, or -1.
  int64_t position() const { return position_; }

  // Times at which buckets were ready, and were first sent, of `time.perf_counter`; infinity and
  // NaN before.
  std::vector<double> ready_s() const;
  std::vector<double> launch_s() const;

 private:
  struct Launch {
    int64_t position;
    int64_t bucket;
    std::shared_ptr<PendingCollective> pending;  // null if there is nothing to wait for
    int64_t record;                              // number in the ring
    bool is_waited = false;
  };

  void follow(std::shared_ptr<const Instrs> list);
  void advance(Phase phase);
  bool may_run(const Instr& instr, Phase phase) const;
  void execute(const Instr& instr);
  void pack(const Instr& instr);
  double pack_natively(int64_t bucket, const at::Tensor& buffer);
  void launch(const Instr& instr);
  const at::Tensor& memory(int64_t bucket);
  Launch* launch_at(int64_t position) const;
  void wait_for(Launch& launch);
  std::string text_of(const Launch& launch) const;
  pybind11::object step() const;

  const std::shared_ptr<const StepConstants> constants_;
  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<FlightRing> ring_;
  const int64_t source_;
  const int64_t number_;
  pybind11::object step_;

  // Recursive, because instructions in Python use the executor. Never acquired with the GIL held,
  // because its holder may need the GIL.
  mutable std::recursive_mutex mutex_;
  std::shared_ptr<const Instrs> list_;
  size_t cursor_ = 0;
  bool is_free_ = false;
  bool has_failed_ = false;
  std::exception_ptr error_;
  int64_t position_ = -1;

  std::vector<at::Tensor> buffers_;
  at::Tensor word_;
  double factor_ = 1.0;
  bool packs_leaves_ = false;
  pybind11::object leaves_;               // owns the sources
  std::vector<BorrowedTensors> sources_;  // by bucket
  std::shared_ptr<GradientCounter> counter_;
  bool is_finite_ = true;
  bool may_overflow_ = false;

  mutable std::vector<Launch> launches_;
  std::vector<int64_t> launch_of_;  // by position: number of the launch, or -1
  std::vector<double> ready_s_;
  std::vector<double> launch_s_;
};

}  // namespace fddp
