#!/usr/bin/env bash
# Two network namespaces joined by a cable of limited speed, as two hosts with two ranks each; taken down afterwards.
# Needs root. usage: two_nodes.sh <python> [rate, e.g. 200mbit] [arguments of bench/ep/nodes.py]
set -euo pipefail
python=$1
rate=${2:-200mbit}
shift $(($# < 2 ? $# : 2))
if [ "$(id -u)" != 0 ]; then
  echo "two_nodes.sh: network namespaces need root: not run"
  exit 0
fi
"$(dirname "$0")/system_packages.sh" iproute2
id=tg$$
pids=()
clean() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  ip netns del "$id-a" 2>/dev/null || true
  ip netns del "$id-b" 2>/dev/null || true  # the cable goes with them
}
trap clean EXIT
ip netns add "$id-a" && ip netns add "$id-b" || { echo "two_nodes.sh: no network namespaces here: not run"; exit 0; }
ip link add "$id-va" netns "$id-a" type veth peer name "$id-vb" netns "$id-b"
for node in a b; do
  ip -n "$id-$node" addr add "10.77.0.$([ $node = a ] && echo 1 || echo 2)/24" dev "$id-v$node"
  ip -n "$id-$node" link set lo up
  ip -n "$id-$node" link set "$id-v$node" up
  tc -n "$id-$node" qdisc add dev "$id-v$node" root tbf rate "$rate" burst 256kb latency 200ms
done
echo "link: $rate each way"
for rank in 0 1 2 3; do
  node=$([ $rank -lt 2 ] && echo a || echo b)
  ip netns exec "$id-$node" env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) MASTER_ADDR=10.77.0.1 MASTER_PORT=29577 \
    GLOO_SOCKET_IFNAME="$id-v$node" TIDEGATE_NODE_ID=$node OMP_NUM_THREADS=1 \
    "$python" bench/ep/nodes.py "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
pids=()
exit $status
