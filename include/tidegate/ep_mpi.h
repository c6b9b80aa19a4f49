// The ranks of an MPI communicator as those of an ep::Buffer. Needs MPI where it is included; the library does not.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "tidegate/ep.h"

namespace tidegate::ep {

class MpiBootstrap : public Bootstrap {
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

 private:
  MPI_Comm comm_;
};

}  // namespace tidegate::ep
