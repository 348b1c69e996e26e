// One pass: the sizes of its decoder, the positions of its rows, and the memory its threads share.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "storage.h"
#include "vectors.h"

namespace memspec {

constexpr int64_t kChunk = 64;    // positions of the context that are attended to together
constexpr int64_t kMaxRows = 64;  // rows of one pass; more are fed in several passes

struct Sizes {
  int64_t hidden, intermediate, heads, kv_heads, head_size;
  double norm_epsilon, rotary_scale;
};

// Which positions the rows of a pass have, and what they see: the context and their ancestors.
//
// `parents` lists the rows of a tree from its first on, and the pass feeds the last of them; empty,
// each row follows the one before. A row of a tree lies at the next free place of the cache, not
// at its position, so that its path tells where what it sees after the context lies.
struct Shape {
  int64_t context;                          // positions before the tree
  std::vector<int64_t> positions;           // of each row of the pass
  std::vector<std::vector<int64_t>> paths;  // places of a row's ancestors and its own, in a tree

  Shape(int64_t start, int64_t rows, const std::vector<int64_t>& parents) : context(start) {
    const int64_t all = parents.size();
    if (all == 0) {
      for (int64_t r = 0; r < rows; ++r) positions.push_back(start + r);
      return;
    }
    context = start + rows - all;
    for (int64_t r = 0; r < all; ++r) {
      const int64_t parent = parents[r];
      TORCH_CHECK(parent >= -1 && parent < r, "row ", r, " has the parent ", parent);
      paths.push_back(parent < 0 ? std::vector<int64_t>() : paths[parent]);
      paths.back().push_back(context + r);
    }
    paths.erase(paths.begin(), paths.end() - rows);
    for (const auto& path : paths) positions.push_back(context + path.size() - 1);
  }

  bool is_tree() const { return !paths.empty(); }

  // How many of the positions from `first` on, at most a chunk's, a row sees.
  int64_t visible(int64_t row, int64_t first) const {
    return std::clamp<int64_t>(positions[row] + 1 - first, 0, kChunk);
  }
};

// What the threads of a pass share. Its first row lies at `start` in the cache, its last before
// `end`; what is seen up to there are `chunks`.
struct Pass {
  const Sizes& sizes;
  const Shape& shape;
  int64_t start, rows, end, chunks;
  float *hidden, *cosines, *sines, *queries, *inner, *partials;

  // What a row's query head finds in a chunk: the largest score and the sum of the weights in the
  // first two of kTile numbers, then the weighted values.
  float* partial(int64_t row, int64_t head, int64_t chunk) const {
    return partials + ((row * sizes.heads + head) * chunks + chunk) * (sizes.head_size + kTile);
  }
};

// Memory for passes, which follow each other in it.
class PassMemory {
 public:
  // Make room for a pass whose rows lie at `hidden`, and for more that follow it, one row each, up
  // to position `end`.
  Pass begin(const Sizes& sizes, const Shape& shape, int64_t start, float* hidden, int64_t end) {
    const int64_t rows = shape.positions.size();
    const int64_t all = std::max(end, start + rows) - start;
    const int64_t chunks = chunks_of(start + rows);
    const int64_t parts = std::max(rows * chunks, chunks_of(start + all));
    return Pass{sizes, shape, start, rows, start + rows, chunks, hidden,
                cosines_.reserve(all * sizes.head_size), sines_.reserve(all * sizes.head_size),
                queries_.reserve(rows * sizes.heads * sizes.head_size),
                inner_.reserve(rows * sizes.intermediate),
                partials_.reserve(parts * sizes.heads * (sizes.head_size + kTile))};
  }

  // The pass of the one row that follows another's last, in the same memory.
  static Pass next(const Pass& last, const Shape& shape) {
    const int64_t angles = last.rows * last.sizes.head_size;
    return Pass{last.sizes, shape, last.end, 1, last.end + 1, chunks_of(last.end + 1),
                last.hidden + last.rows * last.sizes.hidden, last.cosines + angles,
                last.sines + angles, last.queries, last.inner, last.partials};
  }

 private:
  static int64_t chunks_of(int64_t positions) { return (positions + kChunk - 1) / kChunk; }

  Buffer<float> cosines_, sines_, queries_, inner_, partials_;
};

}  // namespace memspec
