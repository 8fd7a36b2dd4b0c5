// Pointers in one flat table, each with a number.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fddp {

// A node-based map allocates for each entry, which is most of what walking a graph would cost.
class PointerTable {
 public:
  explicit PointerTable(size_t expected) {
    size_t slots = 16;
    while (slots < 2 * expected) slots *= 2;
    slots_.resize(slots);
  }

  // Whether the pointer, which is not null, is new; one that is known keeps its number.
  bool add(const void* pointer, size_t number = 0) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[place_of(pointer)];
    if (slot.pointer != nullptr) return false;
    slot = {pointer, number};
    ++count_;
    return true;
  }

  // The number of a pointer; null where it is not known.
  const size_t* find(const void* pointer) const {
    const Slot& slot = slots_[place_of(pointer)];
    return slot.pointer == nullptr ? nullptr : &slot.number;
  }

 private:
  struct Slot {
    const void* pointer = nullptr;
    size_t number = 0;
  };

  // Where the pointer is, or would be.
  size_t place_of(const void* pointer) const {
    // Allocations differ in their middle bits; a product by an odd number carries these up.
    const uint64_t mixed = (reinterpret_cast<uintptr_t>(pointer) >> 4) * 0x9e3779b97f4a7c15u;
    const size_t mask = slots_.size() - 1;
    size_t place = static_cast<size_t>(mixed >> 32) & mask;
    while (slots_[place].pointer != nullptr && slots_[place].pointer != pointer) place = (place + 1) & mask;
    return place;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.pointer != nullptr) slots_[place_of(slot.pointer)] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two of them, at most half of them taken
  size_t count_ = 0;
};

}  // namespace fddp
