// A device that lags: every operation runs late, on the thread of a stream.
//
// The memory of the device has two addresses. Tensors hold the first one, which no thread can
// access. Streams use the second one, `reachable`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lag {

constexpr auto kLag = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// Address at which a stream reaches the memory of the device.
void* reachable(const void* address);

class Recording; // of a graph

// An occurrence on a stream, such as the end of all operations that were issued before.
class Moment {
 public:
  bool is_over() const;
  void wait() const;
  void end();
  double ended_ms() const;

  // Of a stream that was captured: the capture, and the place there. It is never over.
  std::shared_ptr<Recording> recording;
  size_t slot = 0;

  c10::DeviceIndex device = -1; // of an event

 private:
  struct State;
  std::shared_ptr<State> state_ = make();
  static std::shared_ptr<State> make();
};

c10::Stream current_stream(c10::DeviceIndex device);

// Run `operation` on the thread of a stream, after those issued before. Its errors are raised at
// the next synchronisation, as on CUDA.
void issue(const c10::Stream& stream, std::function<void()> operation);

// The end of all operations issued on a stream so far.
Moment end_of(const c10::Stream& stream);

// Make a stream wait for a moment.
void hold(const c10::Stream& stream, const Moment& moment);

// As the three above, of streams that are not captured.
void issue_now(const c10::Stream& stream, std::function<void()> operation);
Moment end_now(const c10::Stream& stream);
void hold_now(const c10::Stream& stream, const Moment& moment);

// Call `operation` with the stream. If that is captured: at each replay, with a stream of the graph.
void on_stream(const c10::Stream& stream, std::function<void(const c10::Stream&)> operation);

// The capture of a stream, or null; and its number, or 0.
std::shared_ptr<Recording> recording_of(const c10::Stream& stream);
uint64_t number_of_capture(const c10::Stream& stream);

// Raise an error if a capture does not permit this to the host, as "global" and "thread_local" of CUDA.
void forbid_in_captures(const std::string& what);

// Overwrite freed memory of a capture at this place of each replay. A join need not wait for it.
void overwrite_in_replays(const c10::Stream& stream, std::function<void()> overwrite);

// Let the memory of a graph that has ended serve others, after its last replay.
void end_memory_of_graph(uint64_t number, const std::optional<Moment>& last);

// Block the host until a stream is idle. `why` is counted; empty if the wait stands for nothing that
// a device does.
void wait_for(const c10::Stream& stream, const std::string& why);

// Reasons of the host's waits since the last call.
std::vector<std::string> take_waits();

// Note operations of a kind: "kernels", "copies", "collectives", "events" or "waits" for events, and the
// bytes that they read and write.
void count(const char* kind, size_t operations, size_t nbytes = 0);

// Operations by kind since the last call, with their "bytes" and the "collective bytes".
std::map<std::string, size_t> take_counts();

// Keep a block from reuse until a stream has finished what was issued on it so far. As on CUDA, this
// does nothing if another deleter than the allocator's frees the memory, as that of a slice does.
void record_use(const c10::DataPtr& memory, const c10::Stream& stream);

void resize(c10::StorageImpl& storage, size_t nbytes);

// Start random delays anew. `scale` is a factor of their length.
void seed(uint64_t number, double scale);

// A tensor of the host over the memory of a tensor of the device, for operations on a stream. It keeps
// nothing alive.
class Operand {
 public:
  explicit Operand(const at::Tensor& tensor);
  at::Tensor on_host() const;

 private:
  void* data_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  bool is_conjugate_, is_negative_;
};

} // namespace lag
