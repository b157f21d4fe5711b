#!/usr/bin/env bash
# A cluster on one machine: network namespaces joined by a bridge, every port limited to one rate both ways.
#   vcluster.sh up NODES RATE [--queue SIZE]
#                                 nodes 10.77.0.1 ... on eth0; RATE and SIZE as tc writes them, such as 1gbit and 256kb
#   vcluster.sh all COMMAND...    COMMAND on every node at once, told by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT;
#                                 all have this script's standard input, so one of them at most may read it
#   vcluster.sh bytes             a line per node: bytes sent, bytes received, frame headers included
#   vcluster.sh down
# Needs root and iproute2. Only namespaces whose names begin with $PREFIX- are touched.
set -euo pipefail

PREFIX=${PREFIX:-poseidon}
SWITCH=$PREFIX-switch
# Chosen by measurement at 1 Gbit/s: a burst of 16 KB costs a third of the rate in retransmissions, and a
# queue that cannot hold many 64 KB segments lets almost nothing through.
BURST=128kb
# What waits at either end of a link before more is dropped; --queue overrules it. Ordinary switches have 100 KB to
# 2 MB a port.
QUEUE=${QUEUE:-2mb}
# Of every TCP connection between nodes: what Linux uses unless told otherwise, whatever this machine does. Set on
# the route, because a namespace's default can only be one the machine lets everybody use; what a route says
# overrules what a program asks for its sockets.
CONGESTION=${CONGESTION:-cubic}

namespaces() { ip netns list | cut -d' ' -f1 | grep -x "$PREFIX-$1" || true; }
node_count() { namespaces 'node[0-9]*' | wc -l; }
limit() { tc -n "$1" qdisc replace dev "$2" root tbf rate "$RATE" burst $BURST limit "$QUEUE"; }
sent() { tc -n "$1" -s qdisc show dev "$2" | awk '$1 == "Sent" { print $2; exit }'; }

add_namespace() {
  ip netns add "$1"
  ip netns exec "$1" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
  ip -n "$1" link set lo up
}

add_node() {
  local node=$PREFIX-node$1 port=port$1
  add_namespace "$node"
  ip -n "$SWITCH" link add "$port" type veth peer name eth0 netns "$node"
  ip -n "$SWITCH" link set "$port" master bridge up
  ip -n "$node" addr add "10.77.0.$1/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" route replace 10.77.0.0/24 dev eth0 proto kernel scope link src "10.77.0.$1" congctl "$CONGESTION"
  # Leaving the node it is limited at the node's end, arriving at the switch's: queued, not dropped.
  limit "$node" eth0
  limit "$SWITCH" "$port"
}

up() {
  local nodes=$1 i
  RATE=$2
  shift 2
  while (($# > 0)); do
    case $1 in
      --queue) QUEUE=${2:?--queue needs a size, such as 256kb}; shift 2 ;;
      *) echo "vcluster.sh up: expected --queue SIZE, got '$1'" >&2; exit 2 ;;
    esac
  done
  down
  add_namespace "$SWITCH"
  ip -n "$SWITCH" link add bridge type bridge stp_state 0 mcast_snooping 0
  ip -n "$SWITCH" link set bridge up
  for ((i = 1; i <= nodes; i++)); do add_node "$i"; done
}

all() {
  local nodes rank status=0 pids=()
  nodes=$(node_count)
  # Whoever ends this script ends the ranks with it.
  trap 'kill "${pids[@]}" 2>/dev/null || true; exit 143' TERM INT
  for ((rank = 0; rank < nodes; rank++)); do
    RANK=$rank WORLD_SIZE=$nodes MASTER_ADDR=10.77.0.1 MASTER_PORT=${MASTER_PORT:-29500} \
      GLOO_SOCKET_IFNAME=eth0 ip netns exec "$PREFIX-node$((rank + 1))" "$@" <&0 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return $status
}

bytes() {
  local i
  for ((i = 1; i <= $(node_count); i++)); do
    echo "$(sent "$PREFIX-node$i" eth0) $(sent "$SWITCH" "port$i")"
  done
}

down() {
  local namespace
  for namespace in $(namespaces 'node[0-9]*') $(namespaces switch); do ip netns del "$namespace"; done
}

case ${1:-} in
  up | all | bytes | down) "$@" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
