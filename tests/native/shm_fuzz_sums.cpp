// Fuzzing of sums, which are compared with plain loops.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/half.h"
#include "../../fddp/csrc/shm/sums.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace shm_fuzz {

using namespace fddp::shm;

namespace {

Drawn draw_recipe(Bytes& in) {
  Drawn drawn{};
  drawn.options.number_type = static_cast<NumberType>(in.byte() % 8);
  drawn.options.average = in.byte() % 2 != 0 && drawn.options.number_type <= NumberType::kBF16;
  drawn.n = 2 + in.byte() % 6;
  return drawn;
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Sum of one number over the summands in rank order.
template <class Wide, class Read>
Wide sum_in_order(size_t n, const Read& read) {
  Wide total = read(0);
  for (size_t s = 1; s < n; ++s) total = static_cast<Wide>(total + read(s));
  return total;
}

// One of the sums of one number over the summands that a tree leaves.
template <class Wide, class Read>
Wide sum_along(const SumTree& tree, size_t place, const Read& read) {
  std::vector<Wide> stack;
  for (size_t s = 0; s < tree.additions.size(); ++s) {
    stack.push_back(read(s));
    for (uint32_t a = 0; a < tree.additions[s]; ++a) {
      const Wide right = stack.back();
      stack.pop_back();
      stack.back() = static_cast<Wide>(stack.back() + right);
    }
  }
  require(tree.sums() == stack.size(), "a tree leaves another number of sums");
  return stack[place];
}

template <class T, class Wide, class Widen, class Narrow>
void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count, const Widen& widen_, const Narrow& narrow_) {
  for (int64_t i = begin; i < begin + count; ++i) {
    const auto read = [&](size_t s) -> Wide {
      return widen_(load<T>(before[s].data() + i * static_cast<int64_t>(sizeof(T))));
    };
    Wide total = drawn.options.tree == nullptr
                     ? sum_in_order<Wide>(drawn.n, read)
                     : sum_along<Wide>(*drawn.options.tree, drawn.place, read);
    if constexpr (std::is_floating_point_v<Wide>) {
      if (drawn.options.average) total = total / static_cast<Wide>(drawn.n);
      if (std::isnan(total)) continue;  // the bits of a NaN are unspecified
    }
    const T due = narrow_(total);
    const char* const is = target + i * static_cast<int64_t>(sizeof(T));
    require(std::memcmp(is, &due, sizeof due) == 0, "a sum is wrong");
  }
}

}  // namespace

void check_sum(
    const Drawn& drawn, const std::vector<std::vector<char>>& before, const char* target,
    int64_t begin, int64_t count) {
  const auto same = [](auto value) { return value; };
  const auto half = [](float value) {
    Half narrowed;
    narrow(value, narrowed);
    return narrowed;
  };
  const auto brain = [](float value) {
    BFloat16 narrowed;
    narrow(value, narrowed);
    return narrowed;
  };
  const auto wide = [](auto value) { return widen(value); };
  switch (drawn.options.number_type) {
    case NumberType::kF64:
      return check_sum<double, double>(drawn, before, target, begin, count, same, same);
    case NumberType::kF32:
      return check_sum<float, float>(drawn, before, target, begin, count, same, same);
    case NumberType::kF16:
      return check_sum<Half, float>(drawn, before, target, begin, count, wide, half);
    case NumberType::kBF16:
      return check_sum<BFloat16, float>(drawn, before, target, begin, count, wide, brain);
    case NumberType::kU8:
    case NumberType::kI8:
      return check_sum<uint8_t, uint8_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kI32:
      return check_sum<uint32_t, uint32_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kI64:
      return check_sum<uint64_t, uint64_t>(drawn, before, target, begin, count, same, same);
    case NumberType::kOpaque:
      return;
  }
}

void fuzz_sums(Bytes in) {
  const Drawn drawn = draw_recipe(in);
  const uint64_t item = number_bytes(drawn.options.number_type);
  const auto numbers = static_cast<int64_t>(in.size() % 5000);
  const auto begin = static_cast<int64_t>(in.size()) % (numbers + 1);
  const int64_t count = numbers - begin;
  const uint64_t bytes = static_cast<uint64_t>(numbers) * item;
  const size_t n_targets = in.byte() % 4 == 0 ? 1 : drawn.n;
  std::vector<ExactBuffer> sources;
  std::vector<std::vector<char>> before;
  std::vector<char*> pointers;
  for (size_t s = 0; s < drawn.n; ++s) {
    sources.emplace_back(bytes, in.byte() % 4 == 0 ? in.byte() % 9 : 0);
    fill(in, sources.back().data(), bytes);
    before.emplace_back(sources.back().data(), sources.back().data() + bytes);
    pointers.push_back(sources.back().data());
  }
  sum(drawn.options, {pointers.data(), drawn.n, pointers.data(), n_targets}, begin, count);
  for (size_t t = 0; t < n_targets; ++t) check_sum(drawn, before, pointers[t], begin, count);
  for (size_t s = 0; s < drawn.n; ++s) {
    const uint64_t kept = s < n_targets ? static_cast<uint64_t>(begin) * item : bytes;
    require(
        kept == 0 || std::memcmp(pointers[s], before[s].data(), kept) == 0,
        "memory outside of the sum was written");
  }
}

}  // namespace shm_fuzz
