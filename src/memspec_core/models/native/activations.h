// The rows that go into a linear layer.
//
// For weights of 4 and 8 bits they are rounded to 8 bits, each block of 32 with a scale of its own,
// so that products within a block are exact integers; for the others they are rounded to bf16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "storage.h"

namespace memspec {

// Rows as the kernels take them.
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

}  // namespace memspec
