// Fuzzing of files and offsets of control blocks from a peer.

#include "shm_fuzz.h"

#include "../../fddp/csrc/shm/arena.h"
#include "../../fddp/csrc/shm/shm_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace shm_fuzz {

using namespace fddp::shm;

void fuzz_map_peer_arena(Bytes in) {
  const uint64_t announced = in.byte() % 2 == 0 ? in.size() * 4096 : in.extreme();
  const uint64_t size = in.byte() % 2 == 0 ? announced : in.extreme();
  const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  require(fd >= 0, "memfd_create");
  const bool sized = size <= (uint64_t{1} << 62) && ftruncate(fd, static_cast<off_t>(size)) == 0;
  constexpr int kSeals[] = {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_WRITE};
  int seals = 0;
  const uint8_t mask = in.byte();
  for (int s = 0; s < 4; ++s) seals |= (mask >> s & 1) != 0 ? kSeals[s] : 0;
  fcntl(fd, F_ADD_SEALS, seals);
  std::shared_ptr<Mapping> mapping;
  try {
    mapping = map_peer_arena(fd, announced);
    require(sized && size == announced && (seals & 7) == 7, "an invalid file was mapped");
  } catch (const std::invalid_argument&) {
  } catch (const std::system_error&) {
  }
  close(fd);
  if (!mapping) return;
  const uint64_t begin = in.extreme();
  const uint64_t bytes = in.extreme();
  const bool holds = mapping->contains(begin, bytes);
  require(holds == (begin <= announced && bytes <= announced - begin), "a range outside");
  if (holds && bytes <= uint64_t{1} << 22) mapping->prefault(begin, bytes);
  ShmGroupOptions options{};
  options.arena = std::make_shared<Arena>(uint64_t{4} << 20);
  options.mappings = {mapping, options.arena->mapping()};
  options.index = 1;
  options.control_block = in.extreme();
  options.timeout = std::chrono::milliseconds(1);
  try {
    ShmGroup group(std::move(options));
    require(false, "an all-zero control block was accepted");
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace shm_fuzz
