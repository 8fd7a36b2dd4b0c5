// Hash map from pointers to integers, with open addressing.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fddp {

// A node-based map allocates memory for each entry, which would dominate the cost of a graph
// traversal.
class PointerMap {
 public:
  explicit PointerMap(size_t expected) {
    size_t slots = 16;
    while (slots < 2 * expected) slots *= 2;
    slots_.resize(slots);
  }

  // Insert a non-null pointer. Return true if it is new. An existing entry keeps its value.
  bool insert(const void* pointer, size_t value = 0) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[find_slot(pointer)];
    if (slot.pointer != nullptr) return false;
    slot = {pointer, value};
    ++count_;
    return true;
  }

  // Return the value of a pointer; null if it is not in the map.
  const size_t* find(const void* pointer) const {
    const Slot& slot = slots_[find_slot(pointer)];
    return slot.pointer == nullptr ? nullptr : &slot.value;
  }

 private:
  struct Slot {
    const void* pointer = nullptr;
    size_t value = 0;
  };

  // Return the slot of the pointer, or the slot at which it would be inserted.
  size_t find_slot(const void* pointer) const {
    // Addresses differ in their middle bits. Multiplication by an odd number carries them upwards.
    const uint64_t hash = (reinterpret_cast<uintptr_t>(pointer) >> 4) * 0x9e3779b97f4a7c15u;
    const size_t mask = slots_.size() - 1;
    size_t position = static_cast<size_t>(hash >> 32) & mask;
    while (slots_[position].pointer != nullptr && slots_[position].pointer != pointer) position = (position + 1) & mask;
    return position;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.pointer != nullptr) slots_[find_slot(slot.pointer)] = slot;
    }
  }

  std::vector<Slot> slots_;  // size is a power of two, load at most one half
  size_t count_ = 0;
};

}  // namespace fddp
