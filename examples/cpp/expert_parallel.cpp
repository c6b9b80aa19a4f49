// A layer of experts spread over the processes of an MPI program:
//   mpirun -np 4 expert_parallel
// Every rank routes its own tokens; experts read them where they lie and write their results where the owners of the
// tokens look for them. At the end each rank compares with all experts in one process: the bits are the same. Then the
// same as if the ranks were on two nodes: MPI carries one row for every token and node.
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

  // The experts of this rank on rows that lie anywhere.
  const auto run_experts = [&](const ep::Handle& h, const std::vector<const void*>& rows, const TensorView& y) {
    std::vector<std::int32_t> expert;
    for (std::size_t e = 0; e < h.expert_rows.size(); ++e) {
      expert.insert(expert.end(), static_cast<std::size_t>(h.expert_rows[e]), static_cast<std::int32_t>(e));
    }
    const std::vector<float> ones(static_cast<std::size_t>(h.rows), 1.0f);
    MoeExpertsInputs in{};
    in.x = contiguous(rows.empty() ? nullptr : rows[0], DType::kF32, {h.rows, H});
    in.x_rows = rows.data();
    in.ids = contiguous(expert.data(), DType::kI32, {h.rows, 1});
    in.weights = view(ones, {h.rows, 1});
    in.gate_up = contiguous(gate_up.data() + first * 2 * I * H, DType::kF32, {local, 2 * I, H});
    in.down = contiguous(down.data() + first * H * I, DType::kF32, {local, H, I});
    moe_experts_fwd(in, y);
  };

  ep::DispatchOptions options;
  options.weights = view(weights, {T, K});
  const ep::HandlePtr h = buffer->dispatch(view(x, {T, H}), ids_view, options);
  const TensorView y = buffer->window_rows(h->rows, H, DType::kF32);
  run_experts(*h, buffer->row_pointers(*h), y);
  buffer->combine(y, *h, view(out, {T, H}));

  std::vector<float> alone(out.size());
  MoeExpertsInputs all{};
  all.x = view(x, {T, H});
  all.ids = ids_view;
  all.weights = view(weights, {T, K});
  all.gate_up = view(gate_up, {E, 2 * I, H});
  all.down = view(down, {E, H, I});
  moe_experts_fwd(all, view(alone, {T, H}));
  bool same = std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0;
  std::printf("rank %d: %lld tokens, experts %lld..%lld, %lld rows: %s\n", rank, static_cast<long long>(T),
              static_cast<long long>(first), static_cast<long long>(first + local - 1), static_cast<long long>(h->rows),
              same ? "the bits of one process" : "DIFFERENT");

  config.node_id = rank < bootstrap.size() / 2 ? "north" : "south";  // by default the name of the host
  ep::NodesBuffer nodes(config, bootstrap);
  const ep::NodesHandlePtr n = nodes.dispatch(view(x, {T, H}), ids_view, view(weights, {T, K}));
  std::vector<float> rows(static_cast<std::size_t>(n->inner->rows * H)), results(rows.size());
  nodes.expand(*n, view(rows, {n->inner->rows, H}));
  std::vector<const void*> pointers;
  for (std::int64_t j = 0; j < n->inner->rows; ++j) {
    pointers.push_back(rows.data() + j * H);
  }
  run_experts(*n->inner, pointers, view(results, {n->inner->rows, H}));
  nodes.combine(view(results, {n->inner->rows, H}), *n, view(out, {T, H}));
  same = same && std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0;
  std::printf("rank %d on %lld nodes: %s\n", rank, static_cast<long long>(nodes.nodes()),
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
