#!/usr/bin/env bash
# A cluster on one machine: network namespaces joined by a bridge, every port limited to one rate both ways.
#   vcluster.sh up NODES RATE [--queue SIZE] [--slow RATE] [--racks RACKS --core RATE [--in-turn]] [--box INTERFACES]
#                                 nodes 10.77.0.1 ... on eth0; RATE and SIZE as tc writes them, such as 1gbit and 256kb
#       --slow RATE               the last node's port has this rate
#       --racks RACKS             nodes are at so many bridges, in equal runs; every bridge has a link of
#                                 --core, each way, to the others; --in-turn: one node to each, in turn
#       --box INTERFACES          adds a machine with eth0, eth1 ..., each with a port of RATE; their
#                                 addresses follow those of the nodes
#   vcluster.sh all COMMAND...    COMMAND on every node at once, told by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
#                                 MASTER_ADDR, MASTER_PORT; all have this script's standard input, so one of them at
#                                 most may read it; RANKS=4 starts four on every node, RANKS=3,1,4 so many on each;
#                                 with --racks they are told by RACK, too, which counts from 0
#   vcluster.sh box COMMAND...    COMMAND on the machine that --box added, told by WORLD_SIZE and MASTER_*
#   vcluster.sh mpi ARGUMENTS...  mpirun with these arguments on the first node, for ranks on all nodes, by RANKS as above
#   vcluster.sh switch COMMAND... COMMAND at the switch, which nodes reach as 10.77.0.254 through their ports
#   vcluster.sh bytes [racks|box] a line per node (per link of a rack, per interface of the box): bytes
#                                 sent, bytes received, frame headers included
#   vcluster.sh down
# Needs root and iproute2. Only namespaces whose names begin with $PREFIX- are touched.
set -euo pipefail

PREFIX=${PREFIX:-poseidon}
SWITCH=$PREFIX-switch
# Chosen by measurement at 1 Gbit/s: a burst of 16 KB costs a third of the rate in retransmissions, and a
# queue that cannot hold many 64 KB segments lets almost nothing through. Ports of more than 10 Gbit/s need more:
# 128 KB pass in 0.1 ms at that rate, and timers are not much finer.
BURST=${BURST:-128kb}
# What waits at either end of a link before more is dropped; --queue overrules it. Ordinary switches have 100 KB to
# 2 MB a port.
QUEUE=${QUEUE:-2mb}
# Of every TCP connection between nodes: what Linux uses unless told otherwise, whatever this machine does. Set on
# the route, because a namespace's default can only be one the machine lets everybody use; what a route says
# overrules what a program asks for its sockets.
CONGESTION=${CONGESTION:-cubic}

namespaces() { ip netns list | cut -d' ' -f1 | grep -x "$PREFIX-$1" || true; }
node_count() { namespaces 'node[0-9]*' | wc -l; }
rack_count() { ip -n "$SWITCH" -o link show type bridge | grep -c ': rack[0-9]*:' || true; }
rack_of() { ip -n "$SWITCH" -o link show "port$1" | sed -n 's/.* master rack\([0-9]*\) .*/\1/p'; }
box_ports() { ip -n "$SWITCH" -o link show | grep -c ': box[0-9]*@' || true; }
limit() {
  tc -n "$1" qdisc replace dev "$2" root tbf rate "${3:-$RATE}" burst "$BURST" limit "$QUEUE"
}
sent() { tc -n "$1" -s qdisc show dev "$2" | awk '$1 == "Sent" { print $2; exit }'; }

add_namespace() {
  ip netns add "$1"
  ip netns exec "$1" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
  ip -n "$1" link set lo up
}

add_bridge() {
  ip -n "$SWITCH" link add "$1" type bridge stp_state 0 mcast_snooping 0
  ip -n "$SWITCH" link set "$1" up
}

# Joins the bridge of a rack to the one between racks. What leaves the rack is limited at the rack's
# end of the link, and what arrives at the other end.
add_rack() {
  add_bridge "rack$1"
  ip -n "$SWITCH" link add "up$1" type veth peer name "down$1"
  ip -n "$SWITCH" link set "up$1" master "rack$1" up
  ip -n "$SWITCH" link set "down$1" master bridge up
  limit "$SWITCH" "up$1" "$CORE"
  limit "$SWITCH" "down$1" "$CORE"
}

# A node of this number at this bridge, with a port of this rate.
add_node() {
  local node=$PREFIX-node$1 port=port$1
  add_namespace "$node"
  ip -n "$SWITCH" link add "$port" type veth peer name eth0 netns "$node"
  ip -n "$SWITCH" link set "$port" master "$2" up
  ip -n "$node" addr add "10.77.0.$1/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" route replace 10.77.0.0/24 dev eth0 proto kernel scope link src "10.77.0.$1" congctl "$CONGESTION"
  # Leaving the node it is limited at the node's end, arriving at the switch's: queued, not dropped.
  limit "$node" eth0 "$3"
  limit "$SWITCH" "$port" "$3"
}

# An interface of the box, of this number and with this address. All of them are in one network. The
# route through the first one is preferred: what is to leave by another one has to be bound to it.
add_interface() {
  local box=$PREFIX-box port=box$1 interface=eth$1 address=$2
  ip -n "$SWITCH" link add "$port" type veth peer name "$interface" netns "$box"
  ip -n "$SWITCH" link set "$port" master bridge up
  ip -n "$box" addr add "$address/24" dev "$interface" noprefixroute
  ip -n "$box" link set "$interface" up
  ip -n "$box" route add 10.77.0.0/24 dev "$interface" proto kernel scope link src "$address" \
    metric $(($1 + 1)) congctl "$CONGESTION"
  limit "$box" "$interface"
  limit "$SWITCH" "$port"
}

add_box() {
  local i
  add_namespace "$PREFIX-box"
  # An interface answers for its own address only, and takes what comes to it whatever the routes
  # say. Interfaces begin with these values, so they are made after them.
  for i in all default; do
    ip netns exec "$PREFIX-box" sysctl -qw "net.ipv4.conf.$i.arp_ignore=1" \
      "net.ipv4.conf.$i.arp_announce=2" "net.ipv4.conf.$i.rp_filter=0"
  done
  for ((i = 0; i < $2; i++)); do add_interface "$i" "10.77.0.$(($1 + 1 + i))"; done
}

up() {
  local nodes=$1 slow=$2 racks='' in_turn=0 interfaces=0 bridge=bridge i
  RATE=$2
  CORE=''
  shift 2
  while (($# > 0)); do
    case $1 in
      --queue) QUEUE=${2:?--queue needs a size, such as 256kb}; shift 2 ;;
      --slow) slow=${2:?--slow needs a rate, such as 100mbit}; shift 2 ;;
      --racks) racks=${2:?--racks needs a number}; shift 2 ;;
      --core) CORE=${2:?--core needs a rate, such as 1gbit}; shift 2 ;;
      --in-turn) in_turn=1; shift ;;
      --box) interfaces=${2:?--box needs a number of interfaces}; shift 2 ;;
      *) echo "vcluster.sh up: expected --queue, --slow, --racks, --core, --in-turn or --box, got '$1'" >&2
        exit 2 ;;
    esac
  done
  if [[ -n $racks$CORE && (! $racks =~ ^[1-9][0-9]*$ || -z $CORE) ]]; then
    echo "vcluster.sh up: expected both --racks RACKS and --core RATE, or neither" >&2
    exit 2
  fi
  if ((racks > 0 && nodes % racks != 0)); then
    echo "vcluster.sh up: $nodes nodes are not dealt to $racks racks equally" >&2
    exit 2
  fi
  down
  add_namespace "$SWITCH"
  add_bridge bridge
  ip -n "$SWITCH" addr add 10.77.0.254/24 dev bridge
  for ((i = 0; i < racks; i++)); do add_rack "$i"; done
  for ((i = 1; i <= nodes; i++)); do
    if ((racks > 0)); then bridge=rack$((in_turn ? (i - 1) % racks : (i - 1) * racks / nodes)); fi
    add_node "$i" "$bridge" "$( ((i < nodes)) && echo "$RATE" || echo "$slow")"
  done
  if ((interfaces > 0)); then add_box "$nodes" "$interfaces"; fi
}

# Sets local_ranks, the number of ranks of each node, and world, that of all of them.
count_ranks() {
  local nodes count i
  nodes=$(node_count)
  IFS=, read -ra local_ranks <<<"${RANKS:-1}"
  if ((${#local_ranks[@]} == 1)); then
    for ((i = 1; i < nodes; i++)); do local_ranks+=("${local_ranks[0]}"); done
  fi
  if ((${#local_ranks[@]} != nodes)); then
    echo "vcluster.sh: RANKS='$RANKS' is for ${#local_ranks[@]} nodes, and there are $nodes" >&2
    exit 2
  fi
  world=0
  for count in "${local_ranks[@]}"; do
    if [[ ! $count =~ ^[1-9][0-9]*$ ]]; then
      echo "vcluster.sh: RANKS='$RANKS': expected numbers of ranks such as 4 or 3,1,4" >&2
      exit 2
    fi
    world=$((world + count))
  done
}

all() {
  local node local_rank rack rank=0 status=0 pids=()
  count_ranks
  # Whoever ends this script ends the ranks with it.
  trap 'kill "${pids[@]}" 2>/dev/null || true; exit 143' TERM INT
  for node in "${!local_ranks[@]}"; do
    rack=$(rack_of $((node + 1)))
    if [[ -n $rack ]]; then export RACK=$rack; fi
    for ((local_rank = 0; local_rank < local_ranks[node]; local_rank++)); do
      RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=${local_ranks[node]} \
        MASTER_ADDR=10.77.0.1 MASTER_PORT=${MASTER_PORT:-29500} \
        GLOO_SOCKET_IFNAME=eth0 ip netns exec "$PREFIX-node$((node + 1))" "$@" <&0 &
      pids+=($!)
      rank=$((rank + 1))
    done
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return $status
}

# Becomes a command on a node that has a name of its own: Open MPI tells machines apart by their names.
become() {
  local node=$1
  shift
  # shellcheck disable=SC2016  # for the inner shell
  exec ip netns exec "$node" unshare --uts sh -c 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"' "$node" "$@"
}

mpi() {
  local node hosts='' agent
  count_ranks
  for node in "${!local_ranks[@]}"; do hosts+=${hosts:+,}10.77.0.$((node + 1)):${local_ranks[node]}; done
  agent="$(realpath "$0") agent"
  export PREFIX
  # Open MPI 4 reads the first name of each pair, Open MPI 5 the second.
  export OMPI_MCA_plm_rsh_agent=$agent PRTE_MCA_plm_ssh_agent=$agent
  export OMPI_MCA_oob_tcp_if_include=eth0 PRTE_MCA_prte_if_include=eth0
  export OMPI_MCA_btl_tcp_if_include=eth0
  # All nodes have the same cores, so ranks of different nodes must not be bound to the same ones.
  become "$PREFIX-node1" mpirun --allow-run-as-root --host "$hosts" -np "$world" --map-by slot --bind-to none "$@"
}

# What mpirun calls in place of ssh: a node's address, and a command for its shell.
agent() {
  local address=$1
  shift
  become "$PREFIX-node${address##*.}" sh -c "$*"
}

box() {
  count_ranks
  WORLD_SIZE=$world MASTER_ADDR=10.77.0.1 MASTER_PORT=${MASTER_PORT:-29500} \
    exec ip netns exec "$PREFIX-box" "$@"
}

switch() { exec ip netns exec "$SWITCH" "$@"; }

bytes() {
  local i
  case ${1:-nodes} in
    nodes) for ((i = 1; i <= $(node_count); i++)); do
      echo "$(sent "$PREFIX-node$i" eth0) $(sent "$SWITCH" "port$i")"
    done ;;
    racks) for ((i = 0; i < $(rack_count); i++)); do
      echo "$(sent "$SWITCH" "up$i") $(sent "$SWITCH" "down$i")"
    done ;;
    box) for ((i = 0; i < $(box_ports); i++)); do
      echo "$(sent "$PREFIX-box" "eth$i") $(sent "$SWITCH" "box$i")"
    done ;;
    *) echo "vcluster.sh bytes: expected racks, box or nothing, got '$1'" >&2; exit 2 ;;
  esac
}

down() {
  local namespace
  for namespace in $(namespaces 'node[0-9]*') $(namespaces box) $(namespaces switch); do
    ip netns del "$namespace"
  done
}

case ${1:-} in
  up | all | box | mpi | agent | switch | bytes | down) "$@" ;;
  *) sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
