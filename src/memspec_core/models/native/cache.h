// The cache of keys and values, and how the rows of a pass get into it.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>

#include "pass.h"
#include "rotary.h"
#include "vectors.h"

namespace memspec {

// Keys [blocks of 16 positions, head size, 16] and values [positions, head size] of one head.
struct Head {
  uint16_t *keys, *values;
  int64_t size;

  uint16_t* key(int64_t position) const {
    return keys + position / kTile * size * kTile + position % kTile;
  }
  // The same from a block's first position on.
  Head from(int64_t position) const {
    return Head{keys + position * size, values + position * size, size};
  }
};

// One layer of the cache, which is fp16 [layers, 2 * kv heads, capacity, head size]: the heads'
// keys, then their values.
class LayerCache {
 public:
  LayerCache(const Sizes& sizes, const torch::Tensor& cache, int64_t layer)
      : kv_heads_(sizes.kv_heads), head_size_(sizes.head_size),
        head_numbers_(cache.size(2) * sizes.head_size),
        keys_(static_cast<uint16_t*>(cache.data_ptr()) + layer * 2 * kv_heads_ * head_numbers_) {}

  Head head(int64_t index) const {
    uint16_t* keys = keys_ + index * head_numbers_;
    return Head{keys, keys + kv_heads_ * head_numbers_, head_size_};
  }

 private:
  int64_t kv_heads_, head_size_, head_numbers_;
  uint16_t* keys_;
};

// Take a tile of query, key and value outputs: rotate, and put it where attention reads it.
inline void store_qkv(const Pass& p, const LayerCache& cache, int64_t tile, int64_t row, __m512 y) {
  const int64_t size = p.sizes.head_size, heads = p.sizes.heads, kv_heads = p.sizes.kv_heads;
  const int64_t index = tile * kTile / size, within = tile * kTile % size;
  const int64_t place = p.start + row;
  if (index >= heads + kv_heads) {
    to_half(cache.head(index - heads - kv_heads).values + place * size + within, y);
    return;
  }
  const __m512 rotated = turned(p, row, within, y);
  if (index < heads) {
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(size)));
    _mm512_storeu_ps(p.queries + (row * heads + index) * size + within,
                     _mm512_mul_ps(rotated, scale));
    return;
  }
  alignas(32) uint16_t halves[kTile];
  to_half(halves, rotated);
  uint16_t* key = cache.head(index - heads).key(place) + within * kTile;
  for (int64_t i = 0; i < kTile; ++i) key[i * kTile] = halves[i];
}

}  // namespace memspec
