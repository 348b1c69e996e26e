// One pass of a few rows through a Llama or Qwen2 decoder, on CPUs with AVX-512, its VNNI
// and its BF16 part.
//
// The arithmetic of a row never depends on how many rows a pass has or on the number of threads:
// every sum has a fixed order. So plain decoding (one row) and verification (several) agree bit
// for bit.
//
// Weights lie in tiles of 16 outputs. A tile is a sequence of groups, read once from its first byte
// to its last; a group has a header and then blocks of 32 inputs:
//   int4  16 scales and 16 minima (fp16); blocks of 256 bytes, in which byte 4i + e of the j-th 64
//         holds inputs 8j + e (low half) and 8j + 4 + e (high half) of output i.
//         w = code * scale + minimum
//   int8  16 scales (fp16); blocks of 512 bytes, in which byte 4i + e of the j-th 64 holds input
//         4j + e of output i, plus 128.  w = (code - 128) * scale
//   bf16  no header; blocks of 1024 bytes: inputs 2j and 2j + 1 of the 16 outputs
//   fp16  no header; blocks of 1024 bytes, input by input
// For weights of 4 and 8 bits activations are rounded to 8 bits, each block of 32 with a scale of
// its own, and products within a block are exact integers; for the others they are rounded to
// bf16. Sums over blocks, norms, attention and the residual are in fp32.

#include <immintrin.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kTile = 16;        // outputs of a tile
constexpr int64_t kBlock = 32;       // inputs of a block
constexpr int64_t kChunk = 64;       // positions of the context that are attended to together
constexpr int64_t kMaxRows = 64;     // rows of one pass; more are fed in several passes
constexpr int64_t kMaxHeadSize = 256;

// --- small vectors -------------------------------------------------------------------------------

// Ask for what comes a page after the bytes at p: the processor's own read-ahead ends with each
// page, and gets going slowly. (Measured: 7 % of a pass of one row, 10 % of one of six.)
template <int64_t Bytes>
inline void read_ahead(const void* p) {
  for (int64_t line = 0; line < Bytes; line += 64) {
    _mm_prefetch(static_cast<const char*>(p) + kPage + line, _MM_HINT_T0);
  }
}

inline __m512 from_half(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}

inline void to_half(void* p, __m512 x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// e^x for x <= 0, to about one unit in the last place; 0 for -inf.
inline __m512 exponential(__m512 x) {
  const __m512 clamped = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                        5.0000001201e-1f}) {
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  }
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(y, n);
}

inline __m512 silu(__m512 x) {
  // Both e^-|x| / (1 + e^-|x|) and 1 / (1 + e^-|x|) stay finite.
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 top = _mm512_mask_blend_ps(negative, one, e);
  return _mm512_mul_ps(x, _mm512_div_ps(top, _mm512_add_ps(one, e)));
}

// --- threads -------------------------------------------------------------------------------------

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
// does no harm.
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
    for (int64_t index = 1; index < threads; ++index) {
      helpers_.emplace_back([this, index] { help(index); });
    }
  }

  ~Team() {
    call_ = nullptr;
    ++round_;
    round_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

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

// --- linear layers -------------------------------------------------------------------------------

enum class Format { int4, int8, bf16, fp16 };

Format parse_format(const std::string& name) {
  if (name == "int4") return Format::int4;
  if (name == "int8") return Format::int8;
  if (name == "bf16") return Format::bf16;
  TORCH_CHECK(name == "fp16", "unknown format ", name);
  return Format::fp16;
}

int64_t block_bytes(Format format) {
  return format == Format::int4 ? 256 : format == Format::int8 ? 512 : 1024;
}

int64_t header_bytes(Format format) {
  return format == Format::int4 ? 64 : format == Format::int8 ? 32 : 0;
}

// Weights of y = x W^T + b, and the order in which the columns take the inputs.
struct Linear {
  Linear(torch::Tensor packed_, const std::string& format_, int64_t outputs_, int64_t inputs_,
         int64_t group_size, torch::optional<torch::Tensor> bias_,
         torch::optional<torch::Tensor> input_order_)
      : packed(packed_), bias(bias_), input_order(input_order_), format(parse_format(format_)),
        outputs(outputs_), inputs(inputs_), group_blocks(group_size / kBlock) {
    TORCH_CHECK(outputs % kTile == 0 && group_size > 0 && group_size % kBlock == 0 &&
                inputs % group_size == 0, "sizes ", outputs, " x ", inputs);
    TORCH_CHECK(packed.scalar_type() == torch::kUInt8 && packed.is_contiguous() &&
                packed.numel() == outputs / kTile * tile_bytes(), "packed weights do not fit");
    TORCH_CHECK(!bias || (bias->scalar_type() == torch::kFloat32 && bias->is_contiguous() &&
                          bias->numel() == outputs), "the bias does not fit");
    TORCH_CHECK(!input_order || (input_order->scalar_type() == torch::kInt32 &&
                input_order->is_contiguous() && input_order->numel() == inputs),
                "the order of the inputs does not fit");
  }

  int64_t tiles() const { return outputs / kTile; }
  bool is_integer() const { return format == Format::int4 || format == Format::int8; }
  int64_t groups() const { return inputs / kBlock / group_blocks; }
  int64_t tile_bytes() const {
    return groups() * (header_bytes(format) + group_blocks * block_bytes(format));
  }
  const uint8_t* tile(int64_t index) const {
    return packed.const_data_ptr<uint8_t>() + index * tile_bytes();
  }

  torch::Tensor packed;
  torch::optional<torch::Tensor> bias, input_order;
  Format format;
  int64_t outputs, inputs, group_blocks;
};

// Memory that grows, is not cleared, and begins at a cache line.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    if (count > count_) {
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
      TORCH_CHECK(memory_, "out of memory");
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

// Rows as the kernels take them: rounded to 8 bits in blocks, or to bf16.
//
// Rows that a kernel takes together form a group of R rows (all rows of a pass if they are at most
// 6, else 4, which is the fastest a row), in which the words of row r (four neighbouring inputs of
// 8 bits, or two in bf16) lie at [word][r], and the scales and sums of blocks at [block][r].
class Activations {
 public:
  static int64_t group_of(int64_t rows) { return rows <= 6 ? rows : 4; }

  void resize(int64_t rows, int64_t size) {
    rows_ = rows;
    group_ = group_of(rows);
    size_ = size;
    words_.reserve(rows * size / 2);
    scales_.reserve(rows * size / kBlock);
    sums_.reserve(rows * size / kBlock);
    row_.reserve(size);
    ordered_.reserve(size);
  }

  // A row to be filled, then set with its number.
  float* row() { return row_.get(); }

  void set(int64_t row, const Linear& linear) { set(row, row_.get(), linear); }

  void set(int64_t row, const float* x, const Linear& linear) {
    if (linear.input_order) {
      const int32_t* order = linear.input_order->const_data_ptr<int32_t>();
      for (int64_t i = 0; i < size_; ++i) ordered_.get()[i] = x[order[i]];
      x = ordered_.get();
    }
    words_a_block_ = linear.is_integer() ? 8 : 16;
    const int64_t first = row / group_ * group_, count = std::min(group_, rows_ - first);
    int32_t* words = words_.get() + first * words_a_row() + row % group_;
    const int64_t block_place = first * size_ / kBlock + row % group_;
    alignas(64) int32_t block[16];
    for (int64_t b = 0; b < size_ / kBlock; ++b, x += kBlock) {
      const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
      if (linear.is_integer()) {
        round_block(low, high, block, scales_.get() + block_place + b * count,
                    sums_.get() + block_place + b * count);
      } else {
        _mm512_store_si512(block, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      for (int64_t i = 0; i < words_a_block_; ++i) {
        words[(b * words_a_block_ + i) * count] = block[i];
      }
    }
  }

  // Of the group that begins with this row.
  const int32_t* words(int64_t row) const { return words_.get() + row * words_a_row(); }
  const float* scales(int64_t row) const { return scales_.get() + row * size_ / kBlock; }
  const float* sums(int64_t row) const { return sums_.get() + row * size_ / kBlock; }

 private:
  int64_t words_a_row() const { return size_ / kBlock * words_a_block_; }

  // The scale is not a number where one of the 32 values is none.
  static void round_block(__m512 low, __m512 high, int32_t* words, float* scale, float* sum) {
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low),
                                                             _mm512_abs_ps(high)));
    const float not_a_number = 0.0f * _mm512_reduce_add_ps(_mm512_add_ps(low, high));
    const __m512 factor = _mm512_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
    _mm_store_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtsepi32_epi8(first));
    _mm_store_si128(reinterpret_cast<__m128i*>(words + 4), _mm512_cvtsepi32_epi8(second));
    *scale = largest / 127.0f + not_a_number;
    *sum = *scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(first, second)));
  }

  int64_t rows_ = 0, group_ = 1, size_ = 0, words_a_block_ = 16;
  Buffer<int32_t> words_;
  Buffer<float> scales_, sums_, row_, ordered_;
};

inline __m512bh everywhere(int32_t pair) { return (__m512bh)_mm512_set1_epi32(pair); }

// The products of a block's 8-bit rows with its weights, given as 8 vectors of 16 outputs times
// four inputs in turn, times the rows' scales.
template <int R, class Weights>
inline void add_block(const Weights& weights, const int32_t* x, const float* scales,
                      __m512 (&dot)[R]) {
  __m512i whole[R];
  for (int r = 0; r < R; ++r) whole[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const __m512i four = weights(j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      whole[r] = _mm512_dpbusd_epi32(whole[r], four, _mm512_set1_epi32(x[j * R + r]));
    }
  }
  for (int r = 0; r < R; ++r) {
    dot[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r]), _mm512_set1_ps(scales[r]), dot[r]);
  }
}

template <int R>
inline void int4_tile(const uint8_t* p, const Linear& linear, const int32_t* x,
                      const float* scales, const float* sums, __m512 (&y)[R]) {
  const __m512i half = _mm512_set1_epi8(15);
  for (int64_t g = linear.groups(); g > 0; --g) {
    const __m512 scale = from_half(p), minimum = from_half(p + 32);
    read_ahead<64>(p);
    p += 64;
    __m512 dot[R];
    float sum[R];
    for (int r = 0; r < R; ++r) {
      dot[r] = _mm512_setzero_ps();
      sum[r] = 0.0f;
    }
    for (int64_t b = linear.group_blocks; b > 0; --b) {
      __m512i bytes;
      read_ahead<256>(p);
      add_block<R>(
          [&](int j) {
            if (j % 2 == 0) bytes = _mm512_loadu_si512(p + 32 * j);
            return _mm512_and_si512(j % 2 == 0 ? bytes : _mm512_srli_epi16(bytes, 4), half);
          },
          x, scales, dot);
      for (int r = 0; r < R; ++r) sum[r] += sums[r];
      p += 256, x += 8 * R, scales += R, sums += R;
    }
    for (int r = 0; r < R; ++r) {
      y[r] = _mm512_fmadd_ps(_mm512_set1_ps(sum[r]), minimum, y[r]);
      y[r] = _mm512_fmadd_ps(dot[r], scale, y[r]);
    }
  }
}

template <int R>
inline void int8_tile(const uint8_t* p, const Linear& linear, const int32_t* x,
                      const float* scales, const float* sums, __m512 (&y)[R]) {
  for (int64_t g = linear.groups(); g > 0; --g) {
    const __m512 scale = from_half(p);
    p += 32;
    __m512 dot[R];
    for (int r = 0; r < R; ++r) dot[r] = _mm512_setzero_ps();
    for (int64_t b = linear.group_blocks; b > 0; --b) {
      read_ahead<512>(p);
      add_block<R>([&](int j) { return _mm512_loadu_si512(p + 64 * j); }, x, scales, dot);
      for (int r = 0; r < R; ++r) {
        dot[r] = _mm512_sub_ps(dot[r], _mm512_set1_ps(128.0f * sums[r]));
      }
      p += 512, x += 8 * R, scales += R, sums += R;
    }
    for (int r = 0; r < R; ++r) y[r] = _mm512_fmadd_ps(dot[r], scale, y[r]);
  }
}

template <int R>
inline void bf16_tile(const uint8_t* p, const Linear& linear, const int32_t* x,
                      __m512 (&y)[R]) {
  for (int64_t g = linear.groups(); g > 0; --g, p += 1024, x += 16 * R) {
    read_ahead<1024>(p);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const __m512bh pairs = (__m512bh)_mm512_loadu_si512(p + 64 * j);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        y[r] = _mm512_dpbf16_ps(y[r], pairs, everywhere(x[j * R + r]));
      }
    }
  }
}

template <int R>
inline void fp16_tile(const uint8_t* p, const Linear& linear, const int32_t* x,
                      __m512 (&y)[R]) {
  const auto everywhere_in_fp32 = [](int32_t bits) {
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
  };
  for (int64_t g = linear.groups(); g > 0; --g, p += 1024, x += 16 * R) {
    read_ahead<1024>(p);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) {
      const __m512 first = from_half(p + 64 * j), second = from_half(p + 64 * j + 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int32_t pair = x[j * R + r];
        y[r] = _mm512_fmadd_ps(first, everywhere_in_fp32(pair << 16), y[r]);
        y[r] = _mm512_fmadd_ps(second, everywhere_in_fp32(pair & 0xFFFF0000), y[r]);
      }
    }
  }
}

// Calls use(row, y) with the 16 outputs of a tile for R rows from `row` on.
template <int R, class Use>
void apply_tile(const Linear& linear, int64_t tile, const Activations& x, int64_t row, Use& use) {
  __m512 y[R];
  for (int r = 0; r < R; ++r) {
    y[r] = linear.bias ? _mm512_loadu_ps(linear.bias->const_data_ptr<float>() + tile * kTile)
                       : _mm512_setzero_ps();
  }
  const uint8_t* weights = linear.tile(tile);
  switch (linear.format) {
    case Format::int4:
      int4_tile<R>(weights, linear, x.words(row), x.scales(row), x.sums(row), y);
      break;
    case Format::int8:
      int8_tile<R>(weights, linear, x.words(row), x.scales(row), x.sums(row), y);
      break;
    case Format::bf16: bf16_tile<R>(weights, linear, x.words(row), y); break;
    case Format::fp16: fp16_tile<R>(weights, linear, x.words(row), y); break;
  }
  for (int r = 0; r < R; ++r) use(row + r, y[r]);
}

// The same for all rows, a group at a time: its sums fit into the registers.
template <class Use>
void apply(const Linear& linear, int64_t tile, const Activations& x, int64_t rows, Use use) {
  const int64_t group = Activations::group_of(rows);
  for (int64_t row = 0; row < rows; row += group) {
    switch (std::min(group, rows - row)) {
      case 1: apply_tile<1>(linear, tile, x, row, use); break;
      case 2: apply_tile<2>(linear, tile, x, row, use); break;
      case 3: apply_tile<3>(linear, tile, x, row, use); break;
      case 4: apply_tile<4>(linear, tile, x, row, use); break;
      case 5: apply_tile<5>(linear, tile, x, row, use); break;
      default: apply_tile<6>(linear, tile, x, row, use); break;
    }
  }
}

// All tiles, shared out among a team: write the results [rows, outputs].
void apply_all(Team& team, int64_t thread, const Linear& linear, const Activations& x,
               int64_t rows, float* out) {
  team.each(thread, linear.tiles(), [&](int64_t tile) {
    apply(linear, tile, x, rows, [&](int64_t row, __m512 y) {
      _mm512_storeu_ps(out + row * linear.outputs + tile * kTile, y);
    });
  });
}

// Write 32 weights of 8 bits, those of output `lane` of a block, in fp32.
inline void copy_block8(const uint8_t* block, int64_t lane, float scale, float* out) {
  alignas(32) int32_t words[8];
  const int32_t* word = reinterpret_cast<const int32_t*>(block) + lane;
  for (int64_t j = 0; j < 8; ++j) words[j] = word[j * kTile];
  for (int64_t half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(words + 4 * half));
    const __m512i codes = _mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(128));
    const __m512 values = _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_set1_ps(scale));
    _mm512_storeu_ps(out + 16 * half, values);
  }
}

// Write row `index` of a weight in fp32.
void copy_row(const Linear& linear, int64_t index, float* out) {
  const int64_t lane = index % kTile;
  const uint8_t* p = linear.tile(index / kTile);
  float scale = 1.0f, minimum = 0.0f;
  const auto half = [](const uint8_t* q, int64_t i) {
    return _cvtsh_ss(reinterpret_cast<const uint16_t*>(q)[i]);
  };
  for (int64_t b = 0; b < linear.inputs / kBlock; ++b, p += block_bytes(linear.format)) {
    const uint8_t* header = p;
    if (b % linear.group_blocks == 0) {
      p += header_bytes(linear.format);
      scale = header_bytes(linear.format) > 0 ? half(header, lane) : 1.0f;
      minimum = linear.format == Format::int4 ? half(header + 32, lane) : 0.0f;
    }
    if (linear.format == Format::int8) {
      copy_block8(p, lane, scale, out + b * kBlock);
      continue;
    }
    for (int64_t k = 0; k < kBlock; ++k) {
      float& value = out[b * kBlock + k];
      const int64_t place = (k / 2 * kTile + lane) * 2 + k % 2;
      if (linear.format == Format::int4) {
        const uint8_t both = p[(k / 8 * kTile + lane) * 4 + k % 4];
        const int code = k / 4 % 2 == 0 ? both & 15 : both >> 4;
        value = std::fma(static_cast<float>(code), scale, minimum);
      } else if (linear.format == Format::fp16) {
        value = half(p + 32 * k, lane);
      } else {
        const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(p)[place]} << 16;
        std::memcpy(&value, &bits, sizeof bits);
      }
    }
  }
}

torch::Tensor rows_of(const Linear& linear, const std::vector<int64_t>& indices) {
  TORCH_CHECK(!linear.input_order, "the weight reorders its inputs");
  torch::Tensor result =
      torch::empty({static_cast<int64_t>(indices.size()), linear.inputs}, torch::kFloat32);
  float* out = result.mutable_data_ptr<float>();
  for (const int64_t index : indices) {
    TORCH_CHECK(index >= 0 && index < linear.outputs, "there is no row ", index);
    copy_row(linear, index, out);
    out += linear.inputs;
  }
  return result;
}

// Eight codes of 4 bits in a word, input by input from its lowest bits on, as a tile has them: four
// inputs in the low halves of the bytes, the next four in the high ones.
inline __m512i as_in_tiles(__m512i words) {
  const auto spread = [](__m512i x) {
    x = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 8)), _mm512_set1_epi32(0x00ff00ff));
    return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 4)),
                            _mm512_set1_epi32(0x0f0f0f0f));
  };
  const __m512i low = spread(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
  return _mm512_or_si512(low, _mm512_slli_epi32(spread(_mm512_srli_epi32(words, 16)), 4));
}

// Weights [outputs, inputs] of 4 bits, two to a byte with the even input in the low half, as packed
// weights; `scale` and `minimum` [outputs, groups].
torch::Tensor packed_pairs(torch::Tensor pairs, torch::Tensor scale, torch::Tensor minimum) {
  const int64_t outputs = pairs.size(0), row_bytes = pairs.size(1), groups = scale.size(1);
  const auto fits = [&](const torch::Tensor& x) {
    return x.scalar_type() == torch::kFloat32 && x.is_contiguous() && x.size(0) == outputs &&
           x.size(1) == groups;
  };
  TORCH_CHECK(pairs.scalar_type() == torch::kUInt8 && pairs.is_contiguous() &&
              outputs % kTile == 0 && groups > 0 && 2 * row_bytes % (groups * kBlock) == 0 &&
              fits(scale) && fits(minimum), "the weights have another shape");
  const int64_t group_blocks = 2 * row_bytes / groups / kBlock;
  torch::Tensor packed = torch::empty(
      {outputs / kTile * groups *
       (header_bytes(Format::int4) + group_blocks * block_bytes(Format::int4))}, torch::kUInt8);
  uint8_t* out = packed.mutable_data_ptr<uint8_t>();
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto column = [&](int64_t width) {
    return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(width)));
  };
  const __m512i rows = column(row_bytes), headers = column(4 * groups);
  for (int64_t first = 0; first < outputs; first += kTile) {
    const uint8_t* codes = pairs.const_data_ptr<uint8_t>() + first * row_bytes;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t header = first * groups + group;
      to_half(out, _mm512_i32gather_ps(headers, scale.const_data_ptr<float>() + header, 1));
      to_half(out + 32, _mm512_i32gather_ps(headers, minimum.const_data_ptr<float>() + header, 1));
      out += header_bytes(Format::int4);
      for (int64_t word = 0; word < group_blocks * 4; ++word, codes += 4, out += 64) {
        _mm512_storeu_si512(out, as_in_tiles(_mm512_i32gather_epi32(rows, codes, 1)));
      }
    }
  }
  return packed;
}

// Round a value to bf16, to even where it lies half way.
inline float to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// Round 32 values to 4 bits between their extremes, scale and minimum in bf16, as round_to_int4 of
// quantised.py does, and put them where output `lane` of a group of 32 inputs has its place.
void put_rounded(const float* values, int64_t lane, uint8_t* group) {
  const __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16);
  const float minimum = to_bf16(_mm512_reduce_min_ps(_mm512_min_ps(low, high)));
  const float span = _mm512_reduce_max_ps(_mm512_max_ps(low, high)) - minimum;
  const float scale = to_bf16(std::max(span / 15.0f, 1e-8f));
  const auto codes = [&](__m512 x) {
    const __m512 level = _mm512_div_ps(_mm512_sub_ps(x, _mm512_set1_ps(minimum)),
                                       _mm512_set1_ps(scale));
    const __m512i code = _mm512_max_epi32(_mm512_cvtps_epi32(level), _mm512_setzero_si512());
    return _mm512_cvtepi32_epi8(_mm512_min_epi32(code, _mm512_set1_epi32(15)));
  };
  alignas(32) uint32_t words[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(words), codes(low));
  _mm_store_si128(reinterpret_cast<__m128i*>(words + 4), codes(high));
  uint16_t* header = reinterpret_cast<uint16_t*>(group);
  header[lane] = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
  header[kTile + lane] = _cvtss_sh(minimum, _MM_FROUND_TO_NEAREST_INT);
  uint32_t* block = reinterpret_cast<uint32_t*>(group + header_bytes(Format::int4));
  for (int64_t j = 0; j < 4; ++j) block[j * kTile + lane] = words[2 * j] | words[2 * j + 1] << 4;
}

// Rows of a weight as packed weights of 4 bits in groups of 32.
torch::Tensor rounded_rows(const Linear& linear, torch::Tensor indices) {
  TORCH_CHECK(!linear.input_order, "the weight reorders its inputs");
  TORCH_CHECK(indices.scalar_type() == torch::kInt64 && indices.is_contiguous() &&
              indices.numel() % kTile == 0, "the indices are no tiles of int64");
  const int64_t rows = indices.numel(), groups = linear.inputs / kBlock;
  const int64_t group_bytes = header_bytes(Format::int4) + block_bytes(Format::int4);
  torch::Tensor packed = torch::empty({rows / kTile * groups * group_bytes}, torch::kUInt8);
  uint8_t* out = packed.mutable_data_ptr<uint8_t>();
  std::vector<float> row(linear.inputs);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t index = indices.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(index >= 0 && index < linear.outputs, "there is no row ", index);
    copy_row(linear, index, row.data());
    uint8_t* group = out + i / kTile * groups * group_bytes;
    for (int64_t b = 0; b < groups; ++b, group += group_bytes) {
      put_rounded(row.data() + b * kBlock, i % kTile, group);
    }
  }
  return packed;
}

torch::Tensor apply_to(const Linear& linear, torch::Tensor x, int64_t threads) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == torch::kFloat32 && x.is_contiguous() &&
              x.size(1) == linear.inputs, "the rows have another shape");
  const int64_t rows = x.size(0);
  torch::Tensor result = torch::empty({rows, linear.outputs}, torch::kFloat32);
  float* out = result.mutable_data_ptr<float>();
  Activations activations;
  activations.resize(rows, linear.inputs);
  for (int64_t row = 0; row < rows; ++row) {
    activations.set(row, x.const_data_ptr<float>() + row * linear.inputs, linear);
  }
  Team::run(threads, [&](Team& team, int64_t thread) {
    apply_all(team, thread, linear, activations, rows, out);
  });
  return result;
}

// --- the step ------------------------------------------------------------------------------------

struct Sizes {
  int64_t hidden, intermediate, heads, kv_heads, head_size;
  double norm_epsilon, rotary_scale;
};

struct Layer {
  torch::Tensor input_norm, post_norm;
  Linear qkv, output, gate_up, down;
};

// Keys [blocks of 16 positions, head size, 16] and values [positions, head size] of one head.
struct Head {
  uint16_t *keys, *values;
  int64_t size;

  uint16_t* key(int64_t position) const {
    return keys + position / kTile * size * kTile + position % kTile;
  }
};

// Which positions the rows of a pass have, and what they see: the context and their ancestors.
//
// `parents` lists the rows of a tree from its first on, and the pass feeds the last of them; empty,
// each row follows the one before. A row of a tree lies at the next free place of the cache, not
// at its position, so that its path tells where what it sees after the context lies.
struct Shape {
  int64_t context;                          // positions before the tree
  std::vector<int64_t> positions;           // of each row of the pass
  std::vector<std::vector<int64_t>> paths;  // places of a row's ancestors and its own, in a tree

  Shape(int64_t start, int64_t rows, const std::vector<int64_t>& parents) : context(start) {
    const int64_t all = parents.size();
    if (all == 0) {
      for (int64_t r = 0; r < rows; ++r) positions.push_back(start + r);
      return;
    }
    context = start + rows - all;
    for (int64_t r = 0; r < all; ++r) {
      const int64_t parent = parents[r];
      TORCH_CHECK(parent >= -1 && parent < r, "row ", r, " has the parent ", parent);
      paths.push_back(parent < 0 ? std::vector<int64_t>() : paths[parent]);
      paths.back().push_back(context + r);
    }
    paths.erase(paths.begin(), paths.end() - rows);
    for (const auto& path : paths) positions.push_back(context + path.size() - 1);
  }

  bool is_tree() const { return !paths.empty(); }

  // How many of the positions from `first` on, at most a chunk's, a row sees.
  int64_t visible(int64_t row, int64_t first) const {
    return std::clamp<int64_t>(positions[row] + 1 - first, 0, kChunk);
  }
};

class Step {
 public:
  Step(Sizes sizes, std::vector<Layer> layers, Linear embedding, torch::Tensor norm, Linear head,
       std::vector<double> frequencies)
      : sizes_(sizes), layers_(std::move(layers)), embedding_(std::move(embedding)), norm_(norm),
        head_(std::move(head)), frequencies_(std::move(frequencies)) {
    TORCH_CHECK(sizes.head_size % kTile == 0 && sizes.head_size <= kMaxHeadSize &&
                sizes.heads % sizes.kv_heads == 0 &&
                static_cast<int64_t>(frequencies_.size()) * 2 == sizes.head_size, "head sizes");
  }

  // Feed tokens into the cache from `start` on; it is fp16 [layers, 2 * kv heads, capacity, head
  // size] in the layout of Head. `parents` may be empty, or is that of Shape. `features`, fp16
  // [positions, taps * hidden], takes what the layer after each of `taps` reads, or the head.
  torch::Tensor forward(const std::vector<int64_t>& tokens, torch::Tensor cache, int64_t start,
                        const std::vector<int64_t>& parents, int64_t threads,
                        torch::optional<torch::Tensor> features,
                        const std::vector<int64_t>& taps) {
    const int64_t rows = tokens.size();
    check_rows(tokens, cache, start, parents);
    Taps tapped;
    if (features) {
      check_features(*features, static_cast<int64_t>(taps.size()) * sizes_.hidden, start + rows);
      tapped = Taps{static_cast<uint16_t*>(features->data_ptr()), taps};
    }
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    reserve_workspaces(threads);
    for (int64_t first = 0; first < rows; first += kMaxRows) {
      const Shape shape(start + first, std::min(kMaxRows, rows - first), parents);
      float* out = hidden.mutable_data_ptr<float>() + first * sizes_.hidden;
      const Pass p = begin_pass(shape, start + first, out);
      for (int64_t r = 0; r < p.rows; ++r) {
        copy_row(embedding_, tokens[first + r], out + r * sizes_.hidden);
      }
      Team::run(threads, [&](Team& team, int64_t thread) {
        run_layers(p, team, thread, cache, tapped);
      });
    }
    return hidden;
  }

  torch::Tensor logits(torch::Tensor hidden, int64_t threads) {
    const int64_t rows = hidden.size(0);
    check_hidden(hidden);
    torch::Tensor result = torch::empty({rows, head_.outputs}, torch::kFloat32);
    float* out = result.mutable_data_ptr<float>();
    reserve_workspaces(threads);
    Team::run(threads, [&](Team& team, int64_t index) {
      Activations& x = workspaces_[index].x;
      x.resize(rows, sizes_.hidden);
      set_normed(x, hidden.const_data_ptr<float>(), rows, norm_, head_);
      apply_all(team, index, head_, x, rows, out);
    });
    return result;
  }

  // The output with the largest logit after each hidden row, of equals the first, and that logit;
  // it is no number where one of the row's logits is none. An iteration ends with it: the next is
  // likely to begin with the draft that this one began with.
  std::pair<std::vector<int64_t>, std::vector<double>> most_probable(torch::Tensor hidden,
                                                                     int64_t threads) {
    const int64_t rows = hidden.size(0);
    check_hidden(hidden);
    std::vector<Largest> found(threads * rows);
    reserve_workspaces(threads);
    Team::run(threads, [&](Team& team, int64_t thread) {
      Workspace& own = workspaces_[thread];
      own.x.resize(rows, sizes_.hidden);
      set_normed(own.x, hidden.const_data_ptr<float>(), rows, norm_, head_);
      Lanes* lanes = own.lanes.reserve(rows);
      std::fill(lanes, lanes + rows, Lanes{});
      team.share(thread, head_.tiles(), [&](int64_t tile) {
        apply(head_, tile, own.x, rows,
              [&](int64_t row, __m512 y) { lanes[row].add(static_cast<int>(tile), y); });
      });
      for (int64_t row = 0; row < rows; ++row) found[thread * rows + row] = lanes[row].largest();
    }, drafted_);
    drafted_ = {};
    std::vector<int64_t> outputs(rows);
    std::vector<double> values(rows);
    for (int64_t row = 0; row < rows; ++row) {
      Largest best = found[row];
      for (int64_t thread = 1; thread < threads; ++thread) {
        best = Largest::of(best, found[thread * rows + row]);
      }
      outputs[row] = best.index;
      values[row] = best.value;
    }
    return {outputs, values};
  }

  // The mean of the last tap's features of the positions from `first` to before `end`.
  torch::Tensor mean_state(torch::Tensor features, int64_t first, int64_t end) const {
    check_features(features, features.size(-1), end);
    const int64_t width = features.size(1), hidden = sizes_.hidden;
    TORCH_CHECK(0 <= first && first < end && hidden <= width, "there are no such features");
    torch::Tensor mean = torch::empty({hidden}, torch::kFloat32);
    const uint16_t* last = static_cast<const uint16_t*>(features.const_data_ptr()) + width - hidden;
    const __m512 count = _mm512_set1_ps(static_cast<float>(end - first));
    for (int64_t i = 0; i < hidden; i += kTile) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t place = first; place < end; ++place) {
        sum = _mm512_add_ps(sum, from_half(last + place * width + i));
      }
      _mm512_storeu_ps(mean.mutable_data_ptr<float>() + i, _mm512_div_ps(sum, count));
    }
    return mean;
  }

 protected:
  // What the threads of a pass share.
  struct Pass {
    const Shape& shape;
    int64_t start, rows, end, chunks;
    float *hidden, *cosines, *sines, *queries, *inner, *partial;
  };

  // After which layers the residual stream is kept, and where.
  struct Taps {
    uint16_t* features = nullptr;
    std::vector<int64_t> layers;
  };

  // An output and its value.
  struct Largest {
    float value = -std::numeric_limits<float>::infinity();
    int64_t index = 0;

    // The larger one, of equals the first; one without a number before all others.
    static Largest of(const Largest& one, const Largest& other) {
      if (std::isnan(one.value)) return one;
      if (std::isnan(other.value) || other.value > one.value) return other;
      return other.value == one.value && other.index < one.index ? other : one;
    }
  };

  // The largest value that each of the 16 lanes of tiles has seen, in turn, and its tile.
  struct Lanes {
    __m512 values = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 nothing = _mm512_setzero_ps();  // 0, or no number as soon as a value is none
    __m512i tiles = _mm512_setzero_si512();

    void add(int tile, __m512 y) {
      const __mmask16 more = _mm512_cmp_ps_mask(y, values, _CMP_GT_OQ);
      values = _mm512_mask_mov_ps(values, more, y);
      tiles = _mm512_mask_set1_epi32(tiles, more, tile);
      nothing = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nothing);
    }

    Largest largest() const {
      alignas(64) float value[kTile];
      alignas(64) int32_t tile[kTile];
      _mm512_store_ps(value, _mm512_add_ps(values, nothing));
      _mm512_store_si512(tile, tiles);
      Largest best;
      for (int64_t lane = 0; lane < kTile; ++lane) {
        best = Largest::of(best, {value[lane], tile[lane] * kTile + lane});
      }
      return best;
    }
  };

  // What a thread has for itself.
  struct Workspace {
    Activations x;
    Buffer<uint16_t> keys, values;  // of a chunk, as a row of a tree sees it
    Buffer<Lanes> lanes;            // of the rows whose largest logits are sought
  };

  void reserve_workspaces(int64_t threads) {
    if (static_cast<int64_t>(workspaces_.size()) < threads) workspaces_.resize(threads);
  }

  void check_rows(const std::vector<int64_t>& tokens, const torch::Tensor& cache, int64_t start,
                  const std::vector<int64_t>& parents) const {
    const int64_t rows = tokens.size(), capacity = cache.size(2);
    TORCH_CHECK(cache.scalar_type() == torch::kHalf && cache.is_contiguous() && cache.dim() == 4 &&
                cache.size(0) == static_cast<int64_t>(layers_.size()) &&
                cache.size(1) == 2 * sizes_.kv_heads && cache.size(3) == sizes_.head_size &&
                capacity % kTile == 0, "the cache has another shape");
    TORCH_CHECK(start >= 0 && start + rows <= capacity, "the cache is full");
    TORCH_CHECK(parents.empty() || rows <= kMaxRows, rows, " rows of a tree are too many");
    TORCH_CHECK(parents.empty() || (parents.size() >= tokens.size() &&
                static_cast<int64_t>(parents.size()) <= start + rows),
                "the tree has ", parents.size(), " rows");
    for (const int64_t token : tokens) {
      TORCH_CHECK(token >= 0 && token < embedding_.outputs, "there is no token ", token);
    }
  }

  void check_hidden(const torch::Tensor& hidden) const {
    TORCH_CHECK(hidden.scalar_type() == torch::kFloat32 && hidden.is_contiguous() &&
                hidden.dim() == 2 && hidden.size(1) == sizes_.hidden,
                "the hidden rows have another shape");
  }

  static void check_features(const torch::Tensor& features, int64_t width, int64_t positions) {
    TORCH_CHECK(features.scalar_type() == torch::kHalf && features.is_contiguous() &&
                features.dim() == 2 && features.size(1) == width, "the features' shape differs");
    TORCH_CHECK(positions <= features.size(0), "there are ", features.size(0), " features");
  }

  // Make room for a pass whose rows lie at `hidden`, and for more that follow it, one row each, up
  // to position `end`.
  Pass begin_pass(const Shape& shape, int64_t start, float* hidden, int64_t end = 0) {
    const int64_t rows = shape.positions.size();
    const int64_t all = std::max(end, start + rows) - start;
    const auto chunks_of = [](int64_t positions) { return (positions + kChunk - 1) / kChunk; };
    const int64_t chunks = chunks_of(start + rows);
    const int64_t parts = std::max(rows * chunks, chunks_of(start + all));
    Pass p{shape, start, rows, start + rows, chunks, hidden,
           cosines_.reserve(all * sizes_.head_size), sines_.reserve(all * sizes_.head_size),
           queries_.reserve(rows * sizes_.heads * sizes_.head_size),
           inner_.reserve(rows * sizes_.intermediate),
           partial_.reserve(parts * sizes_.heads * (sizes_.head_size + kTile))};
    set_rotation(p);
    return p;
  }

  // The pass of the one row that follows another's last, in the same memory.
  Pass next_pass(const Pass& last, const Shape& shape) const {
    Pass p{shape, last.end, 1, last.end + 1, (last.end + kChunk) / kChunk,
           last.hidden + last.rows * sizes_.hidden, last.cosines + last.rows * sizes_.head_size,
           last.sines + last.rows * sizes_.head_size, last.queries, last.inner, last.partial};
    set_rotation(p);
    return p;
  }

  void run_layers(const Pass& p, Team& team, int64_t thread, const torch::Tensor& cache,
                  const Taps& taps) {
    const int64_t capacity = cache.size(2);
    uint16_t* keys = static_cast<uint16_t*>(cache.data_ptr());
    for (size_t index = 0; index < layers_.size(); ++index) {
      run_layer(layers_[index], p, team, thread, keys, capacity);
      keys += 2 * sizes_.kv_heads * capacity * sizes_.head_size;
      for (size_t tap = 0; tap < taps.layers.size(); ++tap) {
        if (taps.layers[tap] != static_cast<int64_t>(index)) continue;
        const bool more = index + 1 < layers_.size();
        const torch::Tensor& next = more ? layers_[index + 1].input_norm : norm_;
        // Nobody waits: the residual stream changes only after the next layer's attention.
        team.share(thread, p.rows, [&](int64_t row) {
          const int64_t place = (p.start + row) * taps.layers.size() + tap;
          write_feature(p.hidden + row * sizes_.hidden, next.const_data_ptr<float>(),
                        taps.features + place * sizes_.hidden);
        });
      }
    }
  }

  void write_feature(const float* hidden, const float* weight, uint16_t* feature) const {
    normalise(hidden, weight, [&](int64_t i, __m512 y) { to_half(feature + i, y); });
  }

  void run_layer(const Layer& layer, const Pass& p, Team& team, int64_t thread, uint16_t* cache,
                 int64_t capacity) {
    Workspace& own = workspaces_[thread];
    Activations& x = own.x;
    const auto head = [&](int64_t index) {
      uint16_t* keys = cache + index * capacity * sizes_.head_size;
      return Head{keys, keys + sizes_.kv_heads * capacity * sizes_.head_size, sizes_.head_size};
    };
    const auto add = [&](int64_t tile) {
      return [&p, tile, this](int64_t row, __m512 y) {
        float* h = p.hidden + row * sizes_.hidden + tile * kTile;
        _mm512_storeu_ps(h, _mm512_add_ps(_mm512_loadu_ps(h), y));
      };
    };

    x.resize(p.rows, sizes_.hidden);
    set_normed(x, p.hidden, p.rows, layer.input_norm, layer.qkv);
    team.each(thread, layer.qkv.tiles(), [&](int64_t tile) {
      apply(layer.qkv, tile, x, p.rows,
            [&](int64_t row, __m512 y) { store_qkv(p, tile, row, y, head); });
    });

    team.each(thread, sizes_.kv_heads * p.chunks, [&](int64_t item) {
      attend(p, own, head(item / p.chunks), item / p.chunks, item % p.chunks);
    });

    x.resize(p.rows, sizes_.heads * sizes_.head_size);
    for (int64_t row = 0; row < p.rows; ++row) {
      merge(p, row, x.row());
      x.set(row, layer.output);
    }
    team.each(thread, layer.output.tiles(),
              [&](int64_t tile) { apply(layer.output, tile, x, p.rows, add(tile)); });

    x.resize(p.rows, sizes_.hidden);
    set_normed(x, p.hidden, p.rows, layer.post_norm, layer.gate_up);
    const int64_t inner_tiles = sizes_.intermediate / kTile;
    team.each(thread, inner_tiles, [&](int64_t tile) {
      const auto place = [&](int64_t row) {
        return p.inner + row * sizes_.intermediate + tile * kTile;
      };
      apply(layer.gate_up, tile, x, p.rows,
            [&](int64_t row, __m512 y) { _mm512_storeu_ps(place(row), silu(y)); });
      apply(layer.gate_up, inner_tiles + tile, x, p.rows, [&](int64_t row, __m512 y) {
        _mm512_storeu_ps(place(row), _mm512_mul_ps(_mm512_loadu_ps(place(row)), y));
      });
    });

    x.resize(p.rows, sizes_.intermediate);
    for (int64_t row = 0; row < p.rows; ++row) {
      x.set(row, p.inner + row * sizes_.intermediate, layer.down);
    }
    team.each(thread, layer.down.tiles(),
              [&](int64_t tile) { apply(layer.down, tile, x, p.rows, add(tile)); });
  }

  // One over the root mean square of a row.
  float norm_factor(const float* hidden) const {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < sizes_.hidden; i += 16) {
      const __m512 value = _mm512_loadu_ps(hidden + i);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(sizes_.hidden);
    return 1.0f / std::sqrt(mean + static_cast<float>(sizes_.norm_epsilon));
  }

  // Hand out a hidden row, divided by its root mean square, times `weight`.
  template <class Use>
  void normalise(const float* hidden, const float* weight, const Use& use) const {
    const __m512 factor = _mm512_set1_ps(norm_factor(hidden));
    for (int64_t i = 0; i < sizes_.hidden; i += 16) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(hidden + i), factor);
      use(i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
    }
  }

  void set_normed(Activations& x, const float* hidden, int64_t rows, const torch::Tensor& weight,
                  const Linear& linear) const {
    float* normed = x.row();
    for (int64_t row = 0; row < rows; ++row) {
      normalise(hidden + row * sizes_.hidden, weight.const_data_ptr<float>(),
                [&](int64_t i, __m512 y) { _mm512_storeu_ps(normed + i, y); });
      x.set(row, linear);
    }
  }

  // Rotary pairs are neighbours: (a, b) turns into (a cos - b sin, b cos + a sin).
  void set_rotation(const Pass& p) const {
    for (int64_t row = 0; row < p.rows; ++row) {
      for (size_t i = 0; i < frequencies_.size(); ++i) {
        const float angle = static_cast<float>(p.shape.positions[row]) *
                            static_cast<float>(frequencies_[i]);
        const float scale = static_cast<float>(sizes_.rotary_scale);
        const int64_t place = row * sizes_.head_size + 2 * i;
        p.cosines[place] = p.cosines[place + 1] = std::cos(angle) * scale;
        p.sines[place + 1] = std::sin(angle) * scale;
        p.sines[place] = -p.sines[place + 1];
      }
    }
  }

  // Take a tile of query, key and value outputs: rotate, and put it where attention reads it.
  template <class HeadOf>
  void store_qkv(const Pass& p, int64_t tile, int64_t row, __m512 y, const HeadOf& head) const {
    const int64_t size = sizes_.head_size, index = tile * kTile / size;
    const int64_t within = tile * kTile % size;
    const int64_t position = p.start + row;
    if (index >= sizes_.heads + sizes_.kv_heads) {
      const Head h = head(index - sizes_.heads - sizes_.kv_heads);
      to_half(h.values + position * size + within, y);
      return;
    }
    const __m512 cosine = _mm512_loadu_ps(p.cosines + row * size + within);
    const __m512 sine = _mm512_loadu_ps(p.sines + row * size + within);
    const __m512 swapped = _mm512_permute_ps(y, 0xB1);
    const __m512 turned = _mm512_fmadd_ps(y, cosine, _mm512_mul_ps(swapped, sine));
    if (index < sizes_.heads) {
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(size)));
      _mm512_storeu_ps(p.queries + (row * sizes_.heads + index) * size + within,
                       _mm512_mul_ps(turned, scale));
      return;
    }
    alignas(32) uint16_t halves[kTile];
    to_half(halves, turned);
    uint16_t* key = head(index - sizes_.heads).key(position) + within * kTile;
    for (int64_t i = 0; i < kTile; ++i) key[i * kTile] = halves[i];
  }

  float* partial(const Pass& p, int64_t row, int64_t head, int64_t chunk) const {
    return p.partial +
           ((row * sizes_.heads + head) * p.chunks + chunk) * (sizes_.head_size + kTile);
  }

  // Attend from all rows and all query heads of one key head to one chunk of the context. A
  // partial result is the largest score and the sum of the weights in the first two of kTile
  // numbers, then the weighted values.
  void attend(const Pass& p, Workspace& own, const Head& head, int64_t kv_head,
              int64_t chunk) const {
    const int64_t first = chunk * kChunk;
    if (p.shape.is_tree() && first + kChunk > p.shape.context) {
      attend_paths(p, own, head, kv_head, chunk);
      return;
    }
    const int64_t count = std::min(kChunk, p.end - first);
    attend_rows(p, 0, p.rows, Head{head.keys + first * head.size, head.values + first * head.size,
                                   head.size}, kv_head, chunk, count);
  }

  // The same where rows of a tree see different places: put what a row sees at its positions
  // first. Every sum is then that of the path as a chain, to the bit.
  void attend_paths(const Pass& p, Workspace& own, const Head& head, int64_t kv_head,
                    int64_t chunk) const {
    const int64_t size = head.size, first = chunk * kChunk;
    const Head seen{own.keys.reserve(kChunk * size), own.values.reserve(kChunk * size), size};
    const int64_t shared = std::clamp<int64_t>(p.shape.context - first, 0, kChunk);
    for (int64_t i = 0; i < shared; i += kTile) {
      std::memcpy(seen.key(i), head.key(first + i), kTile * size * sizeof(uint16_t));
    }
    std::memcpy(seen.values, head.values + first * size, shared * size * sizeof(uint16_t));
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t count = p.shape.visible(row, first);
      for (int64_t i = shared; i < count; ++i) {
        const int64_t place = p.shape.paths[row][first + i - p.shape.context];
        uint16_t* to = seen.key(i);
        const uint16_t* from = head.key(place);
        for (int64_t d = 0; d < size; ++d) to[d * kTile] = from[d * kTile];
        std::memcpy(seen.values + i * size, head.values + place * size, size * sizeof(uint16_t));
      }
      attend_rows(p, row, row + 1, seen, kv_head, chunk, count);
    }
  }

  // Attend from rows `begin` to `end` to the first `count` positions of a chunk.
  void attend_rows(const Pass& p, int64_t begin, int64_t end, const Head& seen, int64_t kv_head,
                   int64_t chunk, int64_t count) const {
    const int64_t size = sizes_.head_size, blocks = (count + kTile - 1) / kTile;
    // Query i of this key head belongs to row i / group.
    const int64_t group = sizes_.heads / sizes_.kv_heads, queries = end * group;
    const auto query = [&](int64_t i) {
      const int64_t row = i / group, index = kv_head * group + i % group;
      return Query{p.queries + (row * sizes_.heads + index) * size,
                   first_bits(p.shape.visible(row, chunk * kChunk)),
                   partial(p, row, index, chunk)};
    };
    int64_t i = begin * group;
    for (; i + 6 <= queries; i += 6) {
      attend_queries<6>({query(i), query(i + 1), query(i + 2), query(i + 3), query(i + 4),
                         query(i + 5)}, seen.keys, seen.values, blocks);
    }
    for (; i + 3 <= queries; i += 3) {
      attend_queries<3>({query(i), query(i + 1), query(i + 2)}, seen.keys, seen.values, blocks);
    }
    for (; i < queries; ++i) attend_queries<1>({query(i)}, seen.keys, seen.values, blocks);
  }

  static uint64_t first_bits(int64_t count) {
    return count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  }

  struct Query {
    const float* vector;
    uint64_t seen;  // bit i: position i of the chunk
    float* partial;
  };

  template <int Q>
  void attend_queries(const std::array<Query, Q>& queries, const uint16_t* keys,
                      const uint16_t* values, int64_t blocks) const {
    const int64_t size = sizes_.head_size;
    uint64_t seen = 0;
    for (const Query& query : queries) seen |= query.seen;
    const int64_t last = seen == 0 ? 0 : 64 - __builtin_clzll(seen);
    alignas(64) float weights[Q][kChunk];
    for (int64_t b = 0; b < blocks; ++b) {
      score_block<Q>(queries, keys + b * size * kTile, weights, b);
    }
    for (int q = 0; q < Q; ++q) weigh(queries[q], weights[q], blocks);
    for (int64_t d = 0; d < size; d += 32) {
      if (d + 32 <= size) {
        add_values<Q, 2>(queries, weights, values + d, last, d);
      } else {
        add_values<Q, 1>(queries, weights, values + d, last, d);
      }
    }
  }

  // Scores of 16 positions. Two sums a query, for the odd and the even dimensions.
  template <int Q>
  void score_block(const std::array<Query, Q>& queries, const uint16_t* keys,
                   float (&scores)[Q][kChunk], int64_t block) const {
    __m512 even[Q], odd[Q];
    for (int q = 0; q < Q; ++q) even[q] = odd[q] = _mm512_setzero_ps();
    for (int64_t d = 0; d < sizes_.head_size; d += 2) {
      read_ahead<64>(keys + d * kTile);
      const __m512 one = from_half(keys + d * kTile);
      const __m512 other = from_half(keys + (d + 1) * kTile);
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q) {
        even[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q].vector[d]), one, even[q]);
        odd[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q].vector[d + 1]), other, odd[q]);
      }
    }
    for (int q = 0; q < Q; ++q) {
      _mm512_store_ps(scores[q] + block * kTile, _mm512_add_ps(even[q], odd[q]));
    }
  }

  // Turn a query's scores into weights; note the largest score and the sum of the weights.
  static void weigh(const Query& query, float* scores, int64_t blocks) {
    const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 largest = nothing;
    for (int64_t b = 0; b < blocks; ++b) {
      const __mmask16 mask = static_cast<__mmask16>(query.seen >> (b * kTile));
      largest = _mm512_mask_max_ps(largest, mask, largest, _mm512_load_ps(scores + b * kTile));
    }
    const float top = _mm512_reduce_max_ps(largest);
    __m512 total = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
      const __mmask16 mask = static_cast<__mmask16>(query.seen >> (b * kTile));
      const __m512 shifted =
          _mm512_sub_ps(_mm512_load_ps(scores + b * kTile), _mm512_set1_ps(top));
      const __m512 weight = _mm512_maskz_mov_ps(mask, exponential(shifted));
      _mm512_store_ps(scores + b * kTile, weight);
      total = _mm512_add_ps(total, weight);
    }
    query.partial[0] = top;
    query.partial[1] = _mm512_reduce_add_ps(total);
  }

  // Weighted values of 16 * N dimensions. Two sums, for the odd and the even positions.
  template <int Q, int N>
  void add_values(const std::array<Query, Q>& queries, const float (&weights)[Q][kChunk],
                  const uint16_t* values, int64_t count, int64_t dimension) const {
    __m512 sums[2][Q][N];
    for (auto& half : sums) {
      for (auto& query : half) {
        for (auto& sum : query) sum = _mm512_setzero_ps();
      }
    }
    const auto add = [&](int64_t i, int parity) {
      const uint16_t* at = values + i * sizes_.head_size;
      read_ahead<32 * N>(at);
      __m512 value[N];
      for (int n = 0; n < N; ++n) {
        value[n] = from_half(at + 16 * n);
      }
#pragma GCC unroll 6
      for (int q = 0; q < Q; ++q) {
        const __m512 weight = _mm512_set1_ps(weights[q][i]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          sums[parity][q][n] = _mm512_fmadd_ps(weight, value[n], sums[parity][q][n]);
        }
      }
    };
    // A weight of zero makes nothing of a number, but not of a NaN that an old row may hold.
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      add(i, 0);
      add(i + 1, 1);
    }
    if (i < count) add(i, 0);
    for (int q = 0; q < Q; ++q) {
      for (int n = 0; n < N; ++n) {
        _mm512_storeu_ps(queries[q].partial + kTile + dimension + 16 * n,
                         _mm512_add_ps(sums[0][q][n], sums[1][q][n]));
      }
    }
  }

  // Put the chunks' partial results of one row together, in their order.
  void merge(const Pass& p, int64_t row, float* out) const {
    const int64_t size = sizes_.head_size;
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
      for (int64_t c = 0; c < p.chunks; ++c) top = std::max(top, partial(p, row, head, c)[0]);
      __m512 sums[kMaxHeadSize / 16];
      for (int64_t i = 0; i < size / 16; ++i) sums[i] = _mm512_setzero_ps();
      for (int64_t c = 0; c < p.chunks; ++c) {
        const float* part = partial(p, row, head, c);
        if (part[1] == 0.0f) continue;
        const float weight = std::exp(part[0] - top);
        total = std::fma(weight, part[1], total);
        for (int64_t i = 0; i < size / 16; ++i) {
          sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(part + kTile + 16 * i),
                                    sums[i]);
        }
      }
      const __m512 divisor = _mm512_set1_ps(total);
      for (int64_t i = 0; i < size / 16; ++i) {
        _mm512_storeu_ps(out + head * size + 16 * i, _mm512_div_ps(sums[i], divisor));
      }
    }
  }

  // What a draft read that has proposed in this thread since the last iteration's end.
  static inline thread_local Soon drafted_;

  Sizes sizes_;
  std::vector<Layer> layers_;
  Linear embedding_;
  torch::Tensor norm_;
  Linear head_;
  std::vector<double> frequencies_;
  std::vector<Workspace> workspaces_;
  Buffer<float> cosines_, sines_, queries_, inner_, partial_;
};

// The layers of a feature draft: their rows are made of a token and of what came before it, which
// is the target's features where it has seen the position, else the draft's own row before.
class FeatureStep : public Step {
 public:
  // `head_tokens` names the tokens of the head's outputs; empty where they are all.
  FeatureStep(Sizes sizes, std::vector<Layer> layers, Linear embedding, torch::Tensor norm,
              Linear head, std::vector<double> frequencies, Linear fuse_features,
              Linear fuse_input, torch::Tensor embedding_norm, std::vector<int64_t> head_tokens)
      : Step(sizes, std::move(layers), std::move(embedding), norm, std::move(head),
             std::move(frequencies)),
        fuse_features_(std::move(fuse_features)), fuse_input_(std::move(fuse_input)),
        embedding_norm_(std::move(embedding_norm)), head_tokens_(std::move(head_tokens)) {
    TORCH_CHECK(fuse_features_.outputs == sizes.hidden && fuse_input_.outputs == sizes.hidden &&
                fuse_input_.inputs == 2 * sizes.hidden, "the fuse has other sizes");
    TORCH_CHECK(embedding_norm_.scalar_type() == torch::kFloat32 &&
                embedding_norm_.is_contiguous() && embedding_norm_.numel() == sizes.hidden,
                "the embedding's norm");
    units_.assign(sizes.hidden, 1.0f);
    TORCH_CHECK(head_tokens_.empty() ||
                static_cast<int64_t>(head_tokens_.size()) == head_.outputs, "the head's tokens");
  }

  // Feed tokens that follow the features [positions, taps * hidden] from `start` on.
  torch::Tensor feed(const std::vector<int64_t>& tokens, torch::Tensor features,
                     torch::Tensor cache, int64_t start, int64_t threads) {
    const int64_t rows = tokens.size();
    check_fed(tokens, features, cache, start);
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    feed_rows(tokens.data(), rows, features, cache, start, hidden.mutable_data_ptr<float>(),
              threads);
    return hidden;
  }

  // Feed proposed tokens, each with the hidden row [hidden] that proposed it.
  torch::Tensor follow(const std::vector<int64_t>& tokens, torch::Tensor states,
                       torch::Tensor cache, int64_t start, const std::vector<int64_t>& parents,
                       int64_t threads) {
    const int64_t rows = tokens.size();
    check_rows(tokens, cache, start, parents);
    TORCH_CHECK(rows <= kMaxRows, rows, " rows are too many");
    TORCH_CHECK(states.scalar_type() == torch::kFloat32 && states.is_contiguous() &&
                states.dim() == 2 && states.size(0) == rows && states.size(1) == sizes_.hidden,
                "the states have another shape");
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    reserve_workspaces(threads);
    const Shape shape(start, rows, parents);
    const Pass p = begin_pass(shape, start, hidden.mutable_data_ptr<float>());
    Team::run(threads, [&](Team& team, int64_t thread) {
      fuse(p, team, thread, tokens.data(), states.const_data_ptr<float>(), weights_of(norm_));
      run_layers(p, team, thread, cache, Taps{});
    });
    return hidden;
  }

  // Feed tokens as `feed` does, then propose: the most probable token, fed in its turn, `count`
  // times. A token is left out where all of them together are less probable than `least`, and not
  // fed where they would be less than `worth` if the next were as probable as it is. Returns them,
  // and how many were fed. The threads meet nowhere but in the passes, and no weight is read but once
  // a proposal.
  std::pair<std::vector<int64_t>, int64_t> roll(
      const std::vector<int64_t>& tokens, torch::Tensor features, torch::Tensor cache,
      int64_t start, int64_t count, double least, double worth, int64_t threads) {
    check_fed(tokens, features, cache, start);
    TORCH_CHECK(!tokens.empty() && count > 0, "there is nothing to propose");
    const int64_t rows = tokens.size(), end = start + rows + count - 1;
    TORCH_CHECK(end <= cache.size(2), "the cache is full");
    const int64_t before = (rows - 1) / kMaxRows * kMaxRows, last = rows - before;
    float* hidden =
        hidden_.reserve((std::max(before, last + count - 1)) * sizes_.hidden);
    feed_rows(tokens.data(), before, features, cache, start, hidden, threads);
    reserve_workspaces(threads);
    std::vector<Shape> shapes{Shape(start + before, last, {})};
    for (int64_t position = start + rows; position < end; ++position) {
      shapes.emplace_back(position, 1, std::vector<int64_t>());
    }
    std::vector<Pass> passes{begin_pass(shapes[0], start + before, hidden, end)};
    float* fused = fused_.reserve(last * sizes_.hidden);
    for (int64_t i = 1; i < count; ++i) passes.push_back(next_pass(passes.back(), shapes[i]));
    best_.assign(threads, Best{});
    drafted_ = weights();
    std::vector<int64_t> proposed;
    proposed.reserve(count);
    int64_t fed = 0;
    Team::run(threads, [&](Team& team, int64_t thread) {
      run_fed(passes[0], team, thread, tokens.data() + before, features, cache, fused);
      double probability = 1.0;  // every thread reckons the same
      for (int64_t i = 0;; ++i) {
        const Pass& p = passes[i];
        const float* state = p.hidden + (p.rows - 1) * sizes_.hidden;
        const Best best = surest(team, thread, state);
        probability /= best.total;
        if (probability < least) break;
        const int64_t token = head_tokens_.empty() ? best.index : head_tokens_[best.index];
        if (thread == 0) proposed.push_back(token);
        if (i + 1 == count || probability / best.total < worth) break;
        if (thread == 0) ++fed;
        fuse(passes[i + 1], team, thread, &token, state, weights_of(norm_));
        run_layers(passes[i + 1], team, thread, cache, Taps{});
      }
    });
    return {proposed, fed};
  }

 private:
  // The largest logit, its output, and the sum of e^(logit - largest): one over its probability.
  struct alignas(64) Best {
    float value;
    int64_t index;
    double total;
  };

  // In the order in which a step reads them.
  Soon weights() const {
    Soon soon;
    const auto add = [&](const Linear& linear) { soon.add(linear.tile(0), linear.packed.numel()); };
    add(fuse_features_);
    add(fuse_input_);
    for (const Layer& layer : layers_) {
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        add(*linear);
      }
    }
    add(head_);
    return soon;
  }

  void check_fed(const std::vector<int64_t>& tokens, const torch::Tensor& features,
                 const torch::Tensor& cache, int64_t start) const {
    check_rows(tokens, cache, start, {});
    check_features(features, fuse_features_.inputs, start + static_cast<int64_t>(tokens.size()));
  }

  void feed_rows(const int64_t* tokens, int64_t rows, const torch::Tensor& features,
                 const torch::Tensor& cache, int64_t start, float* hidden, int64_t threads) {
    reserve_workspaces(threads);
    for (int64_t first = 0; first < rows; first += kMaxRows) {
      const Shape shape(start + first, std::min(kMaxRows, rows - first), {});
      const Pass p = begin_pass(shape, start + first, hidden + first * sizes_.hidden);
      float* fused = fused_.reserve(p.rows * sizes_.hidden);
      Team::run(threads, [&](Team& team, int64_t thread) {
        run_fed(p, team, thread, tokens + first, features, cache, fused);
      });
    }
  }

  // A pass of rows with known features; `fused` is room for what becomes of these.
  void run_fed(const Pass& p, Team& team, int64_t thread, const int64_t* tokens,
               const torch::Tensor& features, const torch::Tensor& cache, float* fused) {
    Activations& x = workspaces_[thread].x;
    const int64_t width = fuse_features_.inputs;
    const uint16_t* known = static_cast<const uint16_t*>(features.const_data_ptr());
    x.resize(p.rows, width);
    for (int64_t row = 0; row < p.rows; ++row) {
      const uint16_t* feature = known + (p.start + row) * width;
      for (int64_t i = 0; i < width; i += 16) _mm512_storeu_ps(x.row() + i, from_half(feature + i));
      x.set(row, fuse_features_);
    }
    apply_all(team, thread, fuse_features_, x, p.rows, fused);
    fuse(p, team, thread, tokens, fused, units_.data());
    run_layers(p, team, thread, cache, Taps{});
  }

  // Make the rows of a pass out of tokens and of vectors [rows, hidden], which are normed with
  // `weight`.
  void fuse(const Pass& p, Team& team, int64_t thread, const int64_t* tokens,
            const float* vectors, const float* weight) {
    Activations& x = workspaces_[thread].x;
    const int64_t hidden = sizes_.hidden;
    x.resize(p.rows, 2 * hidden);
    for (int64_t row = 0; row < p.rows; ++row) {
      copy_row(embedding_, tokens[row], x.row());
      put_normed(x.row(), weights_of(embedding_norm_), x.row());
      put_normed(vectors + row * hidden, weight, x.row() + hidden);
      x.set(row, fuse_input_);
    }
    apply_all(team, thread, fuse_input_, x, p.rows, p.hidden);
  }

  void put_normed(const float* hidden, const float* weight, float* out) const {
    normalise(hidden, weight, [&](int64_t i, __m512 y) { _mm512_storeu_ps(out + i, y); });
  }

  static const float* weights_of(const torch::Tensor& norm) {
    return norm.const_data_ptr<float>();
  }

  // The output with the largest logit after a hidden row; of equals the first. All threads get it.
  Best surest(Team& team, int64_t thread, const float* hidden) {
    Activations& x = workspaces_[thread].x;
    x.resize(1, sizes_.hidden);
    set_normed(x, hidden, 1, norm_, head_);
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 total = _mm512_setzero_ps();
    __m512i tiles = _mm512_setzero_si512();
    team.share(thread, head_.tiles(), [&](int64_t tile) {
      apply(head_, tile, x, 1, [&](int64_t, __m512 y) {
        const __mmask16 more = _mm512_cmp_ps_mask(y, largest, _CMP_GT_OQ);
        if (more) {
          const __m512 before = largest;
          largest = _mm512_mask_mov_ps(largest, more, y);
          total = _mm512_mul_ps(total, exponential(_mm512_sub_ps(before, largest)));
          tiles = _mm512_mask_set1_epi32(tiles, more, static_cast<int>(tile));
        }
        total = _mm512_add_ps(total, exponential(_mm512_sub_ps(y, largest)));
      });
    });
    best_[thread] = best_lane(largest, tiles, total);
    team.meet();
    Best best = best_[0];
    for (size_t other = 1; other < best_.size(); ++other) best = better(best, best_[other]);
    return best;
  }

  static Best best_lane(__m512 values, __m512i tiles, __m512 totals) {
    alignas(64) float value[kTile], total[kTile];
    alignas(64) int32_t tile[kTile];
    _mm512_store_ps(value, values);
    _mm512_store_ps(total, totals);
    _mm512_store_si512(tile, tiles);
    Best best{value[0], tile[0] * kTile, total[0]};
    for (int64_t lane = 1; lane < kTile; ++lane) {
      best = better(best, Best{value[lane], tile[lane] * kTile + lane, total[lane]});
    }
    return best;
  }

  // The larger one, of equals the first, with the sum of both.
  static Best better(const Best& one, const Best& other) {
    const bool later = one.value > other.value ||
                       (one.value == other.value && one.index < other.index);
    Best best = later ? one : other;
    const Best& lower = later ? other : one;
    // A lane that saw nothing has no difference to the largest that is a number.
    if (lower.total > 0.0) best.total += lower.total * std::exp(lower.value - best.value);
    return best;
  }

  Linear fuse_features_, fuse_input_;
  torch::Tensor embedding_norm_;
  std::vector<float> units_;
  std::vector<int64_t> head_tokens_;
  std::vector<Best> best_;
  Buffer<float> hidden_, fused_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<Linear>(module, "Linear")
      .def(py::init<torch::Tensor, const std::string&, int64_t, int64_t, int64_t,
                    torch::optional<torch::Tensor>, torch::optional<torch::Tensor>>())
      .def("apply", &apply_to, release())
      .def("rows", &rows_of, release())
      .def("rounded_rows", &rounded_rows, release());
  module.def("packed_pairs", &packed_pairs, release());
  py::class_<Layer>(module, "Layer")
      .def(py::init([](torch::Tensor input_norm, Linear qkv, Linear output,
                       torch::Tensor post_norm, Linear gate_up, Linear down) {
        return Layer{input_norm, post_norm, qkv, output, gate_up, down};
      }));
  py::class_<Sizes>(module, "Sizes")
      .def(py::init([](int64_t hidden, int64_t intermediate, int64_t heads, int64_t kv_heads,
                       int64_t head_size, double norm_epsilon, double rotary_scale) {
        return Sizes{hidden, intermediate, heads, kv_heads, head_size, norm_epsilon, rotary_scale};
      }));
  py::class_<Step>(module, "Step")
      .def(py::init<Sizes, std::vector<Layer>, Linear, torch::Tensor, Linear,
                    std::vector<double>>())
      .def("forward", &Step::forward, release())
      .def("mean_state", &Step::mean_state, release())
      .def("logits", &Step::logits, release())
      .def("most_probable", &Step::most_probable, release());
  py::class_<FeatureStep, Step>(module, "FeatureStep")
      .def(py::init<Sizes, std::vector<Layer>, Linear, torch::Tensor, Linear, std::vector<double>,
                    Linear, Linear, torch::Tensor, std::vector<int64_t>>())
      .def("feed", &FeatureStep::feed, release())
      .def("follow", &FeatureStep::follow, release())
      .def("roll", &FeatureStep::roll, release());
}
