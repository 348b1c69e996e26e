// Norms: hidden rows divided by their root mean square, times weights.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>

#include "activations.h"
#include "linear.h"
#include "pass.h"

namespace memspec {

// One over the root mean square of a row.
inline float norm_factor(const Sizes& sizes, const float* hidden) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < sizes.hidden; i += 16) {
    const __m512 value = _mm512_loadu_ps(hidden + i);
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(sizes.hidden);
  return 1.0f / std::sqrt(mean + static_cast<float>(sizes.norm_epsilon));
}

// Hand out a normed row: use(i, y) with its 16 numbers from i on.
template <class Use>
void normalise(const Sizes& sizes, const float* hidden, const float* weight, const Use& use) {
  const __m512 factor = _mm512_set1_ps(norm_factor(sizes, hidden));
  for (int64_t i = 0; i < sizes.hidden; i += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(hidden + i), factor);
    use(i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
  }
}

// Write a normed row, which may lie where the row does.
inline void put_normed(const Sizes& sizes, const float* hidden, const float* weight, float* out) {
  normalise(sizes, hidden, weight, [&](int64_t i, __m512 y) { _mm512_storeu_ps(out + i, y); });
}

// Norm rows for a linear layer.
inline void set_normed(const Sizes& sizes, Activations& x, const float* hidden, int64_t rows,
                       const torch::Tensor& weight, const Linear& linear) {
  for (int64_t row = 0; row < rows; ++row) {
    put_normed(sizes, hidden + row * sizes.hidden, weight.const_data_ptr<float>(), x.row());
    x.set(row, linear);
  }
}

}  // namespace memspec
