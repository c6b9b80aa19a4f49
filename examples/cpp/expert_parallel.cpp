// A layer of experts spread over the processes of an MPI program:
//   mpirun -np 4 expert_parallel
// Every rank routes its own tokens; experts read them where they lie and write their results where the owners of the
// tokens look for them. At the end each rank compares with all experts in one process: the bits are the same.
#include <tidegate/ep_mpi.h>
#include <tidegate/tidegate.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

using namespace tidegate;

namespace {

constexpr std::int64_t E = 10, K = 3, H = 256, I = 96;

std::vector<float> random_list(std::int64_t n, unsigned seed, float scale) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> list(static_cast<std::size_t>(n));
  for (float& v : list) {
    v = normal(engine);
  }
  return list;
}
TensorView view(const std::vector<float>& list, std::initializer_list<std::int64_t> sizes) {
  return contiguous(list.data(), DType::kF32, sizes);
}

int run(MPI_Comm comm) {
  ep::MpiBootstrap bootstrap(comm);
  const int rank = bootstrap.rank();
  const std::int64_t T = 5 + 3 * rank;  // every rank has its own number of tokens

  ep::Config config;
  config.experts = E;  // the ranks need not divide them
  config.slots = K;
  config.max_tokens = 128;
  config.row_bytes = H * 4;
  const auto buffer = ep::Buffer::create(config, bootstrap);

  // Tokens, and the router's choice.
  const auto x = random_list(T * H, 100u + static_cast<unsigned>(rank), 1.0f);
  const auto logits = random_list(T * E, 200u + static_cast<unsigned>(rank), 1.0f);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(T * K));
  std::vector<float> weights(static_cast<std::size_t>(T * K)), out(static_cast<std::size_t>(T * H));
  const TensorView ids_view = contiguous(ids.data(), DType::kI32, {T, K});
  moe_route_fwd(view(logits, {T, E}), {}, ids_view, view(weights, {T, K}), {});

  // A real program holds only its own experts; here every rank makes all, to compare at the end.
  const auto gate_up = random_list(E * 2 * I * H, 1, 0.06f);
  const auto down = random_list(E * H * I, 2, 0.1f);
  const std::int64_t first = buffer->first_expert();
  const std::int64_t local = buffer->local_experts();

  ep::DispatchOptions options;
  options.weights = view(weights, {T, K});
  const ep::HandlePtr h = buffer->dispatch(view(x, {T, H}), ids_view, options);
  const std::vector<const void*> rows = buffer->row_pointers(*h);
  std::vector<std::int32_t> expert;
  for (std::size_t e = 0; e < h->expert_rows.size(); ++e) {
    expert.insert(expert.end(), static_cast<std::size_t>(h->expert_rows[e]), static_cast<std::int32_t>(e));
  }
  const std::vector<float> ones(static_cast<std::size_t>(h->rows), 1.0f);
  MoeExpertsInputs in{};
  in.x = contiguous(rows.empty() ? nullptr : rows[0], DType::kF32, {h->rows, H});
  in.x_rows = rows.data();
  in.ids = contiguous(expert.data(), DType::kI32, {h->rows, 1});
  in.weights = view(ones, {h->rows, 1});
  in.gate_up = contiguous(gate_up.data() + first * 2 * I * H, DType::kF32, {local, 2 * I, H});
  in.down = contiguous(down.data() + first * H * I, DType::kF32, {local, H, I});
  const TensorView y = buffer->window_rows(h->rows, H, DType::kF32);
  moe_experts_fwd(in, y);
  buffer->combine(y, *h, view(out, {T, H}));

  std::vector<float> alone(out.size());
  MoeExpertsInputs all{};
  all.x = view(x, {T, H});
  all.ids = ids_view;
  all.weights = view(weights, {T, K});
  all.gate_up = view(gate_up, {E, 2 * I, H});
  all.down = view(down, {E, H, I});
  moe_experts_fwd(all, view(alone, {T, H}));
  const bool same = std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0;
  std::printf("rank %d: %lld tokens, experts %lld..%lld, %lld rows: %s\n", rank, static_cast<long long>(T),
              static_cast<long long>(first), static_cast<long long>(first + local - 1), static_cast<long long>(h->rows),
              same ? "the bits of one process" : "DIFFERENT");
  return same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  set_num_threads(1);
  int failed = run(MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return failed;
}
