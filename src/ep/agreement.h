// What ranks on several nodes tell each other before rows travel: who failed, and what each is about to do.
#pragma once

#include "ep/group.h"
#include "tidegate/ep_nodes.h"

namespace tidegate::ep {

// Every rank has a count for every rank; those for this one. Terms must be equal. Throws Failure on all ranks if they
// are not, or if a rank announced a failure in its place; nothing has travelled then.
std::vector<std::int64_t> agree(std::string_view op, const std::string& group, Wire& wire, const Terms& terms,
                                const std::vector<std::int64_t>& counts);
void announce(Wire& wire, const std::string& failure);

// The nodes of all ranks that make a buffer, whose configuration must be equal. `failure`: why this rank cannot.
std::vector<std::string> gather_nodes(Wire& wire, const Config& config, NodeSums sums, const std::string& failure);

// Around what a rank does alone before it agrees: if that fails, the others learn it there, rather than wait.
template <class F>
auto announced(Wire& wire, F body) {
  try {
    return body();
  } catch (const std::exception& e) {
    announce(wire, e.what());
    throw;
  }
}

}  // namespace tidegate::ep
