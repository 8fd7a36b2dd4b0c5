// 64 bits that stand for a stretch of memory: which bits, and where. Replicas compare them.

#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace py = pybind11;

namespace {

// Odd, with as many ones as zeros, from the digits of pi.
constexpr uint64_t kFactor = 0x9216D5D98979FB1BULL;
constexpr uint64_t kOther = 0xD1310BA698DFB5ADULL;
constexpr uint64_t kStart = 0x243F6A8885A308D3ULL;

constexpr int kLanes = 8;  // words that are taken in at a time, independently of each other
constexpr size_t kBlockBytes = kLanes * sizeof(uint64_t);
// Digests of pieces are digested in turn, so that threads can share pieces out.
constexpr size_t kPieceBytes = size_t{1} << 20;

uint64_t mixed(uint64_t x) {
  x ^= x >> 32;
  x *= kFactor;
  x ^= x >> 29;
  x *= kOther;
  return x ^ (x >> 32);
}

// One word taken in. For a given word no two states become one, and for a given state no two words.
// The turn keeps the highest bits, which signs are, from standing apart: a product moves bits only
// upwards.
uint64_t taken(uint64_t state, uint64_t word) {
  state ^= word;
  state = (state << 29) | (state >> 35);
  return state * kFactor;
}

uint64_t digest_of_piece(const unsigned char* data, size_t size) {
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kStart + kOther * lane;
  const size_t whole = size / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) {
    uint64_t words[kLanes];
    std::memcpy(words, data + at, kBlockBytes);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = taken(lanes[lane], words[lane]);
  }
  uint64_t words[kLanes] = {};
  if (size > whole) std::memcpy(words, data + whole, size - whole);
  uint64_t state = kStart ^ static_cast<uint64_t>(size);
  for (int lane = 0; lane < kLanes; ++lane) {
    state = mixed(taken(state, taken(lanes[lane], words[lane])));
  }
  return state;
}

uint64_t digest(const unsigned char* data, size_t size) {
  if (size <= kPieceBytes) return digest_of_piece(data, size);
  const size_t pieces = (size + kPieceBytes - 1) / kPieceBytes;
  std::vector<uint64_t> digests(pieces);
  at::parallel_for(0, static_cast<int64_t>(pieces), 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const size_t at = static_cast<size_t>(piece) * kPieceBytes;
      digests[piece] = digest_of_piece(data + at, std::min(kPieceBytes, size - at));
    }
  });
  const auto* told = reinterpret_cast<const unsigned char*>(digests.data());
  return digest_of_piece(told, pieces * sizeof(uint64_t));
}

uint64_t digest_buffer(const py::buffer& memory) {
  const py::buffer_info info = memory.request();
  int64_t expected = info.itemsize;
  for (auto dim = info.ndim; dim-- > 0;) {
    if (info.shape[dim] != 1 && info.size != 0 && info.strides[dim] != expected) {
      throw py::value_error("digest_bytes: the memory has gaps; pass a contiguous copy");
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
        "64 bits of the bytes of a contiguous buffer and of their places.");
}
