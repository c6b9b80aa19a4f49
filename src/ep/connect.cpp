// How the ranks of a group find each other's windows.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "ep/group.h"

namespace tidegate::ep {
namespace {

constexpr std::string_view kOp = "ep_buffer";

// What a rank tells the others about itself.
struct Address {
  static constexpr int kNumbers = 10;
  static constexpr std::string_view kNames[kNumbers] = {
      "number of ranks", "experts",      "slots",         "max_tokens",   "row_bytes",
      "zero_experts",    "copy_experts", "const_experts", "expert_begin", "version of the window"};
  std::uint64_t number[kNumbers];
  std::uint64_t secret;
  std::int32_t rank;
  char socket[76];
  char node[256];
};

void copy_text(char* to, std::size_t size, const std::string& text) {
  std::memset(to, 0, size);
  text.copy(to, size - 1);
}

}  // namespace

std::string node_id(const std::string& configured) {
  if (!configured.empty()) {
    return configured;
  }
  if (const char* named = std::getenv("TIDEGATE_NODE_ID"); named != nullptr && *named != '\0') {
    return named;
  }
  char host[128] = {};
  gethostname(host, sizeof host - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return std::string(host) + "/" + boot;
}

std::int64_t window_bytes(const Config& config, std::int64_t ranks) {
  return window_layout(config, ranks, sizeof(Control), sizeof(Header)).bytes;
}

Group::Group(const Config& c, int rank_of_mine, int rank_count)
    : config(c), rank(rank_of_mine), ranks(rank_count), slots_begin_(0), owner_(getpid()) {
  check_config(config, rank, ranks);
  expert_begin = expert_shares(config, ranks);
  layout = window_layout(config, ranks, sizeof(Control), sizeof(Header));
  slots_begin_ = layout.bytes - 2 * layout.slot;
  waited.assign(static_cast<std::size_t>(ranks), 0);
  window_ = make_window(static_cast<std::size_t>(layout.bytes));
  peers_.resize(static_cast<std::size_t>(ranks));
  doorway_ = std::make_unique<Doorway>();
}

std::string Group::address() const {
  check(doorway_ != nullptr, kOp, ": address: expected a buffer that is not connected yet, got one that is");
  Address a{};
  const std::uint64_t numbers[] = {static_cast<std::uint64_t>(ranks),
                                   static_cast<std::uint64_t>(config.experts),
                                   static_cast<std::uint64_t>(config.slots),
                                   static_cast<std::uint64_t>(config.max_tokens),
                                   static_cast<std::uint64_t>(config.row_bytes),
                                   static_cast<std::uint64_t>(config.zero_experts),
                                   static_cast<std::uint64_t>(config.copy_experts),
                                   static_cast<std::uint64_t>(config.const_experts),
                                   hash_list(std::span<const std::int64_t>(expert_begin), 1),
                                   1};
  std::memcpy(a.number, numbers, sizeof numbers);
  a.secret = doorway_->secret();
  a.rank = rank;
  copy_text(a.socket, sizeof a.socket, doorway_->name());
  copy_text(a.node, sizeof a.node, node_id(config.node_id));
  return {reinterpret_cast<const char*>(&a), sizeof a};
}

void Group::connect(const std::vector<std::string>& addresses) {
  const std::string group = std::string(kOp) + ": group " + config.name + ", rank " + std::to_string(rank) + ": ";
  check(static_cast<int>(addresses.size()) == ranks, kOp, ": addresses: expected ", ranks, ", got ", addresses.size());
  std::vector<Address> all(addresses.size());
  Address mine{};
  const std::string own = address();
  std::memcpy(&mine, own.data(), sizeof mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    check(addresses[r].size() == sizeof(Address), kOp, ": addresses[", r, "]: expected ", sizeof(Address),
          " bytes, got ", addresses[r].size());
    std::memcpy(&all[r], addresses[r].data(), sizeof(Address));
    check(all[r].rank == static_cast<int>(r), kOp, ": addresses[", r, "]: expected that of rank ", r, ", got that of ",
          all[r].rank);
    for (int i = 0; i < Address::kNumbers; ++i) {
      if (all[r].number[i] != mine.number[i]) {
        throw Failure(group + "rank " + std::to_string(rank) + " and rank " + std::to_string(r) +
                      " disagree: " + std::string(Address::kNames[i]) + " is " + std::to_string(mine.number[i]) +
                      " on rank " + std::to_string(rank) + " and " + std::to_string(all[r].number[i]) + " on rank " +
                      std::to_string(r));
      }
    }
    if (std::strncmp(all[r].node, mine.node, sizeof mine.node) != 0) {
      throw Failure(group + "rank " + std::to_string(r) + " is on node " + all[r].node + ", rank " +
                    std::to_string(rank) + " on node " + mine.node +
                    ": a buffer's ranks share memory; set TIDEGATE_NODE_ID if they are on one node");
    }
  }
  std::vector<std::unique_ptr<Visit>> visits(all.size());
  for (int r = 0; r < ranks; ++r) {
    if (r != rank) {
      const Address& a = all[static_cast<std::size_t>(r)];
      visits[static_cast<std::size_t>(r)] = std::make_unique<Visit>(a.socket, a.secret, rank);
      peers_[static_cast<std::size_t>(r)].life = visits[static_cast<std::size_t>(r)]->life();
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  std::vector<bool> served(all.size(), false);
  served[static_cast<std::size_t>(rank)] = true;
  const auto first_missing = [&] { return std::find(served.begin(), served.end(), false); };
  const auto check_time = [&](std::size_t r) {
    const bool gone = is_gone(peers_[r].life);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    if (gone || time.count() > config.timeout_seconds) {
      throw Failure(group + "waited " + std::to_string(time.count()) + " s for rank " + std::to_string(r) +
                    " to connect" + (gone ? ": process gone" : ""));
    }
  };
  constexpr int kSlice = 50;  // milliseconds between two looks at the clock and the other processes
  while (first_missing() != served.end()) {
    const int visitor = doorway_->serve(window_.get(), kSlice);
    if (visitor >= 0 && visitor < ranks) {
      served[static_cast<std::size_t>(visitor)] = true;
    } else {
      check_time(static_cast<std::size_t>(first_missing() - served.begin()));
    }
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    Fd window;
    while (static_cast<int>(r) != rank && !(window = visits[r]->receive(kSlice)).valid()) {
      check_time(r);
    }
    const int fd = static_cast<int>(r) == rank ? window_.get() : window.get();
    struct stat file {};
    if (fstat(fd, &file) != 0 || file.st_size != layout.bytes) {
      throw Failure(group + "the window of rank " + std::to_string(r) + " has another size");
    }
    peers_[r].window = Mapping(fd, static_cast<std::size_t>(layout.bytes));
  }
  doorway_.reset();
  epoch = all[0].secret;
  connected_ = true;
}

}  // namespace tidegate::ep
