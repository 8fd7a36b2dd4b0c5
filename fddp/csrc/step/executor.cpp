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
void write_values(Number* word, const at::Tensor& values, const StepConstants& constants, uint32_t fingerprint) {
  std::memcpy(word, values.const_data_ptr(), values.nbytes());
  if (constants.limb_bits == 0) {
    word[0] = static_cast<Number>(fingerprint);
    return;
  }
  const uint64_t mask = (uint64_t{1} << constants.limb_bits) - 1;
  for (int64_t i = 0; i < constants.limbs; ++i) {
    word[i] = static_cast<Number>((uint64_t{fingerprint} >> (i * constants.limb_bits)) & mask);
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

Executor::Executor(std::shared_ptr<const StepConstants> constants, std::shared_ptr<Collectives> collectives,
                   std::shared_ptr<FlightRing> ring, int64_t source, int64_t number, py::object step,
                   std::shared_ptr<const Instrs> list)
    : constants_(std::move(constants)), collectives_(std::move(collectives)), ring_(std::move(ring)),
      source_(source), number_(number), step_(std::move(step)), list_(std::move(list)) {
  const size_t count = constants_->buckets.size();
  buffers_.resize(count);
  ready_s_.assign(count, std::numeric_limits<double>::infinity());
  launch_s_.assign(count, std::numeric_limits<double>::quiet_NaN());
  launch_of_.assign(constants_->positions, -1);
}

Executor::~Executor() {
  const py::gil_scoped_acquire gil;
  step_ = py::object();
  sources_.clear();
  leaves_ = py::object();
  list_.reset();
  error_ = nullptr;
  launches_.clear();
}

// Sources

bool Executor::pack_leaves(const py::list& leaves, double factor) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(leaves.size()) == constants_->leaves, "expected ", constants_->leaves,
                    " leaves, got ", leaves.size());
  static const at::Tensor missing;
  bool is_whole = true;
  std::vector<BorrowedTensors> sources;
  sources.reserve(constants_->buckets.size());
  for (const StepBucket& bucket : constants_->buckets) {
    BorrowedTensors& own = sources.emplace_back(bucket.leaves.size());
    for (const int64_t leaf : bucket.leaves) {
      const at::Tensor* const tensor = tensor_or_none_at(leaves, leaf);
      is_whole = is_whole && tensor != nullptr;
      own.borrow(tensor == nullptr ? missing : *tensor);
    }
  }
  leaves_ = leaves;
  sources_ = std::move(sources);
  packs_leaves_ = true;
  factor_ = factor;
  return is_whole;
}

void Executor::pack_counted(std::shared_ptr<GradientCounter> counter, double factor) {
  counter_ = std::move(counter);
  factor_ = factor;
}

void Executor::pack_in_python() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  packs_leaves_ = false;
  counter_.reset();
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

void Executor::follow(std::shared_ptr<const Instrs> list) {
  TORCH_INTERNAL_ASSERT(cursor_ == list_->items.size(), "a list of instructions was left before its end");
  list_ = std::move(list);
  cursor_ = 0;
}

void Executor::bucket_ready(int64_t bucket) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  ready_s_.at(bucket) = std::min(ready_s_[bucket], perf_counter_s());
  advance(Phase::kBackward);
}

bool Executor::run(Phase phase) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (phase != Phase::kBackward && !is_free_) {
    const double now_s = perf_counter_s();
    for (double& time_s : ready_s_) time_s = std::min(time_s, now_s);
  }
  is_free_ = phase == Phase::kFree;
  advance(phase);
  if (error_ && phase == Phase::kFree) std::rethrow_exception(std::exchange(error_, nullptr));
  return !has_failed_ && cursor_ == list_->items.size();
}

bool Executor::run_list(std::shared_ptr<const Instrs> list, Phase phase) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  follow(std::move(list));
  return run(phase);
}

void Executor::advance(Phase phase) {
  // After a failure, other ranks would match the next collective with the one that failed.
  if (has_failed_) return;
  // Results outlive the inference mode of the caller.
  const c10::InferenceMode no_inference(false);
  try {
    while (cursor_ < list_->items.size()) {
      const Instr& instr = list_->items[cursor_];
      if (phase != Phase::kFree && !may_run(instr, phase)) return;
      execute(instr);
    }
    position_ = -1;
  } catch (...) {
    error_ = std::current_exception();
    has_failed_ = true;
  }
}

bool Executor::may_run(const Instr& instr, Phase phase) const {
  if (phase == Phase::kBackward && instr.bucket >= 0) {
    if (instr.bucket == constants_->last_bucket || std::isinf(ready_s_[instr.bucket])) return false;
  }
  // Backward never blocks on a collective.
  return std::all_of(instr.awaited.begin(), instr.awaited.end(), [this](int64_t position) {
    const Launch* const launch = launch_at(position);
    return launch == nullptr || launch->is_waited || !launch->pending || launch->pending->done();
  });
}

void Executor::execute(const Instr& instr) {
  for (const int64_t position : instr.awaited) {
    Launch* const launch = launch_at(position);
    if (launch != nullptr) wait_for(*launch);
  }
  position_ = instr.position;
  ++cursor_;  // first: a gradient that arrives meanwhile must not repeat it
  if (instr.kind == InstrKind::kPack) pack(instr);
  if (instr.kind == InstrKind::kReduce || instr.kind == InstrKind::kStart) launch(instr);
  if (instr.kind == InstrKind::kCall) {
    const PythonEntry python;
    instr.call(step());
  }
}

void Executor::pack(const Instr& instr) {
  if (packs_leaves_ || counter_) {
    const StepBucket& bucket = constants_->buckets[instr.bucket];
    const at::Tensor& buffer = memory(instr.bucket);
    if (packs_leaves_ || counter_) {  // Python may have failed for lack of memory
      try {
        const double amax = pack_natively(instr.bucket, buffer);
        if (!(amax <= bucket.max_safe_magnitude)) note_magnitude(!std::isinf(amax));
        return;
      } catch (...) {
        const std::exception_ptr error = std::current_exception();
        const PythonEntry python;
        const py::cpp_function raise_error(
            torch::wrap_pybind_function([error] { std::rethrow_exception(error); }));
        instr.call(step(), raise_error);
        return;
      }
    }
  }
  const PythonEntry python;
  instr.call(step());
}

double Executor::pack_natively(int64_t b, const at::Tensor& buffer) {
  const StepBucket& bucket = constants_->buckets[b];
  const int64_t numel = bucket.layout.numel();
  if (numel < bucket.padded_numel) {
    auto* const end = static_cast<char*>(buffer.data_ptr()) + numel * buffer.itemsize();
    std::memset(end, 0, static_cast<size_t>((bucket.padded_numel - numel) * buffer.itemsize()));
  }
  if (counter_) return counter_->pack(b, buffer, *bucket.packing, bucket.keep, factor_);
  return pack_(buffer, bucket.layout, sources_.at(b).tensors(), factor_);
}

void Executor::launch(const Instr& instr) {
  const int64_t record = ring_->launch(source_, number_, instr.position).number;
  if (instr.bucket >= 0 && std::isnan(launch_s_[instr.bucket])) launch_s_[instr.bucket] = perf_counter_s();
  std::shared_ptr<PendingCollective> pending;
  if (instr.kind == InstrKind::kReduce) {
    const bool is_word = instr.bucket < 0;
    const at::Tensor tensor = is_word ? word_ : range_of(memory(instr.bucket), instr.start, instr.stop);
    pending = collectives_->all_reduce(tensor, !is_word && constants_->average, is_free_);
  } else {
    const PythonEntry python;
    pending = pending_in_python(instr.call(step(), is_free_));
  }
  launch_of_[instr.position] = static_cast<int64_t>(launches_.size());
  launches_.push_back({instr.position, instr.bucket, std::move(pending), record});
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
  const double end_s = perf_counter_s();
  if (pending && !pending->notes_waits() && end_s - start_s > kLeastWait_s) {
    const PythonEntry python;
    step().attr("note_wait")(start_s, end_s);
  }
  ring_->set_done(record, end_s);
}

void Executor::wait_at(int64_t position) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Launch* const launch = launch_at(position);
  if (launch != nullptr) wait_for(*launch);
  position_ = -1;
}

void Executor::drain() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const int64_t number : std::vector<int64_t>(launch_of_)) {
    if (number >= 0) wait_for(launches_[number]);
  }
  position_ = -1;
}

std::string Executor::text_of(const Launch& launch) const {
  const std::string text = launch.bucket < 0 ? "the control word" : constants_->buckets[launch.bucket].text;
  return text + " of step " + std::to_string(number_);
}

// The control word

void Executor::send_word(const at::Tensor& values, uint32_t fingerprint, int64_t b,
                         std::shared_ptr<const Instrs> list, Phase phase) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  at::Tensor word = b < 0 ? at::empty_like(values)
                          : memory(b).narrow(0, constants_->buckets[b].padded_numel, values.numel());
  TORCH_CHECK_TYPE(word.scalar_type() == values.scalar_type(), "a control word has another dtype than its bucket");
  with_number_type(word, [&](auto number) {
    write_values(static_cast<decltype(number)*>(word.data_ptr()), values, *constants_, fingerprint);
  });
  send_written_word(std::move(word), std::move(list), phase);
}

void Executor::send_written_word(at::Tensor word, std::shared_ptr<const Instrs> list, Phase phase) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  word_ = std::move(word);
  run_list(std::move(list), phase);
}

std::optional<at::Tensor> Executor::word() const {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return word_.defined() ? std::optional<at::Tensor>(word_) : std::nullopt;
}

bool Executor::read_word(int64_t position, const at::Tensor& values, uint32_t fingerprint) {
  wait_at(position);
  TORCH_CHECK(word_.defined(), "the control word was read before it was written");
  return with_number_type(values, [&](auto number) {
    using Number = decltype(number);
    std::vector<Number> own(static_cast<size_t>(values.numel()));
    write_values(own.data(), values, *constants_, fingerprint);
    const auto* const found = static_cast<const Number*>(word_.const_data_ptr());
    for (size_t i = 0; i < own.size(); ++i) {
      if (found[i] != own[i] * static_cast<Number>(constants_->world_size)) return false;
    }
    return true;
  });
}

std::vector<at::Tensor> Executor::results() const {
  std::vector<at::Tensor> results(static_cast<size_t>(constants_->leaves));
  for (size_t b = 0; b < buffers_.size(); ++b) {
    if (!buffers_[b].defined()) continue;  // left out, because no rank uses it
    const StepBucket& bucket = constants_->buckets[b];
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
  m.def("is_profiled", &at::hasCallbacks);
  py::class_<StepBucket>(m, "StepBucket")
      .def(py::init([](std::vector<int64_t> leaves, const Layout& layout, std::shared_ptr<BucketPacking> packing,
                       int64_t padded_numel, double max_safe_magnitude, bool keep, std::string text) {
             return StepBucket{std::move(leaves), layout, std::move(packing), padded_numel, max_safe_magnitude, keep,
                               std::move(text)};
           }),
           py::arg("leaves"), py::arg("layout"), py::arg("packing").none(false), py::arg("padded_numel"),
           py::arg("max_safe_magnitude"), py::arg("keep"), py::arg("text"));
  py::class_<StepConstants, std::shared_ptr<StepConstants>>(m, "StepConstants")
      .def(py::init([](std::vector<StepBucket> buckets, int64_t positions, int64_t leaves, int64_t last_bucket,
                       int64_t world_size, bool average, int64_t limb_bits, int64_t limbs) {
             return std::make_shared<StepConstants>(StepConstants{std::move(buckets), positions, leaves, last_bucket,
                                                                  world_size, average, limb_bits, limbs});
           }),
           py::arg("buckets"), py::arg("positions"), py::arg("leaves"), py::arg("last_bucket"),
           py::arg("world_size"), py::arg("average"), py::arg("limb_bits"), py::arg("limbs"));
  py::class_<Instr>(m, "Instr")
      .def(py::init([](const std::string& kind, int64_t position, int64_t bucket, int64_t start, int64_t stop,
                       std::vector<int64_t> awaited, py::object call) {
             const auto known = kind == "pack" ? InstrKind::kPack
                 : kind == "reduce"            ? InstrKind::kReduce
                 : kind == "start"             ? InstrKind::kStart
                 : kind == "await"             ? InstrKind::kAwait
                                               : InstrKind::kCall;
             return Instr{known, position, bucket, start, stop, std::move(awaited), std::move(call)};
           }),
           py::arg("kind"), py::arg("position"), py::arg("bucket"), py::arg("start"), py::arg("stop"),
           py::arg("awaited"), py::arg("call"));
  py::class_<Instrs, std::shared_ptr<Instrs>>(m, "Instrs")
      .def(py::init([](const py::list& instrs) {
             auto list = std::make_shared<Instrs>();
             for (const py::handle instr : instrs) list->items.push_back(instr.cast<Instr>());
             return list;
           }),
           py::arg("instrs"));
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Executor, BucketListener, std::shared_ptr<Executor>>(m, "Executor")
      .def(py::init<std::shared_ptr<StepConstants>, std::shared_ptr<Collectives>, std::shared_ptr<FlightRing>, int64_t,
                    int64_t, py::object, std::shared_ptr<Instrs>>(),
           py::arg("constants").none(false), py::arg("collectives").none(false), py::arg("ring").none(false),
           py::arg("source"), py::arg("number"), py::arg("step"), py::arg("list").none(false))
      .def("__call__", &Executor::bucket_ready, py::arg("bucket"), Released())
      .def("pack_leaves", torch::wrap_pybind_function([](Executor& self, const py::list& leaves, double factor) {
             return self.pack_leaves(leaves, factor);
           }),
           py::arg("leaves"), py::arg("factor"))
      .def("pack_counted", &Executor::pack_counted, py::arg("counter").none(false), py::arg("factor"))
      .def("pack_in_python", &Executor::pack_in_python, Released())
      .def("set_buffer", &Executor::set_buffer, py::arg("bucket"), py::arg("buffer"), Released())
      .def("buffer", &Executor::buffer, py::arg("bucket"), Released())
      .def("run", torch::wrap_pybind_function_no_gil([](Executor& self, int64_t phase) {
             return self.run(static_cast<Phase>(phase));
           }),
           py::arg("phase"))
      .def("run_list", torch::wrap_pybind_function_no_gil([](Executor& self, std::shared_ptr<Instrs> list,
                                                             int64_t phase) {
             return self.run_list(std::move(list), static_cast<Phase>(phase));
           }),
           py::arg("list").none(false), py::arg("phase"))
      .def("drain", torch::wrap_pybind_function_no_gil([](Executor& self) { self.drain(); }))
      .def("wait_at", torch::wrap_pybind_function_no_gil([](Executor& self, int64_t position) {
             self.wait_at(position);
           }),
           py::arg("position"))
      .def("send_word", torch::wrap_pybind_function_no_gil([](Executor& self, const at::Tensor& values,
                                                              uint32_t fingerprint, int64_t bucket,
                                                              std::shared_ptr<Instrs> list, int64_t phase) {
             self.send_word(values, fingerprint, bucket, std::move(list), static_cast<Phase>(phase));
           }),
           py::arg("values"), py::arg("fingerprint"), py::arg("bucket"), py::arg("list").none(false),
           py::arg("phase"))
      .def("send_written_word", torch::wrap_pybind_function_no_gil([](Executor& self, at::Tensor word,
                                                                      std::shared_ptr<Instrs> list, int64_t phase) {
             self.send_written_word(std::move(word), std::move(list), static_cast<Phase>(phase));
           }),
           py::arg("word"), py::arg("list").none(false), py::arg("phase"))
      .def("word", &Executor::word, Released())
      .def("read_word", torch::wrap_pybind_function_no_gil([](Executor& self, int64_t position,
                                                              const at::Tensor& values, uint32_t fingerprint) {
             return self.read_word(position, values, fingerprint);
           }),
           py::arg("position"), py::arg("values"), py::arg("fingerprint"))
      .def("buffers", [](const Executor& self) { return to_list(self.buffers()); })
      .def("results", torch::wrap_pybind_function([](const Executor& self) { return to_list(self.results()); }))
      .def("note_magnitude", &Executor::note_magnitude, py::arg("is_finite"), Released())
      .def_property_readonly("is_finite", &Executor::is_finite)
      .def_property_readonly("may_overflow", &Executor::may_overflow)
      .def_property_readonly("position", &Executor::position)
      .def("ready_s", &Executor::ready_s, Released())
      .def("launch_s", &Executor::launch_s, Released());
}
