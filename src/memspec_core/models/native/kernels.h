// Linear layers applied to rows: a kernel a format, which reads each weight once for several rows.
//
// Sums are in fp32. Their order is the same for every number of rows and of threads.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "linear.h"
#include "storage.h"
#include "team.h"
#include "vectors.h"

namespace memspec {

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

// Add the products of a tile's weights and R rows to the rows' 16 outputs: one function a format.
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
inline void apply_all(Team& team, int64_t thread, const Linear& linear, const Activations& x,
                      int64_t rows, float* out) {
  team.each(thread, linear.tiles(), [&](int64_t tile) {
    apply(linear, tile, x, rows, [&](int64_t row, __m512 y) {
      _mm512_storeu_ps(out + row * linear.outputs + tile * kTile, y);
    });
  });
}

// The layer's results [rows, outputs] in fp32 for rows x [rows, inputs].
inline torch::Tensor apply_to(const Linear& linear, torch::Tensor x, int64_t threads) {
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

}  // namespace memspec
