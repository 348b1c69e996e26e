// The layers of a feature draft, which thinks on from what the target thought.
#pragma once

#include <immintrin.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "largest.h"
#include "linear.h"
#include "norm.h"
#include "pass.h"
#include "rows.h"
#include "step.h"
#include "storage.h"
#include "taps.h"
#include "team.h"
#include "vectors.h"

namespace memspec {

// Its rows are made of a token and of what came before it, which is the target's features where it
// has seen the position, else the draft's own row before.
class FeatureStep : public Step {
 public:
  // `head_tokens` (int64) names the tokens of the head's outputs; none where they are all.
  FeatureStep(Sizes sizes, std::vector<Layer> layers, Linear embedding, torch::Tensor norm,
              Linear head, std::vector<double> frequencies, Linear fuse_features,
              Linear fuse_input, torch::Tensor embedding_norm,
              torch::optional<torch::Tensor> head_tokens)
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
    widest_ = std::max({widest_, fuse_features_.inputs, fuse_input_.inputs});
    TORCH_CHECK(!head_tokens_ || (head_tokens_->scalar_type() == torch::kInt64 &&
                head_tokens_->is_contiguous() && head_tokens_->numel() == head_.outputs),
                "the head's tokens");
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
    reserve_workspaces(threads, rows);
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
  // and how many were fed. The threads meet nowhere but in the passes, and no weight is read but
  // once a proposal.
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
    reserve_workspaces(threads, last);
    std::vector<Shape> shapes{Shape(start + before, last, {})};
    for (int64_t position = start + rows; position < end; ++position) {
      shapes.emplace_back(position, 1, std::vector<int64_t>());
    }
    std::vector<Pass> passes{begin_pass(shapes[0], start + before, hidden, end)};
    float* fused = fused_.reserve(last * sizes_.hidden);
    for (int64_t i = 1; i < count; ++i) passes.push_back(next_pass(passes.back(), shapes[i]));
    best_.assign(threads, Largest{});
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
        const Largest best = surest(team, thread, state);
        probability /= best.total;
        if (probability < least) break;
        const int64_t token = token_of(best.index);
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
    reserve_workspaces(threads, std::min(kMaxRows, rows));
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
      put_normed(sizes_, x.row(), weights_of(embedding_norm_), x.row());
      put_normed(sizes_, vectors + row * hidden, weight, x.row() + hidden);
      x.set(row, fuse_input_);
    }
    apply_all(team, thread, fuse_input_, x, p.rows, p.hidden);
  }

  int64_t token_of(int64_t output) const {
    return head_tokens_ ? head_tokens_->const_data_ptr<int64_t>()[output] : output;
  }

  static const float* weights_of(const torch::Tensor& norm) {
    return norm.const_data_ptr<float>();
  }

  // The output with the largest logit after a hidden row; of equals the first. All threads get it.
  Largest surest(Team& team, int64_t thread, const float* hidden) {
    Activations& x = workspaces_[thread].x;
    x.resize(1, sizes_.hidden);
    set_normed(sizes_, x, hidden, 1, norm_, head_);
    Lanes lanes;
    team.share(thread, head_.tiles(), [&](int64_t tile) {
      apply(head_, tile, x, 1,
            [&](int64_t, __m512 y) { lanes.weigh(static_cast<int>(tile), y); });
    });
    best_[thread] = lanes.largest();
    team.meet();
    Largest best;
    for (const Largest& other : best_) best = Largest::of(best, other);
    return best;
  }

  Linear fuse_features_, fuse_input_;
  torch::Tensor embedding_norm_;
  std::vector<float> units_;
  torch::optional<torch::Tensor> head_tokens_;
  std::vector<Largest> best_;
  Buffer<float> hidden_, fused_;
};

}  // namespace memspec
