// A linear layer's weights, and how they lie in memory.
//
// They lie in tiles of 16 outputs. A tile is a sequence of groups, read once from its first byte
// to its last; a group has a header and then blocks of 32 inputs:
//   int4  16 scales and 16 minima (fp16); blocks of 256 bytes, in which byte 4i + e of the j-th 64
//         holds inputs 8j + e (low half) and 8j + 4 + e (high half) of output i.
//         w = code * scale + minimum
//   int8  16 scales (fp16); blocks of 512 bytes, in which byte 4i + e of the j-th 64 holds input
//         4j + e of output i, plus 128.  w = (code - 128) * scale
//   bf16  no header; blocks of 1024 bytes: inputs 2j and 2j + 1 of the 16 outputs
//   fp16  no header; blocks of 1024 bytes, input by input
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>

#include "vectors.h"

namespace memspec {

constexpr int64_t kBlock = 32;  // inputs of a block

enum class Format { int4, int8, bf16, fp16 };

inline Format parse_format(const std::string& name) {
  if (name == "int4") return Format::int4;
  if (name == "int8") return Format::int8;
  if (name == "bf16") return Format::bf16;
  TORCH_CHECK(name == "fp16", "unknown format ", name);
  return Format::fp16;
}

inline int64_t block_bytes(Format format) {
  return format == Format::int4 ? 256 : format == Format::int8 ? 512 : 1024;
}

inline int64_t header_bytes(Format format) {
  return format == Format::int4 ? 64 : format == Format::int8 ? 32 : 0;
}

// Weights of y = x W^T + b, and the order in which the columns take the inputs.
struct Linear {
  Linear(torch::Tensor packed_, const std::string& format_, int64_t outputs_, int64_t inputs_,
         int64_t group_size, torch::optional<torch::Tensor> bias_,
         torch::optional<torch::Tensor> input_order_)
      : packed(packed_), bias(bias_), input_order(input_order_), format(parse_format(format_)),
        outputs(outputs_), inputs(inputs_), group_blocks(group_size / kBlock) {
    TORCH_CHECK(outputs % kTile == 0 && group_size > 0 && group_size % kBlock == 0 &&
                inputs % group_size == 0, "sizes ", outputs, " x ", inputs);
    TORCH_CHECK(packed.scalar_type() == torch::kUInt8 && packed.is_contiguous() &&
                packed.numel() == outputs / kTile * tile_bytes(), "packed weights do not fit");
    TORCH_CHECK(!bias || (bias->scalar_type() == torch::kFloat32 && bias->is_contiguous() &&
                          bias->numel() == outputs), "the bias does not fit");
    TORCH_CHECK(!input_order || (input_order->scalar_type() == torch::kInt32 &&
                input_order->is_contiguous() && input_order->numel() == inputs),
                "the order of the inputs does not fit");
  }

  int64_t tiles() const { return outputs / kTile; }
  bool is_integer() const { return format == Format::int4 || format == Format::int8; }
  int64_t groups() const { return inputs / kBlock / group_blocks; }
  int64_t tile_bytes() const {
    return groups() * (header_bytes(format) + group_blocks * block_bytes(format));
  }
  const uint8_t* tile(int64_t index) const {
    return packed.const_data_ptr<uint8_t>() + index * tile_bytes();
  }

  torch::Tensor packed;
  torch::optional<torch::Tensor> bias, input_order;
  Format format;
  int64_t outputs, inputs, group_blocks;
};

}  // namespace memspec
