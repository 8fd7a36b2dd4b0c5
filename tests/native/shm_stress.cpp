// Stresses the shared-memory core: random operations of random sizes in several teams at once,
// every result held against what it must be. No torch, so that it runs under sanitizers.
//
//   shm_stress threads RANKS OPERATIONS SEED     ranks are threads that share their mappings
//   shm_stress processes RANKS OPERATIONS SEED   ranks are processes
//   shm_stress kill RANKS ROUNDS SEED            in each round one process kills itself
//
// All ranks draw the same random numbers, so that each knows what the others do.

#include "../../fddp/csrc/shm/half.h"
#include "../../fddp/csrc/shm/team.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
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

constexpr size_t kMostRanks = 8;
constexpr size_t kInFlight = 24;
constexpr size_t kSubteams = 3;

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "shm_stress: %s\n", what.c_str());
  std::_Exit(1);
}

void require(bool holds, const std::string& what) {
  if (!holds) give_up(what);
}

uint64_t mixed(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What ranks know of each other while they set up. Lies in shared memory.
struct Lobby {
  struct Seat {
    std::atomic<int> pid;
    std::atomic<int> fd;
    std::atomic<uint64_t> boards[1 + kSubteams];
    std::atomic<int> stage;
  };
  Seat seats[kMostRanks];

  void arrive(size_t rank, size_t ranks, int stage) {
    seats[rank].stage.store(stage);
    for (size_t r = 0; r < ranks; ++r) {
      while (seats[r].stage.load() < stage) std::this_thread::yield();
    }
  }
};

struct Job {
  bool threads;
  size_t ranks;
  uint64_t operations;
  uint64_t seed;
  int victim;           // the rank that kills itself, or -1
  uint64_t victim_at;   // before this operation
};

// Members of each team, by rank in ascending order; the first is everybody.
std::vector<std::vector<size_t>> rosters(const Job& job) {
  std::vector<std::vector<size_t>> teams(1);
  for (size_t r = 0; r < job.ranks; ++r) teams[0].push_back(r);
  std::mt19937_64 random(job.seed);
  for (size_t t = 0; t < kSubteams && job.ranks > 2; ++t) {
    std::vector<size_t> all = teams[0];
    std::shuffle(all.begin(), all.end(), random);
    all.resize(2 + random() % (job.ranks - 1));
    std::sort(all.begin(), all.end());
    teams.push_back(all);
  }
  return teams;
}

// One operation as all ranks draw it.
struct Draw {
  size_t team;
  Terms terms;
  uint64_t id;
  bool clash;  // members ask for different things
};

Draw draw(std::mt19937_64& random, const std::vector<std::vector<size_t>>& teams, uint64_t id) {
  Draw drawn{};
  drawn.id = id;
  drawn.team = random() % 3 == 0 ? random() % teams.size() : 0;
  const auto n = static_cast<int64_t>(teams[drawn.team].size());
  Terms& terms = drawn.terms;
  terms.kind = static_cast<Kind>(random() % kKinds);
  const bool sums = terms.kind == Kind::kAllReduce || terms.kind == Kind::kReduceScatter;
  terms.number = sums ? static_cast<Number>(random() % 8) : Number::kOpaque;
  terms.unit_bytes = static_cast<uint32_t>(
      sums ? number_bytes(terms.number) : std::vector<size_t>{1, 2, 4, 8, 16}[random() % 5]);
  terms.src = static_cast<uint32_t>(random() % static_cast<uint64_t>(n));
  terms.average = sums && terms.number <= Number::kBF16 && random() % 2 == 0;
  // Mostly small, some with several pieces of a staging buffer.
  const uint64_t magnitude = random() % 40 == 0 ? 20 : random() % 15;
  const uint64_t bytes = random() % (uint64_t{1} << magnitude) + 1;
  terms.units = static_cast<int64_t>(bytes / terms.unit_bytes);
  if (random() % 50 == 0) terms.units = 0;
  if (terms.kind == Kind::kReduceScatter || terms.kind == Kind::kAllGather) {
    terms.units = terms.units / n * n;
  }
  if (sums && n == 4 && random() % 2 == 0) {
    terms.order.axes = 2;
    terms.order.sizes[0] = terms.order.sizes[1] = 2;
  }
  drawn.clash = random() % 300 == 0;
  return drawn;
}

// Whole numbers, small enough for sums of them to be exact in every dtype.
int64_t value_of(const Draw& drawn, size_t rank, int64_t i, size_t members) {
  const auto base = static_cast<int64_t>((drawn.id * 7 + rank * 3 + static_cast<uint64_t>(i)) % 11);
  return drawn.terms.average != 0 ? base * static_cast<int64_t>(members) : base;
}

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

void put_number(Number number, char* at, int64_t value) {
  Half half;
  BFloat16 brain;
  switch (number) {
    case Number::kF64:
      return put(at, static_cast<double>(value));
    case Number::kF32:
      return put(at, static_cast<float>(value));
    case Number::kF16:
      narrow(static_cast<float>(value), half);
      return put(at, half);
    case Number::kBF16:
      narrow(static_cast<float>(value), brain);
      return put(at, brain);
    case Number::kU8:
    case Number::kI8:
    case Number::kOpaque:
      return put(at, static_cast<uint8_t>(value));
    case Number::kI32:
      return put(at, static_cast<int32_t>(value));
    case Number::kI64:
      return put(at, value);
  }
}

// A rank's tensor before (`rank` is its number) or what some part of it must be after.
void fill(
    const Draw& drawn, size_t rank, size_t members, char* data, int64_t begin, int64_t count) {
  const Terms& terms = drawn.terms;
  for (int64_t i = begin; i < begin + count; ++i) {
    char* const at = data + i * terms.unit_bytes;
    if (terms.number == Number::kOpaque) {
      std::memset(at, static_cast<int>(value_of(drawn, rank, i, members)), terms.unit_bytes);
    } else {
      put_number(terms.number, at, value_of(drawn, rank, i, members));
    }
  }
}

void fill_sum(
    const Draw& drawn, const std::vector<size_t>& roster, char* data, int64_t begin,
    int64_t count) {
  const Terms& terms = drawn.terms;
  for (int64_t i = begin; i < begin + count; ++i) {
    int64_t total = 0;
    for (const size_t r : roster) total += value_of(drawn, r, i, roster.size());
    if (terms.average != 0) total /= static_cast<int64_t>(roster.size());
    put_number(terms.number, data + i * terms.unit_bytes, total);
  }
}

// A tensor in the arena or outside of it, at any alignment there.
class Buffer {
 public:
  Buffer(Arena& arena, uint64_t bytes, uint64_t choice) : arena_(arena), bytes_(bytes) {
    if (choice % 4 != 0) {
      block_ = arena.take(bytes);
      require(block_.has_value(), "the arena is full");
      data_ = arena.mapping()->base() + block_->begin;
    } else {
      own_.resize(bytes + 16);
      data_ = own_.data() + choice / 4 % 9;
    }
  }
  ~Buffer() {
    if (block_) arena_.give(block_->begin);
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
  std::optional<Range> block_;
  std::vector<char> own_;
  char* data_;
};

class Rank {
 public:
  Rank(const Job& job, Lobby& lobby, std::shared_ptr<Arena>* arenas, size_t rank)
      : job_(job), rank_(rank), teams_(rosters(job)), arena_(std::make_shared<Arena>(1 << 28)) {
    arenas[rank] = arena_;
    open(lobby, arenas);
  }

  // Carries out all operations; false if the team came to an end as it should.
  bool run() {
    std::mt19937_64 random(job_.seed * 77 + 5);
    std::mt19937_64 own(mixed(job_.seed, rank_));
    for (uint64_t id = 0; id < job_.operations; ++id) {
      if (job_.victim == static_cast<int>(rank_) && id == job_.victim_at) raise(SIGKILL);
      const Draw drawn = draw(random, teams_, id);
      if (place(drawn.team) < 0) continue;
      if (start(drawn, own()) && !finish(flights_.size() - 1)) return false;
      if (flights_.empty()) continue;
      const Flight& oldest = flights_.front();
      if (own() % 4 == 0) finished_ += team(oldest.drawn).done(*oldest.operation);
      while (flights_.size() >= kInFlight || (!flights_.empty() && own() % 2 == 0)) {
        if (!finish(own() % 3 == 0 ? own() % flights_.size() : 0)) return false;
      }
    }
    while (!flights_.empty()) {
      if (!finish(0)) return false;
    }
    return true;
  }

  void leave() {
    for (auto& team : open_) {
      if (team) team->leave();
    }
  }

 private:
  struct Flight {
    Draw drawn;
    std::shared_ptr<Buffer> buffer;
    OperationPtr operation;
  };

  int place(size_t team) const {
    const auto& roster = teams_[team];
    const auto found = std::find(roster.begin(), roster.end(), rank_);
    return found == roster.end() ? -1 : static_cast<int>(found - roster.begin());
  }

  Team& team(const Draw& drawn) {
    return *open_[drawn.team];
  }

  void open(Lobby& lobby, std::shared_ptr<Arena>* arenas) {
    Lobby::Seat& own = lobby.seats[rank_];
    own.pid = getpid();
    own.fd = arena_->fd();
    for (size_t t = 0; t < teams_.size(); ++t) {
      if (teams_[t][0] != rank_) continue;
      own.boards[t] = Team::make_board(*arena_, teams_[t].size()).value();
    }
    lobby.arrive(rank_, job_.ranks, 1);
    std::vector<std::shared_ptr<Mapping>> mappings;
    std::vector<int> pidfds;
    for (size_t r = 0; r < job_.ranks; ++r) {
      mappings.push_back(
          r == rank_ || job_.threads ? arenas[r]->mapping() : peer(lobby.seats[r]));
      pidfds.push_back(
          r == rank_ || job_.threads
              ? -1
              : static_cast<int>(syscall(SYS_pidfd_open, lobby.seats[r].pid.load(), 0)));
    }
    lobby.arrive(rank_, job_.ranks, 2);
    for (size_t t = 0; t < teams_.size(); ++t) {
      open_.push_back(place(t) < 0 ? nullptr : join(lobby, t, mappings, pidfds));
    }
    for (const int pidfd : pidfds) {
      if (pidfd >= 0) close(pidfd);
    }
  }

  std::shared_ptr<Mapping> peer(const Lobby::Seat& seat) const {
    const std::string path =
        "/proc/" + std::to_string(seat.pid.load()) + "/fd/" + std::to_string(seat.fd.load());
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    require(fd >= 0, "a peer's descriptor can't be opened");
    auto mapping = adopt(fd, arena_->mapping()->span());
    close(fd);
    return mapping;
  }

  std::unique_ptr<Team> join(
      const Lobby& lobby, size_t t, const std::vector<std::shared_ptr<Mapping>>& mappings,
      const std::vector<int>& pidfds) const {
    TeamOptions options{};
    options.arena = arena_;
    for (const size_t r : teams_[t]) {
      options.mappings.push_back(mappings[r]);
      options.pidfds.push_back(pidfds[r]);
    }
    options.me = static_cast<size_t>(place(t));
    options.board = lobby.seats[teams_[t][0]].boards[t].load();
    options.timeout = std::chrono::seconds(60);
    options.crowd = job_.ranks;
    return std::make_unique<Team>(std::move(options));
  }

  // Whether it said that it is about to wait.
  bool start(Draw drawn, uint64_t choice) {
    const auto& roster = teams_[drawn.team];
    if (drawn.clash && place(drawn.team) == 1) drawn.terms.tag = 1;
    auto buffer = std::make_shared<Buffer>(*arena_, drawn.terms.bytes(), choice);
    fill(drawn, rank_, roster.size(), buffer->data(), 0, drawn.terms.units);
    const bool soon = (choice >> 8) % 2 == 0;
    Request request{drawn.terms, buffer->data(), soon, (choice >> 9) % 8 == 0, buffer};
    flights_.push_back({drawn, buffer, team(drawn).start(std::move(request))});
    return soon;
  }

  bool finish(size_t position) {
    const Flight flight = flights_[position];
    flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(position));
    Status status;
    do {
      status = team(flight.drawn).wait(*flight.operation, std::chrono::milliseconds(200));
    } while (status == Status::kPending);
    const std::string where = "rank " + std::to_string(rank_) + " operation " +
                              std::to_string(flight.drawn.id) + ": status " +
                              std::to_string(static_cast<int>(status));
    if (status == Status::kLost && job_.victim >= 0) {
      check_loss(flight.drawn, where);
      return false;
    }
    if (flight.drawn.clash) {
      require(status == Status::kMismatch, where);
      require(flight.operation->met().size() == teams_[flight.drawn.team].size(), where);
      return true;
    }
    require(status == Status::kOk, where);
    check_result(flight, where);
    return true;
  }

  void check_loss(const Draw& drawn, const std::string& where) {
    // A survivor leaves all of its teams, and may be missed in one before the victim is.
    const Failure failure = team(drawn).failure();
    require(failure.about.any(), where + ", nobody was blamed");
    for (size_t m = 0; m < teams_[drawn.team].size(); ++m) {
      const bool victim = static_cast<int>(teams_[drawn.team][m]) == job_.victim;
      require(
          !failure.about[m] || victim || team(drawn).state(m) != State::kHere,
          where + ", somebody was blamed who is there");
    }
  }

  void check_result(const Flight& flight, const std::string& where) {
    const Terms& terms = flight.drawn.terms;
    const auto& roster = teams_[flight.drawn.team];
    const int64_t chunk = terms.units / static_cast<int64_t>(roster.size());
    const int64_t own = place(flight.drawn.team) * chunk;
    std::vector<char> expected(terms.bytes() + 1);
    int64_t begin = 0;
    int64_t count = terms.units;
    switch (terms.kind) {
      case Kind::kReduceScatter:
        begin = own;
        count = chunk;
        [[fallthrough]];
      case Kind::kAllReduce:
        fill_sum(flight.drawn, roster, expected.data(), begin, count);
        break;
      case Kind::kAllGather:
        for (size_t m = 0; m < roster.size(); ++m) {
          const int64_t at = static_cast<int64_t>(m) * chunk;
          fill(flight.drawn, roster[m], roster.size(), expected.data(), at, chunk);
        }
        break;
      case Kind::kBroadcast:
        fill(flight.drawn, roster[terms.src], roster.size(), expected.data(), 0, terms.units);
        break;
    }
    const auto from = static_cast<size_t>(begin) * terms.unit_bytes;
    const auto bytes = static_cast<size_t>(count) * terms.unit_bytes;
    const bool equal =
        std::memcmp(expected.data() + from, flight.buffer->data() + from, bytes) == 0;
    require(equal, where + ", a wrong result");
  }

  const Job job_;
  const size_t rank_;
  const std::vector<std::vector<size_t>> teams_;
  std::shared_ptr<Arena> arena_;
  std::vector<std::unique_ptr<Team>> open_;
  std::vector<Flight> flights_;
  uint64_t finished_ = 0;
};

void run_threads(const Job& job, Lobby& lobby) {
  std::vector<std::shared_ptr<Arena>> arenas(job.ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < job.ranks; ++r) {
    threads.emplace_back([&, r] {
      Rank rank(job, lobby, arenas.data(), r);
      require(rank.run(), "a rank was lost");
      rank.leave();
    });
  }
  for (auto& thread : threads) thread.join();
}

int rank_process(const Job& job, Lobby& lobby, size_t r) {
  std::vector<std::shared_ptr<Arena>> arenas(job.ranks);
  Rank rank(job, lobby, arenas.data(), r);
  require(rank.run() == (job.victim < 0), "a rank was lost, or its loss not noticed");
  rank.leave();
  return 0;
}

void run_processes(const Job& job, Lobby& lobby) {
  std::vector<pid_t> children;
  for (size_t r = 0; r < job.ranks; ++r) {
    const pid_t pid = fork();
    require(pid >= 0, "fork");
    if (pid == 0) std::exit(rank_process(job, lobby, r));
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

// Memory for the ranks' first words with each other, anew for each run.
Lobby& make_lobby() {
  void* const memory =
      mmap(nullptr, sizeof(Lobby), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap");
  return *new (memory) Lobby{};
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) give_up("usage: shm_stress threads|processes|kill RANKS OPERATIONS|ROUNDS SEED");
  const std::string mode = arguments[1];
  const auto ranks = static_cast<size_t>(std::stoul(arguments[2]));
  const auto number = std::stoull(arguments[3]);
  const auto seed = std::stoull(arguments[4]);
  require(ranks >= 2 && ranks <= kMostRanks, "2 to 8 ranks");
  if (mode == "threads") {
    run_threads({true, ranks, number, seed, -1, 0}, make_lobby());
  } else if (mode == "processes") {
    run_processes({false, ranks, number, seed, -1, 0}, make_lobby());
  } else {
    require(mode == "kill", "unknown mode " + mode);
    for (uint64_t round = 0; round < number; ++round) {
      const uint64_t s = mixed(seed, round);
      const auto victim = static_cast<int>(s % ranks);
      run_processes({false, ranks, 100000, s, victim, (s >> 8) % 400}, make_lobby());
    }
  }
  std::printf("%s: %llu with %zu ranks, all well\n", mode.c_str(), number, ranks);
  return 0;
}
