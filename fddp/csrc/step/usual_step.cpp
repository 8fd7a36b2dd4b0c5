#include "step/usual_step.h"

#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>

#include "clock.h"
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
void write_word_to(Number* word, const at::Tensor& values, const StepProgram& program, uint32_t fingerprint) {
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

template <class Number>
bool is_sum_of_equals(const Number* sum, const std::vector<Number>& own, int64_t world_size) {
  for (size_t i = 0; i < own.size(); ++i) {
    if (sum[i] != own[i] * static_cast<Number>(world_size)) return false;
  }
  return true;
}

// Call `body<Number>()` with the type of the elements of a control word.
template <class Body>
auto with_number_type(const at::Tensor& word, const Body& body) {
  if (word.scalar_type() == at::kDouble) return body(double{});
  TORCH_CHECK_TYPE(word.scalar_type() == at::kFloat, "a control word has dtype ", word.scalar_type());
  return body(float{});
}

}  // namespace

UsualStep::UsualStep(const StepSetup& setup, const StepMoment& moment, std::shared_ptr<FlightRing> ring,
                     std::vector<at::Tensor> buffers, at::Tensor word, py::object interpreter)
    : program_(setup.program), collectives_(setup.collectives), ring_(std::move(ring)), source_(std::get<2>(moment)),
      buffers_(std::move(buffers)), template_(std::move(word)), fingerprint_(std::get<1>(moment)), factor_(setup.factor),
      number_(std::get<0>(moment)), interpreter_(std::move(interpreter)) {
  TORCH_CHECK_VALUE(buffers_.size() == program_->buckets.size(), "expected ", program_->buckets.size(),
                    " buffers, got ", buffers_.size());
  for (const at::Tensor& buffer : buffers_) {
    TORCH_CHECK_VALUE(buffer.is_cpu() && buffer.is_contiguous(), "a buffer is not contiguous memory of the CPU");
  }
  ready_.assign(buffers_.size(), false);
  launch_of_.assign(program_->positions, -1);
}

UsualStep::~UsualStep() {
  const py::gil_scoped_acquire gil;
  interpreter_ = py::object();
  sources_.clear();
  leaves_ = py::object();
}

bool UsualStep::set_leaves(const py::list& leaves) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(leaves.size()) == program_->leaves, "expected ", program_->leaves,
                    " leaves, got ", leaves.size());
  std::vector<BorrowedTensors> sources;
  sources.reserve(program_->buckets.size());
  for (const StepBucket& bucket : program_->buckets) {
    BorrowedTensors& own = sources.emplace_back(bucket.leaves.size());
    for (const int64_t leaf : bucket.leaves) {
      const at::Tensor* const tensor = tensor_or_none_at(leaves, leaf);
      if (tensor == nullptr) return false;
      own.borrow(*tensor);
    }
  }
  leaves_ = leaves;
  sources_ = std::move(sources);
  return true;
}

void UsualStep::set_counter(std::shared_ptr<GradientCounter> counter) { counter_ = std::move(counter); }

void UsualStep::bucket_ready(int64_t bucket) {
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    ready_.at(bucket) = true;
    if (is_usual_) advance();
    if (is_usual_) return;
  }
  const py::gil_scoped_acquire gil;
  const py::object interpreter = interpreter_();
  if (!interpreter.is_none()) interpreter.attr("bucket_ready")(bucket);
}

bool UsualStep::finish() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  runs_freely_ = true;
  if (is_usual_) advance();
  return is_usual_ && cursor_ == program_->ops.size();
}

void UsualStep::advance() {
  // Results outlive the inference mode of the caller.
  const c10::InferenceMode no_inference(false);
  while (is_usual_ && cursor_ < program_->ops.size()) {
    const StepOp& op = program_->ops[cursor_];
    try {
      if (!runs_freely_ && !may_run(op)) return;
      if (!execute(op)) is_usual_ = false;
    } catch (...) {
      error_ = std::current_exception();
      is_usual_ = false;
    }
  }
}

bool UsualStep::may_run(const StepOp& op) const {
  if (op.needs_report || op.bucket == program_->last_bucket || op.bucket < 0 || !ready_[op.bucket]) return false;
  if (op.kind != StepOpKind::kPack && op.kind != StepOpKind::kAllReduce) return false;
  // Backward never blocks on a collective.
  return std::all_of(op.awaited.begin(), op.awaited.end(), [this](const auto& dep) {
    const Launch* const launch = launch_at(dep.first);
    return launch == nullptr || !launch->pending || launch->pending->done();
  });
}

// Return false to stop before the operation. If an operation raises, the cursor is behind it.
bool UsualStep::execute(const StepOp& op) {
  if (op.needs_report && !has_report_) {
    if (!is_usual_sum()) return false;
    has_report_ = true;
  }
  for (const auto& dep : op.awaited) {
    if (!wait_for(dep.first)) return false;
  }
  switch (op.kind) {
    case StepOpKind::kPack:
      failed_op_ = op.position;
      ++cursor_;  // first: a finalizer that runs meanwhile must not repeat it
      pack(op);
      break;
    case StepOpKind::kControl:
      if (!write_word(op)) return false;
      break;
    case StepOpKind::kAllReduce:
      launch(op, range_of(buffers_[op.bucket], op.start, op.stop), program_->average);
      break;
    case StepOpKind::kUnpack:
      ++cursor_;  // results are slices of the buffer, see `results`
      unpacked_.push_back(op.position);
      break;
    case StepOpKind::kOther:
      return false;
  }
  failed_op_ = -1;
  return true;
}

void UsualStep::pack(const StepOp& op) {
  const StepBucket& bucket = program_->buckets[op.bucket];
  const at::Tensor& buffer = buffers_[op.bucket];
  const int64_t numel = bucket.layout.numel();
  if (numel < bucket.padded_numel) {
    auto* const end = static_cast<char*>(buffer.data_ptr()) + numel * buffer.itemsize();
    std::memset(end, 0, static_cast<size_t>((bucket.padded_numel - numel) * buffer.itemsize()));
  }
  double amax = 0.0;
  if (counter_) {
    amax = counter_->pack(op.bucket, buffer, *bucket.packing, bucket.keep, factor_);
  } else {
    amax = pack_(buffer, bucket.layout, sources_.at(op.bucket).tensors(), factor_);
  }
  if (!(amax <= bucket.max_safe_magnitude)) {
    is_finite_ = is_finite_ && !std::isinf(amax);
    may_overflow_ = true;
  }
}

bool UsualStep::write_word(const StepOp& op) {
  if (may_overflow_ || (counter_ && !counter_->is_complete())) return false;
  if (op.bucket < 0) separate_word_ = at::empty_like(template_);
  word_bucket_ = op.bucket;
  with_number_type(template_, [this](auto number) {
    write_word_to(static_cast<decltype(number)*>(word_data()), template_, *program_, fingerprint_);
  });
  if (op.bucket < 0) {
    launch(op, separate_word_, /*average=*/false);
  } else {
    ++cursor_;
  }
  return true;
}

void* UsualStep::word_data() const {
  const int64_t b = *word_bucket_;
  if (b < 0) return separate_word_.data_ptr();
  return static_cast<char*>(buffers_[b].data_ptr()) + program_->buckets[b].padded_numel * template_.itemsize();
}

void UsualStep::launch(const StepOp& op, const at::Tensor& tensor, bool average) {
  const int64_t record = ring_->launch(source_, number_, op.position).number;
  failed_op_ = op.position;
  ++cursor_;
  auto pending = collectives_->all_reduce(tensor, average, runs_freely_);
  launch_of_[op.position] = static_cast<int64_t>(launches_.size());
  launches_.push_back({op.position, op.bucket, std::move(pending), record});
}

const UsualStep::Launch* UsualStep::launch_at(int64_t position) const {
  const int64_t number = launch_of_[position];
  return number < 0 || launches_[number].is_waited ? nullptr : &launches_[number];
}

std::string UsualStep::text_of(const Launch& launch) const {
  const std::string what = launch.bucket < 0 ? "the control word" : program_->buckets[launch.bucket].text;
  return what + " of step " + std::to_string(number_);
}

bool UsualStep::wait_for(int64_t position) {
  if (launch_at(position) == nullptr) return true;
  Launch* const launch = &launches_[launch_of_[position]];
  const double start_s = perf_counter_s();
  ring_->set_waited(launch->record, start_s);
  failed_op_ = position;
  const bool has_succeeded = !launch->pending || launch->pending->wait([&] { return text_of(*launch); });
  const double end_s = perf_counter_s();
  if (end_s - start_s > kLeastWait_s) waits_.emplace_back(start_s, end_s);
  if (!has_succeeded) return false;
  failed_op_ = -1;
  launch->is_waited = true;
  ring_->set_done(launch->record, end_s);
  return true;
}

// Wait for the control word. Return true if its sum is that of equal words of all ranks.
bool UsualStep::is_usual_sum() {
  if (!word_bucket_ || !wait_for(program_->carrier_op)) return false;
  return with_number_type(template_, [this](auto number) {
    using Number = decltype(number);
    std::vector<Number> own(static_cast<size_t>(template_.numel()));
    write_word_to(own.data(), template_, *program_, fingerprint_);
    return is_sum_of_equals(static_cast<const Number*>(word_data()), own, program_->world_size);
  });
}

std::vector<at::Tensor> UsualStep::results() const {
  std::vector<at::Tensor> results(static_cast<size_t>(program_->leaves));
  for (size_t b = 0; b < buffers_.size(); ++b) {
    const StepBucket& bucket = program_->buckets[b];
    std::vector<at::Tensor> found = slices(buffers_[b], bucket.layout);
    for (size_t i = 0; i < found.size(); ++i) results[bucket.leaves[i]] = std::move(found[i]);
  }
  return results;
}

UsualStep::State UsualStep::take_over() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  is_usual_ = false;
  State state{};
  state.cursor = static_cast<int64_t>(cursor_);
  state.ready = ready_;
  for (Launch& launch : launches_) {
    if (launch.is_waited) continue;
    if (launch.pending) {
      state.in_flight.push_back(std::exchange(launch, {}));
    } else {
      wait_for(launch.position);  // notes its end
    }
  }
  launches_.clear();
  if (word_bucket_) {
    const int64_t b = *word_bucket_;
    state.word =
        b < 0 ? separate_word_ : buffers_[b].narrow(0, program_->buckets[b].padded_numel, template_.numel());
  }
  state.unpacked = unpacked_;
  state.is_finite = is_finite_;
  state.may_overflow = may_overflow_;
  state.error = std::exchange(error_, nullptr);
  state.failed_op = state.error ? failed_op_ : -1;
  sources_.clear();
  counter_.reset();
  return state;
}

}  // namespace fddp

void bind_usual_step(py::module_& m) {
  using namespace fddp;
  m.def("is_profiled", &at::hasCallbacks);
  using Awaited = std::vector<std::pair<int64_t, int64_t>>;
  py::class_<StepBucket>(m, "StepBucket")
      .def(py::init([](std::vector<int64_t> leaves, const Layout& layout, std::shared_ptr<BucketPacking> packing,
                       int64_t padded_numel, double max_safe_magnitude, bool keep, std::string text) {
             return StepBucket{std::move(leaves), layout, std::move(packing), padded_numel, max_safe_magnitude, keep,
                               std::move(text)};
           }),
           py::arg("leaves"), py::arg("layout"), py::arg("packing").none(false), py::arg("padded_numel"),
           py::arg("max_safe_magnitude"), py::arg("keep"), py::arg("text"));
  py::class_<StepOp>(m, "StepOp")
      .def(py::init([](const std::string& kind, int64_t position, int64_t bucket, int64_t start, int64_t stop,
                       Awaited awaited, bool needs_report) {
             const auto known = kind == "pack" ? StepOpKind::kPack
                 : kind == "all_reduce"        ? StepOpKind::kAllReduce
                 : kind == "control"           ? StepOpKind::kControl
                 : kind == "unpack"            ? StepOpKind::kUnpack
                                               : StepOpKind::kOther;
             return StepOp{known, position, bucket, start, stop, std::move(awaited), needs_report};
           }),
           py::arg("kind"), py::arg("position"), py::arg("bucket"), py::arg("start"), py::arg("stop"),
           py::arg("awaited"), py::arg("needs_report"));
  py::class_<StepProgram, std::shared_ptr<StepProgram>>(m, "StepProgram")
      .def(py::init([](std::vector<StepOp> ops, std::vector<StepBucket> buckets, int64_t positions, int64_t leaves,
                       int64_t carrier_op, int64_t last_bucket, int64_t world_size, bool average,
                       int64_t limb_bits, int64_t limbs) {
             return std::make_shared<StepProgram>(StepProgram{std::move(ops), std::move(buckets), positions, leaves,
                                                              carrier_op, last_bucket, world_size, average, limb_bits,
                                                              limbs});
           }),
           py::arg("ops"), py::arg("buckets"), py::arg("positions"), py::arg("leaves"), py::arg("carrier_op"),
           py::arg("last_bucket"), py::arg("world_size"), py::arg("average"), py::arg("limb_bits"),
           py::arg("limbs"));
  py::class_<UsualStep::State>(m, "UsualStepState")
      .def_readonly("cursor", &UsualStep::State::cursor)
      .def_readonly("ready", &UsualStep::State::ready)
      .def_readonly("word", &UsualStep::State::word)
      .def_readonly("unpacked", &UsualStep::State::unpacked)
      .def_readonly("is_finite", &UsualStep::State::is_finite)
      .def_readonly("may_overflow", &UsualStep::State::may_overflow)
      .def_readonly("failed_op", &UsualStep::State::failed_op)
      // Moved, and so is the error: the traceback of an error refers to the state, and the work of a
      // collective to its error, which would close a cycle that the garbage collector cannot see.
      .def("take_in_flight",
           [](UsualStep::State& state) {
             py::list works;
             for (const auto& launch : std::exchange(state.in_flight, {})) {
               works.append(
                   py::make_tuple(launch.position, launch.bucket, launch.pending->to_python(), launch.record));
             }
             return works;
           })
      .def("raise_error", torch::wrap_pybind_function([](UsualStep::State& state) {
             if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
           }));
  py::class_<StepSetup>(m, "StepSetup")
      .def(py::init([](std::shared_ptr<StepProgram> program, std::shared_ptr<Collectives> collectives,
                       double factor) {
             return StepSetup{std::move(program), std::move(collectives), factor};
           }),
           py::arg("program").none(false), py::arg("collectives").none(false), py::arg("factor"))
      .def("begin",
           torch::wrap_pybind_function(
               [](const StepSetup& setup, const StepMoment& moment, std::shared_ptr<FlightRing> ring,
                  std::vector<at::Tensor> buffers, at::Tensor word, const py::object& gradients,
                  py::object interpreter) {
                 auto step = std::make_shared<UsualStep>(setup, moment, std::move(ring), std::move(buffers),
                                                         std::move(word), std::move(interpreter));
                 if (!py::isinstance<py::list>(gradients)) {
                   step->set_counter(gradients.cast<std::shared_ptr<GradientCounter>>());
                 } else if (!step->set_leaves(gradients)) {
                   step.reset();
                 }
                 return step;
               }),
           py::arg("moment"), py::arg("ring").none(false), py::arg("buffers"), py::arg("word"),
           py::arg("gradients").none(false), py::arg("interpreter"));
  py::class_<UsualStep, BucketListener, std::shared_ptr<UsualStep>>(m, "UsualStep")
      .def("__call__", &UsualStep::bucket_ready, py::arg("bucket"), py::call_guard<py::gil_scoped_release>())
      .def("finish", &UsualStep::finish, py::call_guard<py::gil_scoped_release>())
      .def("results", torch::wrap_pybind_function([](const UsualStep& step) { return to_list(step.results()); }))
      .def_property_readonly("waits", [](const UsualStep& step) { return step.waits(); })
      .def("take_over", &UsualStep::take_over, py::call_guard<py::gil_scoped_release>());
}
