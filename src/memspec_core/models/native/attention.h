// Attention of a pass to the cache: chunk by chunk, then put together.
//
// A sum has the same order for every number of rows, and for a row of a tree as for its path alone.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cache.h"
#include "pass.h"
#include "storage.h"
#include "vectors.h"

namespace memspec {

constexpr int64_t kMaxHeadSize = 256;

// A row's query head before a chunk.
struct Query {
  const float* vector;
  uint64_t seen;  // bit i: position i of the chunk
  float* partial;
};

inline uint64_t first_bits(int64_t count) {
  return count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// Scores of 16 positions. Two sums a query, for the odd and the even dimensions.
template <int Q>
void score_block(const std::array<Query, Q>& queries, const Head& chunk,
                 float (&scores)[Q][kChunk], int64_t block) {
  const uint16_t* keys = chunk.keys + block * chunk.size * kTile;
  __m512 even[Q], odd[Q];
  for (int q = 0; q < Q; ++q) even[q] = odd[q] = _mm512_setzero_ps();
  for (int64_t d = 0; d < chunk.size; d += 2) {
    read_ahead<64>(keys + d * kTile);
    const __m512 one = from_half(keys + d * kTile);
    const __m512 other = from_half(keys + (d + 1) * kTile);
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q) {
      even[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q].vector[d]), one, even[q]);
      odd[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q].vector[d + 1]), other, odd[q]);
    }
  }
  for (int q = 0; q < Q; ++q) {
    _mm512_store_ps(scores[q] + block * kTile, _mm512_add_ps(even[q], odd[q]));
  }
}

// Turn a query's scores into weights; note the largest score and the sum of the weights.
inline void weigh(const Query& query, float* scores, int64_t blocks) {
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest = nothing;
  for (int64_t b = 0; b < blocks; ++b) {
    const __mmask16 mask = static_cast<__mmask16>(query.seen >> (b * kTile));
    largest = _mm512_mask_max_ps(largest, mask, largest, _mm512_load_ps(scores + b * kTile));
  }
  const float top = _mm512_reduce_max_ps(largest);
  __m512 total = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    const __mmask16 mask = static_cast<__mmask16>(query.seen >> (b * kTile));
    const __m512 shifted =
        _mm512_sub_ps(_mm512_load_ps(scores + b * kTile), _mm512_set1_ps(top));
    const __m512 weight = _mm512_maskz_mov_ps(mask, exponential(shifted));
    _mm512_store_ps(scores + b * kTile, weight);
    total = _mm512_add_ps(total, weight);
  }
  query.partial[0] = top;
  query.partial[1] = _mm512_reduce_add_ps(total);
}

// Weighted values of 16 * N dimensions. Two sums, for the odd and the even positions.
template <int Q, int N>
void add_values(const std::array<Query, Q>& queries, const float (&weights)[Q][kChunk],
                const Head& chunk, int64_t count, int64_t dimension) {
  __m512 sums[2][Q][N];
  for (auto& half : sums) {
    for (auto& query : half) {
      for (auto& sum : query) sum = _mm512_setzero_ps();
    }
  }
  const auto add = [&](int64_t i, int parity) {
    const uint16_t* at = chunk.values + i * chunk.size + dimension;
    read_ahead<32 * N>(at);
    __m512 value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = from_half(at + 16 * n);
    }
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q) {
      const __m512 weight = _mm512_set1_ps(weights[q][i]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        sums[parity][q][n] = _mm512_fmadd_ps(weight, value[n], sums[parity][q][n]);
      }
    }
  };
  // A weight of zero makes nothing of a number, but not of a NaN that an old row may hold.
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    add(i, 0);
    add(i + 1, 1);
  }
  if (i < count) add(i, 0);
  for (int q = 0; q < Q; ++q) {
    for (int n = 0; n < N; ++n) {
      _mm512_storeu_ps(queries[q].partial + kTile + dimension + 16 * n,
                       _mm512_add_ps(sums[0][q][n], sums[1][q][n]));
    }
  }
}

// Attend from Q queries together to a chunk, up to its last of `blocks` of 16 positions.
template <int Q>
void attend_queries(const std::array<Query, Q>& queries, const Head& chunk, int64_t blocks) {
  const int64_t size = chunk.size;
  uint64_t seen = 0;
  for (const Query& query : queries) seen |= query.seen;
  const int64_t last = seen == 0 ? 0 : 64 - __builtin_clzll(seen);
  alignas(64) float weights[Q][kChunk];
  for (int64_t b = 0; b < blocks; ++b) {
    score_block<Q>(queries, chunk, weights, b);
  }
  for (int q = 0; q < Q; ++q) weigh(queries[q], weights[q], blocks);
  for (int64_t d = 0; d < size; d += 32) {
    if (d + 32 <= size) {
      add_values<Q, 2>(queries, weights, chunk, last, d);
    } else {
      add_values<Q, 1>(queries, weights, chunk, last, d);
    }
  }
}

// Attend from rows `begin` to `end` to the first `count` positions of a chunk.
inline void attend_rows(const Pass& p, int64_t begin, int64_t end, const Head& seen,
                        int64_t kv_head, int64_t chunk, int64_t count) {
  const int64_t size = p.sizes.head_size, blocks = (count + kTile - 1) / kTile;
  // Query i of this key head belongs to row i / group.
  const int64_t group = p.sizes.heads / p.sizes.kv_heads, queries = end * group;
  const auto query = [&](int64_t i) {
    const int64_t row = i / group, index = kv_head * group + i % group;
    return Query{p.queries + (row * p.sizes.heads + index) * size,
                 first_bits(p.shape.visible(row, chunk * kChunk)),
                 p.partial(row, index, chunk)};
  };
  int64_t i = begin * group;
  for (; i + 6 <= queries; i += 6) {
    attend_queries<6>({query(i), query(i + 1), query(i + 2), query(i + 3), query(i + 4),
                       query(i + 5)}, seen, blocks);
  }
  for (; i + 3 <= queries; i += 3) {
    attend_queries<3>({query(i), query(i + 1), query(i + 2)}, seen, blocks);
  }
  for (; i < queries; ++i) attend_queries<1>({query(i)}, seen, blocks);
}

// Memory for keys and values of a chunk as a row of a tree sees them.
struct PathChunk {
  void reserve(int64_t head_size) {
    keys.reserve(kChunk * head_size);
    values.reserve(kChunk * head_size);
  }

  Buffer<uint16_t> keys, values;
};

// Attend where rows of a tree see different places: put what a row sees at its positions
// first. Every sum is then that of the path as a chain, to the bit.
inline void attend_paths(const Pass& p, PathChunk& path, const Head& head, int64_t kv_head,
                         int64_t chunk) {
  const int64_t size = head.size, first = chunk * kChunk;
  const Head seen{path.keys.get(), path.values.get(), size};
  const int64_t shared = std::clamp<int64_t>(p.shape.context - first, 0, kChunk);
  for (int64_t i = 0; i < shared; i += kTile) {
    std::memcpy(seen.key(i), head.key(first + i), kTile * size * sizeof(uint16_t));
  }
  std::memcpy(seen.values, head.values + first * size, shared * size * sizeof(uint16_t));
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t count = p.shape.visible(row, first);
    for (int64_t i = shared; i < count; ++i) {
      const int64_t place = p.shape.paths[row][first + i - p.shape.context];
      uint16_t* to = seen.key(i);
      const uint16_t* from = head.key(place);
      for (int64_t d = 0; d < size; ++d) to[d * kTile] = from[d * kTile];
      std::memcpy(seen.values + i * size, head.values + place * size, size * sizeof(uint16_t));
    }
    attend_rows(p, row, row + 1, seen, kv_head, chunk, count);
  }
}

// Attend from all rows and all query heads of one key head to one chunk of the context.
inline void attend(const Pass& p, PathChunk& path, const Head& head, int64_t kv_head,
                   int64_t chunk) {
  const int64_t first = chunk * kChunk;
  if (p.shape.is_tree() && first + kChunk > p.shape.context) {
    attend_paths(p, path, head, kv_head, chunk);
    return;
  }
  const int64_t count = std::min(kChunk, p.end - first);
  attend_rows(p, 0, p.rows, head.from(first), kv_head, chunk, count);
}

// Put the chunks' partial results of one row together, in their order.
inline void merge(const Pass& p, int64_t row, float* out) {
  const int64_t size = p.sizes.head_size;
  for (int64_t head = 0; head < p.sizes.heads; ++head) {
    float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int64_t c = 0; c < p.chunks; ++c) top = std::max(top, p.partial(row, head, c)[0]);
    __m512 sums[kMaxHeadSize / 16];
    for (int64_t i = 0; i < size / 16; ++i) sums[i] = _mm512_setzero_ps();
    for (int64_t c = 0; c < p.chunks; ++c) {
      const float* part = p.partial(row, head, c);
      if (part[1] == 0.0f) continue;
      const float weight = std::exp(part[0] - top);
      total = std::fma(weight, part[1], total);
      for (int64_t i = 0; i < size / 16; ++i) {
        sums[i] = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(part + kTile + 16 * i),
                                  sums[i]);
      }
    }
    const __m512 divisor = _mm512_set1_ps(total);
    for (int64_t i = 0; i < size / 16; ++i) {
      _mm512_storeu_ps(out + head * size + 16 * i, _mm512_div_ps(sums[i], divisor));
    }
  }
}

}  // namespace memspec
