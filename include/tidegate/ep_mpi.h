// The ranks of an MPI communicator as those of an ep::Buffer, and MPI as what carries rows between nodes. Needs MPI
// where it is included; the library does not.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "tidegate/ep_nodes.h"

namespace tidegate::ep {

class MpiBootstrap : public Wire {
 public:
  explicit MpiBootstrap(MPI_Comm comm) : comm_(comm) {}
  int rank() const override {
    int r = 0;
    MPI_Comm_rank(comm_, &r);
    return r;
  }
  int size() const override {
    int n = 0;
    MPI_Comm_size(comm_, &n);
    return n;
  }
  // Addresses have the same length on all ranks.
  std::vector<std::string> all_gather(const std::string& mine) override {
    const int bytes = static_cast<int>(mine.size());
    std::string all(mine.size() * static_cast<std::size_t>(size()), '\0');
    MPI_Allgather(mine.data(), bytes, MPI_CHAR, all.data(), bytes, MPI_CHAR, comm_);
    std::vector<std::string> list;
    for (std::size_t r = 0; r < static_cast<std::size_t>(size()); ++r) {
      list.push_back(all.substr(r * mine.size(), mine.size()));
    }
    return list;
  }
  void all_to_all(const char* send, const std::vector<std::int64_t>& sent, char* receive,
                  const std::vector<std::int64_t>& received) override {
    // MPI counts in int: in units of the largest power of two that divides all.
    std::int64_t bits = 1 << 20;
    for (const auto* list : {&sent, &received}) {
      for (const std::int64_t n : *list) {
        bits |= n;
      }
    }
    const std::int64_t unit = bits & -bits;
    MPI_Datatype type;
    MPI_Type_contiguous(static_cast<int>(unit), MPI_CHAR, &type);
    MPI_Type_commit(&type);
    std::vector<int> out, out_at, in, in_at;
    const auto fill = [&](const std::vector<std::int64_t>& list, std::vector<int>& counts, std::vector<int>& at) {
      int begin = 0;
      for (const std::int64_t n : list) {
        counts.push_back(static_cast<int>(n / unit));
        at.push_back(begin);
        begin += counts.back();
      }
    };
    fill(sent, out, out_at);
    fill(received, in, in_at);
    MPI_Alltoallv(send, out.data(), out_at.data(), type, receive, in.data(), in_at.data(), type, comm_);
    MPI_Type_free(&type);
  }

 private:
  MPI_Comm comm_;
};

}  // namespace tidegate::ep
