// Stress test of the shared-memory core: random operations of random sizes in several groups at a
// time. Every result is compared with the expected one. No torch, so that it runs under sanitizers.
//
//   shm_stress threads RANKS OPERATIONS SEED     ranks are threads that share their mappings
//   shm_stress processes RANKS OPERATIONS SEED   ranks are processes
//   shm_stress kill RANKS ROUNDS SEED            in each round one process kills itself
//
// All ranks draw the same random numbers, so that each knows the operations of the others.

#include "../../fddp/csrc/shm/half.h"
#include "../../fddp/csrc/shm/shm_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace fddp::shm;

namespace {

constexpr size_t kMaxRanks = 8;
constexpr size_t kMaxInFlight = 24;
constexpr size_t kSubgroups = 3;

[[noreturn]] void fail_with(const std::string& what) {
  std::fprintf(stderr, "shm_stress: %s\n", what.c_str());
  std::_Exit(1);
}

void require(bool holds, const std::string& what) {
  if (!holds) fail_with(what);
}

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Rendezvous of the ranks, in shared memory.
struct Rendezvous {
  struct Entry {
    std::atomic<int> pid;
    std::atomic<int> fd;
    std::atomic<uint64_t> control_blocks[1 + kSubgroups];
    std::atomic<int> stage;
  };
  Entry entries[kMaxRanks];

  void arrive(size_t rank, size_t ranks, int stage) {
    entries[rank].stage.store(stage);
    for (size_t r = 0; r < ranks; ++r) {
      while (entries[r].stage.load() < stage) std::this_thread::yield();
    }
  }
};

struct Job {
  bool threads;
  size_t ranks;
  uint64_t operations;
  uint64_t seed;
  int victim;          // the rank that kills itself, or -1
  uint64_t victim_at;  // the operation before which it does
};

// Members of each group in ascending order. The first group has all ranks.
std::vector<std::vector<size_t>> group_members(const Job& job) {
  std::vector<std::vector<size_t>> groups(1);
  for (size_t r = 0; r < job.ranks; ++r) groups[0].push_back(r);
  std::mt19937_64 random(job.seed);
  for (size_t t = 0; t < kSubgroups && job.ranks > 2; ++t) {
    std::vector<size_t> all = groups[0];
    std::shuffle(all.begin(), all.end(), random);
    all.resize(2 + random() % (job.ranks - 1));
    std::sort(all.begin(), all.end());
    groups.push_back(all);
  }
  return groups;
}

// One operation, drawn identically by all ranks.
struct Draw {
  size_t group;
  Signature signature;
  uint64_t id;
  bool mismatch;  // members post different operations
  std::shared_ptr<const SumTree> tree;
};

Draw draw(std::mt19937_64& random, const std::vector<std::vector<size_t>>& groups, uint64_t id) {
  Draw drawn{};
  drawn.id = id;
  drawn.group = random() % 3 == 0 ? random() % groups.size() : 0;
  const auto n = static_cast<int64_t>(groups[drawn.group].size());
  Signature& signature = drawn.signature;
  signature.kind = static_cast<Kind>(random() % (kKindCount - 1));  // all but exchanges
  const bool sums = is_reduction(signature.kind);
  signature.number_type = sums ? static_cast<NumberType>(random() % 8) : NumberType::kOpaque;
  signature.unit_bytes = static_cast<uint32_t>(
      sums ? number_bytes(signature.number_type)
           : std::vector<size_t>{1, 2, 4, 8, 16}[random() % 5]);
  signature.src = static_cast<uint32_t>(random() % static_cast<uint64_t>(n));
  const bool averages = sums && signature.number_type <= NumberType::kBF16 && random() % 2 == 0;
  signature.reduction = averages ? Reduction::kAverage : Reduction::kSum;
  // Mostly small, some with several segments of a staging buffer.
  const uint64_t magnitude = random() % 40 == 0 ? 20 : random() % 15;
  const uint64_t bytes = random() % (uint64_t{1} << magnitude) + 1;
  signature.units = static_cast<int64_t>(bytes / signature.unit_bytes);
  if (random() % 50 == 0) signature.units = 0;
  if (has_chunks(signature.kind)) {
    signature.units = signature.units / n * n;
  }
  const bool has_tree = signature.kind == Kind::kReduceScatter && !averages && random() % 2 == 0;
  if (has_tree) {
    std::vector<uint32_t> additions(static_cast<size_t>(n), 1);  // in rank order
    additions[0] = 0;
    if (n == 4) additions = {0, 1, 0, 2};
    drawn.tree = std::make_shared<const SumTree>(SumTree{std::vector<uint32_t>(static_cast<size_t>(n), 1), additions});
    signature.tree = drawn.tree->digest();
  }
  drawn.mismatch = random() % 300 == 0;
  return drawn;
}

// Integers small enough for exact sums in every dtype.
int64_t value_of(const Draw& drawn, size_t rank, int64_t i, size_t members) {
  const auto base = static_cast<int64_t>((drawn.id * 7 + rank * 3 + static_cast<uint64_t>(i)) % 11);
  return drawn.signature.reduction == Reduction::kAverage ? base * static_cast<int64_t>(members) : base;
}

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

void put_number(NumberType number, char* at, int64_t value) {
  Half half;
  BFloat16 brain;
  switch (number) {
    case NumberType::kF64:
      return put(at, static_cast<double>(value));
    case NumberType::kF32:
      return put(at, static_cast<float>(value));
    case NumberType::kF16:
      narrow(static_cast<float>(value), half);
      return put(at, half);
    case NumberType::kBF16:
      narrow(static_cast<float>(value), brain);
      return put(at, brain);
    case NumberType::kU8:
    case NumberType::kI8:
    case NumberType::kOpaque:
      return put(at, static_cast<uint8_t>(value));
    case NumberType::kI32:
      return put(at, static_cast<int32_t>(value));
    case NumberType::kI64:
      return put(at, value);
  }
}

// Fill a range with the values of `rank`.
void fill(
    const Draw& drawn, size_t rank, size_t members, char* data, int64_t begin, int64_t count) {
  const Signature& signature = drawn.signature;
  for (int64_t i = begin; i < begin + count; ++i) {
    char* const at = data + i * signature.unit_bytes;
    if (signature.number_type == NumberType::kOpaque) {
      std::memset(at, static_cast<int>(value_of(drawn, rank, i, members)), signature.unit_bytes);
    } else {
      put_number(signature.number_type, at, value_of(drawn, rank, i, members));
    }
  }
}

void fill_sum(
    const Draw& drawn, const std::vector<size_t>& member_ranks, char* data, int64_t begin,
    int64_t count) {
  const Signature& signature = drawn.signature;
  for (int64_t i = begin; i < begin + count; ++i) {
    int64_t total = 0;
    for (const size_t r : member_ranks) total += value_of(drawn, r, i, member_ranks.size());
    if (signature.reduction == Reduction::kAverage) total /= static_cast<int64_t>(member_ranks.size());
    put_number(signature.number_type, data + i * signature.unit_bytes, total);
  }
}

// Tensor in the arena, or outside of it at any alignment.
class Buffer {
 public:
  Buffer(Arena& arena, uint64_t bytes, uint64_t choice) : arena_(arena), bytes_(bytes) {
    if (choice % 4 != 0) {
      block_ = arena.allocate(bytes);
      require(block_.has_value(), "the arena is full");
      data_ = arena.mapping()->base() + block_->begin;
    } else {
      own_.resize(bytes + 16);
      data_ = own_.data() + choice / 4 % 9;
    }
  }
  ~Buffer() {
    if (block_) arena_.free(block_->begin);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* data() const {
    return data_;
  }
  uint64_t bytes() const {
    return bytes_;
  }

 private:
  Arena& arena_;
  uint64_t bytes_;
  std::optional<ByteRange> block_;
  std::vector<char> own_;
  char* data_;
};

class Rank {
 public:
  Rank(const Job& job, Rendezvous& rendezvous, std::shared_ptr<Arena>* arenas, size_t rank)
      : job_(job),
        rank_(rank),
        groups_(group_members(job)),
        arena_(std::make_shared<Arena>(1 << 28)) {
    arenas[rank] = arena_;
    open(rendezvous, arenas);
  }

  // Run all operations. Return false if the group ended as expected.
  bool run() {
    std::mt19937_64 random(job_.seed * 77 + 5);
    std::mt19937_64 own(mix(job_.seed, rank_));
    for (uint64_t id = 0; id < job_.operations; ++id) {
      if (job_.victim == static_cast<int>(rank_) && id == job_.victim_at) raise(SIGKILL);
      const Draw drawn = draw(random, groups_, id);
      if (place(drawn.group) < 0) continue;
      if (start(drawn, own()) && !finish(in_flight_.size() - 1)) return false;
      if (in_flight_.empty()) continue;
      const InFlight& oldest = in_flight_.front();
      if (own() % 4 == 0) finished_ += group(oldest.drawn).done(*oldest.operation);
      while (in_flight_.size() >= kMaxInFlight || (!in_flight_.empty() && own() % 2 == 0)) {
        if (!finish(own() % 3 == 0 ? own() % in_flight_.size() : 0)) return false;
      }
    }
    while (!in_flight_.empty()) {
      if (!finish(0)) return false;
    }
    return true;
  }

  void leave() {
    for (auto& group : open_) {
      if (group) group->leave();
    }
  }

 private:
  struct InFlight {
    Draw drawn;
    std::shared_ptr<Buffer> buffer;
    OperationPtr operation;
  };

  int place(size_t group) const {
    const auto& member_ranks = groups_[group];
    const auto found = std::find(member_ranks.begin(), member_ranks.end(), rank_);
    return found == member_ranks.end() ? -1 : static_cast<int>(found - member_ranks.begin());
  }

  ShmGroup& group(const Draw& drawn) {
    return *open_[drawn.group];
  }

  void open(Rendezvous& rendezvous, std::shared_ptr<Arena>* arenas) {
    Rendezvous::Entry& own = rendezvous.entries[rank_];
    own.pid = getpid();
    own.fd = arena_->fd();
    for (size_t t = 0; t < groups_.size(); ++t) {
      if (groups_[t][0] != rank_) continue;
      own.control_blocks[t] = ShmGroup::make_control_block(*arena_, groups_[t].size()).value();
    }
    rendezvous.arrive(rank_, job_.ranks, 1);
    std::vector<std::shared_ptr<Mapping>> mappings;
    for (size_t r = 0; r < job_.ranks; ++r) {
      mappings.push_back(
          r == rank_ || job_.threads ? arenas[r]->mapping() : peer(rendezvous.entries[r]));
    }
    rendezvous.arrive(rank_, job_.ranks, 2);
    for (size_t t = 0; t < groups_.size(); ++t) {
      open_.push_back(place(t) < 0 ? nullptr : join(rendezvous, t, mappings));
    }
  }

  std::shared_ptr<Mapping> peer(const Rendezvous::Entry& entry) const {
    const std::string path =
        "/proc/" + std::to_string(entry.pid.load()) + "/fd/" + std::to_string(entry.fd.load());
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    require(fd >= 0, "the descriptor of a peer cannot be opened");
    auto mapping = map_peer_arena(fd, arena_->mapping()->span());
    close(fd);
    return mapping;
  }

  std::unique_ptr<ShmGroup> join(
      const Rendezvous& rendezvous, size_t t, const std::vector<std::shared_ptr<Mapping>>& mappings) const {
    ShmGroupOptions options{};
    options.arena = arena_;
    for (const size_t r : groups_[t]) options.mappings.push_back(mappings[r]);
    options.index = static_cast<size_t>(place(t));
    options.control_block = rendezvous.entries[groups_[t][0]].control_blocks[t].load();
    options.timeout = std::chrono::seconds(60);
    options.waiters_on_host = job_.ranks;
    return std::make_unique<ShmGroup>(std::move(options));
  }

  // Return true if the caller announced that it waits soon.
  bool start(Draw drawn, uint64_t choice) {
    const auto& member_ranks = groups_[drawn.group];
    if (drawn.mismatch && place(drawn.group) == 1) drawn.signature.tag = 1;
    auto buffer = std::make_shared<Buffer>(*arena_, drawn.signature.bytes(), choice);
    fill(drawn, rank_, member_ranks.size(), buffer->data(), 0, drawn.signature.units);
    const bool soon = (choice >> 8) % 2 == 0;
    Request request{drawn.signature, buffer->data(), soon, (choice >> 9) % 8 == 0, buffer};
    request.tree = drawn.tree;
    in_flight_.push_back({drawn, buffer, group(drawn).start(std::move(request))});
    return soon;
  }

  bool finish(size_t position) {
    const InFlight in_flight = in_flight_[position];
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(position));
    Status status;
    do {
      status = group(in_flight.drawn).wait(*in_flight.operation, std::chrono::milliseconds(200));
    } while (status == Status::kPending);
    const std::string context = "rank " + std::to_string(rank_) + " operation " +
                              std::to_string(in_flight.drawn.id) + ": status " +
                              std::to_string(static_cast<int>(status));
    if (status == Status::kLost && job_.victim >= 0) {
      check_loss(in_flight.drawn, context);
      return false;
    }
    if (in_flight.drawn.mismatch) {
      require(status == Status::kMismatch, context);
      const size_t members = groups_[in_flight.drawn.group].size();
      require(in_flight.operation->signatures().size() == members, context);
      return true;
    }
    require(status == Status::kOk, context);
    check_result(in_flight, context);
    return true;
  }

  void check_loss(const Draw& drawn, const std::string& context) {
    // A survivor leaves all of its groups, and may be missed in one of them before the victim is.
    const Failure failure = group(drawn).failure();
    require(failure.blamed.any(), context + ", no member was blamed");
    for (size_t m = 0; m < groups_[drawn.group].size(); ++m) {
      const bool victim = static_cast<int>(groups_[drawn.group][m]) == job_.victim;
      require(
          !failure.blamed[m] || victim || group(drawn).state(m) != MemberState::kActive,
          context + ", an active member was blamed");
    }
  }

  void check_result(const InFlight& in_flight, const std::string& context) {
    const Signature& signature = in_flight.drawn.signature;
    const auto& member_ranks = groups_[in_flight.drawn.group];
    const int64_t chunk = signature.units / static_cast<int64_t>(member_ranks.size());
    const int64_t own = place(in_flight.drawn.group) * chunk;
    std::vector<char> expected(signature.bytes() + 1);
    int64_t begin = 0;
    int64_t count = signature.units;
    switch (signature.kind) {
      case Kind::kReduceScatter:
        begin = own;
        count = chunk;
        [[fallthrough]];
      case Kind::kReduce:
        if (static_cast<int>(signature.src) != place(in_flight.drawn.group)) return;
        [[fallthrough]];
      case Kind::kAllReduce:
        fill_sum(in_flight.drawn, member_ranks, expected.data(), begin, count);
        break;
      case Kind::kAllGather:
        for (size_t m = 0; m < member_ranks.size(); ++m) {
          const int64_t at = static_cast<int64_t>(m) * chunk;
          fill(in_flight.drawn, member_ranks[m], member_ranks.size(), expected.data(), at, chunk);
        }
        break;
      case Kind::kAllToAll:
        for (size_t m = 0; m < member_ranks.size(); ++m) {
          std::vector<char> theirs(expected.size());
          fill(in_flight.drawn, member_ranks[m], member_ranks.size(), theirs.data(), own, chunk);
          const auto bytes = static_cast<size_t>(chunk) * signature.unit_bytes;
          const auto unit_bytes = static_cast<size_t>(signature.unit_bytes);
          std::memcpy(
              expected.data() + m * bytes, theirs.data() + static_cast<size_t>(own) * unit_bytes,
              bytes);
        }
        break;
      case Kind::kBroadcast:
        fill(
            in_flight.drawn, member_ranks[signature.src], member_ranks.size(), expected.data(), 0,
            signature.units);
        break;
      case Kind::kExchange:
        return;
    }
    const auto from = static_cast<size_t>(begin) * signature.unit_bytes;
    const auto bytes = static_cast<size_t>(count) * signature.unit_bytes;
    const bool equal =
        std::memcmp(expected.data() + from, in_flight.buffer->data() + from, bytes) == 0;
    require(equal, context + ", a wrong result");
  }

  const Job job_;
  const size_t rank_;
  const std::vector<std::vector<size_t>> groups_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::unique_ptr<ShmGroup>> open_;
  std::vector<InFlight> in_flight_;
  uint64_t finished_ = 0;
};

void run_threads(const Job& job, Rendezvous& rendezvous) {
  std::vector<std::shared_ptr<Arena>> arenas(job.ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < job.ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(job, rendezvous, arenas.data(), r);
      require(rank.run(), "a rank was lost");
      rank.leave();
    });
  }
  for (auto& thread : threads) thread.join();
}

int rank_process(const Job& job, Rendezvous& rendezvous, size_t r) {
  std::vector<std::shared_ptr<Arena>> arenas(job.ranks);
  Rank rank(job, rendezvous, arenas.data(), r);
  require(rank.run() == (job.victim < 0), "a rank was lost, or its loss was not detected");
  rank.leave();
  return 0;
}

void run_processes(const Job& job, Rendezvous& rendezvous) {
  std::vector<pid_t> children;
  for (size_t r = 0; r < job.ranks; ++r) {
    const pid_t pid = fork();
    require(pid >= 0, "fork");
    if (pid == 0) std::exit(rank_process(job, rendezvous, r));
    children.push_back(pid);
  }
  bool well = true;
  for (size_t r = 0; r < job.ranks; ++r) {
    int status = 0;
    waitpid(children[r], &status, 0);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    well = well && (static_cast<int>(r) == job.victim ? killed : status == 0);
  }
  require(well, "a rank failed");
}

// Return new shared memory for one run.
Rendezvous& make_rendezvous() {
  void* const memory =
      mmap(nullptr, sizeof(Rendezvous), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap");
  return *new (memory) Rendezvous{};
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    fail_with("usage: shm_stress threads|processes|kill RANKS OPERATIONS|ROUNDS SEED");
  }
  const std::string mode = arguments[1];
  const auto ranks = static_cast<size_t>(std::stoul(arguments[2]));
  const auto number = std::stoull(arguments[3]);
  const auto seed = std::stoull(arguments[4]);
  require(ranks >= 2 && ranks <= kMaxRanks, "2 to 8 ranks");
  if (mode == "threads") {
    run_threads({true, ranks, number, seed, -1, 0}, make_rendezvous());
  } else if (mode == "processes") {
    run_processes({false, ranks, number, seed, -1, 0}, make_rendezvous());
  } else {
    require(mode == "kill", "unknown mode " + mode);
    for (uint64_t round = 0; round < number; ++round) {
      const uint64_t s = mix(seed, round);
      const auto victim = static_cast<int>(s % ranks);
      run_processes({false, ranks, 100000, s, victim, (s >> 8) % 400}, make_rendezvous());
    }
  }
  std::printf("%s: %llu with %zu ranks, all well\n", mode.c_str(), number, ranks);
  return 0;
}
