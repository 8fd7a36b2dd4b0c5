// Fuzzing of algorithms: all members run in one thread, one after the other, on buffers of exact
// size.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/algorithms.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

namespace shm_fuzz {

using namespace fddp::shm;

namespace {

// Random tree over summands of `n` members, which leaves one sum or several.
std::shared_ptr<const SumTree> draw_tree(Bytes& in, size_t n) {
  SumTree tree;
  uint32_t height = 0;
  for (size_t m = 0; m < n; ++m) {
    tree.summands.push_back(1 + in.byte() % 3);
    for (uint32_t r = 0; r < tree.summands.back(); ++r) {
      const uint32_t times = in.byte() % (height + 1);
      tree.additions.push_back(times);
      height += 1 - times;
    }
  }
  if (in.byte() % 2 == 0) tree.additions.back() += height - 1;
  require(tree.is_valid(n), "a valid tree is refused");
  return std::make_shared<const SumTree>(tree);
}

}  // namespace

void fuzz_algorithms(Bytes in) {
  const size_t n = 2 + in.byte() % 4;
  Signature signature = draw_signature(in, n);
  std::shared_ptr<const SumTree> tree;
  if (signature.kind == Kind::kReduceScatter && signature.reduction == Reduction::kSum && in.byte() % 2 == 0) {
    tree = draw_tree(in, n);
    const auto pieces = static_cast<int64_t>(n * tree->rows());
    signature.units = signature.units / pieces * pieces;
    signature.tree = tree->digest();
  }
  const uint64_t bytes = signature.bytes();
  std::vector<ExactBuffer> own;
  std::vector<ExactBuffer> staging;
  std::vector<MemberData> member_data;
  std::vector<std::vector<char>> before;
  for (size_t m = 0; m < n; ++m) {
    own.emplace_back(bytes, 0);
    fill(in, own.back().data(), bytes);
    before.emplace_back(own.back().data(), own.back().data() + bytes);
    const bool staged = in.byte() % 2 == 0;
    staging.emplace_back(staged ? 2 * kSegmentBytes : 0, 0);
    member_data.push_back(
        staged ? MemberData{DataLocation::kStaged, staging.back().data()}
               : MemberData{DataLocation::kArena, own.back().data()});
  }
  std::deque<TensorAlgorithm> algorithms;
  for (size_t m = 0; m < n; ++m) {
    algorithms.emplace_back(signature, own[m].data(), nullptr, m, member_data, tree);
  }
  for (int64_t segment = 0; segment < algorithms[0].segments(); ++segment) {
    for (size_t m = 0; m < n; ++m) algorithms[m].copy_in(segment);
    for (size_t m = 0; m < n; ++m) {
      for (size_t other = 0; other < n; ++other) {
        const ByteRange part = algorithms[m].accessed_range(other);
        require(part.begin <= bytes && part.bytes <= bytes - part.begin, "an access out of bounds");
      }
      algorithms[m].run(segment);
    }
    for (size_t m = 0; m < n; ++m) algorithms[m].copy_out(segment);
  }
  if (signature.kind == Kind::kBroadcast) {
    for (size_t m = 0; m < n; ++m) {
      require(
          bytes == 0 || std::memcmp(own[m].data(), before[signature.src].data(), bytes) == 0,
          "a broadcast is wrong");
    }
  } else if (signature.kind == Kind::kAllReduce) {
    const Drawn drawn = {{signature.number_type, signature.reduction == Reduction::kAverage}, n};
    for (size_t m = 0; m < n; ++m) check_sum(drawn, before, own[m].data(), 0, signature.units);
  } else if (tree != nullptr) {
    const size_t rows = tree->rows();
    const size_t row_bytes = bytes / n / rows;
    Drawn drawn = {{signature.number_type, false, tree.get()}, tree->additions.size()};
    for (size_t m = 0; m < n; ++m) {
      std::vector<std::vector<char>> summands;
      for (size_t other = 0; other < n; ++other) {
        for (size_t r = 0; r < tree->summands[other]; ++r) {
          const char* const row = before[other].data() + (m * rows + r) * row_bytes;
          summands.emplace_back(row, row + row_bytes);
        }
      }
      const auto count = static_cast<int64_t>(row_bytes / signature.unit_bytes);
      for (drawn.place = 0; drawn.place < tree->sums(); ++drawn.place) {
        const char* const sum = own[m].data() + (m * rows + drawn.place) * row_bytes;
        check_sum(drawn, summands, sum, 0, count);
      }
    }
  } else if (signature.kind == Kind::kAllToAll) {
    const uint64_t chunk = bytes / n;
    for (size_t m = 0; m < n; ++m) {
      for (size_t other = 0; other < n; ++other) {
        require(
            std::equal(
                own[m].data() + other * chunk, own[m].data() + (other + 1) * chunk,
                before[other].data() + m * chunk),
            "an all-to-all is wrong");
      }
    }
  }
}

}  // namespace shm_fuzz
