// 64-bit digest of memory, by which replicas are compared.

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace py = pybind11;

namespace {

// Odd constants with as many ones as zeros, from the digits of pi.
constexpr uint64_t kFactor1 = 0x9216D5D98979FB1BULL;
constexpr uint64_t kFactor2 = 0xD1310BA698DFB5ADULL;
constexpr uint64_t kStart = 0x243F6A8885A308D3ULL;

constexpr int kLanes = 8;  // words absorbed at a time, in independent lanes
constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);
// The digest of larger memory is the digest of the digests of its chunks, which threads compute in
// parallel.
constexpr size_t kChunkBytes = size_t{1} << 20;

uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= kFactor1;
  x ^= x >> 29;
  x *= kFactor2;
  return x ^ (x >> 32);
}

// Absorb one word. The function is injective in the state and in the word. The rotation mixes the
// highest bits, which are the signs, because multiplication carries bits only upwards.
uint64_t absorb(uint64_t state, uint64_t word) {
  state ^= word;
  state = (state << 29) | (state >> 35);
  return state * kFactor1;
}

uint64_t digest_chunk(const unsigned char* data, size_t size) {
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kStart + kFactor2 * lane;
  const size_t whole = size / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, kBlockBytes);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = absorb(lanes[lane], words[lane]);
  }
  uint64_t words[kLanes] = {};
  if (size > whole) std::memcpy(words, data + whole, size - whole);
  uint64_t state = kStart ^ static_cast<uint64_t>(size);
  for (int lane = 0; lane < kLanes; ++lane) {
    state = mix(absorb(state, absorb(lanes[lane], words[lane])));
  }
  return state;
}

uint64_t digest(const unsigned char* data, size_t size) {
  if (size <= kChunkBytes) return digest_chunk(data, size);
  const size_t chunks = (size + kChunkBytes - 1) / kChunkBytes;
  std::vector<uint64_t> digests(chunks);
  at::parallel_for(0, static_cast<int64_t>(chunks), 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const size_t at = static_cast<size_t>(chunk) * kChunkBytes;
      digests[chunk] = digest_chunk(data + at, std::min(kChunkBytes, size - at));
    }
  });
  const auto* bytes = reinterpret_cast<const unsigned char*>(digests.data());
  return digest_chunk(bytes, chunks * sizeof(uint64_t));
}

uint64_t digest_buffer(const py::buffer& memory) {
  const py::buffer_info info = memory.request();
  int64_t expected = info.itemsize;
  for (auto dim = info.ndim; dim-- > 0;) {
    if (info.shape[dim] != 1 && info.size != 0 && info.strides[dim] != expected) {
      throw py::value_error("digest_bytes: the buffer is not contiguous; pass a contiguous copy");
    }
    expected *= info.shape[dim];
  }
  const auto size = static_cast<size_t>(info.size) * static_cast<size_t>(info.itemsize);
  const py::gil_scoped_release release;
  return digest(static_cast<const unsigned char*>(info.ptr), size);
}

}  // namespace

void bind_digest(py::module_& m) {
  m.def("digest_bytes", &digest_buffer, py::arg("memory"),
        "Return a 64-bit digest of the bytes of a contiguous buffer.");
}
