// The largest of a row's outputs, and how probable it is, found while tiles of them are made.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace memspec {

// An output and its value. `total` is the sum of e^(value - the largest) of all that were weighed:
// one over the output's probability. Threads write theirs side by side, each into its cache line.
struct alignas(64) Largest {
  float value = -std::numeric_limits<float>::infinity();
  int64_t index = 0;
  double total = 0.0;

  // The larger one, of equals the first, with the sum of both; one without a number before all
  // others.
  static Largest of(const Largest& one, const Largest& other) {
    const bool is_one = std::isnan(one.value) || one.value > other.value ||
                        (one.value == other.value && one.index < other.index);
    Largest best = is_one ? one : other;
    const Largest& lower = is_one ? other : one;
    // What has weighed nothing has no difference to the largest that is a number.
    if (lower.total > 0.0) best.total += lower.total * std::exp(lower.value - best.value);
    return best;
  }
};

// The largest value that each of the 16 lanes of tiles has seen, in turn, and its tile.
class Lanes {
 public:
  // Take a tile's values. A lane's largest is no number as soon as one of its values is none.
  void add(int tile, __m512 y) {
    compare(tile, y);
    nothing_ = _mm512_fmadd_ps(y, _mm512_setzero_ps(), nothing_);
  }

  // Take a tile's values and sum up what they weigh; those that are no numbers count for nothing.
  void weigh(int tile, __m512 y) {
    const __m512 before = values_;
    if (compare(tile, y)) {
      totals_ = _mm512_mul_ps(totals_, exponential(_mm512_sub_ps(before, values_)));
    }
    totals_ = _mm512_add_ps(totals_, exponential(_mm512_sub_ps(y, values_)));
  }

  Largest largest() const {
    alignas(64) float value[kTile], total[kTile];
    alignas(64) int32_t tile[kTile];
    _mm512_store_ps(value, _mm512_add_ps(values_, nothing_));
    _mm512_store_ps(total, totals_);
    _mm512_store_si512(tile, tiles_);
    Largest best;
    for (int64_t lane = 0; lane < kTile; ++lane) {
      best = Largest::of(best, {value[lane], tile[lane] * kTile + lane, total[lane]});
    }
    return best;
  }

 private:
  // Note which lanes have a new largest value, and return them.
  __mmask16 compare(int tile, __m512 y) {
    const __mmask16 more = _mm512_cmp_ps_mask(y, values_, _CMP_GT_OQ);
    values_ = _mm512_mask_mov_ps(values_, more, y);
    tiles_ = _mm512_mask_set1_epi32(tiles_, more, tile);
    return more;
  }

  __m512 values_ = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 totals_ = _mm512_setzero_ps();
  __m512 nothing_ = _mm512_setzero_ps();  // 0, or no number
  __m512i tiles_ = _mm512_setzero_si512();
};

}  // namespace memspec
