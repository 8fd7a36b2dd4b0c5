// Executor of the operations of one step on one rank.
//
// [Note: one executor]
// A program is one list: the operations of the schedule, in the order that was proved and that every
// rank runs, each with the collectives that it waits for and a guard. The executor walks the list once,
// as far as the launch rule allows (core/protocol/launch.py states it in Python). Before the first
// operation that needs the report, it awaits the sum of the control words; from then on guards decide
// which operations run. A regular control word, that of a rank which contributes all gradients with
// weight 1, is written and compared here, and a sum of regular words is a report without repairs. All
// else that is not native is a function of Python, see `StepCalls` in fddp/_C.pyi.
//
// In a program that defers the report, no instruction needs it and results are those of regular words.
// The sum is compared at the end of the list if a bucket has carried it, and otherwise by `settle`.

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
#include "step/profile.h"
#include "tensor/layout.h"
#include "tensor/python_lists.h"

namespace fddp {

enum class InstrKind : int {
  kPack,     // write a bucket's gradients into its buffer
  kCollect,  // start a collective
  kWord,     // write the control word, and start its all-reduce unless a bucket carries it
  kUnpack,   // make results of a buffer
  kAwait,    // wait for the awaited collectives only
  kCall,     // call Python
};

// Condition of an instruction. Idle buckets are left out because no rank used them in the step
// before; the report has the late ones.
enum class Guard : int {
  kAlways,
  kUnlessIdle,
  kIfUsed,  // unless the bucket is idle and stays unused
  kLate,
};

struct Instr {
  InstrKind kind;
  Guard guard;
  bool is_native;     // runs in C++, except for collectives of buckets in a step that records times
  bool needs_report;  // follows the sum of the control words
  int64_t bucket;     // -1 for a control word that travels by itself
  int64_t start;      // range of the buffer that a collective works on
  int64_t stop;
  std::vector<int64_t> waits;  // positions of collectives that must have finished
  std::string title;           // in a profile
};

struct StepBucket {
  std::vector<int64_t> leaves;  // in the plan
  Layout layout;
  std::shared_ptr<const BucketPacking> packing;
  int64_t padded_numel;  // elements that collectives work on
  bool keep;  // gradients are retained for a second reduction
  std::string text;
};

// A program on one rank. The position of an instruction is that of its operation in the schedule.
struct StepProgram {
  std::vector<Instr> instrs;
  std::vector<StepBucket> buckets;
  int64_t leaves;        // of the plan
  int64_t last_bucket;   // not sent during backward, because the control word follows it
  int64_t summed_word;   // position of the collective that sums the control word
  int64_t world_size;    // summands of the control word
  bool average;          // the collectives divide the sum
  bool has_views;        // results of a regular step are slices of the buffers
  bool defers_report;    // no instruction needs the report, which `settle` reads
  int64_t limb_bits;     // of the fingerprint in the control word; 0 if it is one element
  int64_t limbs;         // elements of the fingerprint
  int64_t compared;      // elements of the control word before squared norms, which differ by rank
  std::string word_title;  // of the sum of control words that travel alone, in a profile
};

// Functions of Python that run what is not native, see `StepCalls` in fddp/_C.pyi.
struct StepCalls {
  pybind11::object run;
  pybind11::object fail_pack;
  pybind11::object write_word;
  pybind11::object read_report;
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
  // alive. `source` is the number of the schedule in the ring. `idle` are the buckets that are left
  // out. `records_times`: Python starts the collectives. `measures`: Python makes the results.
  Executor(std::shared_ptr<const StepProgram> program, std::shared_ptr<const StepCalls> calls,
           std::shared_ptr<Collectives> collectives, std::shared_ptr<FlightRing> ring, int64_t source, int64_t number,
           pybind11::object step, const std::vector<int64_t>& idle, bool records_times, bool measures);
  ~Executor() override;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Pack gradients by leaf of the plan, None for missing ones, times `factor`.
  void pack_leaves(const pybind11::list& leaves, double factor);
  // Pack the gradients that a counter collects, times `factor`.
  void pack_counted(std::shared_ptr<GradientCounter> counter, double factor);
  // Send `values` with a fingerprint as the control word, if all gradients have arrived by then.
  void set_regular_word(at::Tensor values, uint32_t fingerprint);
  // Pack by Python from now on, and send no regular word.
  void leave_to_python();
  // Release gradients and buffers. Only the control word is kept, for `settle`.
  void release();

  void set_buffer(int64_t bucket, at::Tensor buffer);
  std::optional<at::Tensor> buffer(int64_t bucket) const;
  const std::vector<at::Tensor>& buffers() const { return buffers_; }  // undefined before use

  void bucket_ready(int64_t bucket) override;
  // Run the list as far as the rule allows in this phase; with kFree, to its end. Throws the error
  // that an instruction has raised, now or during backward, with kFree only.
  void run(Phase phase);
  // Read a deferred report, if that has not happened. Throws what comes of it.
  void settle();
  // Wait for all collectives in flight, in the order of the schedule.
  void drain();

  // The control word, or its sum once the report was read.
  std::optional<at::Tensor> word() const;
  // True if the report is that of regular words: nothing is repaired, and results need no factor. Of
  // a deferred report that is assumed, until it has been read.
  bool is_regular() const { return is_regular_; }
  bool has_report() const { return has_report_; }
  // True if results are slices of the buffers.
  bool gives_views() const { return is_regular_ && program_->has_views && !measures_; }
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
    std::shared_ptr<CollectiveRange> range;      // null without a profiler
    bool is_waited = false;
  };

  void advance(Phase phase);
  bool applies(const Instr& instr) const;
  bool may_run(const Instr& instr, Phase phase) const;
  void execute(int64_t position);
  void run_in_python(int64_t position) const;
  void pack(int64_t position);
  void pack_natively(int64_t bucket, const at::Tensor& buffer);
  void write_word(int64_t bucket);
  void read_report();
  void compare_early();
  bool is_sum_of_regular_words() const;
  void launch(int64_t position);
  std::shared_ptr<CollectiveRange> begin_range(const Instr& instr, bool is_word) const;
  const at::Tensor& memory(int64_t bucket);
  Launch* launch_at(int64_t position) const;
  void wait_for(Launch& launch);
  std::string text_of(const Launch& launch) const;
  pybind11::object step() const;

  const std::shared_ptr<const StepProgram> program_;
  std::shared_ptr<const StepCalls> calls_;
  const std::shared_ptr<Collectives> collectives_;
  const std::shared_ptr<FlightRing> ring_;
  const int64_t source_;
  const int64_t number_;
  const bool records_times_;
  const bool measures_;
  pybind11::object step_;

  // Recursive, because instructions in Python use the executor. Never acquired with the GIL held,
  // because its holder may need the GIL.
  mutable std::recursive_mutex mutex_;
  size_t cursor_ = 0;  // position of the next instruction
  bool is_free_ = false;
  // Set by the first error, kept until `run(kFree)` throws it. No instruction runs afterwards: other
  // ranks would match the next collective with the one that failed.
  bool has_failed_ = false;
  std::exception_ptr error_;
  int64_t position_ = -1;

  std::vector<at::Tensor> buffers_;  // by bucket; taken from the pool at first use, returned by the step
  // Sources of native packing: either the leaves of a tree, or a counter.
  double factor_ = 1.0;
  bool packs_leaves_ = false;
  bool has_all_leaves_ = false;
  pybind11::object leaves_;               // owns the sources
  std::vector<BorrowedTensors> sources_;  // by bucket
  std::shared_ptr<GradientCounter> counter_;
  bool is_finite_ = true;
  bool may_overflow_ = false;

  at::Tensor regular_;  // undefined once this rank's word is another
  uint32_t fingerprint_ = 0;
  at::Tensor word_;  // behind a bucket, or in memory of its own
  bool has_report_ = false;
  bool is_regular_ = false;
  // By bucket; empty for none.
  std::vector<bool> idle_;
  std::vector<bool> late_;  // from the report

  mutable std::vector<Launch> launches_;
  std::vector<int64_t> launch_of_;  // by position: number of the launch, or -1
  std::vector<double> ready_s_;
  std::vector<double> launch_s_;
};

}  // namespace fddp
