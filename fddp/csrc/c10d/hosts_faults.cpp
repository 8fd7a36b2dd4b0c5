#include "c10d/hosts_faults.h"

#include "c10d/shm_errors.h"
#include "shm/futex.h"

#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace fddp {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPollInterval{20};
// Ranks report their own waits within this time, after which a rank that has reported nothing can
// be called late by one that waits for it.
constexpr milliseconds kReportTime{1000};
// All ranks that wait have reported within this time.
constexpr milliseconds kSilenceTime{3000};
constexpr milliseconds kStoreLimit{2000};  // longest wait for an answer of the store
constexpr char kCause[] = "cause";
constexpr char kReported[] = "reported";
constexpr char kTimedOut[] = "timed_out";

// Call `body` on another thread, because its server may have been stopped. Returns nullopt if it
// does not return in time, or throws.
template <class Result>
std::optional<Result> limited(std::function<Result()> body, milliseconds limit) {
  const auto promise = std::make_shared<std::promise<Result>>();
  std::future<Result> result = promise->get_future();
  std::thread([promise, body = std::move(body)] {
    try {
      promise->set_value(body());
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return result.get();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string numbers_in_words(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string text_of_late(const std::vector<int>& ranks, milliseconds timeout) {
  return numbers_in_words(ranks) + " did not take part within the timeout of " +
         in_seconds(timeout);
}

// The exchange of one rank with the others.
struct Agreement {
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  Finding finding;
  FaultReports::Probe probe;
  milliseconds timeout;

  static std::vector<uint8_t> bytes_of(const std::string& text) {
    return {text.begin(), text.end()};
  }

  // Return the value of the key, which is `text` if it had none.
  std::string first_of(const std::string& key, const std::string& text) const {
    const auto value = store->compareSet(key, {}, bytes_of(text));
    return {value.begin(), value.end()};
  }

  std::vector<int> silent(const std::vector<int>& among) const {
    std::vector<int> found;
    for (const int other : among) {
      const bool reported = store->check({kReported + std::to_string(other)});
      if (other != rank && !reported) found.push_back(other);
    }
    return found;
  }

  std::string cause_of_silence() const {
    std::vector<int> all;
    for (int other = 0; other < size; ++other) all.push_back(other);
    const std::vector<int> ranks = silent(all);
    if (ranks.empty()) return finding.text;
    return store->check({kTimedOut}) ? text_of_late(ranks, timeout) : text_of_lost(ranks);
  }

  void report() const {
    if (finding.timed_out) store->set(kTimedOut, bytes_of("1"));
    if (!finding.cause.empty()) first_of(kCause, finding.cause);
    store->set(kReported + std::to_string(rank), bytes_of("1"));
    store->set(kReported, bytes_of("1"));
  }

  std::string settle() const {
    const auto begin = shm::Clock::now();
    const auto passed = [&](milliseconds time) { return shm::Clock::now() - begin >= time; };
    for (milliseconds next_probe = finding.probe_after;;) {
      if (store->check({kCause})) return first_of(kCause, "");
      if (passed(next_probe)) {
        next_probe = 2 * next_probe + kPollInterval;
        // Ranks that timed out close connections that work.
        const bool lost_only = !store->check({kTimedOut});
        if (lost_only && !probe().empty()) {
          // Other processes of a lost host end at about the same time.
          std::this_thread::sleep_for(kPollInterval);
          return first_of(kCause, text_of_lost(probe()));
        }
      }
      if (!finding.late.empty() && passed(kReportTime)) {
        const std::vector<int> late = silent(finding.late);
        if (!late.empty()) return first_of(kCause, text_of_late(late, timeout));
      }
      if (passed(kSilenceTime)) return first_of(kCause, cause_of_silence());
      std::this_thread::sleep_for(kPollInterval);
    }
  }
};

}  // namespace

std::string text_of_lost(const std::vector<int>& ranks) {
  return numbers_in_words(ranks) +
         (ranks.size() == 1 ? " left the group, or its process has ended"
                            : " left the group, or their processes have ended");
}

FaultReports::FaultReports(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : store_(store->clone()), rank_(rank), size_(size) {}

bool FaultReports::exist() {
  if (!answers_) return false;
  const auto found = limited<bool>(
      [store = store_] { return store->check({kReported}); }, kStoreLimit);
  answers_ = found.has_value();
  return found.value_or(false);
}

void FaultReports::report(const Finding& finding) {
  if (!answers_) return;
  const Agreement agreement{store_, rank_, size_, finding, nullptr, {}};
  const auto reported = limited<bool>(
      [agreement] {
        agreement.report();
        return true;
      },
      kStoreLimit);
  answers_ = reported.has_value();
}

std::string FaultReports::settle(
    const Finding& finding, const Probe& probe, std::chrono::milliseconds timeout) {
  if (answers_) {
    const Agreement agreement{store_, rank_, size_, finding, probe, timeout};
    const auto cause = limited<std::string>(
        [agreement] { return agreement.settle(); }, kSilenceTime + kStoreLimit);
    if (cause) return *cause;
    answers_ = false;
  }
  // The process with the store may be the one that was lost.
  if (!finding.cause.empty()) return finding.cause;
  if (!finding.disconnected.empty()) return text_of_lost(finding.disconnected);
  const std::vector<int> lost = finding.timed_out ? std::vector<int>() : probe();
  if (!lost.empty()) return text_of_lost(lost);
  if (!finding.late.empty()) return text_of_late(finding.late, timeout);
  const std::string found = finding.suspects.empty()
                                ? finding.text
                                : "one of " + text_of_late(finding.suspects, timeout);
  return found + "; the store of the group does not answer";
}

}  // namespace fddp
