#include "autograd/gradient_placement.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "tensor/checks.h"
#include "tensor/kept_slices.h"

namespace fddp {
namespace {

// Placement of the backward pass on this thread.
thread_local bool is_active = false;  // readable while thread-local objects are destroyed
struct ActivePlacement {
  std::shared_ptr<GradientPlacement> placement;
  ~ActivePlacement() { is_active = false; }
};
thread_local ActivePlacement active;

// Owners of memory that was served, by address. As torch's own memory is, it is released by its
// address alone: kernels take it from the allocator without a tensor around it.
class ServedMemory {
 public:
  void add(void* data, std::shared_ptr<void> owner) {
    const std::lock_guard<std::mutex> lock(mutex_);
    owners_[data] = std::move(owner);
  }

  // Return the owner, or null if the memory was not served.
  std::shared_ptr<void> remove(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = owners_.find(data);
    if (found == owners_.end()) return nullptr;
    std::shared_ptr<void> owner = std::move(found->second);
    owners_.erase(found);
    return owner;
  }

  // Never destroyed: tensors may be released when the process ends.
  static ServedMemory& instance() {
    static auto* const memory = new ServedMemory();
    return *memory;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<void>> owners_;
};

void release_served(void* data) { ServedMemory::instance().remove(data); }

// Allocator of CPU tensors, in front of the one that was installed before.
class PlacingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return is_active ? active.placement->allocate(nbytes, *others()) : others()->allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }

  static c10::Allocator* others() {
    static c10::Allocator* const allocator = c10::GetCPUAllocator();
    return allocator;
  }

 private:
  static void release_raw(void* data) {
    if (!ServedMemory::instance().remove(data)) others()->raw_deallocate(data);
  }
};

void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    PlacingAllocator::others();
    // Never destroyed: storages refer to it until the process ends.
    c10::SetCPUAllocator(new PlacingAllocator(), /*priority=*/1);
  });
}

// Copy the storage to other memory. Return a storage with its old memory.
c10::Storage exchange_memory(const c10::Storage& storage) {
  const size_t nbytes = storage.nbytes();
  c10::DataPtr memory = PlacingAllocator::others()->allocate(nbytes);
  std::memcpy(memory.get(), storage.data(), nbytes);
  c10::DataPtr old = storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
  return {c10::Storage::use_byte_size_t(), nbytes, std::move(old), /*allocator=*/nullptr, /*resizable=*/false};
}

// Return true if nothing refers to the memory of `grad` but autograd, which is about to drop it.
bool is_alone(const at::Tensor& grad, const PassedGradient& passed) {
  int64_t owners = 1;
  if (passed.tensor.defined() && passed.tensor.is_alias_of(grad)) {
    const bool is_view = passed.tensor.is_view();
    if (passed.has_further_hooks || (is_view && passed.tensor._base().use_count() != 1)) return false;
    owners += is_view ? 2 : 1;
  }
  // Lazy clones have storages of their own over the same memory, and another deleter.
  const c10::DataPtr& memory = grad.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const auto found = static_cast<int64_t>(grad.storage().use_count());
  return memory.get_deleter() == &release_served && grad.use_count() == 1 && found == owners;
}

}  // namespace

std::optional<PlacementHistory::Allocation> PlacementHistory::prediction(int64_t leaf) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(leaf);
  return found == known_.end() ? std::nullopt : std::optional<Allocation>(found->second);
}

void PlacementHistory::learn(int64_t leaf, Allocation allocation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto misses = misses_.find(leaf);
  if (misses == misses_.end() || misses->second < kMostMisses) known_[leaf] = allocation;
}

void PlacementHistory::hit(int64_t leaf) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!misses_.empty()) misses_.erase(leaf);
}

void PlacementHistory::miss(int64_t leaf) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++misses_[leaf];
  known_.erase(leaf);
}

GradientPlacement::GradientPlacement(std::shared_ptr<PlacementHistory> history, std::vector<PlacementSlot> slots)
    : history_(std::move(history)) {
  places_.reserve(slots.size());
  std::unordered_map<const c10::TensorImpl*, bool> is_movable;  // by buffer
  for (PlacementSlot& slot : slots) {
    const size_t nbytes = slot.nbytes();
    auto size = std::find_if(sizes_.begin(), sizes_.end(), [&](const Size& s) { return s.nbytes == nbytes; });
    if (size == sizes_.end()) size = sizes_.insert(sizes_.end(), Size{nbytes});
    const auto expected = history_->prediction(slot.leaf);
    if (expected && expected->nbytes == nbytes) size->predicted.emplace(expected->number, places_.size());
    place_of_.emplace(slot.leaf, places_.size());
    const auto [movable, is_new] = is_movable.try_emplace(slot.buffer.unsafeGetTensorImpl(), false);
    if (is_new) movable->second = is_unused(slot.buffer);  // a bucket with views can't be moved
    const bool is_open = movable->second;
    places_.push_back({std::move(slot), is_open});
  }
}

std::shared_ptr<GradientPlacement> GradientPlacement::begin(
    std::shared_ptr<PlacementHistory> history, std::vector<PlacementSlot> slots) {
  install_allocator();
  auto placement = std::shared_ptr<GradientPlacement>(new GradientPlacement(std::move(history), std::move(slots)));
  active.placement = placement;
  is_active = true;
  return placement;
}

c10::DataPtr GradientPlacement::allocate(size_t nbytes, c10::Allocator& others) {
  // Outside of backward, and with create_graph=True, tensors may be kept for long.
  if (nbytes < kLeastBytes || c10::GradMode::is_enabled()) return others.allocate(nbytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto size = std::find_if(sizes_.begin(), sizes_.end(), [&](const Size& s) { return s.nbytes == nbytes; });
  if (size == sizes_.end()) return others.allocate(nbytes);
  const int64_t number = size->count++;
  const auto predicted = size->predicted.find(number);
  const bool is_served = predicted != size->predicted.end() && places_[predicted->second].is_open &&
      closed_.count(places_[predicted->second].bucket) == 0;
  c10::DataPtr memory = is_served ? serve(predicted->second) : others.allocate(nbytes);
  records_.push_back({memory.get(), {nbytes, number}});
  return memory;
}

c10::DataPtr GradientPlacement::serve(size_t index) {
  Place& place = places_[index];
  auto claim = std::make_shared<Claim>(Claim{place.buffer.storage()});
  place.claim = claim;
  place.is_open = false;
  served_.push_back(index);
  char* const data = place.data();
  ServedMemory::instance().add(data, std::move(claim));
  return {data, data, &release_served, place.buffer.device()};
}

bool GradientPlacement::arrive(int64_t leaf, int64_t bucket, const at::Tensor& grad, const PassedGradient& passed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool has_storage = grad.layout() == at::kStrided && grad.has_storage();
  const void* const data = has_storage ? grad.storage().data() : nullptr;
  const auto found = place_of_.find(leaf);
  drop_unused();
  if (found != place_of_.end()) {
    Place& place = places_[found->second];
    place.is_open = false;
    learn(place, data);
    const auto served = std::find(served_.begin(), served_.end(), found->second);
    const bool is_in_slot = served != served_.end() && data == place.data() && is_linear(grad, place.slot());
    if (is_in_slot && is_alone(grad, passed)) {
      history_->hit(leaf);
      served_.erase(served);
      return true;
    }
  }
  const bool is_misplaced = std::any_of(served_.begin(), served_.end(), [&](size_t index) {
    const Place& other = places_[index];
    return other.bucket == bucket && (other.leaf == leaf || other.data() == data);
  });
  if (is_misplaced) move_bucket(bucket);
  return false;
}

void GradientPlacement::learn(const Place& place, const void* data) {
  const auto record = std::find_if(records_.rbegin(), records_.rend(), [&](const Record& r) { return r.data == data; });
  if (record != records_.rend() && record->allocation.nbytes == place.nbytes()) {
    history_->learn(place.leaf, record->allocation);
  }
}

// Forget the places whose memory no tensor uses any more.
void GradientPlacement::drop_unused() {
  const auto is_unused = [this](size_t index) { return places_[index].claim.expired(); };
  served_.erase(std::remove_if(served_.begin(), served_.end(), is_unused), served_.end());
}

// Exchange the memory of a bucket. The tensors in its slots keep the old memory.
void GradientPlacement::move_bucket(int64_t bucket) {
  std::optional<c10::Storage> old;
  for (const size_t index : served_) {
    Place& place = places_[index];
    const std::shared_ptr<Claim> claim = place.claim.lock();
    if (place.bucket != bucket || !claim) continue;
    if (!old) old = exchange_memory(place.buffer.storage());
    claim->memory = *old;
    place.claim.reset();
    history_->miss(place.leaf);
  }
  drop_unused();
}

void GradientPlacement::close(int64_t bucket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_.insert(bucket);
  move_bucket(bucket);
}

void GradientPlacement::end() {
  if (is_active && active.placement.get() == this) is_active = false;
  std::vector<Place> places;  // released without the mutex: a buffer known to Python may need the GIL
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!served_.empty()) {
    move_bucket(places_[served_.back()].bucket);
    drop_unused();
  }
  places_.swap(places);
  place_of_.clear();
  sizes_.clear();
  records_.clear();
}

}  // namespace fddp
