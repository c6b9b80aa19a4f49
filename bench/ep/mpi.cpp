// Dispatch and combine against MPI_Alltoallv, in one run, turn by turn. One line of JSON for each size.
//   mpirun -np 4 tidegate_ep_bench [tokens ...]
// The peer is what programs do without a library: sort the pairs by expert, exchange counts, pack K rows a token,
// MPI_Alltoallv, and all the way back; then the weighted sum. Its local work uses this library's kernels, and it is not
// charged for bringing rows into the order of experts, which dispatch does. A second form of ours, "in_place", expands
// nothing: see run_in_place.
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tidegate/ep_mpi.h"
#include "tidegate/tidegate.h"

namespace {

using namespace tidegate;
constexpr std::int64_t kHidden = 7168, kSlots = 8, kExperts = 256;

struct Memory {
  explicit Memory(std::int64_t bytes)
      : size(static_cast<std::size_t>(bytes)), data(std::aligned_alloc(64, (size + 4159) / 64 * 64)) {
    std::memset(data, 0, size);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data); }
  std::size_t size;
  void* data;
};

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Problem {
  std::int64_t T;
  int rank, ranks;
  Memory x, ids, weights;
  TensorView xv, iv, wv;
  Problem(std::int64_t tokens, int r, int n)
      : T(tokens), rank(r), ranks(n), x(tokens * kHidden * 2), ids(tokens * kSlots * 4), weights(tokens * kSlots * 4) {
    std::uint64_t state = static_cast<std::uint64_t>(r) * 7919 + 17;
    const auto random = [&] {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<std::uint32_t>(state >> 33);
    };
    for (std::int64_t i = 0; i < T * kHidden; ++i) {
      static_cast<std::uint16_t*>(x.data)[i] = static_cast<std::uint16_t>(0x3f00u + random() % 256);  // 0.5 .. 2
    }
    auto* id = static_cast<std::int32_t*>(ids.data);
    for (std::int64_t t = 0; t < T; ++t) {  // uniform, without repetition
      for (std::int64_t k = 0; k < kSlots; ++k) {
        do {
          id[t * kSlots + k] = static_cast<std::int32_t>(random() % kExperts);
        } while (std::find(id + t * kSlots, id + t * kSlots + k, id[t * kSlots + k]) != id + t * kSlots + k);
        static_cast<float*>(weights.data)[t * kSlots + k] = 1.0f / kSlots;
      }
    }
    xv = contiguous(x.data, DType::kBF16, {T, kHidden});
    iv = contiguous(ids.data, DType::kI32, {T, kSlots});
    wv = contiguous(weights.data, DType::kF32, {T, kSlots});
  }
};

struct Times {
  double dispatch, combine;
};

int cores() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return CPU_COUNT(&set);
}

// All ranks begin the next part together. Those that are done sleep meanwhile if they share cores: MPI's own waiting
// would take time from the others.
void begin_together() {
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (ranks > cores()) {
    MPI_Request all{};
    MPI_Ibarrier(MPI_COMM_WORLD, &all);
    for (int done = 0; done == 0; usleep(200)) {
      MPI_Test(&all, &done, MPI_STATUS_IGNORE);
    }
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

// The peer. Buffers are made once and large enough.
class AllToAll {
 public:
  explicit AllToAll(const Problem& p)
      : p_(p),
        counts_(kExperts * 8),
        src_(p.T * kSlots * 4),
        pos_(p.T * kSlots * 4),
        send_(p.T * kSlots * kHidden * 2),
        receive_(p.ranks * p.T * kSlots * kHidden * 2),
        theirs_(static_cast<std::size_t>(kExperts)) {
    for (auto* list : {&sent_, &sent_at_, &got_, &got_at_}) {
      list->resize(static_cast<std::size_t>(p.ranks));
    }
    MPI_Type_contiguous(kHidden * 2, MPI_CHAR, &row_);
    MPI_Type_commit(&row_);
  }
  ~AllToAll() { MPI_Type_free(&row_); }
  Times run(const TensorView& out) {
    const double begin = now();
    const TensorView counts = contiguous(counts_.data, DType::kI64, {kExperts});
    const TensorView src = contiguous(src_.data, DType::kI32, {p_.T * kSlots});
    const TensorView pos = contiguous(pos_.data, DType::kI32, {p_.T, kSlots});
    moe_init_routing(p_.iv, counts, src, pos);
    const TensorView packed = contiguous(send_.data, DType::kBF16, {p_.T * kSlots, kHidden});
    moe_permute(p_.xv, src, packed, kSlots);
    const int local = static_cast<int>(kExperts / p_.ranks);
    MPI_Alltoall(counts_.data, local, MPI_INT64_T, theirs_.data(), local, MPI_INT64_T, MPI_COMM_WORLD);
    int send_at = 0;
    int get_at = 0;
    for (std::size_t r = 0; r < sent_.size(); ++r) {
      sent_[r] = got_[r] = 0;
      for (int e = 0; e < local; ++e) {
        sent_[r] += static_cast<int>(static_cast<std::int64_t*>(counts_.data)[static_cast<int>(r) * local + e]);
        got_[r] += static_cast<int>(theirs_[r * static_cast<std::size_t>(local) + static_cast<std::size_t>(e)]);
      }
      sent_at_[r] = send_at;
      got_at_[r] = get_at;
      send_at += sent_[r];
      get_at += got_[r];
    }
    MPI_Alltoallv(send_.data, sent_.data(), sent_at_.data(), row_, receive_.data, got_.data(), got_at_.data(), row_,
                  MPI_COMM_WORLD);
    const double dispatched = now() - begin;
    begin_together();
    const double middle = now();
    MPI_Alltoallv(receive_.data, got_.data(), got_at_.data(), row_, send_.data, sent_.data(), sent_at_.data(), row_,
                  MPI_COMM_WORLD);
    moe_unpermute_fwd(packed, pos, p_.wv, out);
    return {dispatched, now() - middle};
  }

 private:
  const Problem& p_;
  Memory counts_, src_, pos_, send_, receive_;
  std::vector<std::int64_t> theirs_;
  std::vector<int> sent_, sent_at_, got_, got_at_;
  MPI_Datatype row_;
};

// Ours: identity experts, so that the rows that are received are the results.
Times run_tidegate(ep::Buffer& buffer, const Problem& p, const TensorView& out, std::int64_t& bytes) {
  const double begin = now();
  ep::DispatchOptions o;
  o.weights = p.wv;
  const ep::HandlePtr h = buffer.dispatch(p.xv, p.iv, o);
  const TensorView rows = buffer.window_rows(h->rows, kHidden, DType::kBF16);
  buffer.expand(*h, rows);
  const double dispatched = now() - begin;
  begin_together();
  const double middle = now();
  buffer.combine(rows, *h, out);
  const double combined = now() - middle;
  // Read out of other processes' memory: a row is read once for each token that has an expert here, then K rows back.
  bytes = 0;
  std::vector<std::int64_t> last(static_cast<std::size_t>(p.ranks), -1);
  std::vector<std::pair<std::int32_t, std::int32_t>> tokens;
  for (std::size_t j = 0; j < h->row_pair.size(); ++j) {
    if (h->row_rank[j] != p.rank) {
      tokens.emplace_back(h->row_rank[j], h->row_pair[j] / kSlots);
    }
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  bytes += static_cast<std::int64_t>(tokens.size()) * kHidden * 2;
  bytes += std::count_if(h->rank.begin(), h->rank.end(), [&](std::int32_t r) { return r != p.rank; }) * kHidden * 2;
  return {dispatched, combined};
}

// What tidegate.ep.experts does without gradients: experts read the rows where the senders left them, and write their
// results into the window. Here they are copied there between the two timed parts: their work, not that of the
// exchange.
Times run_in_place(ep::Buffer& buffer, const Problem& p, const TensorView& out) {
  const double begin = now();
  ep::DispatchOptions o;
  o.weights = p.wv;
  const ep::HandlePtr h = buffer.dispatch(p.xv, p.iv, o);
  const std::vector<const void*> pointers = buffer.row_pointers(*h);
  const double dispatched = now() - begin;
  begin_together();
  const TensorView rows = buffer.window_rows(h->rows, kHidden, DType::kBF16);
  for (std::int64_t j = 0; j < h->rows; ++j) {
    std::memcpy(rows.as<std::uint16_t>() + j * rows.strides[0], pointers[static_cast<std::size_t>(j)], kHidden * 2);
  }
  begin_together();
  const double middle = now();
  buffer.combine(rows, *h, out);
  return {dispatched, now() - middle};
}

double median(std::vector<double> list) {
  std::nth_element(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(list.size() / 2), list.end());
  return list[list.size() / 2];
}

// The slowest rank counts.
Times slowest(const Times& mine) {
  Times all{};
  double in[3] = {mine.dispatch, mine.combine, 0.0};
  MPI_Allreduce(in, &all, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return all;
}

void measure(std::int64_t T, int rank, int ranks) {
  const Problem p(T, rank, ranks);
  ep::Config config;
  config.experts = kExperts;
  config.slots = kSlots;
  config.max_tokens = T;
  config.row_bytes = kHidden * 2;
  ep::MpiBootstrap bootstrap(MPI_COMM_WORLD);
  const auto buffer = ep::Buffer::create(config, bootstrap);
  AllToAll peer(p);
  Memory out(T * kHidden * 2), wanted(T * kHidden * 2);
  const TensorView out_view = contiguous(out.data, DType::kBF16, {T, kHidden});
  const TensorView wanted_view = contiguous(wanted.data, DType::kBF16, {T, kHidden});
  const int rounds = T <= 64 ? 60 : 9;
  std::vector<double> times[3][3];  // of the peer, of ours, of ours in place: dispatch, combine, both
  std::int64_t bytes = 0;
  int same = 1;
  for (int i = -2; i < rounds; ++i) {  // two rounds to touch all memory
    const auto turn = [&](std::vector<double>(&list)[3], auto run) {
      begin_together();
      const Times mine = run();
      begin_together();
      const Times t = slowest(mine);
      const double parts[] = {t.dispatch, t.combine, t.dispatch + t.combine};
      for (int j = 0; j < 3 && i >= 0; ++j) {
        list[j].push_back(parts[j]);
      }
    };
    const auto compare = [&] { same &= std::memcmp(out.data, wanted.data, out.size) == 0 ? 1 : 0; };
    turn(times[0], [&] { return peer.run(wanted_view); });
    turn(times[1], [&] { return run_tidegate(*buffer, p, out_view, bytes); });
    compare();
    turn(times[0], [&] { return peer.run(wanted_view); });
    turn(times[2], [&] { return run_in_place(*buffer, p, out_view); });
    compare();
  }
  MPI_Allreduce(MPI_IN_PLACE, &same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &bytes, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0) {
    std::printf("{\"ranks\": %d, \"tokens\": %lld, \"cores\": %d", ranks, static_cast<long long>(T), cores());
    constexpr const char* kNames[3][3] = {{"mpi_dispatch", "mpi_combine", "mpi"},
                                          {"dispatch", "combine", "total"},
                                          {"in_place_dispatch", "in_place_combine", "in_place"}};
    for (int way = 0; way < 3; ++way) {
      for (int part = 0; part < 3; ++part) {
        std::printf(", \"%s\": %.4f", kNames[way][part], median(times[way][part]));
      }
    }
    std::printf(", \"bytes\": %lld, \"equal\": %s}\n", static_cast<long long>(bytes), same != 0 ? "true" : "false");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  set_num_threads(1);  // a rank is a core
  int rank = 0;
  int ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::vector<std::int64_t> sizes;
  for (int i = 1; i < argc; ++i) {
    sizes.push_back(std::atoll(argv[i]));
  }
  for (const std::int64_t T : sizes.empty() ? std::vector<std::int64_t>{32, 1024} : sizes) {
    measure(T, rank, ranks);
  }
  MPI_Finalize();
  return 0;
}
