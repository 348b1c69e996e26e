// Rotary positions: neighbours (a, b) of a head turn into (a cos - b sin, b cos + a sin).
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pass.h"

namespace memspec {

// Reckon the cosines and sines of a pass: by how much its rows turn. `frequencies` [head size / 2].
inline void set_rotation(const Pass& p, const std::vector<double>& frequencies) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (size_t i = 0; i < frequencies.size(); ++i) {
      const float angle =
          static_cast<float>(p.shape.positions[row]) * static_cast<float>(frequencies[i]);
      const float scale = static_cast<float>(p.sizes.rotary_scale);
      const int64_t place = row * p.sizes.head_size + 2 * i;
      p.cosines[place] = p.cosines[place + 1] = std::cos(angle) * scale;
      p.sines[place + 1] = std::sin(angle) * scale;
      p.sines[place] = -p.sines[place + 1];
    }
  }
}

// Turn 16 numbers of a row's query or key head, the first of which is its number `within`.
inline __m512 turned(const Pass& p, int64_t row, int64_t within, __m512 y) {
  const __m512 cosine = _mm512_loadu_ps(p.cosines + row * p.sizes.head_size + within);
  const __m512 sine = _mm512_loadu_ps(p.sines + row * p.sizes.head_size + within);
  const __m512 swapped = _mm512_permute_ps(y, 0xB1);
  return _mm512_fmadd_ps(y, cosine, _mm512_mul_ps(swapped, sine));
}

}  // namespace memspec
