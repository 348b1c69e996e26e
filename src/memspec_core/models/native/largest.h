// The largest of a row's outputs, found while tiles of them are made.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace memspec {

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

}  // namespace memspec
