// One pass of a few rows through a Llama or Qwen2 decoder, on CPUs with AVX-512, its VNNI
// and its BF16 part.
//
// The arithmetic of a row never depends on how many rows a pass has or on the number of threads:
// every sum has a fixed order. So plain decoding (one row) and verification (several) agree bit
// for bit.
//
// This file is what Python sees of it. Each header has one job; they include one another in one
// direction, from the last of these to the first:
//   storage.h       memory that is asked for ahead, and buffers
//   vectors.h       vectors of 16 numbers
//   team.h          the threads that compute a pass together
//   linear.h        a linear layer's weights, as they lie in memory
//   rows.h          rows of weights, in fp32
//   packing.h       how weights of 4 bits get there
//   activations.h   rows as linear layers take them
//   kernels.h       linear layers applied to rows
//   largest.h       the largest output of a row, without writing all
//   pass.h          the sizes of a decoder, which positions rows see, what threads share
//   norm.h          root mean square norms
//   taps.h          the features that a pass keeps for drafts
//   rotary.h        rotary positions
//   cache.h         keys and values
//   attention.h     attention to them
//   step.h          a decoder of all these
//   feature_step.h  a feature draft

#include <torch/extension.h>

#include <cstdint>
#include <string>
#include <vector>

#include "feature_step.h"
#include "kernels.h"
#include "linear.h"
#include "packing.h"
#include "pass.h"
#include "rows.h"
#include "step.h"

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
                    Linear, Linear, torch::Tensor, torch::optional<torch::Tensor>>())
      .def("feed", &FeatureStep::feed, release())
      .def("follow", &FeatureStep::follow, release())
      .def("roll", &FeatureStep::roll, release());
}
