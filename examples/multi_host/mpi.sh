#!/bin/sh
# Under MPI, from the root of the repository, which all hosts see:
#
#     examples/multi_host/mpi.sh 2 --host node1,node2 -- node1:12345 examples.multi_host.train
#
# What stands before "--" goes to mpirun. Each process reads its rank and their number from
# the variables that Open MPI or MPICH set; process 0 runs on the first host named, which is
# that of the coordinator.
set -eu
usage="usage: $0 PROCESSES [OPTIONS OF MPIRUN] -- NAME:PORT MODULE [ARGUMENTS]"
[ $# -ge 4 ] || { echo "$usage" >&2; exit 2; }
processes=$1
shift
hosts=
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    hosts="$hosts $1"
    shift
done
[ $# -ge 3 ] || { echo "$usage" >&2; exit 2; }
coordinator=$2
shift 2
# shellcheck disable=SC2086  # several words
exec "${MPIRUN:-mpirun}" -n "$processes" $hosts "${PYTHON:-python}" \
    -m examples.multi_host.start --coordinator "$coordinator" "$@"
