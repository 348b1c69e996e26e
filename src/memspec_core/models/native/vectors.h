// Vectors of 16 numbers: between fp16 and fp32, and the functions that a decoder takes of them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace memspec {

// Numbers of a vector, and so outputs of a tile of weights and positions of a block of keys.
constexpr int64_t kTile = 16;

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

}  // namespace memspec
