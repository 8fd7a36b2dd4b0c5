// Graphs of the device, with the rules of CUDA's: `torch.accelerator.Graph` captures a stream, and
// those that come to wait for it.

#include "device.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace lag {
namespace {

std::recursive_mutex captures_lock;
std::map<std::pair<int, c10::StreamId>, std::shared_ptr<Recording>> captures; // by stream
std::atomic<int> captures_underway{0};
std::vector<c10::Stream> idle_streams; // of graphs that have ended
c10::StreamId next_stream = 1000; // streams of graphs serve nothing else
uint64_t next_number = 1;

c10::Stream stream_for_replays(c10::Device device) {
  for (auto it = idle_streams.begin(); it != idle_streams.end(); ++it) {
    if (it->device() == device) {
      const auto found = *it;
      idle_streams.erase(it);
      return found;
    }
  }
  return c10::Stream(c10::Stream::UNSAFE, device, next_stream++);
}

} // namespace

// Operations of a graph in the order of their issue. Replays issue them again, on streams of their own.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  Recording(const c10::Stream& origin, at::GraphCaptureMode mode)
      : number(next_number++), mode_(mode), thread_(std::this_thread::get_id()), origin_(origin) {}

  void begin() {
    ++captures_underway;
    branch_of(origin_);
  }

  void add(const c10::Stream& stream, std::function<void(const c10::Stream&)> operation) {
    const size_t branch = branch_of(stream);
    ++branches_[branch].seen[branch];
    nodes_.push_back({branch, std::move(operation)});
  }

  void add_unseen(const c10::Stream& stream, std::function<void(const c10::Stream&)> operation) {
    nodes_.push_back({branch_of(stream), std::move(operation)});
  }

  // Note the end of what was recorded for a stream. Return its number.
  size_t note(const c10::Stream& stream) {
    const size_t branch = branch_of(stream), slot = noted_.size();
    noted_.push_back(branches_[branch].seen);
    nodes_.push_back({branch, [this, slot](const c10::Stream& own) { moments_[slot] = end_now(own); }});
    return slot;
  }

  // Let a stream, which thereby joins the capture, wait for what was noted.
  void hold(const c10::Stream& stream, size_t slot) {
    add(stream, [this, slot](const c10::Stream& own) { hold_now(own, moments_[slot]); });
    auto& seen = branches_[branch_of(stream)].seen;
    for (const auto& [branch, count] : noted_[slot]) {
      seen[branch] = std::max(seen[branch], count);
    }
  }

  // Raise if an operation of the host is not allowed. The capture has then failed.
  void forbid(const std::string& what) {
    using Mode = at::GraphCaptureMode;
    const bool is_own = std::this_thread::get_id() == thread_;
    if (mode_ != Mode::Relaxed && (is_own || mode_ != Mode::ThreadLocal)) {
      fail(what + " is not permitted when a stream is capturing");
    }
  }

  [[noreturn]] void fail(const std::string& error) {
    error_ = error_.empty() ? error : error_;
    TORCH_CHECK(false, error);
  }

  void end(const c10::Stream& stream) {
    --captures_underway;
    std::erase_if(captures, [this](const auto& each) { return each.second.get() == this; });
    is_over = true;
    TORCH_CHECK(error_.empty(), "the capture has failed: ", error_);
    TORCH_CHECK(stream == origin_, "the capture was ended on another stream");
    for (size_t branch = 0; branch < branches_.size(); ++branch) {
      auto& seen = branches_[0].seen;
      TORCH_CHECK(
          seen[branch] == branches_[branch].seen[branch],
          "the capture has work that was not joined, of ", branches_[branch].captured);
    }
    moments_.resize(noted_.size());
    is_complete_ = true;
  }

  void replay() {
    TORCH_CHECK(is_complete_, "a graph is replayed that was not captured");
    const auto stream = current_stream(origin_.device_index());
    TORCH_CHECK(recording_of(stream) == nullptr, "a graph is replayed in a capture");
    const auto own = branches_[0].replayed;
    hold_now(own, end_now(stream));
    for (const auto& node : nodes_) {
      node.operation(branches_[node.branch].replayed);
    }
    last_ = end_now(own);
    hold_now(stream, *last_);
  }

  // The end of the last replay.
  std::optional<Moment> last() const {
    return last_;
  }

  void release() {
    const std::lock_guard lock(captures_lock);
    nodes_.clear();
    for (const auto& branch : branches_) {
      idle_streams.push_back(branch.replayed);
    }
    branches_.clear();
  }

  const uint64_t number;
  bool is_over = false;

 private:
  struct Branch {
    c10::Stream captured, replayed;
    std::map<size_t, size_t> seen; // by branch: operations before the end of this one
  };
  struct Node {
    size_t branch;
    std::function<void(const c10::Stream&)> operation;
  };

  size_t branch_of(const c10::Stream& stream) {
    for (size_t branch = 0; branch < branches_.size(); ++branch) {
      if (branches_[branch].captured == stream) {
        return branch;
      }
    }
    if (stream.id() == 0) {
      fail("the default stream can't be captured");
    }
    captures[{stream.device_index(), stream.id()}] = shared_from_this();
    branches_.push_back({stream, stream_for_replays(stream.device()), {}});
    return branches_.size() - 1;
  }

  const at::GraphCaptureMode mode_;
  const std::thread::id thread_;
  const c10::Stream origin_;
  std::vector<Branch> branches_;
  std::vector<Node> nodes_;
  std::vector<std::map<size_t, size_t>> noted_; // `seen` by slot
  std::vector<Moment> moments_; // of the running replay, by slot
  std::optional<Moment> last_;
  std::string error_;
  bool is_complete_ = false;
};

std::shared_ptr<Recording> recording_of(const c10::Stream& stream) {
  if (captures_underway == 0) {
    return nullptr;
  }
  const std::lock_guard lock(captures_lock);
  const auto found = captures.find({stream.device_index(), stream.id()});
  return found == captures.end() ? nullptr : found->second;
}

uint64_t number_of_capture(const c10::Stream& stream) {
  const auto recording = recording_of(stream);
  return recording ? recording->number : 0;
}

void on_stream(const c10::Stream& stream, std::function<void(const c10::Stream&)> operation) {
  if (const auto recording = recording_of(stream)) {
    const std::lock_guard lock(captures_lock);
    recording->add(stream, std::move(operation));
  } else {
    operation(stream);
  }
}

void issue(const c10::Stream& stream, std::function<void()> operation) {
  on_stream(stream, [operation = std::move(operation)](const c10::Stream& own) {
    issue_now(own, operation);
  });
}

void overwrite_in_replays(const c10::Stream& stream, std::function<void()> overwrite) {
  const auto recording = recording_of(stream);
  const std::lock_guard lock(captures_lock);
  recording->add_unseen(stream, [overwrite = std::move(overwrite)](const c10::Stream& own) {
    issue_now(own, overwrite);
  });
}

Moment end_of(const c10::Stream& stream) {
  const auto recording = recording_of(stream);
  if (recording == nullptr) {
    return end_now(stream);
  }
  const std::lock_guard lock(captures_lock);
  Moment moment;
  moment.recording = recording;
  moment.slot = recording->note(stream);
  return moment;
}

void hold(const c10::Stream& stream, const Moment& moment) {
  const auto own = recording_of(stream);
  if (own == nullptr && moment.recording == nullptr) {
    hold_now(stream, moment);
    return;
  }
  const std::lock_guard lock(captures_lock);
  if (own != nullptr && own != moment.recording) {
    own->fail("a stream that is capturing waits for an event from outside of the capture");
  }
  TORCH_CHECK(!moment.recording->is_over, "a stream waits for an event that was recorded in a capture");
  moment.recording->hold(stream, moment.slot);
}

void forbid_in_captures(const std::string& what) {
  if (captures_underway == 0) {
    return;
  }
  const std::lock_guard lock(captures_lock);
  for (const auto& [stream, recording] : std::map(captures)) {
    recording->forbid(what);
  }
}

namespace {

class LagGraph final : public at::GraphImplInterface {
 public:
  explicit LagGraph(const at::GraphImplArgs&) {}

  ~LagGraph() override {
    reset();
  }

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(pool == at::MempoolId_t(0, 0), "graphs of the device share no memory");
    const auto stream = current_stream(c10::impl::VirtualGuardImpl(kLag).getDevice().index());
    TORCH_CHECK(recording_of(stream) == nullptr, "the stream is capturing already");
    const std::lock_guard lock(captures_lock);
    recording_ = std::make_shared<Recording>(stream, mode);
    recording_->begin();
  }

  void capture_end() override {
    const std::lock_guard lock(captures_lock);
    recording_->end(current_stream(c10::impl::VirtualGuardImpl(kLag).getDevice().index()));
  }

  void instantiate() override {}

  void replay() override {
    recording_->replay();
  }

  void reset() override {
    if (const auto recording = std::exchange(recording_, nullptr)) {
      end_memory_of_graph(recording->number, recording->last());
      recording->release();
    }
  }

  at::MempoolId_t pool() const override {
    return {0, recording_->number};
  }

  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  std::shared_ptr<Recording> recording_;
};

} // namespace
} // namespace lag

namespace at {
REGISTER_GRAPH_IMPL(LAG, lag::LagGraph) // the name of the device
} // namespace at
