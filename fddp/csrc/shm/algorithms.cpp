#include "algorithms.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fddp::shm {
namespace {

// Upper limit of copied operations, summed over members. Each member reads all copies, so the
// traffic grows with the square of the number of members. With a processor for each rank, two ranks
// are faster in place from 8 KiB on (1 against 5 us at 32 KiB). But a copy avoids waking the
// progress thread, and it avoids the second of two sleeps if ranks outnumber processors (31 against
// 60 us at 32 KiB for 4 ranks on 2 processors). The limit is therefore higher.
constexpr uint64_t kMaxCopiedBytes = uint64_t{64} << 10;

void copy(char* to, const char* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// Swap two ranges that do not overlap, through a buffer that fits into the first-level cache.
void swap(char* a, char* b, int64_t bytes) {
  char buffer[4096];
  for (int64_t done = 0; done < bytes; done += sizeof buffer) {
    const int64_t n = std::min<int64_t>(sizeof buffer, bytes - done);
    copy(buffer, a + done, n);
    copy(a + done, b + done, n);
    copy(b + done, buffer, n);
  }
}

// Return true if an operation exchanges a range of every chunk in each segment.
bool cuts_each_chunk(Kind kind) {
  return kind == Kind::kReduceScatter || kind == Kind::kAllToAll;
}

// Return the first unit of the part of `member`. Parts begin at multiples of a cache line, so that
// no two members write to the same line.
int64_t part_begin(int64_t units, uint32_t unit_bytes, size_t members, size_t member) {
  if (member == members) return units;
  const int64_t grain = std::max<int64_t>(1, kCacheLineBytes / unit_bytes);
  const int64_t even = units / static_cast<int64_t>(members) * static_cast<int64_t>(member) +
                       units % static_cast<int64_t>(members) * static_cast<int64_t>(member) /
                           static_cast<int64_t>(members);
  return even / grain * grain;
}

}  // namespace

uint64_t max_copied_bytes(size_t members) {
  return kMaxCopiedBytes / members;
}

bool is_copied(const Signature& signature, size_t members) {
  return signature.kind != Kind::kExchange && signature.bytes() <= max_copied_bytes(members);
}

ByteRange copied_part(const Signature& signature, size_t members, size_t member) {
  const uint64_t chunk = signature.bytes() / members;
  switch (signature.kind) {
    case Kind::kAllGather:
      return {chunk * member, chunk};
    case Kind::kBroadcast:
      return {0, member == signature.src ? signature.bytes() : 0};
    case Kind::kAllReduce:
    case Kind::kReduceScatter:
    case Kind::kReduce:
    case Kind::kExchange:
    case Kind::kAllToAll:
      break;
  }
  return {0, signature.bytes()};
}

bool is_shared(const Signature& signature, size_t member) {
  return signature.kind != Kind::kBroadcast || member == signature.src;
}

TensorAlgorithm::TensorAlgorithm(
    const Signature& signature, char* own, char* result, size_t index,
    std::vector<MemberData> member_data, std::shared_ptr<const SumTree> tree)
    : signature_(signature),
      own_(own),
      result_(result),
      index_(index),
      member_data_(std::move(member_data)),
      tree_(std::move(tree)),
      staged_(false),
      direct_(
          is_reduction(signature.kind) &&
          reinterpret_cast<uintptr_t>(own) % signature.unit_bytes == 0) {
  for (size_t m = 0; m < members(); ++m) staged_ = staged_ || is_staged(m);
  const int64_t whole = has_chunks(signature.kind) ? row() : signature.units;
  const auto room = static_cast<int64_t>(kSegmentBytes / signature.unit_bytes);
  // A segment has a range of every row of every chunk.
  const int64_t most = cuts_each_chunk(signature.kind)
                           ? room / (static_cast<int64_t>(members()) * rows())
                           : room;
  segment_units_ = staged_ ? most : std::max<int64_t>(whole, 1);
  segments_ = std::max<int64_t>(1, (whole + segment_units_ - 1) / segment_units_);
}

bool TensorAlgorithm::is_staged(size_t member) const {
  return is_shared(signature_, member) && member_data_[member].location == DataLocation::kStaged;
}

TensorAlgorithm::UnitRange TensorAlgorithm::range_of(int64_t segment) const {
  const int64_t whole = has_chunks(signature_.kind) ? row() : signature_.units;
  const int64_t begin = segment * segment_units_;
  return {begin, std::min(segment_units_, whole - begin)};
}

TensorAlgorithm::UnitRange TensorAlgorithm::own_part(UnitRange range) const {
  const int64_t begin = part_begin(range.count, signature_.unit_bytes, members(), index_);
  const int64_t end = part_begin(range.count, signature_.unit_bytes, members(), index_ + 1);
  return {begin, end - begin};
}

// Address of a unit that this member reads or writes, in the memory of `member`: at `unit` of the
// tensor, or at `staged_unit` of the staging buffer.
char* TensorAlgorithm::at(size_t member, int64_t segment, int64_t unit, int64_t staged_unit) const {
  if (!is_staged(member)) return member_data_[member].memory + bytes(unit);
  if (direct_ && member == index_) return own_ + bytes(unit);
  return staged_at(member, segment, staged_unit);
}

char* TensorAlgorithm::staged_at(size_t member, int64_t segment, int64_t staged_unit) const {
  const uint64_t half = segment % 2 == 0 ? 0 : kSegmentBytes;
  return member_data_[member].memory + half + bytes(staged_unit);
}

std::vector<char*> TensorAlgorithm::summands(int64_t segment, int64_t begin) const {
  std::vector<char*> found;
  for (size_t m = 0; m < members(); ++m) {
    const int64_t count = tree_ == nullptr ? 1 : tree_->summands[m];
    for (int64_t r = 0; r < count; ++r) {
      const int64_t number = static_cast<int64_t>(index_) * rows() + r;
      found.push_back(at(m, segment, number * row() + begin, number * segment_units_));
    }
  }
  return found;
}

void TensorAlgorithm::run_copied() const {
  const auto n = static_cast<int64_t>(members());
  if (signature_.kind == Kind::kAllGather) {
    for (int64_t r = 0; r < n; ++r) {
      if (static_cast<size_t>(r) == index_) continue;
      copy(own_ + bytes(r * chunk()), member_data_[static_cast<size_t>(r)].memory, bytes(chunk()));
    }
    return;
  }
  if (signature_.kind == Kind::kBroadcast) {
    if (index_ == signature_.src) return;
    copy(own_, member_data_[signature_.src].memory, bytes(signature_.units));
    return;
  }
  if (signature_.kind == Kind::kReduce && index_ != signature_.src) return;
  if (signature_.kind == Kind::kReduceScatter) {
    const std::vector<char*> targets = results(0);
    reduce_into(summands(0, 0), targets.data(), targets.size(), {0, row()});
    return;
  }
  if (signature_.kind == Kind::kAllToAll) {
    const int64_t own_chunk = static_cast<int64_t>(index_) * chunk();
    for (int64_t m = 0; m < n; ++m) {
      if (static_cast<size_t>(m) == index_) continue;
      const char* const theirs = member_data_[static_cast<size_t>(m)].memory;
      copy(own_ + bytes(m * chunk()), theirs + bytes(own_chunk), bytes(chunk()));
    }
    return;
  }
  std::vector<char*> sources;
  sources.reserve(members());
  for (const MemberData& place : member_data_) sources.push_back(place.memory);
  char* target = own_;
  reduce_into(sources, &target, 1, {0, signature_.units});
}

void TensorAlgorithm::copy_in(int64_t segment) const {
  if (!is_staged(index_)) return;
  const UnitRange range = range_of(segment);
  const auto own_chunk = static_cast<int64_t>(index_) * chunk();
  switch (signature_.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      copy_segment(segment, /*in=*/true);
      return;
    case Kind::kBroadcast:
      copy(staged_at(index_, segment, 0), own_ + bytes(range.begin), bytes(range.count));
      return;
    case Kind::kAllGather:
      copy(
          staged_at(index_, segment, 0), own_ + bytes(own_chunk + range.begin),
          bytes(range.count));
      return;
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      for (int64_t r = 0; r < static_cast<int64_t>(members()) * rows(); ++r) {
        if (direct_ && r / rows() == static_cast<int64_t>(index_)) continue;
        copy(
            staged_at(index_, segment, r * segment_units_), own_ + bytes(r * row() + range.begin),
            bytes(range.count));
      }
      return;
    case Kind::kExchange:
      return;
  }
}

void TensorAlgorithm::copy_segment(int64_t segment, bool in) const {
  const UnitRange range = range_of(segment);
  const auto copy_part = [&](int64_t begin, int64_t end) {
    char* const staged = staged_at(index_, segment, begin);
    char* const own = own_ + bytes(range.begin + begin);
    copy(in ? staged : own, in ? own : staged, bytes(end - begin));
  };
  const UnitRange part = direct_ ? own_part(range) : UnitRange{0, 0};
  copy_part(0, part.begin);
  copy_part(part.begin + part.count, range.count);
}

// See [Note: write ownership].
void TensorAlgorithm::run(int64_t segment) const {
  const UnitRange range = range_of(segment);
  std::vector<char*> sources;
  sources.reserve(members());
  switch (signature_.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const UnitRange part = own_part(range);
      for (size_t m = 0; m < members(); ++m) {
        sources.push_back(at(m, segment, range.begin + part.begin, part.begin));
      }
      if (signature_.kind == Kind::kAllReduce) {
        reduce_into(sources, sources.data(), members(), {0, part.count});
      } else {
        reduce_into(sources, &sources[signature_.src], 1, {0, part.count});
      }
      return;
    }
    case Kind::kReduceScatter: {
      const std::vector<char*> targets = results(range.begin);
      reduce_into(
          summands(segment, range.begin), targets.data(), targets.size(), {0, range.count});
      return;
    }
    case Kind::kAllGather:
      // Each member begins with its neighbour, so that reads are spread over all members.
      for (size_t step = 1; step < members(); ++step) {
        const size_t m = (index_ + step) % members();
        const int64_t begin = static_cast<int64_t>(m) * chunk() + range.begin;
        copy(own_ + bytes(begin), at(m, segment, begin, 0), bytes(range.count));
      }
      return;
    case Kind::kBroadcast:
      if (index_ == signature_.src) return;
      copy(
          own_ + bytes(range.begin), at(signature_.src, segment, range.begin, 0),
          bytes(range.count));
      return;
    case Kind::kAllToAll:
      for (size_t step = 1; step < members(); ++step) {
        const size_t m = (index_ + step) % members();
        if (!swaps_with(m)) continue;
        const auto other = static_cast<int64_t>(m);
        const auto own = static_cast<int64_t>(index_);
        swap(
            at(index_, segment, other * chunk() + range.begin, other * segment_units_),
            at(m, segment, own * chunk() + range.begin, own * segment_units_),
            bytes(range.count));
      }
      return;
    case Kind::kExchange:
      return;
  }
}

// Return true if this member, rather than the other, swaps the chunks of the two in an all-to-all.
// Each member swaps about half of its pairs.
bool TensorAlgorithm::swaps_with(size_t member) const {
  return (index_ < member) == ((index_ + member) % 2 == 0);
}

void TensorAlgorithm::copy_out(int64_t segment) const {
  if (!is_staged(index_)) return;
  const UnitRange range = range_of(segment);
  if (signature_.kind == Kind::kAllToAll) {
    for (int64_t c = 0; c < static_cast<int64_t>(members()); ++c) {
      copy(
          own_ + bytes(c * chunk() + range.begin), staged_at(index_, segment, c * segment_units_),
          bytes(range.count));
    }
  }
  const bool has_result =
      signature_.kind == Kind::kAllReduce ||
      (signature_.kind == Kind::kReduce && index_ == signature_.src);
  if (has_result) copy_segment(segment, /*in=*/false);
}

ByteRange TensorAlgorithm::accessed_range(size_t member) const {
  if (is_staged(member) || !is_shared(signature_, member)) return {0, 0};
  const auto chunk_bytes = static_cast<uint64_t>(bytes(chunk()));
  switch (signature_.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const UnitRange part = own_part({0, signature_.units});
      return {static_cast<uint64_t>(bytes(part.begin)), static_cast<uint64_t>(bytes(part.count))};
    }
    case Kind::kReduceScatter:
      return {chunk_bytes * index_, chunk_bytes};
    case Kind::kAllToAll:
      if (member == index_) break;
      return {chunk_bytes * index_, chunk_bytes};
    case Kind::kAllGather:
      return {chunk_bytes * member, chunk_bytes};
    case Kind::kBroadcast:
    case Kind::kExchange:
      break;
  }
  return {0, signature_.bytes()};
}

// Addresses of a unit of the results of a reduce-scatter: the first rows of this member's chunk.
std::vector<char*> TensorAlgorithm::results(int64_t begin) const {
  char* const first =
      result_ != nullptr ? result_ : own_ + bytes(static_cast<int64_t>(index_) * chunk());
  std::vector<char*> found;
  const int64_t count = tree_ == nullptr ? 1 : tree_->sums();
  for (int64_t r = 0; r < count; ++r) found.push_back(first + bytes(r * row() + begin));
  return found;
}

void TensorAlgorithm::reduce_into(
    const std::vector<char*>& sources, char* const* targets, size_t n, UnitRange range) const {
  const SumBuffers buffers = {sources.data(), sources.size(), targets, n};
  if (!is_sum(signature_.reduction)) {
    reduce(signature_.reduction, signature_.number_type, buffers, range.begin, range.count);
    return;
  }
  const bool average = signature_.reduction == Reduction::kAverage;
  const SumOptions options = {signature_.number_type, average, tree_.get()};
  sum(options, buffers, range.begin, range.count);
}

}  // namespace fddp::shm
