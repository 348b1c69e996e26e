// A decoder's layers with its embedding and head: a target's, or an independent draft's.
//
// Norms, attention and the residual stream are in fp32.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "cache.h"
#include "kernels.h"
#include "largest.h"
#include "linear.h"
#include "norm.h"
#include "pass.h"
#include "rotary.h"
#include "rows.h"
#include "storage.h"
#include "taps.h"
#include "team.h"
#include "vectors.h"

namespace memspec {

struct Layer {
  torch::Tensor input_norm, post_norm;
  Linear qkv, output, gate_up, down;
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
    widest_ = std::max({sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_size});
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
    reserve_workspaces(threads, std::min(kMaxRows, rows));
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
    reserve_workspaces(threads, rows);
    Team::run(threads, [&](Team& team, int64_t index) {
      Activations& x = workspaces_[index].x;
      x.resize(rows, sizes_.hidden);
      set_normed(sizes_, x, hidden.const_data_ptr<float>(), rows, norm_, head_);
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
    reserve_workspaces(threads, rows);
    Team::run(threads, [&](Team& team, int64_t thread) {
      Workspace& own = workspaces_[thread];
      own.x.resize(rows, sizes_.hidden);
      set_normed(sizes_, own.x, hidden.const_data_ptr<float>(), rows, norm_, head_);
      Lanes* lanes = own.lanes.get();
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
      Largest best;
      for (int64_t thread = 0; thread < threads; ++thread) {
        best = Largest::of(best, found[thread * rows + row]);
      }
      outputs[row] = best.index;
      values[row] = best.value;
    }
    return {outputs, values};
  }

  // See taps.h.
  torch::Tensor mean_state(torch::Tensor features, int64_t first, int64_t end) const {
    return memspec::mean_state(sizes_, features, first, end);
  }

 protected:
  // What a thread has for itself.
  struct Workspace {
    Activations x;
    PathChunk path;
    Buffer<Lanes> lanes;  // of the rows whose largest logits are sought
  };

  // Give each thread all that it may need in a pass of so many rows.
  void reserve_workspaces(int64_t threads, int64_t rows) {
    if (static_cast<int64_t>(workspaces_.size()) < threads) workspaces_.resize(threads);
    for (Workspace& own : workspaces_) {
      own.x.resize(rows, widest_);
      own.lanes.reserve(rows);
      own.path.reserve(sizes_.head_size);
    }
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

  // See PassMemory.
  Pass begin_pass(const Shape& shape, int64_t start, float* hidden, int64_t end = 0) {
    const Pass p = memory_.begin(sizes_, shape, start, hidden, end);
    set_rotation(p, frequencies_);
    return p;
  }

  Pass next_pass(const Pass& last, const Shape& shape) const {
    const Pass p = PassMemory::next(last, shape);
    set_rotation(p, frequencies_);
    return p;
  }

  void run_layers(const Pass& p, Team& team, int64_t thread, const torch::Tensor& cache,
                  const Taps& taps) {
    const int64_t count = layers_.size();
    for (int64_t index = 0; index < count; ++index) {
      run_attention(layers_[index], p, team, thread, LayerCache(sizes_, cache, index));
      run_inner(layers_[index], p, team, thread);
      for (size_t tap = 0; tap < taps.layers.size(); ++tap) {
        if (taps.layers[tap] != index) continue;
        const torch::Tensor& norm = index + 1 < count ? layers_[index + 1].input_norm : norm_;
        // Nobody waits: the residual stream changes only after the next layer's attention.
        team.share(thread, p.rows,
                   [&](int64_t row) { keep_feature(p, taps, tap, row, norm); });
      }
    }
  }

  // The first half of a layer: add what attention finds to the residual stream.
  void run_attention(const Layer& layer, const Pass& p, Team& team, int64_t thread,
                     const LayerCache& cache) {
    Workspace& own = workspaces_[thread];
    Activations& x = own.x;
    x.resize(p.rows, sizes_.hidden);
    set_normed(sizes_, x, p.hidden, p.rows, layer.input_norm, layer.qkv);
    team.each(thread, layer.qkv.tiles(), [&](int64_t tile) {
      apply(layer.qkv, tile, x, p.rows,
            [&](int64_t row, __m512 y) { store_qkv(p, cache, tile, row, y); });
    });

    team.each(thread, sizes_.kv_heads * p.chunks, [&](int64_t item) {
      const int64_t kv_head = item / p.chunks;
      attend(p, own.path, cache.head(kv_head), kv_head, item % p.chunks);
    });

    x.resize(p.rows, sizes_.heads * sizes_.head_size);
    for (int64_t row = 0; row < p.rows; ++row) {
      merge(p, row, x.row());
      x.set(row, layer.output);
    }
    add_all(layer.output, p, team, thread, x);
  }

  // The second half: add the gated inner layer.
  void run_inner(const Layer& layer, const Pass& p, Team& team, int64_t thread) {
    Activations& x = workspaces_[thread].x;
    x.resize(p.rows, sizes_.hidden);
    set_normed(sizes_, x, p.hidden, p.rows, layer.post_norm, layer.gate_up);
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
    add_all(layer.down, p, team, thread, x);
  }

  // Add a layer's results to the residual stream.
  void add_all(const Linear& linear, const Pass& p, Team& team, int64_t thread,
               const Activations& x) const {
    team.each(thread, linear.tiles(), [&](int64_t tile) {
      apply(linear, tile, x, p.rows, [&](int64_t row, __m512 y) {
        float* h = p.hidden + row * sizes_.hidden + tile * kTile;
        _mm512_storeu_ps(h, _mm512_add_ps(_mm512_loadu_ps(h), y));
      });
    });
  }

  // What a draft read that has proposed in this thread since the last iteration's end.
  static inline thread_local Soon drafted_;

  Sizes sizes_;
  std::vector<Layer> layers_;
  Linear embedding_;
  torch::Tensor norm_;
  Linear head_;
  std::vector<double> frequencies_;
  int64_t widest_;  // of the rows that any of the layers reads
  std::vector<Workspace> workspaces_;
  PassMemory memory_;
};

}  // namespace memspec
