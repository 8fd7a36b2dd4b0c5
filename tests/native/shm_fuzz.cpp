// Feeds arbitrary bytes to the shared-memory core, which must survive arbitrary writes of a peer.
// No torch, so that it runs under sanitizers.
//
// With clang this is a libFuzzer target (-fsanitize=fuzzer,address,undefined). With gcc,
// fuzz_driver.cpp drives it. The first byte selects the function under test.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/algorithms.h"

#include <cstddef>
#include <cstdint>

namespace shm_fuzz {

void fill(Bytes& in, char* data, uint64_t bytes) {
  uint32_t state = static_cast<uint32_t>(in.word()) | 1u;
  for (uint64_t i = 0; i < bytes; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<char>(state >> 24);
  }
}

Signature draw_signature(Bytes& in, size_t n) {
  Signature signature{};
  signature.kind = static_cast<Kind>(in.byte() % (kKindCount - 1));  // all but exchanges
  const bool sums = is_reduction(signature.kind);
  signature.number_type = sums ? static_cast<NumberType>(in.byte() % 8) : NumberType::kOpaque;
  constexpr uint32_t kItems[] = {1, 2, 3, 4, 8, 16, 1024};
  signature.unit_bytes = sums ? static_cast<uint32_t>(number_bytes(signature.number_type))
                          : kItems[in.byte() % std::size(kItems)];
  signature.src = static_cast<uint32_t>(in.byte() % n);
  const bool averages = sums && signature.number_type <= NumberType::kBF16 && in.byte() % 2 != 0;
  signature.reduction = averages ? Reduction::kAverage : Reduction::kSum;
  signature.units = static_cast<int64_t>(in.size());
  if (in.byte() % 16 == 0) {
    signature.units += static_cast<int64_t>(kSegmentBytes / signature.unit_bytes) + in.byte() - 128;
  }
  if (has_chunks(signature.kind)) {
    signature.units = signature.units / static_cast<int64_t>(n) * static_cast<int64_t>(n);
  }
  return signature;
}

}  // namespace shm_fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shm_fuzz;
  Bytes in(data, size);
  switch (in.byte() % 8) {
    case 0:
      fuzz_allocator(in);
      break;
    case 1:
    case 2:
      fuzz_sums(in);
      break;
    case 3:
      fuzz_algorithms(in);
      break;
    case 4:
      fuzz_map_peer_arena(in);
      break;
    default:
      fuzz_group(in);
      break;
  }
  return 0;
}
