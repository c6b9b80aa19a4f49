// chunk_local_cumsum: checks, partition, dispatch.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/float_environment.h"
#include "ops/chunk_local_cumsum/kernel.h"
#include "ops/chunk_local_cumsum/reference.h"
#include "tidegate/cpu.h"
#include "tidegate/parallel.h"

namespace tidegate {

void chunk_local_cumsum(const TensorView& g, const TensorView& out, std::int64_t chunk_size, const SeqLens& seq,
                        const ChunkLocalCumsumOptions& options) {
  constexpr std::string_view op = "chunk_local_cumsum";
  const FloatEnvironment environment;
  const DeltaSizes s = gate_sizes(op, {"g", g}, options.layout);
  check(chunk_size >= 1 && std::has_single_bit(static_cast<std::uint64_t>(chunk_size)), op,
        ": chunk_size: expected a power of two, got ", chunk_size);
  check(std::isfinite(options.scale), op, ": scale: expected a finite number, got ", options.scale);
  check(!options.floor || std::isfinite(*options.floor), op, ": floor: expected a finite number or none, got ",
        options.floor.value_or(0.0));
  check_same_shape(op, {"out", out}, {"g", g});
  check(out.dtype == DType::kF32 || out.dtype == DType::kF64, op,
        ": out: expected dtype float32 or float64, got dtype ", out.dtype);
  check_boundaries(op, seq, s);
  check_outputs(op, {{"out", out}}, {{"g", g}});
  const ChunkProblem p = chunk_problem(s, chunk_size, options.layout, seq);
  if (g.dtype == DType::kF64) {
    cumsum_stage::reference<double>(p, g, out, options);
    return;
  }
  const cumsum_stage::Args args{gates_of(g, options.layout), gates_of(out, options.layout), options.scale,
                                options.floor.value_or(-std::numeric_limits<double>::infinity()), options.reverse};
  const auto& kernels = chunk_local_cumsum_kernels_for(active_isa());
  const auto run = kernels.run[data_type_index(g.dtype)][out.dtype == DType::kF64 ? 1 : 0];
  const std::int64_t blocks = (s.HV + cumsum_stage::kHeads - 1) / cumsum_stage::kHeads;
  parallel_for(static_cast<std::int64_t>(p.chunks.size()) * blocks, [&](std::int64_t task) {
    const std::int64_t first = task % blocks * cumsum_stage::kHeads;
    run(args, p.chunks[static_cast<std::size_t>(task / blocks)], first, std::min(first + cumsum_stage::kHeads, s.HV));
  });
}

}  // namespace tidegate
