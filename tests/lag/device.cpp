#include "device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace lag {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kArenaBytes = size_t{16} << 30; // of addresses; pages are used as they are touched
constexpr size_t kGrain = 512;
constexpr int kPoison = 0xFF; // NaN in all floating dtypes, -1 in all integers
constexpr c10::StreamId kStreams = 9; // of a device; the first is the default stream

// Random delays

std::atomic<uint64_t> seed_number{0};
std::atomic<uint64_t> seed_count{0};
std::atomic<double> delay_scale{1.0};

class Delays {
 public:
  explicit Delays(uint64_t stream) : stream_(stream) {}

  void sleep() {
    if (const uint64_t count = seed_count; count != count_) {
      count_ = count;
      random_.seed(seed_number * 1000003 + stream_);
    }
    // Most operations follow at once, some after the time of a kernel, few after a long one.
    const auto kind = random_() % 100;
    const double micros = kind < 70 ? 0 : kind < 95 ? random_() % 200 : random_() % 2000;
    if (micros > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(micros * delay_scale));
    }
  }

 private:
  uint64_t stream_, count_ = ~uint64_t{0};
  std::mt19937_64 random_;
};

// Streams

std::mutex error_lock;
std::string first_error;

void raise_error() {
  std::lock_guard lock(error_lock);
  if (!first_error.empty()) {
    TORCH_CHECK(false, "an operation on the device failed: ", std::exchange(first_error, ""));
  }
}

class StreamThread {
 public:
  explicit StreamThread(uint64_t number) : delays_(number) {
    std::thread([this] { run(); }).detach();
  }

  void issue(std::function<void()> operation) {
    std::lock_guard lock(lock_);
    operations_.push_back(std::move(operation));
    changed_.notify_one();
  }

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below;
    while (true) {
      std::function<void()> operation;
      {
        std::unique_lock lock(lock_);
        changed_.wait(lock, [this] { return !operations_.empty(); });
        operation = std::move(operations_.front());
        operations_.pop_front();
      }
      delays_.sleep();
      try {
        operation();
      } catch (const std::exception& error) {
        std::lock_guard lock(error_lock);
        if (first_error.empty()) {
          first_error = error.what();
        }
      }
    }
  }

  Delays delays_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
};

StreamThread& thread_of(const c10::Stream& stream) {
  // Never destroyed: threads run until the process ends.
  static auto& threads = *new std::map<std::pair<int, int64_t>, std::unique_ptr<StreamThread>>;
  static auto& lock = *new std::mutex;
  std::lock_guard held(lock);
  auto& found = threads[{stream.device_index(), stream.id()}];
  if (found == nullptr) {
    found = std::make_unique<StreamThread>(stream.device_index() * kStreams + stream.id());
  }
  return *found;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::mutex waits_lock;
std::vector<std::string> waits;

void count_wait(const std::string& why) {
  if (!why.empty()) {
    std::lock_guard lock(waits_lock);
    waits.push_back(why);
  }
}

std::mutex counts_lock;
std::map<std::string, size_t> counts;

// Memory

struct Arena {
  char* addresses;
  char* memory;
  Arena() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* none = mmap(nullptr, kArenaBytes, PROT_NONE, flags, -1, 0);
    void* all = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(none != MAP_FAILED && all != MAP_FAILED, "no address space for the device");
    addresses = static_cast<char*>(none);
    memory = static_cast<char*>(all);
  }
};

const Arena& arena() {
  static const Arena found;
  return found;
}

struct Block {
  char* address;
  size_t nbytes;
  c10::Stream stream; // on which it was allocated
  uint64_t graph; // in whose capture, or 0
  std::set<c10::StreamId> others; // that use it
};

// Gives a freed block to the next allocation of its size on its stream, as a caching allocator does:
// at once, unless other streams have recorded its use. A block of a capture serves only that until
// the graph has ended.
class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kLag, current_device);
    if (nbytes == 0) {
      return {nullptr, nullptr, &Memory::ignore, device};
    }
    nbytes = (nbytes + kGrain - 1) / kGrain * kGrain;
    Block* block = take(nbytes, current_stream(current_device));
    return {block->address, block, &Memory::release, device};
  }

  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "copy_data");
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void record(const c10::DataPtr& memory, const c10::Stream& stream) {
    std::lock_guard lock(lock_);
    if (memory.get_deleter() != &Memory::release) {
      return;
    }
    auto* block = static_cast<Block*>(memory.get_context());
    if (stream != block->stream) {
      block->others.insert(stream.id());
    }
  }

  void end_graph(uint64_t number, const std::optional<Moment>& last) {
    std::lock_guard lock(lock_);
    ended_[number] = last;
    for (Block* block : std::exchange(left_[number], {})) {
      leave_graph(block);
      reuse(block);
    }
    for (auto& [key, blocks] : free_) {
      if (std::get<0>(key) == number) {
        for (Block* block : std::exchange(blocks, {})) {
          leave_graph(block);
          reuse(block);
        }
      }
    }
  }

 private:
  static void ignore(void*) {}

  static void release(void* context);

  Block* take(size_t nbytes, const c10::Stream& stream) {
    std::lock_guard lock(lock_);
    reuse_finished();
    const uint64_t graph = number_of_capture(stream);
    auto& free = free_[{graph, stream.device_index(), stream.id(), nbytes}];
    Block* block = nullptr;
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK(next_ + nbytes <= kArenaBytes, "out of memory");
      block = new Block{arena().addresses + next_, nbytes, stream, graph, {}};
      std::memset(reachable(block->address), kPoison, nbytes);
      next_ += nbytes;
    }
    return block;
  }

  void give_back(Block* block) {
    std::lock_guard lock(lock_);
    if (block->graph != 0 && ended_.contains(block->graph)) {
      leave_graph(block);
    }
    if (block->graph != 0) {
      if (block->others.empty() && number_of_capture(block->stream) == block->graph) {
        reuse(block);
      } else {
        left_[block->graph].push_back(block);
      }
      return;
    }
    if (block->others.empty()) {
      reuse(block);
      return;
    }
    std::vector<Moment> ends;
    for (const auto id : std::exchange(block->others, {})) {
      ends.push_back(end_now(c10::Stream(c10::Stream::UNSAFE, block->stream.device(), id)));
    }
    waiting_.emplace_back(block, ends);
  }

  void reuse_finished() {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto& [block, ends] = *it;
      const bool over = std::all_of(ends.begin(), ends.end(), [](auto& end) { return end.is_over(); });
      if (over) {
        reuse(block);
      }
      it = over ? waiting_.erase(it) : it + 1;
    }
  }

  void reuse(Block* block) {
    auto overwrite = [memory = reachable(block->address), nbytes = block->nbytes] {
      std::memset(memory, kPoison, nbytes);
    };
    if (block->graph == 0) {
      issue_now(block->stream, overwrite);
    } else {
      overwrite_in_replays(block->stream, overwrite);
    }
    free_[{block->graph, block->stream.device_index(), block->stream.id(), block->nbytes}].push_back(block);
  }

  void leave_graph(Block* block) {
    if (const auto& last = ended_.at(block->graph)) {
      hold_now(block->stream, *last);
    }
    block->graph = 0;
  }

  std::mutex lock_;
  size_t next_ = kGrain;
  using Key = std::tuple<uint64_t, int, int64_t, size_t>; // of a graph, or 0
  std::map<Key, std::vector<Block*>> free_; // last in, first out
  std::vector<std::pair<Block*, std::vector<Moment>>> waiting_;
  std::map<uint64_t, std::vector<Block*>> left_; // by graph: freed, for no further use there
  std::map<uint64_t, std::optional<Moment>> ended_; // last replays of graphs that have ended
};

Memory& memory() {
  static auto& found = *new Memory;
  return found;
}

void Memory::release(void* context) {
  memory().give_back(static_cast<Block*>(context));
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = std::malloc(std::max(nbytes, size_t{1}));
    std::lock_guard lock(lock_);
    blocks_[static_cast<char*>(data)] = nbytes;
    return {data, data, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &PinnedMemory::release;
  }

  bool holds(const void* data) {
    std::lock_guard lock(lock_);
    auto after = blocks_.upper_bound(static_cast<const char*>(data));
    return after != blocks_.begin() && (--after, data < after->first + after->second);
  }

 private:
  static void release(void* data);

  std::mutex lock_;
  std::map<const char*, size_t> blocks_;
};

PinnedMemory& pinned() {
  static auto& found = *new PinnedMemory;
  return found;
}

void PinnedMemory::release(void* data) {
  {
    std::lock_guard lock(pinned().lock_);
    pinned().blocks_.erase(static_cast<char*>(data));
  }
  std::free(data);
}

// What torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kLag;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kLag, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", int{kDevices}, " devices, not ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index() < 0 ? current_device : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make(device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{0};
    return make(device, 1 + next++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &thread_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    count("events", 1);
    auto* moment = new Moment(end_of(stream));
    moment->device = stream.device_index();
    delete static_cast<Moment*>(std::exchange(*event, moment));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      count("waits", 1);
      hold(stream, *static_cast<Moment*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    forbid_in_captures("query of an event");
    return event == nullptr || static_cast<Moment*>(event)->is_over();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      forbid_in_captures("synchronize of an event");
      count_wait("synchronize of an event");
      static_cast<Moment*>(event)->wait();
      raise_error();
    }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    forbid_in_captures("elapsed time of events");
    const auto& start = *static_cast<Moment*>(first);
    const auto& end = *static_cast<Moment*>(second);
    TORCH_CHECK(start.device == end.device, "elapsed time between events of two devices");
    TORCH_CHECK(start.is_over() && end.is_over(), "elapsed time of an event that is not over");
    return end.ended_ms() - start.ended_ms();
  }
  bool queryStream(const c10::Stream& stream) const override {
    forbid_in_captures("query of a stream");
    return end_of(stream).is_over();
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return recording_of(stream) != nullptr;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(stream, "synchronize of a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count_wait("synchronize of a device");
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      wait_for(make({kLag, device}, id), "");
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static c10::Stream make(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kLag, index(device)}, id);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kLag, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kLag, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kLag, current_device};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
  c10::SetAllocator(kLag, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

struct Moment::State {
  std::mutex lock;
  std::condition_variable changed;
  bool over = false;
  double ms = 0;
};

std::shared_ptr<Moment::State> Moment::make() {
  return std::make_shared<State>();
}

bool Moment::is_over() const {
  TORCH_CHECK(recording == nullptr, "the host asks for an event that was recorded in a capture");
  std::lock_guard lock(state_->lock);
  return state_->over;
}

void Moment::wait() const {
  TORCH_CHECK(recording == nullptr, "the host waits for an event that was recorded in a capture");
  std::unique_lock lock(state_->lock);
  state_->changed.wait(lock, [this] { return state_->over; });
}

void Moment::end() {
  std::lock_guard lock(state_->lock);
  state_->over = true;
  state_->ms = std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
  state_->changed.notify_all();
}

double Moment::ended_ms() const {
  TORCH_CHECK(recording == nullptr, "the host asks for an event that was recorded in a capture");
  std::lock_guard lock(state_->lock);
  return state_->ms;
}

void* reachable(const void* address) {
  return address == nullptr
      ? nullptr
      : arena().memory + (static_cast<const char*>(address) - arena().addresses);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, {kLag, device}, current_streams[device]);
}

void issue_now(const c10::Stream& stream, std::function<void()> operation) {
  thread_of(stream).issue(std::move(operation));
}

Moment end_now(const c10::Stream& stream) {
  Moment moment;
  issue_now(stream, [moment]() mutable { moment.end(); });
  return moment;
}

void hold_now(const c10::Stream& stream, const Moment& moment) {
  issue_now(stream, [moment] { moment.wait(); });
}

void end_memory_of_graph(uint64_t number, const std::optional<Moment>& last) {
  memory().end_graph(number, last);
}

void wait_for(const c10::Stream& stream, const std::string& why) {
  forbid_in_captures(why.empty() ? "a wait of the host" : why);
  count_wait(why);
  end_of(stream).wait();
  raise_error();
}

std::vector<std::string> take_waits() {
  std::lock_guard lock(waits_lock);
  return std::exchange(waits, {});
}

void count(const char* kind, size_t operations, size_t nbytes) {
  std::lock_guard lock(counts_lock);
  counts[kind] += operations;
  if (nbytes > 0) {
    counts[std::strcmp(kind, "collectives") == 0 ? "collective bytes" : "bytes"] += nbytes;
  }
}

std::map<std::string, size_t> take_counts() {
  std::lock_guard lock(counts_lock);
  return std::exchange(counts, {});
}

void record_use(const c10::DataPtr& data, const c10::Stream& stream) {
  memory().record(data, stream);
}

void resize(c10::StorageImpl& storage, size_t nbytes) {
  auto data = memory().allocate(nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0) {
    void *to = reachable(data.get()), *from = reachable(storage.data());
    issue(current_stream(current_device), [to, from, kept] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(nbytes);
}

void seed(uint64_t number, double scale) {
  seed_number = number;
  delay_scale = scale;
  ++seed_count;
}

Operand::Operand(const at::Tensor& tensor)
    : data_(reachable(tensor.storage().data())),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      is_conjugate_(tensor.is_conj()),
      is_negative_(tensor.is_neg()) {
  if (data_ != nullptr) {
    data_ = static_cast<char*>(data_) + tensor.storage_offset() * tensor.element_size();
  }
}

at::Tensor Operand::on_host() const {
  auto tensor = at::from_blob(data_, sizes_, strides_, at::TensorOptions(dtype_));
  tensor._set_conj(is_conjugate_);
  tensor._set_neg(is_negative_);
  return tensor;
}

} // namespace lag
