// Features: what a pass keeps of the residual stream, for drafts to read and to be chosen by.
//
// They are fp16 [positions, taps * hidden]: after each of the layers `taps` a row as the layer that
// follows reads it, or the head.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "norm.h"
#include "pass.h"
#include "vectors.h"

namespace memspec {

// After which layers features are kept, and where.
struct Taps {
  uint16_t* features = nullptr;
  std::vector<int64_t> layers;
};

inline void check_features(const torch::Tensor& features, int64_t width, int64_t positions) {
  TORCH_CHECK(features.scalar_type() == torch::kHalf && features.is_contiguous() &&
              features.dim() == 2 && features.size(1) == width, "the features' shape differs");
  TORCH_CHECK(positions <= features.size(0), "there are ", features.size(0), " features");
}

// Keep a row of a pass after tap number `tap`, with the weight of the norm before what follows.
inline void keep_feature(const Pass& p, const Taps& taps, int64_t tap, int64_t row,
                         const torch::Tensor& norm) {
  const int64_t hidden = p.sizes.hidden;
  const int64_t place = (p.start + row) * taps.layers.size() + tap;
  uint16_t* feature = taps.features + place * hidden;
  normalise(p.sizes, p.hidden + row * hidden, norm.const_data_ptr<float>(),
            [&](int64_t i, __m512 y) { to_half(feature + i, y); });
}

// The mean [hidden] in fp32 of the last tap's features of the positions from `first` to before
// `end`.
inline torch::Tensor mean_state(const Sizes& sizes, const torch::Tensor& features, int64_t first,
                                int64_t end) {
  check_features(features, features.size(-1), end);
  const int64_t width = features.size(1), hidden = sizes.hidden;
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

}  // namespace memspec
