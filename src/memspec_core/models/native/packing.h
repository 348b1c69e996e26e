// Weights of 4 bits put into the layout of linear.h.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"
#include "rows.h"
#include "vectors.h"

namespace memspec {

// Eight codes of 4 bits in a word, input by input from its lowest bits on, as a tile has them: four
// inputs in the low halves of the bytes, the next four in the high ones.
inline __m512i as_in_tiles(__m512i words) {
  const auto spread = [](__m512i x) {
    x = _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 8)),
                         _mm512_set1_epi32(0x00ff00ff));
    return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi32(x, 4)),
                            _mm512_set1_epi32(0x0f0f0f0f));
  };
  const __m512i low = spread(_mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
  return _mm512_or_si512(low, _mm512_slli_epi32(spread(_mm512_srli_epi32(words, 16)), 4));
}

// Weights [outputs, inputs] of 4 bits, two to a byte with the even input in the low half, as packed
// weights; `scale` and `minimum` [outputs, groups].
inline torch::Tensor packed_pairs(torch::Tensor pairs, torch::Tensor scale,
                                  torch::Tensor minimum) {
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
inline void put_rounded(const float* values, int64_t lane, uint8_t* group) {
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

// Ask for the tile that will be read after another one, if it is not the same.
inline void ask_for_tile(const Linear& linear, int64_t next, int64_t current) {
  if (next == current || next < 0 || next >= linear.tiles()) return;
  const uint8_t* tile = linear.tile(next);
  for (int64_t at = 0; at < linear.tile_bytes(); at += 64) _mm_prefetch(tile + at, _MM_HINT_T0);
}

// Rows of a weight as packed weights of 4 bits in groups of 32.
inline torch::Tensor rounded_rows(const Linear& linear, torch::Tensor indices) {
  TORCH_CHECK(!linear.input_order, "the weight reorders its inputs");
  TORCH_CHECK(indices.scalar_type() == torch::kInt64 && indices.is_contiguous() &&
              indices.numel() % kTile == 0, "the indices are no tiles of int64");
  const int64_t rows = indices.numel(), groups = linear.inputs / kBlock;
  const int64_t group_bytes = header_bytes(Format::int4) + block_bytes(Format::int4);
  torch::Tensor packed = torch::empty({rows / kTile * groups * group_bytes}, torch::kUInt8);
  uint8_t* out = packed.mutable_data_ptr<uint8_t>();
  std::vector<float> row(linear.inputs);
  const int64_t* chosen = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t index = chosen[i];
    TORCH_CHECK(index >= 0 && index < linear.outputs, "there is no row ", index);
    if (i + 1 < rows) ask_for_tile(linear, chosen[i + 1] / kTile, index / kTile);
    copy_row(linear, index, row.data());
    uint8_t* group = out + i / kTile * groups * group_bytes;
    for (int64_t b = 0; b < groups; ++b, group += group_bytes) {
      put_rounded(row.data() + b * kBlock, i % kTile, group);
    }
  }
  return packed;
}

}  // namespace memspec
