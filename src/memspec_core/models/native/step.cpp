// One pass of a few rows through a Llama or Qwen2 decoder, on CPUs with AVX-512, its VNNI
// and its BF16 part.
//
// The arithmetic of a row never depends on how many rows a pass has or on the number of threads:
// every sum has a fixed order. So plain decoding (one row) and verification (several) agree bit
// for bit.

#include <immintrin.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "linear.h"
#include "memory.h"
#include "packing.h"
#include "rows.h"
#include "team.h"
#include "vectors.h"

namespace memspec {

constexpr int64_t kChunk = 64;       // positions of the context that are attended to together
constexpr int64_t kMaxRows = 64;     // rows of one pass; more are fed in several passes
constexpr int64_t kMaxHeadSize = 256;

struct Sizes {
  int64_t hidden, intermediate, heads, kv_heads, head_size;
  double norm_epsilon, rotary_scale;
};

struct Layer {
  torch::Tensor input_norm, post_norm;
  Linear qkv, output, gate_up, down;
};

// Keys [blocks of 16 positions, head size, 16] and values [positions, head size] of one head.
struct Head {
  uint16_t *keys, *values;
  int64_t size;

  uint16_t* key(int64_t position) const {
    return keys + position / kTile * size * kTile + position % kTile;
  }
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

class Step {
 public:
  Step(Sizes sizes, std::vector<Layer> layers, Linear embedding, torch::Tensor norm, Linear head,
       std::vector<double> frequencies)
      : sizes_(sizes), layers_(std::move(layers)), embedding_(std::move(embedding)), norm_(norm),
        head_(std::move(head)), frequencies_(std::move(frequencies)) {
    TORCH_CHECK(sizes.head_size % kTile == 0 && sizes.head_size <= kMaxHeadSize &&
                sizes.heads % sizes.kv_heads == 0 &&
                static_cast<int64_t>(frequencies_.size()) * 2 == sizes.head_size, "head sizes");
  }

  // Feed tokens into the cache from `start` on; it is fp16 [layers, 2 * kv heads, capacity, head
  // size] in the layout of Head. `parents` may be empty, or is that of Shape. `features`, fp16
  // [positions, taps * hidden], takes what the layer after each of `taps` reads, or the head.
  torch::Tensor forward(const std::vector<int64_t>& tokens, torch::Tensor cache, int64_t start,
                        const std::vector<int64_t>& parents, int64_t threads,
                        torch::optional<torch::Tensor> features,
                        const std::vector<int64_t>& taps) {
    const int64_t rows = tokens.size();
    check_rows(tokens, cache, start, parents);
    Taps tapped;
    if (features) {
      check_features(*features, static_cast<int64_t>(taps.size()) * sizes_.hidden, start + rows);
      tapped = Taps{static_cast<uint16_t*>(features->data_ptr()), taps};
    }
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    reserve_workspaces(threads);
    for (int64_t first = 0; first < rows; first += kMaxRows) {
      const Shape shape(start + first, std::min(kMaxRows, rows - first), parents);
      float* out = hidden.mutable_data_ptr<float>() + first * sizes_.hidden;
      const Pass p = begin_pass(shape, start + first, out);
      for (int64_t r = 0; r < p.rows; ++r) {
        copy_row(embedding_, tokens[first + r], out + r * sizes_.hidden);
      }
      Team::run(threads, [&](Team& team, int64_t thread) {
        run_layers(p, team, thread, cache, tapped);
      });
    }
    return hidden;
  }

  torch::Tensor logits(torch::Tensor hidden, int64_t threads) {
    const int64_t rows = hidden.size(0);
    check_hidden(hidden);
    torch::Tensor result = torch::empty({rows, head_.outputs}, torch::kFloat32);
    float* out = result.mutable_data_ptr<float>();
    reserve_workspaces(threads);
    Team::run(threads, [&](Team& team, int64_t index) {
      Activations& x = workspaces_[index].x;
      x.resize(rows, sizes_.hidden);
      set_normed(x, hidden.const_data_ptr<float>(), rows, norm_, head_);
      apply_all(team, index, head_, x, rows, out);
    });
    return result;
  }

  // The output with the largest logit after each hidden row, of equals the first, and that logit;
  // it is no number where one of the row's logits is none. An iteration ends with it: the next is
  // likely to begin with the draft that this one began with.
  std::pair<std::vector<int64_t>, std::vector<double>> most_probable(torch::Tensor hidden,
                                                                     int64_t threads) {
    const int64_t rows = hidden.size(0);
    check_hidden(hidden);
    std::vector<Largest> found(threads * rows);
    reserve_workspaces(threads);
    Team::run(threads, [&](Team& team, int64_t thread) {
      Workspace& own = workspaces_[thread];
      own.x.resize(rows, sizes_.hidden);
      set_normed(own.x, hidden.const_data_ptr<float>(), rows, norm_, head_);
      Lanes* lanes = own.lanes.reserve(rows);
      std::fill(lanes, lanes + rows, Lanes{});
      team.share(thread, head_.tiles(), [&](int64_t tile) {
        apply(head_, tile, own.x, rows,
              [&](int64_t row, __m512 y) { lanes[row].add(static_cast<int>(tile), y); });
      });
      for (int64_t row = 0; row < rows; ++row) found[thread * rows + row] = lanes[row].largest();
    }, drafted_);
    drafted_ = {};
    std::vector<int64_t> outputs(rows);
    std::vector<double> values(rows);
    for (int64_t row = 0; row < rows; ++row) {
      Largest best = found[row];
      for (int64_t thread = 1; thread < threads; ++thread) {
        best = Largest::of(best, found[thread * rows + row]);
      }
      outputs[row] = best.index;
      values[row] = best.value;
    }
    return {outputs, values};
  }

  // The mean of the last tap's features of the positions from `first` to before `end`.
  torch::Tensor mean_state(torch::Tensor features, int64_t first, int64_t end) const {
    check_features(features, features.size(-1), end);
    const int64_t width = features.size(1), hidden = sizes_.hidden;
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

 protected:
  // What the threads of a pass share.
  struct Pass {
    const Shape& shape;
    int64_t start, rows, end, chunks;
    float *hidden, *cosines, *sines, *queries, *inner, *partial;
  };

  // After which layers the residual stream is kept, and where.
  struct Taps {
    uint16_t* features = nullptr;
    std::vector<int64_t> layers;
  };

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

  // What a thread has for itself.
  struct Workspace {
    Activations x;
    Buffer<uint16_t> keys, values;  // of a chunk, as a row of a tree sees it
    Buffer<Lanes> lanes;            // of the rows whose largest logits are sought
  };

  void reserve_workspaces(int64_t threads) {
    if (static_cast<int64_t>(workspaces_.size()) < threads) workspaces_.resize(threads);
  }

  void check_rows(const std::vector<int64_t>& tokens, const torch::Tensor& cache, int64_t start,
                  const std::vector<int64_t>& parents) const {
    const int64_t rows = tokens.size(), capacity = cache.size(2);
    TORCH_CHECK(cache.scalar_type() == torch::kHalf && cache.is_contiguous() && cache.dim() == 4 &&
                cache.size(0) == static_cast<int64_t>(layers_.size()) &&
                cache.size(1) == 2 * sizes_.kv_heads && cache.size(3) == sizes_.head_size &&
                capacity % kTile == 0, "the cache has another shape");
    TORCH_CHECK(start >= 0 && start + rows <= capacity, "the cache is full");
    TORCH_CHECK(parents.empty() || rows <= kMaxRows, rows, " rows of a tree are too many");
    TORCH_CHECK(parents.empty() || (parents.size() >= tokens.size() &&
                static_cast<int64_t>(parents.size()) <= start + rows),
                "the tree has ", parents.size(), " rows");
    for (const int64_t token : tokens) {
      TORCH_CHECK(token >= 0 && token < embedding_.outputs, "there is no token ", token);
    }
  }

  void check_hidden(const torch::Tensor& hidden) const {
    TORCH_CHECK(hidden.scalar_type() == torch::kFloat32 && hidden.is_contiguous() &&
                hidden.dim() == 2 && hidden.size(1) == sizes_.hidden,
                "the hidden rows have another shape");
  }

  static void check_features(const torch::Tensor& features, int64_t width, int64_t positions) {
    TORCH_CHECK(features.scalar_type() == torch::kHalf && features.is_contiguous() &&
                features.dim() == 2 && features.size(1) == width, "the features' shape differs");
    TORCH_CHECK(positions <= features.size(0), "there are ", features.size(0), " features");
  }

  // Make room for a pass whose rows lie at `hidden`, and for more that follow it, one row each, up
  // to position `end`.
  Pass begin_pass(const Shape& shape, int64_t start, float* hidden, int64_t end = 0) {
    const int64_t rows = shape.positions.size();
    const int64_t all = std::max(end, start + rows) - start;
    const auto chunks_of = [](int64_t positions) { return (positions + kChunk - 1) / kChunk; };
    const int64_t chunks = chunks_of(start + rows);
    const int64_t parts = std::max(rows * chunks, chunks_of(start + all));
    Pass p{shape, start, rows, start + rows, chunks, hidden,
           cosines_.reserve(all * sizes_.head_size), sines_.reserve(all * sizes_.head_size),
           queries_.reserve(rows * sizes_.heads * sizes_.head_size),
           inner_.reserve(rows * sizes_.intermediate),
           partial_.reserve(parts * sizes_.heads * (sizes_.head_size + kTile))};
    set_rotation(p);
    return p;
  }

  // The pass of the one row that follows another's last, in the same memory.
  Pass next_pass(const Pass& last, const Shape& shape) const {
    Pass p{shape, last.end, 1, last.end + 1, (last.end + kChunk) / kChunk,
           last.hidden + last.rows * sizes_.hidden, last.cosines + last.rows * sizes_.head_size,
           last.sines + last.rows * sizes_.head_size, last.queries, last.inner, last.partial};
    set_rotation(p);
    return p;
  }

  void run_layers(const Pass& p, Team& team, int64_t thread, const torch::Tensor& cache,
                  const Taps& taps) {
    const int64_t capacity = cache.size(2);
    uint16_t* keys = static_cast<uint16_t*>(cache.data_ptr());
    for (size_t index = 0; index < layers_.size(); ++index) {
      run_layer(layers_[index], p, team, thread, keys, capacity);
      keys += 2 * sizes_.kv_heads * capacity * sizes_.head_size;
      for (size_t tap = 0; tap < taps.layers.size(); ++tap) {
        if (taps.layers[tap] != static_cast<int64_t>(index)) continue;
        const bool more = index + 1 < layers_.size();
        const torch::Tensor& next = more ? layers_[index + 1].input_norm : norm_;
        // Nobody waits: the residual stream changes only after the next layer's attention.
        team.share(thread, p.rows, [&](int64_t row) {
          const int64_t place = (p.start + row) * taps.layers.size() + tap;
          write_feature(p.hidden + row * sizes_.hidden, next.const_data_ptr<float>(),
                        taps.features + place * sizes_.hidden);
        });
      }
    }
  }

  void write_feature(const float* hidden, const float* weight, uint16_t* feature) const {
    normalise(hidden, weight, [&](int64_t i, __m512 y) { to_half(feature + i, y); });
  }

  void run_layer(const Layer& layer, const Pass& p, Team& team, int64_t thread, uint16_t* cache,
                 int64_t capacity) {
    Workspace& own = workspaces_[thread];
    Activations& x = own.x;
    const auto head = [&](int64_t index) {
      uint16_t* keys = cache + index * capacity * sizes_.head_size;
      return Head{keys, keys + sizes_.kv_heads * capacity * sizes_.head_size, sizes_.head_size};
    };
    const auto add = [&](int64_t tile) {
      return [&p, tile, this](int64_t row, __m512 y) {
        float* h = p.hidden + row * sizes_.hidden + tile * kTile;
        _mm512_storeu_ps(h, _mm512_add_ps(_mm512_loadu_ps(h), y));
      };
    };

    x.resize(p.rows, sizes_.hidden);
    set_normed(x, p.hidden, p.rows, layer.input_norm, layer.qkv);
    team.each(thread, layer.qkv.tiles(), [&](int64_t tile) {
      apply(layer.qkv, tile, x, p.rows,
            [&](int64_t row, __m512 y) { store_qkv(p, tile, row, y, head); });
    });

    team.each(thread, sizes_.kv_heads * p.chunks, [&](int64_t item) {
      attend(p, own, head(item / p.chunks), item / p.chunks, item % p.chunks);
    });

    x.resize(p.rows, sizes_.heads * sizes_.head_size);
    for (int64_t row = 0; row < p.rows; ++row) {
      merge(p, row, x.row());
      x.set(row, layer.output);
    }
    team.each(thread, layer.output.tiles(),
              [&](int64_t tile) { apply(layer.output, tile, x, p.rows, add(tile)); });

    x.resize(p.rows, sizes_.hidden);
    set_normed(x, p.hidden, p.rows, layer.post_norm, layer.gate_up);
    const int64_t inner_tiles = sizes_.intermediate / kTile;
    team.each(thread, inner_tiles, [&](int64_t tile) {
      const auto place = [&](int64_t row) {
        return p.inner + row * sizes_.intermediate + tile * kTile;
      };
      apply(layer.gate_up, tile, x, p.rows,
            [&](int64_t row, __m512 y) { _mm512_storeu_ps(place(row), silu(y)); });
      apply(layer.gate_up, inner_tiles + tile, x, p.rows, [&](int64_t row, __m512 y) {
        _mm512_storeu_ps(place(row), _mm512_mul_ps(_mm512_loadu_ps(place(row)), y));
      });
    });

    x.resize(p.rows, sizes_.intermediate);
    for (int64_t row = 0; row < p.rows; ++row) {
      x.set(row, p.inner + row * sizes_.intermediate, layer.down);
    }
    team.each(thread, layer.down.tiles(),
              [&](int64_t tile) { apply(layer.down, tile, x, p.rows, add(tile)); });
  }

  // One over the root mean square of a row.
  float norm_factor(const float* hidden) const {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < sizes_.hidden; i += 16) {
      const __m512 value = _mm512_loadu_ps(hidden + i);
      squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(sizes_.hidden);
    return 1.0f / std::sqrt(mean + static_cast<float>(sizes_.norm_epsilon));
  }

  // Hand out a hidden row, divided by its root mean square, times `weight`.
  template <class Use>
  void normalise(const float* hidden, const float* weight, const Use& use) const {
    const __m512 factor = _mm512_set1_ps(norm_factor(hidden));
    for (int64_t i = 0; i < sizes_.hidden; i += 16) {
      const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(hidden + i), factor);
      use(i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
    }
  }

  void set_normed(Activations& x, const float* hidden, int64_t rows, const torch::Tensor& weight,
                  const Linear& linear) const {
    float* normed = x.row();
    for (int64_t row = 0; row < rows; ++row) {
      normalise(hidden + row * sizes_.hidden, weight.const_data_ptr<float>(),
                [&](int64_t i, __m512 y) { _mm512_storeu_ps(normed + i, y); });
      x.set(row, linear);
    }
  }

  // Rotary pairs are neighbours: (a, b) turns into (a cos - b sin, b cos + a sin).
  void set_rotation(const Pass& p) const {
    for (int64_t row = 0; row < p.rows; ++row) {
      for (size_t i = 0; i < frequencies_.size(); ++i) {
        const float angle = static_cast<float>(p.shape.positions[row]) *
                            static_cast<float>(frequencies_[i]);
        const float scale = static_cast<float>(sizes_.rotary_scale);
        const int64_t place = row * sizes_.head_size + 2 * i;
        p.cosines[place] = p.cosines[place + 1] = std::cos(angle) * scale;
        p.sines[place + 1] = std::sin(angle) * scale;
        p.sines[place] = -p.sines[place + 1];
      }
    }
  }

  // Take a tile of query, key and value outputs: rotate, and put it where attention reads it.
  template <class HeadOf>
  void store_qkv(const Pass& p, int64_t tile, int64_t row, __m512 y, const HeadOf& head) const {
    const int64_t size = sizes_.head_size, index = tile * kTile / size;
    const int64_t within = tile * kTile % size;
    const int64_t position = p.start + row;
    if (index >= sizes_.heads + sizes_.kv_heads) {
      const Head h = head(index - sizes_.heads - sizes_.kv_heads);
      to_half(h.values + position * size + within, y);
      return;
    }
    const __m512 cosine = _mm512_loadu_ps(p.cosines + row * size + within);
    const __m512 sine = _mm512_loadu_ps(p.sines + row * size + within);
    const __m512 swapped = _mm512_permute_ps(y, 0xB1);
    const __m512 turned = _mm512_fmadd_ps(y, cosine, _mm512_mul_ps(swapped, sine));
    if (index < sizes_.heads) {
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(size)));
      _mm512_storeu_ps(p.queries + (row * sizes_.heads + index) * size + within,
                       _mm512_mul_ps(turned, scale));
      return;
    }
    alignas(32) uint16_t halves[kTile];
    to_half(halves, turned);
    uint16_t* key = head(index - sizes_.heads).key(position) + within * kTile;
    for (int64_t i = 0; i < kTile; ++i) key[i * kTile] = halves[i];
  }

  float* partial(const Pass& p, int64_t row, int64_t head, int64_t chunk) const {
    return p.partial +
           ((row * sizes_.heads + head) * p.chunks + chunk) * (sizes_.head_size + kTile);
  }

  // Attend from all rows and all query heads of one key head to one chunk of the context. A
  // partial result is the largest score and the sum of the weights in the first two of kTile
  // numbers, then the weighted values.
  void attend(const Pass& p, Workspace& own, const Head& head, int64_t kv_head,
              int64_t chunk) const {
    const int64_t first = chunk * kChunk;
    if (p.shape.is_tree() && first + kChunk > p.shape.context) {
      attend_paths(p, own, head, kv_head, chunk);
      return;
    }
    const int64_t count = std::min(kChunk, p.end - first);
    attend_rows(p, 0, p.rows, Head{head.keys + first * head.size, head.values + first * head.size,
                                   head.size}, kv_head, chunk, count);
  }

  // The same where rows of a tree see different places: put what a row sees at its positions
  // first. Every sum is then that of the path as a chain, to the bit.
  void attend_paths(const Pass& p, Workspace& own, const Head& head, int64_t kv_head,
                    int64_t chunk) const {
    const int64_t size = head.size, first = chunk * kChunk;
    const Head seen{own.keys.reserve(kChunk * size), own.values.reserve(kChunk * size), size};
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

  // Attend from rows `begin` to `end` to the first `count` positions of a chunk.
  void attend_rows(const Pass& p, int64_t begin, int64_t end, const Head& seen, int64_t kv_head,
                   int64_t chunk, int64_t count) const {
    const int64_t size = sizes_.head_size, blocks = (count + kTile - 1) / kTile;
    // Query i of this key head belongs to row i / group.
    const int64_t group = sizes_.heads / sizes_.kv_heads, queries = end * group;
    const auto query = [&](int64_t i) {
      const int64_t row = i / group, index = kv_head * group + i % group;
      return Query{p.queries + (row * sizes_.heads + index) * size,
                   first_bits(p.shape.visible(row, chunk * kChunk)),
                   partial(p, row, index, chunk)};
    };
    int64_t i = begin * group;
    for (; i + 6 <= queries; i += 6) {
      attend_queries<6>({query(i), query(i + 1), query(i + 2), query(i + 3), query(i + 4),
                         query(i + 5)}, seen.keys, seen.values, blocks);
    }
    for (; i + 3 <= queries; i += 3) {
      attend_queries<3>({query(i), query(i + 1), query(i + 2)}, seen.keys, seen.values, blocks);
    }
    for (; i < queries; ++i) attend_queries<1>({query(i)}, seen.keys, seen.values, blocks);
  }

  static uint64_t first_bits(int64_t count) {
    return count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
  }

  struct Query {
    const float* vector;
    uint64_t seen;  // bit i: position i of the chunk
    float* partial;
  };

  template <int Q>
  void attend_queries(const std::array<Query, Q>& queries, const uint16_t* keys,
                      const uint16_t* values, int64_t blocks) const {
    const int64_t size = sizes_.head_size;
    uint64_t seen = 0;
    for (const Query& query : queries) seen |= query.seen;
    const int64_t last = seen == 0 ? 0 : 64 - __builtin_clzll(seen);
    alignas(64) float weights[Q][kChunk];
    for (int64_t b = 0; b < blocks; ++b) {
      score_block<Q>(queries, keys + b * size * kTile, weights, b);
    }
    for (int q = 0; q < Q; ++q) weigh(queries[q], weights[q], blocks);
    for (int64_t d = 0; d < size; d += 32) {
      if (d + 32 <= size) {
        add_values<Q, 2>(queries, weights, values + d, last, d);
      } else {
        add_values<Q, 1>(queries, weights, values + d, last, d);
      }
    }
  }

  // Scores of 16 positions. Two sums a query, for the odd and the even dimensions.
  template <int Q>
  void score_block(const std::array<Query, Q>& queries, const uint16_t* keys,
                   float (&scores)[Q][kChunk], int64_t block) const {
    __m512 even[Q], odd[Q];
    for (int q = 0; q < Q; ++q) even[q] = odd[q] = _mm512_setzero_ps();
    for (int64_t d = 0; d < sizes_.head_size; d += 2) {
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
  static void weigh(const Query& query, float* scores, int64_t blocks) {
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
                  const uint16_t* values, int64_t count, int64_t dimension) const {
    __m512 sums[2][Q][N];
    for (auto& half : sums) {
      for (auto& query : half) {
        for (auto& sum : query) sum = _mm512_setzero_ps();
      }
    }
    const auto add = [&](int64_t i, int parity) {
      const uint16_t* at = values + i * sizes_.head_size;
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

  // Put the chunks' partial results of one row together, in their order.
  void merge(const Pass& p, int64_t row, float* out) const {
    const int64_t size = sizes_.head_size;
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      float top = -std::numeric_limits<float>::infinity(), total = 0.0f;
      for (int64_t c = 0; c < p.chunks; ++c) top = std::max(top, partial(p, row, head, c)[0]);
      __m512 sums[kMaxHeadSize / 16];
      for (int64_t i = 0; i < size / 16; ++i) sums[i] = _mm512_setzero_ps();
      for (int64_t c = 0; c < p.chunks; ++c) {
        const float* part = partial(p, row, head, c);
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

  // What a draft read that has proposed in this thread since the last iteration's end.
  static inline thread_local Soon drafted_;

  Sizes sizes_;
  std::vector<Layer> layers_;
  Linear embedding_;
  torch::Tensor norm_;
  Linear head_;
  std::vector<double> frequencies_;
  std::vector<Workspace> workspaces_;
  Buffer<float> cosines_, sines_, queries_, inner_, partial_;
};

// The layers of a feature draft: their rows are made of a token and of what came before it, which
// is the target's features where it has seen the position, else the draft's own row before.
class FeatureStep : public Step {
 public:
  // `head_tokens` names the tokens of the head's outputs; empty where they are all.
  FeatureStep(Sizes sizes, std::vector<Layer> layers, Linear embedding, torch::Tensor norm,
              Linear head, std::vector<double> frequencies, Linear fuse_features,
              Linear fuse_input, torch::Tensor embedding_norm, std::vector<int64_t> head_tokens)
      : Step(sizes, std::move(layers), std::move(embedding), norm, std::move(head),
             std::move(frequencies)),
        fuse_features_(std::move(fuse_features)), fuse_input_(std::move(fuse_input)),
        embedding_norm_(std::move(embedding_norm)), head_tokens_(std::move(head_tokens)) {
    TORCH_CHECK(fuse_features_.outputs == sizes.hidden && fuse_input_.outputs == sizes.hidden &&
                fuse_input_.inputs == 2 * sizes.hidden, "the fuse has other sizes");
    TORCH_CHECK(embedding_norm_.scalar_type() == torch::kFloat32 &&
                embedding_norm_.is_contiguous() && embedding_norm_.numel() == sizes.hidden,
                "the embedding's norm");
    units_.assign(sizes.hidden, 1.0f);
    TORCH_CHECK(head_tokens_.empty() ||
                static_cast<int64_t>(head_tokens_.size()) == head_.outputs, "the head's tokens");
  }

  // Feed tokens that follow the features [positions, taps * hidden] from `start` on.
  torch::Tensor feed(const std::vector<int64_t>& tokens, torch::Tensor features,
                     torch::Tensor cache, int64_t start, int64_t threads) {
    const int64_t rows = tokens.size();
    check_fed(tokens, features, cache, start);
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    feed_rows(tokens.data(), rows, features, cache, start, hidden.mutable_data_ptr<float>(),
              threads);
    return hidden;
  }

  // Feed proposed tokens, each with the hidden row [hidden] that proposed it.
  torch::Tensor follow(const std::vector<int64_t>& tokens, torch::Tensor states,
                       torch::Tensor cache, int64_t start, const std::vector<int64_t>& parents,
                       int64_t threads) {
    const int64_t rows = tokens.size();
    check_rows(tokens, cache, start, parents);
    TORCH_CHECK(rows <= kMaxRows, rows, " rows are too many");
    TORCH_CHECK(states.scalar_type() == torch::kFloat32 && states.is_contiguous() &&
                states.dim() == 2 && states.size(0) == rows && states.size(1) == sizes_.hidden,
                "the states have another shape");
    torch::Tensor hidden = torch::empty({rows, sizes_.hidden}, torch::kFloat32);
    reserve_workspaces(threads);
    const Shape shape(start, rows, parents);
    const Pass p = begin_pass(shape, start, hidden.mutable_data_ptr<float>());
    Team::run(threads, [&](Team& team, int64_t thread) {
      fuse(p, team, thread, tokens.data(), states.const_data_ptr<float>(), weights_of(norm_));
      run_layers(p, team, thread, cache, Taps{});
    });
    return hidden;
  }

  // Feed tokens as `feed` does, then propose: the most probable token, fed in its turn, `count`
  // times. A token is left out where all of them together are less probable than `least`, and not
  // fed where they would be less than `worth` if the next were as probable as it is. Returns them,
  // and how many were fed. The threads meet nowhere but in the passes, and no weight is read but once
  // a proposal.
  std::pair<std::vector<int64_t>, int64_t> roll(
      const std::vector<int64_t>& tokens, torch::Tensor features, torch::Tensor cache,
      int64_t start, int64_t count, double least, double worth, int64_t threads) {
    check_fed(tokens, features, cache, start);
    TORCH_CHECK(!tokens.empty() && count > 0, "there is nothing to propose");
    const int64_t rows = tokens.size(), end = start + rows + count - 1;
    TORCH_CHECK(end <= cache.size(2), "the cache is full");
    const int64_t before = (rows - 1) / kMaxRows * kMaxRows, last = rows - before;
    float* hidden =
        hidden_.reserve((std::max(before, last + count - 1)) * sizes_.hidden);
    feed_rows(tokens.data(), before, features, cache, start, hidden, threads);
    reserve_workspaces(threads);
    std::vector<Shape> shapes{Shape(start + before, last, {})};
    for (int64_t position = start + rows; position < end; ++position) {
      shapes.emplace_back(position, 1, std::vector<int64_t>());
    }
    std::vector<Pass> passes{begin_pass(shapes[0], start + before, hidden, end)};
    float* fused = fused_.reserve(last * sizes_.hidden);
    for (int64_t i = 1; i < count; ++i) passes.push_back(next_pass(passes.back(), shapes[i]));
    best_.assign(threads, Best{});
    drafted_ = weights();
    std::vector<int64_t> proposed;
    proposed.reserve(count);
    int64_t fed = 0;
    Team::run(threads, [&](Team& team, int64_t thread) {
      run_fed(passes[0], team, thread, tokens.data() + before, features, cache, fused);
      double probability = 1.0;  // every thread reckons the same
      for (int64_t i = 0;; ++i) {
        const Pass& p = passes[i];
        const float* state = p.hidden + (p.rows - 1) * sizes_.hidden;
        const Best best = surest(team, thread, state);
        probability /= best.total;
        if (probability < least) break;
        const int64_t token = head_tokens_.empty() ? best.index : head_tokens_[best.index];
        if (thread == 0) proposed.push_back(token);
        if (i + 1 == count || probability / best.total < worth) break;
        if (thread == 0) ++fed;
        fuse(passes[i + 1], team, thread, &token, state, weights_of(norm_));
        run_layers(passes[i + 1], team, thread, cache, Taps{});
      }
    });
    return {proposed, fed};
  }

 private:
  // The largest logit, its output, and the sum of e^(logit - largest): one over its probability.
  struct alignas(64) Best {
    float value;
    int64_t index;
    double total;
  };

  // In the order in which a step reads them.
  Soon weights() const {
    Soon soon;
    const auto add = [&](const Linear& linear) { soon.add(linear.tile(0), linear.packed.numel()); };
    add(fuse_features_);
    add(fuse_input_);
    for (const Layer& layer : layers_) {
      for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
        add(*linear);
      }
    }
    add(head_);
    return soon;
  }

  void check_fed(const std::vector<int64_t>& tokens, const torch::Tensor& features,
                 const torch::Tensor& cache, int64_t start) const {
    check_rows(tokens, cache, start, {});
    check_features(features, fuse_features_.inputs, start + static_cast<int64_t>(tokens.size()));
  }

  void feed_rows(const int64_t* tokens, int64_t rows, const torch::Tensor& features,
                 const torch::Tensor& cache, int64_t start, float* hidden, int64_t threads) {
    reserve_workspaces(threads);
    for (int64_t first = 0; first < rows; first += kMaxRows) {
      const Shape shape(start + first, std::min(kMaxRows, rows - first), {});
      const Pass p = begin_pass(shape, start + first, hidden + first * sizes_.hidden);
      float* fused = fused_.reserve(p.rows * sizes_.hidden);
      Team::run(threads, [&](Team& team, int64_t thread) {
        run_fed(p, team, thread, tokens + first, features, cache, fused);
      });
    }
  }

  // A pass of rows with known features; `fused` is room for what becomes of these.
  void run_fed(const Pass& p, Team& team, int64_t thread, const int64_t* tokens,
               const torch::Tensor& features, const torch::Tensor& cache, float* fused) {
    Activations& x = workspaces_[thread].x;
    const int64_t width = fuse_features_.inputs;
    const uint16_t* known = static_cast<const uint16_t*>(features.const_data_ptr());
    x.resize(p.rows, width);
    for (int64_t row = 0; row < p.rows; ++row) {
      const uint16_t* feature = known + (p.start + row) * width;
      for (int64_t i = 0; i < width; i += 16) _mm512_storeu_ps(x.row() + i, from_half(feature + i));
      x.set(row, fuse_features_);
    }
    apply_all(team, thread, fuse_features_, x, p.rows, fused);
    fuse(p, team, thread, tokens, fused, units_.data());
    run_layers(p, team, thread, cache, Taps{});
  }

  // Make the rows of a pass out of tokens and of vectors [rows, hidden], which are normed with
  // `weight`.
  void fuse(const Pass& p, Team& team, int64_t thread, const int64_t* tokens,
            const float* vectors, const float* weight) {
    Activations& x = workspaces_[thread].x;
    const int64_t hidden = sizes_.hidden;
    x.resize(p.rows, 2 * hidden);
    for (int64_t row = 0; row < p.rows; ++row) {
      copy_row(embedding_, tokens[row], x.row());
      put_normed(x.row(), weights_of(embedding_norm_), x.row());
      put_normed(vectors + row * hidden, weight, x.row() + hidden);
      x.set(row, fuse_input_);
    }
    apply_all(team, thread, fuse_input_, x, p.rows, p.hidden);
  }

  void put_normed(const float* hidden, const float* weight, float* out) const {
    normalise(hidden, weight, [&](int64_t i, __m512 y) { _mm512_storeu_ps(out + i, y); });
  }

  static const float* weights_of(const torch::Tensor& norm) {
    return norm.const_data_ptr<float>();
  }

  // The output with the largest logit after a hidden row; of equals the first. All threads get it.
  Best surest(Team& team, int64_t thread, const float* hidden) {
    Activations& x = workspaces_[thread].x;
    x.resize(1, sizes_.hidden);
    set_normed(x, hidden, 1, norm_, head_);
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 total = _mm512_setzero_ps();
    __m512i tiles = _mm512_setzero_si512();
    team.share(thread, head_.tiles(), [&](int64_t tile) {
      apply(head_, tile, x, 1, [&](int64_t, __m512 y) {
        const __mmask16 more = _mm512_cmp_ps_mask(y, largest, _CMP_GT_OQ);
        if (more) {
          const __m512 before = largest;
          largest = _mm512_mask_mov_ps(largest, more, y);
          total = _mm512_mul_ps(total, exponential(_mm512_sub_ps(before, largest)));
          tiles = _mm512_mask_set1_epi32(tiles, more, static_cast<int>(tile));
        }
        total = _mm512_add_ps(total, exponential(_mm512_sub_ps(y, largest)));
      });
    });
    best_[thread] = best_lane(largest, tiles, total);
    team.meet();
    Best best = best_[0];
    for (size_t other = 1; other < best_.size(); ++other) best = better(best, best_[other]);
    return best;
  }

  static Best best_lane(__m512 values, __m512i tiles, __m512 totals) {
    alignas(64) float value[kTile], total[kTile];
    alignas(64) int32_t tile[kTile];
    _mm512_store_ps(value, values);
    _mm512_store_ps(total, totals);
    _mm512_store_si512(tile, tiles);
    Best best{value[0], tile[0] * kTile, total[0]};
    for (int64_t lane = 1; lane < kTile; ++lane) {
      best = better(best, Best{value[lane], tile[lane] * kTile + lane, total[lane]});
    }
    return best;
  }

  // The larger one, of equals the first, with the sum of both.
  static Best better(const Best& one, const Best& other) {
    const bool later = one.value > other.value ||
                       (one.value == other.value && one.index < other.index);
    Best best = later ? one : other;
    const Best& lower = later ? other : one;
    // A lane that saw nothing has no difference to the largest that is a number.
    if (lower.total > 0.0) best.total += lower.total * std::exp(lower.value - best.value);
    return best;
  }

  Linear fuse_features_, fuse_input_;
  torch::Tensor embedding_norm_;
  std::vector<float> units_;
  std::vector<int64_t> head_tokens_;
  std::vector<Best> best_;
  Buffer<float> hidden_, fused_;
};

}  // namespace memspec

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memspec;
  namespace py = pybind11;
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<Linear>(module, "Linear")
      .def(py::init<torch::Tensor, const std::string&, int64_t, int64_t, int64_t,
                    torch::optional<torch::Tensor>, torch::optional<torch::Tensor>>())
      .def("apply", &apply_to, release())
      .def("rows", &rows_of, release())
      .def("rounded_rows", &rounded_rows, release());
  module.def("packed_pairs", &packed_pairs, release());
  py::class_<Layer>(module, "Layer")
      .def(py::init([](torch::Tensor input_norm, Linear qkv, Linear output,
                       torch::Tensor post_norm, Linear gate_up, Linear down) {
        return Layer{input_norm, post_norm, qkv, output, gate_up, down};
      }));
  py::class_<Sizes>(module, "Sizes")
      .def(py::init([](int64_t hidden, int64_t intermediate, int64_t heads, int64_t kv_heads,
                       int64_t head_size, double norm_epsilon, double rotary_scale) {
        return Sizes{hidden, intermediate, heads, kv_heads, head_size, norm_epsilon, rotary_scale};
      }));
  py::class_<Step>(module, "Step")
      .def(py::init<Sizes, std::vector<Layer>, Linear, torch::Tensor, Linear,
                    std::vector<double>>())
      .def("forward", &Step::forward, release())
      .def("mean_state", &Step::mean_state, release())
      .def("logits", &Step::logits, release())
      .def("most_probable", &Step::most_probable, release());
  py::class_<FeatureStep, Step>(module, "FeatureStep")
      .def(py::init<Sizes, std::vector<Layer>, Linear, torch::Tensor, Linear, std::vector<double>,
                    Linear, Linear, torch::Tensor, std::vector<int64_t>>())
      .def("feed", &FeatureStep::feed, release())
      .def("follow", &FeatureStep::follow, release())
      .def("roll", &FeatureStep::roll, release());
}
