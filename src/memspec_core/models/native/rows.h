// Rows of a packed weight, in fp32: an embedding's, or those that a draft's head is cut from.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"
#include "vectors.h"

namespace memspec {

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
inline void copy_row(const Linear& linear, int64_t index, float* out) {
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

// Rows [indices, inputs] of a weight, which does not reorder its inputs.
inline torch::Tensor rows_of(const Linear& linear, const std::vector<int64_t>& indices) {
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

}  // namespace memspec
