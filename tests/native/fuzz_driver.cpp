// Coverage-guided driver of a libFuzzer target for gcc, which has no libFuzzer. gcc reports
// coverage through -fsanitize-coverage=trace-pc; this file is compiled without it.
//
//   fuzz SECONDS SEED [FILE...]    the files are initial inputs; with 0 seconds only they are run
//
// The current input is always in the file `fuzz-input` in the working directory. The file stays
// there if the process ends early.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;

constexpr size_t kEdges = size_t{1} << 16;
constexpr size_t kLongest = 1024;
// Hit counts by hash of the code address. Threads update them without a lock; lost counts are
// harmless.
uint8_t hits[kEdges];
uint8_t seen[kEdges];

// Return true if the last input reached new code.
bool news() {
  bool found = false;
  for (size_t e = 0; e < kEdges; ++e) {
    // Hit count in powers of two.
    uint8_t grade = 0;
    for (uint8_t count = hits[e]; count != 0; count >>= 1) ++grade;
    if (grade > seen[e]) {
      seen[e] = grade;
      found = true;
    }
  }
  return found;
}

// Current input, in a file that outlives the process.
class Record {
 public:
  Record() {
    const int fd = open("fuzz-input", O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ftruncate(fd, 8 + 2 * kLongest) != 0) std::abort();
    void* const at = mmap(nullptr, 8 + 2 * kLongest, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) std::abort();
    close(fd);
    memory_ = static_cast<uint8_t*>(at);
  }
  void put(const Input& input) {
    const uint64_t size = input.size();
    std::memcpy(memory_, &size, 8);
    if (size != 0) std::memcpy(memory_ + 8, input.data(), size);
  }

 private:
  uint8_t* memory_;
};

bool run(Record& record, const Input& input) {
  record.put(input);
  std::memset(hits, 0, sizeof hits);
  // A copy of exactly this size, so that sanitizers detect reads past its end.
  const Input exact(input);
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  return news();
}

Input random_input(std::mt19937_64& random) {
  Input input(random() % 200 + 1);
  for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
  return input;
}

Input mutated(std::mt19937_64& random, Input input, const std::vector<Input>& corpus) {
  constexpr uint8_t kEnds[] = {0, 1, 0x7f, 0x80, 0xff};
  for (uint64_t change = random() % 6 + 1; change > 0; --change) {
    const size_t at = input.empty() ? 0 : random() % input.size();
    const auto here = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (input.empty() ? 2 : random() % 6) {
      case 0:
        input[at] ^= static_cast<uint8_t>(1u << random() % 8);
        break;
      case 1:
        input[at] = random() % 2 == 0 ? kEnds[random() % std::size(kEnds)]
                                      : static_cast<uint8_t>(random());
        break;
      case 2: {
        const Input more = random_input(random);
        input.insert(here, more.begin(), more.begin() + 1 + static_cast<int>(more.size() / 8));
        break;
      }
      case 3:
        input.erase(here, here + static_cast<std::ptrdiff_t>(random() % (input.size() - at)));
        break;
      case 4: {
        const Input& other = corpus[random() % corpus.size()];
        const size_t from = other.empty() ? 0 : random() % other.size();
        input.resize(at);
        input.insert(
            input.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
        break;
      }
      default:
        std::swap(input[at], input[random() % input.size()]);
        break;
    }
  }
  if (input.size() > kLongest) input.resize(kLongest);
  return input;
}

size_t edges() {
  return static_cast<size_t>(std::count_if(seen, seen + kEdges, [](uint8_t h) { return h != 0; }));
}

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& count = hits[(place ^ place >> 16) % kEdges];
  if (count != 255) ++count;
}

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: fuzz SECONDS SEED [FILE...]\n");
    return 2;
  }
  const double seconds = std::atof(arguments[1]);
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  Record record;
  std::vector<Input> corpus;
  uint64_t executions = 0;
  for (int a = 3; a < count; ++a) {
    std::ifstream file(arguments[a], std::ios::binary);
    Input input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (std::string(arguments[a]).ends_with("fuzz-input") && input.size() >= 8) {
      uint64_t size = 0;
      std::memcpy(&size, input.data(), 8);
      input.erase(input.begin(), input.begin() + 8);
      input.resize(std::min<size_t>(size, input.size()));
    }
    run(record, input);
    corpus.push_back(input);
    ++executions;
  }
  const auto begin = Clock::now();
  auto report = begin + std::chrono::seconds(30);
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  while (passed() < seconds) {
    const bool fresh = corpus.empty() || random() % 8 == 0;
    const Input input =
        fresh ? random_input(random)
              : mutated(random, corpus[random() % corpus.size()], corpus);
    if (run(record, input)) corpus.push_back(input);
    ++executions;
    if (Clock::now() < report) continue;
    report += std::chrono::seconds(30);
    std::printf(
        "%.0f s: %llu executions, %zu places in the code, %zu inputs kept\n", passed(),
        static_cast<unsigned long long>(executions), edges(), corpus.size());
    std::fflush(stdout);
  }
  unlink("fuzz-input");
  std::printf(
      "%llu executions, %zu places in the code, %zu inputs kept, all well\n",
      static_cast<unsigned long long>(executions), edges(), corpus.size());
  return 0;
}
