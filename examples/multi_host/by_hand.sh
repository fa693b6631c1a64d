#!/bin/sh
# One process on each host, started by hand; process 0 runs on the host of the coordinator.
#
#     on node1:  examples/multi_host/by_hand.sh node1:12345 2 0 examples.multi_host.train
#     on node2:  examples/multi_host/by_hand.sh node1:12345 2 1 examples.multi_host.train
#
# PYTHON names another interpreter; ONE_HOST=1 says that both processes run on one host.
set -eu
usage="usage: $0 NAME:PORT PROCESSES PROCESS MODULE [ARGUMENTS]"
[ $# -ge 4 ] || { echo "$usage" >&2; exit 2; }
coordinator=$1 processes=$2 process=$3
shift 3
exec "${PYTHON:-python}" -m examples.multi_host.start ${ONE_HOST:+--one-host} \
    --coordinator "$coordinator" --processes "$processes" --process "$process" "$@"
