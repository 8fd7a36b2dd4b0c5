// Random exchanges and messages between ranks that are threads, for sanitizers and as a test.
//
//   shm_messages RANKS ROUNDS SEED
//
// In each round all ranks draw the same exchange and the same messages. They wait for them in
// different orders, or leave them to the progress threads.

#include "../../fddp/csrc/shm/messages.h"
#include "../../fddp/csrc/shm/shm_group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace fddp::shm;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

char byte_of(uint64_t id, uint64_t at) {
  return static_cast<char>((id * 31 + at * 7 + at / 251) & 0x7f);
}

constexpr int32_t kUnanswered = 9;  // tag

struct Letter {
  size_t from;
  size_t to;
  int32_t tag;
  uint64_t bytes;
};

// Sizes around the limits of copies, slots and outboxes.
uint64_t draw_bytes(std::mt19937_64& random) {
  constexpr uint64_t kSizes[] = {0, 1, 100, 5000, 70'000, 300'000, 700'000};
  return kSizes[random() % (random() % 8 == 0 ? 7 : 5)] + random() % 3;
}

class Member {
 public:
  Member(std::shared_ptr<ShmGroup> group, std::shared_ptr<Arena> arena, uint64_t seed)
      : group_(std::move(group)),
        arena_(std::move(arena)),
        messages_(std::make_unique<Messages>(group_)),
        same_(seed),
        own_(seed * 1000 + group_->index()) {}

  void round(uint64_t id) {
    start_exchange(id);
    start_letters(id);
    std::vector<size_t> order(sent_.size() + received_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), own_);
    const bool exchange_first = own_() % 2 == 0;
    if (exchange_first) finish_exchange(id);
    for (const size_t i : order) {
      const bool sends = i < sent_.size();
      Message& message = sends ? *sent_[i].first : *received_[i - sent_.size()].first;
      if (own_() % 3 == 0) {
        while (!messages_->done(message)) std::this_thread::yield();
      }
      require(messages_->wait(message, std::chrono::seconds(60)) == Status::kOk, "a message failed");
    }
    for (const auto& [message, content] : received_) check(content);
    if (!exchange_first) finish_exchange(id);
    sent_.clear();
    received_.clear();
  }

  // Finish an exchange to which all contribute while receives are pending that nobody answers, and
  // leave. It completes on each member, whichever have left. The receives fail, and nothing else:
  // member 0 leaves last, and waits for them.
  void leave(uint64_t id) {
    char unused = 0;
    std::vector<MessagePtr> unanswered;
    for (size_t m = 0; m < group_->members(); ++m) {
      if (m == group_->index()) continue;
      unanswered.push_back(messages_->receive({m, kUnanswered, &unused, 1, nullptr, nullptr}));
    }
    start_exchange(id);
    // Time for the others to leave, and for the progress thread to look for them.
    if (own_() % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(25));
    finish_exchange(id);
    if (group_->index() == 0) {
      for (const MessagePtr& message : unanswered) {
        const Status status = messages_->wait(*message, std::chrono::seconds(60));
        require(status == Status::kLost, "a receive from a member that left");
      }
    }
    messages_->close();
    group_->leave();
  }

 private:
  struct Content {
    uint64_t id;
    std::vector<char> bytes;
  };

  void fill(std::vector<char>& bytes, uint64_t id) {
    for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_of(id, i);
  }
  void check(const Content& content) {
    for (uint64_t i = 0; i < content.bytes.size(); ++i) {
      require(content.bytes[i] == byte_of(content.id, i), "wrong content");
    }
  }

  void start_exchange(uint64_t id) {
    const size_t n = group_->members();
    std::vector<uint64_t> sizes(n * n);
    const bool uniform = same_() % 3 == 0;
    const bool in_arena = own_() % 2 == 0;
    const bool any_size = own_() % 3 == 0;
    for (uint64_t& size : sizes) size = draw_bytes(same_);
    buffers_ = std::make_shared<ExchangeBuffers>();
    sources_.assign(n, {});
    targets_.assign(n, {});
    blocks_.clear();
    for (size_t m = 0; m < n; ++m) {
      const size_t own = group_->index();
      const uint64_t sent = uniform ? sizes[own] : sizes[own * n + m];
      sources_[m].resize(sent);
      fill(sources_[m], id * 100 + own * 10 + (uniform ? 0 : m));
      const char* data = uniform ? sources_[0].data() : sources_[m].data();
      if (in_arena && !uniform) {
        blocks_.push_back(arena_->allocate(sent + 1).value().begin);
        char* const to = arena_->mapping()->base() + blocks_.back();
        if (sent != 0) std::memcpy(to, data, sent);
        data = to;
      }
      buffers_->sources.push_back({data, sent});
      targets_[m].resize(uniform ? sizes[m] : sizes[m * n + own]);
      if (any_size) {
        buffers_->targets.push_back({nullptr, kAnySize});
      } else {
        buffers_->targets.push_back({targets_[m].data(), targets_[m].size()});
      }
    }
    if (any_size) buffers_->allocate = [this](const auto& found) { return sized(found); };
    uniform_ = uniform;
    Request request{};
    request.signature.kind = Kind::kExchange;
    request.signature.number_type = NumberType::kOpaque;
    request.signature.unit_bytes = 1;
    request.wait_soon = own_() % 2 == 0;
    request.exchange = buffers_;
    exchange_ = group_->start(std::move(request));
  }

  // Targets that are passed once the sizes are known.
  std::vector<ExchangeBuffers::Target> sized(const std::vector<uint64_t>& sizes) {
    std::vector<ExchangeBuffers::Target> targets;
    for (size_t m = 0; m < targets_.size(); ++m) {
      require(sizes[m] == targets_[m].size(), "wrong size");
      targets.push_back({targets_[m].data(), sizes[m]});
    }
    return targets;
  }

  void finish_exchange(uint64_t id) {
    require(
        group_->wait(*exchange_, std::chrono::seconds(60)) == Status::kOk, "an exchange failed");
    for (size_t m = 0; m < targets_.size(); ++m) {
      check({id * 100 + m * 10 + (uniform_ ? 0 : group_->index()), targets_[m]});
    }
    for (const uint64_t block : blocks_) arena_->free(block);
    blocks_.clear();
  }

  void start_letters(uint64_t id) {
    const size_t n = group_->members();
    for (size_t k = 0; k < 6; ++k) {
      const size_t from = same_() % n;
      const Letter letter = {
          from, (from + 1 + same_() % (n - 1)) % n, static_cast<int32_t>(same_() % 2),
          draw_bytes(same_)};
      const uint64_t content = id * 100 + 50 + k;
      const bool any = same_() % 4 == 0 && n == 2;
      if (letter.from == group_->index()) {
        auto& [message, kept] = sent_.emplace_back(nullptr, Content{content, {}});
        kept.bytes.resize(letter.bytes);
        fill(kept.bytes, content);
        message = messages_->send(
            {letter.to, letter.tag, kept.bytes.data(), letter.bytes, nullptr, nullptr});
      } else if (letter.to == group_->index()) {
        auto& [message, kept] = received_.emplace_back(nullptr, Content{content, {}});
        kept.bytes.resize(letter.bytes);
        message = messages_->receive(
            {any ? MessageRequest::kAnyMember : letter.from, letter.tag, kept.bytes.data(),
             letter.bytes, nullptr, nullptr});
      }
    }
  }

  std::shared_ptr<ShmGroup> group_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<Messages> messages_;
  std::mt19937_64 same_;
  std::mt19937_64 own_;
  std::shared_ptr<ExchangeBuffers> buffers_;
  std::vector<std::vector<char>> sources_;
  std::vector<std::vector<char>> targets_;
  std::vector<uint64_t> blocks_;
  bool uniform_ = false;
  OperationPtr exchange_;
  std::vector<std::pair<MessagePtr, Content>> sent_;
  std::vector<std::pair<MessagePtr, Content>> received_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: shm_messages RANKS ROUNDS SEED\n");
    return 2;
  }
  const size_t n = std::strtoull(argv[1], nullptr, 10);
  const uint64_t rounds = std::strtoull(argv[2], nullptr, 10);
  const uint64_t seed = std::strtoull(argv[3], nullptr, 10);
  std::vector<std::shared_ptr<Arena>> arenas;
  for (size_t m = 0; m < n; ++m) arenas.push_back(std::make_shared<Arena>(1 << 28));
  ShmGroupOptions options{};
  for (const auto& arena : arenas) options.mappings.push_back(arena->mapping());
  options.control_block = ShmGroup::make_control_block(*arenas[0], n).value();
  options.timeout = std::chrono::seconds(60);
  options.waiters_on_host = n;
  std::vector<std::unique_ptr<Member>> members;
  for (size_t m = 0; m < n; ++m) {
    options.arena = arenas[m];
    options.index = m;
    members.push_back(
        std::make_unique<Member>(std::make_shared<ShmGroup>(options), arenas[m], seed));
  }
  std::vector<std::thread> threads;
  for (auto& member : members) {
    threads.emplace_back([&] {
      for (uint64_t id = 0; id < rounds; ++id) member->round(id);
      member->leave(rounds);
    });
  }
  for (auto& thread : threads) thread.join();
  std::printf("all well\n");
  return 0;
}
