#include "step/executor.h"

#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "clock.h"
#include "python_entry.h"
#include "tensor/pack.h"
#include "tensor/storage.h"

namespace py = pybind11;

namespace fddp {
namespace {

constexpr double kLeastWait_s = 2e-6;  // as LEAST_S in telemetry/waits.py

at::Tensor range_of(const at::Tensor& buffer, int64_t start, int64_t stop) {
  return start == 0 && stop == buffer.numel() ? buffer : buffer.narrow(0, start, stop - start);
}

template <class Number>
void write_values(Number* word, const at::Tensor& values, const StepProgram& program, uint32_t fingerprint) {
  std::memcpy(word, values.const_data_ptr(), values.nbytes());
  if (program.limb_bits == 0) {
    word[0] = static_cast<Number>(fingerprint);
    return;
  }
  const uint64_t mask = (uint64_t{1} << program.limb_bits) - 1;
  for (int64_t i = 0; i < program.limbs; ++i) {
    word[i] = static_cast<Number>((uint64_t{fingerprint} >> (i * program.limb_bits)) & mask);
  }
}

// Call `body(Number{})` with the type of the elements of a control word.
template <class Body>
auto with_number_type(const at::Tensor& word, const Body& body) {
  if (word.scalar_type() == at::kDouble) return body(double{});
  TORCH_CHECK_TYPE(word.scalar_type() == at::kFloat, "a control word has dtype ", word.scalar_type());
  return body(float{});
}

}  // namespace

Executor::Executor(std::shared_ptr<const StepProgram> program, std::shared_ptr<const StepCalls> calls,
                   std::shared_ptr<Collectives> collectives, std::shared_ptr<FlightRing> ring, int64_t source,
                   int64_t number, py::object step, const std::vector<int64_t>& idle, bool records_times,
                   bool measures)
    : program_(std::move(program)), calls_(std::move(calls)), collectives_(std::move(collectives)),
      ring_(std::move(ring)), source_(source), number_(number), records_times_(records_times), measures_(measures),
      step_(std::move(step)) {
  const size_t count = program_->buckets.size();
  buffers_.resize(count);
  ready_s_.assign(count, std::numeric_limits<double>::infinity());
  launch_s_.assign(count, std::numeric_limits<double>::quiet_NaN());
  launch_of_.assign(program_->instrs.size(), -1);
  if (!idle.empty()) {
    idle_.resize(count);
    for (const int64_t bucket : idle) idle_.at(bucket) = true;
  }
}

Executor::~Executor() {
  const py::gil_scoped_acquire gil;
  step_ = py::object();
  calls_.reset();
  sources_.clear();
  leaves_ = py::object();
  error_ = nullptr;
  launches_.clear();
}

// Sources

void Executor::pack_leaves(const py::list& leaves, double factor) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(leaves.size()) == program_->leaves, "expected ", program_->leaves,
                    " leaves, got ", leaves.size());
  static const at::Tensor missing;
  bool has_all = true;
  std::vector<BorrowedTensors> sources;
  sources.reserve(program_->buckets.size());
  for (const StepBucket& bucket : program_->buckets) {
    BorrowedTensors& own = sources.emplace_back(bucket.leaves.size());
    for (const int64_t leaf : bucket.leaves) {
      const at::Tensor* const tensor = tensor_or_none_at(leaves, leaf);
      has_all = has_all && tensor != nullptr;
      own.borrow(tensor == nullptr ? missing : *tensor);
    }
  }
  leaves_ = leaves;
  sources_ = std::move(sources);
  packs_leaves_ = true;
  has_all_leaves_ = has_all;
  factor_ = factor;
}

void Executor::pack_counted(std::shared_ptr<GradientCounter> counter, double factor) {
  counter_ = std::move(counter);
  factor_ = factor;
}

void Executor::set_regular_word(at::Tensor values, uint32_t fingerprint) {
  regular_ = std::move(values);
  fingerprint_ = fingerprint;
}

void Executor::leave_to_python() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  packs_leaves_ = false;
  counter_.reset();
}

void Executor::release() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const py::gil_scoped_acquire gil;
  leaves_ = py::object();
  sources_.clear();
  counter_.reset();
  packs_leaves_ = false;
  buffers_.assign(buffers_.size(), at::Tensor());
}

void Executor::set_buffer(int64_t bucket, at::Tensor buffer) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  buffers_.at(bucket) = std::move(buffer);
}

std::optional<at::Tensor> Executor::buffer(int64_t bucket) const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  const at::Tensor& found = buffers_.at(bucket);
  return found.defined() ? std::optional<at::Tensor>(found) : std::nullopt;
}

// Execution

void Executor::bucket_ready(int64_t bucket) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  ready_s_.at(bucket) = std::min(ready_s_[bucket], perf_counter_s());
  advance(Phase::kBackward);
}

void Executor::run(Phase phase) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (phase != Phase::kBackward && !is_free_) {
    const double now_s = perf_counter_s();
    for (double& time_s : ready_s_) time_s = std::min(time_s, now_s);
  }
  is_free_ = phase == Phase::kFree;
  advance(phase);
  if (error_ && phase == Phase::kFree) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Executor::advance(Phase phase) {
  if (has_failed_) return;
  // Results outlive the inference mode of the caller.
  const c10::InferenceMode no_inference(false);
  try {
    for (; cursor_ < program_->instrs.size();) {
      const Instr& instr = program_->instrs[cursor_];
      if (!instr.needs_report && !applies(instr)) {
        ++cursor_;
        continue;
      }
      if (phase != Phase::kFree && !may_run(instr, phase)) return;
      if (instr.needs_report) {
        if (!has_report_) read_report();
        if (!applies(instr)) {
          ++cursor_;
          continue;
        }
      }
      // Moved first: a gradient that arrives meanwhile must not repeat the instruction.
      execute(static_cast<int64_t>(cursor_++));
    }
    if (phase == Phase::kFree && !has_report_) {
      if (program_->defers_report) {
        compare_early();
      } else {
        read_report();
      }
    }
    position_ = -1;
  } catch (...) {
    error_ = std::current_exception();
    has_failed_ = true;
  }
}

bool Executor::applies(const Instr& instr) const {
  const auto has = [&](const std::vector<bool>& buckets) { return !buckets.empty() && buckets[instr.bucket]; };
  switch (instr.guard) {
    case Guard::kAlways: return true;
    case Guard::kUnlessIdle: return !has(idle_);
    case Guard::kIfUsed: return !has(idle_) || has(late_);
    case Guard::kLate: return has(late_);
  }
  return true;
}

// Backward and the phase after it never block on a collective, and know no report.
bool Executor::may_run(const Instr& instr, Phase phase) const {
  if (instr.needs_report) return false;
  if (phase == Phase::kBackward) {
    if (instr.kind == InstrKind::kWord) return false;
    if (instr.bucket == program_->last_bucket || std::isinf(ready_s_[instr.bucket])) return false;
  }
  return std::all_of(instr.waits.begin(), instr.waits.end(), [this](int64_t position) {
    const Launch* const launch = launch_at(position);
    return launch == nullptr || launch->is_waited || !launch->pending || launch->pending->done();
  });
}

void Executor::execute(int64_t position) {
  const Instr& instr = program_->instrs[position];
  for (const int64_t awaited : instr.waits) {
    Launch* const launch = launch_at(awaited);
    if (launch != nullptr) wait_for(*launch);
  }
  position_ = position;
  // A collective has a range of its own, which goes on after this function.
  std::optional<at::RecordFunction> range;
  if (instr.kind != InstrKind::kCollect && at::hasCallbacks()) {
    range.emplace(at::RecordScope::USER_SCOPE);
    range->before(std::string_view(instr.title));
  }
  switch (instr.kind) {
    case InstrKind::kPack:
      pack(position);
      break;
    case InstrKind::kCollect:
      launch(position);
      break;
    case InstrKind::kWord:
      write_word(instr.bucket);
      range.reset();
      if (instr.bucket < 0) launch(position);
      break;
    case InstrKind::kUnpack:
      if (!gives_views()) run_in_python(position);
      break;
    case InstrKind::kAwait:
      break;
    case InstrKind::kCall:
      run_in_python(position);
      break;
  }
}

void Executor::run_in_python(int64_t position) const {
  const PythonEntry python;
  calls_->run(step(), position, is_free_);
}

void Executor::pack(int64_t position) {
  const Instr& instr = program_->instrs[position];
  if (instr.is_native && (packs_leaves_ || counter_)) {
    const at::Tensor& buffer = memory(instr.bucket);
    if (packs_leaves_ || counter_) {  // Python may have failed for lack of memory
      try {
        pack_natively(instr.bucket, buffer);
      } catch (...) {
        const std::exception_ptr error = std::current_exception();
        const PythonEntry python;
        torch::translate_exception_to_python(error);
        const py::error_already_set raised;
        calls_->fail_pack(step(), position, raised.value());
      }
      return;
    }
  }
  run_in_python(position);
}

void Executor::pack_natively(int64_t b, const at::Tensor& buffer) {
  const StepBucket& bucket = program_->buckets[b];
  const int64_t numel = bucket.layout.numel();
  if (numel < bucket.padded_numel) {
    buffer.narrow(0, numel, bucket.padded_numel - numel).zero_();
  }
  if (counter_) {
    counter_->pack(b, buffer, *bucket.packing, bucket.keep, factor_);
  } else {
    pack_(buffer, bucket.layout, sources_.at(b).tensors(), factor_);
  }
}

void Executor::launch(int64_t position) {
  const Instr& instr = program_->instrs[position];
  const int64_t record = ring_->launch(source_, number_, position).number;
  const bool is_word = instr.bucket < 0;
  // The word travels alone if its bucket is left out.
  const bool is_alone = is_word || (!idle_.empty() && idle_[instr.bucket]);
  if (!is_word && std::isnan(launch_s_[instr.bucket])) launch_s_[instr.bucket] = perf_counter_s();
  std::shared_ptr<CollectiveRange> range;
  if (at::hasCallbacks()) range = begin_range(instr, is_alone);
  std::shared_ptr<PendingCollective> pending;
  if (instr.is_native && (is_word || !records_times_)) {
    const at::Tensor tensor = is_alone ? word_ : range_of(memory(instr.bucket), instr.start, instr.stop);
    pending = collectives_->all_reduce(tensor, !is_word && program_->average, is_free_);
  } else {
    const PythonEntry python;
    pending = pending_in_python(calls_->run(step(), position, is_free_));
  }
  launch_of_[position] = static_cast<int64_t>(launches_.size());
  launches_.push_back({position, instr.bucket, pending, record, range});
  if (!range) return;
  if (pending) {
    pending->end_range(std::move(range));
  } else {
    range->end();
  }
}

std::shared_ptr<CollectiveRange> Executor::begin_range(const Instr& instr, bool is_word) const {
  if (is_word) return CollectiveRange::begin(program_->word_title, word_);
  const at::Tensor& buffer = buffers_[instr.bucket];
  return CollectiveRange::begin(instr.title, buffer.defined() ? range_of(buffer, instr.start, instr.stop) : buffer);
}

const at::Tensor& Executor::memory(int64_t bucket) {
  at::Tensor& buffer = buffers_[bucket];
  if (!buffer.defined()) {
    const PythonEntry python;
    at::Tensor made = step().attr("new_memory")(bucket).cast<at::Tensor>();
    if (!buffer.defined()) buffer = std::move(made);
  }
  return buffer;
}

// The control word

void Executor::write_word(int64_t b) {
  const bool is_complete = counter_ ? counter_->is_complete() : packs_leaves_ && has_all_leaves_;
  if (!regular_.defined() || !is_complete || records_times_) {
    const PythonEntry python;
    const py::object written = calls_->write_word(step());
    if (!written.is_none()) {
      word_ = written.cast<at::Tensor>();
      regular_.reset();
      return;
    }
    TORCH_INTERNAL_ASSERT(regular_.defined(), "a step has no regular control word");
  }
  word_ = b < 0 ? at::empty_like(regular_)
                : memory(b).narrow(0, program_->buckets[b].padded_numel, regular_.numel());
  is_regular_ = program_->defers_report;
  TORCH_CHECK_TYPE(word_.scalar_type() == regular_.scalar_type(), "a control word has another dtype than its bucket");
  with_number_type(word_, [&](auto number) {
    write_values(static_cast<decltype(number)*>(word_.data_ptr()), regular_, *program_, fingerprint_);
  });
}

void Executor::read_report() {
  TORCH_CHECK(word_.defined(), "the control word was read before it was written");
  Launch* const launch = launch_at(program_->summed_word);
  if (launch != nullptr) wait_for(*launch);
  position_ = -1;
  has_report_ = true;
  const bool is_equal = regular_.defined() && is_sum_of_regular_words();
  if (is_equal && program_->has_views && !measures_) {  // nothing in Python follows
    is_regular_ = true;
    return;
  }
  const PythonEntry python;
  const auto found = calls_->read_report(step(), is_equal).cast<std::pair<std::vector<int64_t>, bool>>();
  is_regular_ = found.second;
  if (!found.first.empty()) late_.resize(program_->buckets.size());
  for (const int64_t bucket : found.first) late_.at(bucket) = true;
}

// A word behind a bucket has been reduced with it, and its memory is about to return to the pool.
void Executor::compare_early() {
  const Launch* const launch = launch_at(program_->summed_word);
  if (launch != nullptr && launch->pending) return;
  has_report_ = regular_.defined() && is_sum_of_regular_words();
  if (!has_report_) word_ = word_.clone();
}

void Executor::settle() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!has_report_ && !has_failed_) read_report();
}

bool Executor::is_sum_of_regular_words() const {
  return with_number_type(regular_, [&](auto number) {
    using Number = decltype(number);
    std::vector<Number> own(static_cast<size_t>(regular_.numel()));
    write_values(own.data(), regular_, *program_, fingerprint_);
    const auto* const found = static_cast<const Number*>(word_.const_data_ptr());
    for (int64_t i = 0; i < program_->compared; ++i) {
      if (found[i] != own[i] * static_cast<Number>(program_->world_size)) return false;
    }
    return true;
  });
}

std::optional<at::Tensor> Executor::word() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return word_.defined() ? std::optional<at::Tensor>(word_) : std::nullopt;
}

// Collectives in flight

Executor::Launch* Executor::launch_at(int64_t position) const {
  const int64_t number = launch_of_[position];
  return number < 0 ? nullptr : &launches_[number];
}

void Executor::wait_for(Launch& launch) {
  if (launch.is_waited) return;
  launch.is_waited = true;
  position_ = launch.position;
  const auto pending = std::exchange(launch.pending, nullptr);
  const int64_t record = launch.record;
  const double start_s = perf_counter_s();
  ring_->set_waited(record, start_s);
  if (pending) {
    const std::string what = text_of(launch);
    if (!pending->wait([&] { return what; })) {
      // It takes long, or has failed: Python finds out which, and whose fault it is.
      const PythonEntry python;
      step().attr("wait")(pending->to_python(), what);
    }
  }
  if (const auto range = std::exchange(launch.range, nullptr)) range->end();
  const double end_s = perf_counter_s();
  if (pending && !pending->notes_waits() && end_s - start_s > kLeastWait_s) {
    const PythonEntry python;
    step().attr("note_wait")(start_s, end_s);
  }
  ring_->set_done(record, end_s);
}

void Executor::drain() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const int64_t number : std::vector<int64_t>(launch_of_)) {
    if (number >= 0) wait_for(launches_[number]);
  }
  position_ = -1;
}

std::string Executor::text_of(const Launch& launch) const {
  const std::string text = launch.bucket < 0 ? "the control word" : program_->buckets[launch.bucket].text;
  return text + " of step " + std::to_string(number_);
}

// Results

std::vector<at::Tensor> Executor::results() const {
  std::vector<at::Tensor> results(static_cast<size_t>(program_->leaves));
  for (size_t b = 0; b < buffers_.size(); ++b) {
    if (!buffers_[b].defined()) continue;  // left out, because no rank uses it
    const StepBucket& bucket = program_->buckets[b];
    std::vector<at::Tensor> found = slices(buffers_[b], bucket.layout);
    for (size_t i = 0; i < found.size(); ++i) results[bucket.leaves[i]] = std::move(found[i]);
  }
  return results;
}

void Executor::note_magnitude(bool is_finite) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  is_finite_ = is_finite_ && is_finite;
  may_overflow_ = true;
}

std::vector<double> Executor::ready_s() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return ready_s_;
}

std::vector<double> Executor::launch_s() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return launch_s_;
}

py::object Executor::step() const {
  py::object found = step_();
  TORCH_INTERNAL_ASSERT(!found.is_none(), "a step was dropped while its operations ran");
  return found;
}

}  // namespace fddp

void bind_executor(py::module_& m) {
  using namespace fddp;
  py::class_<StepBucket>(m, "StepBucket")
      .def(py::init([](std::vector<int64_t> leaves, const Layout& layout, std::shared_ptr<BucketPacking> packing,
                       int64_t padded_numel, bool keep, std::string text) {
             return StepBucket{std::move(leaves), layout, std::move(packing), padded_numel, keep, std::move(text)};
           }),
           py::arg("leaves"), py::arg("layout"), py::arg("packing").none(false), py::arg("padded_numel"),
           py::arg("keep"), py::arg("text"));
  py::class_<Instr>(m, "Instr")
      .def(py::init([](const std::string& kind, const std::string& guard, bool is_native, bool needs_report,
                       int64_t bucket, int64_t start, int64_t stop, std::vector<int64_t> waits, std::string title) {
             static const std::unordered_map<std::string, InstrKind> kinds = {
                 {"pack", InstrKind::kPack},     {"collect", InstrKind::kCollect}, {"word", InstrKind::kWord},
                 {"unpack", InstrKind::kUnpack}, {"await", InstrKind::kAwait},     {"call", InstrKind::kCall}};
             static const std::unordered_map<std::string, Guard> guards = {{"always", Guard::kAlways},
                                                                           {"unless idle", Guard::kUnlessIdle},
                                                                           {"if used", Guard::kIfUsed},
                                                                           {"late", Guard::kLate}};
             return Instr{kinds.at(kind), guards.at(guard), is_native, needs_report, bucket, start, stop,
                          std::move(waits), std::move(title)};
           }),
           py::arg("kind"), py::arg("guard"), py::arg("is_native"), py::arg("needs_report"), py::arg("bucket"),
           py::arg("start"), py::arg("stop"), py::arg("waits"), py::arg("title"));
  py::class_<StepProgram, std::shared_ptr<StepProgram>>(m, "StepProgram")
      .def(py::init([](std::vector<Instr> instrs, std::vector<StepBucket> buckets, int64_t leaves,
                       int64_t last_bucket, int64_t summed_word, int64_t world_size, bool average, bool has_views,
                       int64_t limb_bits, int64_t limbs, bool defers_report, int64_t compared,
                       std::string word_title) {
             return std::make_shared<StepProgram>(StepProgram{std::move(instrs), std::move(buckets), leaves,
                                                              last_bucket, summed_word, world_size, average, has_views,
                                                              defers_report, limb_bits, limbs, compared,
                                                              std::move(word_title)});
           }),
           py::arg("instrs"), py::arg("buckets"), py::arg("leaves"), py::arg("last_bucket"), py::arg("summed_word"),
           py::arg("world_size"), py::arg("average"), py::arg("has_views"), py::arg("limb_bits"), py::arg("limbs"),
           py::arg("defers_report"), py::arg("compared"), py::arg("word_title"));
  py::class_<StepCalls, std::shared_ptr<StepCalls>>(m, "StepCalls")
      .def(py::init([](py::object run, py::object fail_pack, py::object write_word, py::object read_report) {
             return std::make_shared<StepCalls>(StepCalls{std::move(run), std::move(fail_pack), std::move(write_word),
                                                          std::move(read_report)});
           }),
           py::arg("run"), py::arg("fail_pack"), py::arg("write_word"), py::arg("read_report"));
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Executor, BucketListener, std::shared_ptr<Executor>>(m, "Executor")
      .def(py::init<std::shared_ptr<StepProgram>, std::shared_ptr<StepCalls>, std::shared_ptr<Collectives>,
                    std::shared_ptr<FlightRing>, int64_t, int64_t, py::object, std::vector<int64_t>, bool, bool>(),
           py::arg("program").none(false), py::arg("calls").none(false), py::arg("collectives").none(false),
           py::arg("ring").none(false), py::arg("source"), py::arg("number"), py::arg("step"), py::arg("idle"),
           py::arg("records_times"), py::arg("measures"))
      .def("__call__", &Executor::bucket_ready, py::arg("bucket"), Released())
      .def("pack_leaves", torch::wrap_pybind_function([](Executor& self, const py::list& leaves, double factor) {
             self.pack_leaves(leaves, factor);
           }),
           py::arg("leaves"), py::arg("factor"))
      .def("pack_counted", &Executor::pack_counted, py::arg("counter").none(false), py::arg("factor"))
      .def("set_regular_word", &Executor::set_regular_word, py::arg("values"), py::arg("fingerprint"))
      .def("leave_to_python", &Executor::leave_to_python, Released())
      .def("release", &Executor::release, Released())
      .def("set_buffer", &Executor::set_buffer, py::arg("bucket"), py::arg("buffer"), Released())
      .def("buffer", &Executor::buffer, py::arg("bucket"), Released())
      .def("run", torch::wrap_pybind_function_no_gil([](Executor& self, int64_t phase) {
             self.run(static_cast<Phase>(phase));
           }),
           py::arg("phase"))
      .def("settle", torch::wrap_pybind_function_no_gil([](Executor& self) { self.settle(); }))
      .def("drain", torch::wrap_pybind_function_no_gil([](Executor& self) { self.drain(); }))
      .def("word", &Executor::word, Released())
      .def("buffers", [](const Executor& self) { return to_list(self.buffers()); })
      .def("results", torch::wrap_pybind_function([](const Executor& self) { return to_list(self.results()); }))
      .def("note_magnitude", &Executor::note_magnitude, py::arg("is_finite"), Released())
      .def_property_readonly("is_finite", &Executor::is_finite)
      .def_property_readonly("may_overflow", &Executor::may_overflow)
      .def_property_readonly("is_regular", &Executor::is_regular)
      .def_property_readonly("has_report", &Executor::has_report)
      .def_property_readonly("gives_views", &Executor::gives_views)
      .def_property_readonly("position", &Executor::position)
      .def("ready_s", &Executor::ready_s, Released())
      .def("launch_s", &Executor::launch_s, Released());
}
