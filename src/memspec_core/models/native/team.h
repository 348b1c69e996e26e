// The threads that compute a pass together.
#pragma once

#include <immintrin.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "storage.h"

namespace memspec {

// Memory that is likely to be read next.
struct Soon {
  struct Part {
    const char* begin;
    int64_t bytes;
  };

  void add(const void* begin, int64_t bytes) {
    if (count < kMost) parts[count++] = {static_cast<const char*>(begin), bytes};
  }

  static constexpr int64_t kMost = 16;
  std::array<Part, kMost> parts;
  int64_t count = 0;
};

// Threads that run a function together. They wait for the next one, and for each other, by
// spinning for a while and then asleep: the threads of a pass meet some 150 times, too often to
// sleep each time. (GCC's OpenMP does, as soon as a process has more threads of its teams than
// there are CPUs, whatever they do.) Where something else runs on the CPUs too, two of them may
// have to share one: soon a thread that spins lets others run. Before it spins it asks for memory
// that will be read soon, while the caller is at other things; a request for memory that was freed
// does no harm. A function must not throw: the other threads would wait for one that left.
class Team {
 public:
  // Run function(team, index) on `threads` threads, of which the caller is number 0. The process
  // has one team: passes of different decoders follow each other.
  template <class Function>
  static void run(int64_t threads, const Function& function, const Soon& soon = {}) {
    if (threads == 1) {  // which nobody has to wait for
      Team alone(1);
      alone.start(function, soon);
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!team_ || team_->threads_ != threads) {
      team_.reset();
      team_ = std::make_unique<Team>(threads);
    }
    team_->start(function, soon);
  }

  explicit Team(int64_t threads) : threads_(threads) {
    helpers_.reserve(threads - 1);
    try {
      for (int64_t index = 1; index < threads; ++index) {
        helpers_.emplace_back([this, index] { help(index); });
      }
    } catch (...) {  // the system gives no more threads
      dismiss();
      throw;
    }
  }

  ~Team() { dismiss(); }

  // Share 0 .. count - 1 out in equal parts, and wait until all threads have done theirs.
  template <class Function>
  void each(int64_t index, int64_t count, const Function& function) {
    share(index, count, function);
    meet();
  }

  // The same without waiting.
  template <class Function>
  void share(int64_t index, int64_t count, const Function& function) {
    const int64_t end = count * (index + 1) / threads_;
    for (int64_t i = count * index / threads_; i < end; ++i) function(i);
  }

  void meet() {
    const uint32_t meeting = meetings_.load();
    if (++arrived_ < threads_) {
      wait_while(meetings_, meeting);
      return;
    }
    arrived_ = 0;
    ++meetings_;
    meetings_.notify_all();
  }

 private:
  static constexpr int kSpins = 1000, kYields = 3000;
  static inline std::mutex mutex_;
  static inline std::unique_ptr<Team> team_;

  template <class Function>
  void start(const Function& function, const Soon& soon) {
    call_ = [](const void* f, Team& team, int64_t index) {
      (*static_cast<const Function*>(f))(team, index);
    };
    function_ = &function;
    soon_ = soon;
    ++round_;
    round_.notify_all();
    function(*this, 0);
    meet();
  }

  void dismiss() {
    call_ = nullptr;
    ++round_;
    round_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  void help(int64_t index) {
    for (uint32_t round = 0;; ++round) {
      wait_while(round_, round);
      if (call_ == nullptr) return;
      call_(function_, *this, index);
      const Soon soon = soon_;  // of this round; after the meeting it may be the next one's
      meet();
      ask_for(soon, index, round + 1);
    }
  }

  // Bring memory into the caches until the round changes: first what thread `index` will read of
  // weights that are shared out in equal parts, then, by thread 1, what the caller will.
  void ask_for(const Soon& soon, int64_t index, uint32_t round) {
    for (const int64_t thread : {index, int64_t{0}}) {
      if (thread == 0 && index > 1) return;
      for (int64_t part = 0; part < soon.count; ++part) {
        const auto [begin, bytes] = soon.parts[part];
        const int64_t end = bytes * (thread + 1) / threads_;
        for (int64_t at = bytes * thread / threads_; at < end; at += 64) {
          if (at % kPage < 64 && round_.load() != round) return;
          _mm_prefetch(begin + at, _MM_HINT_T1);
        }
      }
    }
  }

  static void wait_while(std::atomic<uint32_t>& value, uint32_t old) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (value.load() != old) return;
      _mm_pause();
    }
    for (int yield = 0; yield < kYields; ++yield) {
      if (value.load() != old) return;
      std::this_thread::yield();
    }
    while (value.load() == old) value.wait(old);
  }

  const int64_t threads_;
  std::vector<std::thread> helpers_;
  void (*call_)(const void*, Team&, int64_t) = nullptr;
  const void* function_ = nullptr;
  Soon soon_;
  std::atomic<uint32_t> round_{0}, meetings_{0};
  std::atomic<int64_t> arrived_{0};
};

}  // namespace memspec
