"""MPI: Allreduce in place on a numpy buffer. Start it with mpirun, which chooses the transport."""

import sys
import time

import numpy as np
from mpi4py import MPI

import protocol

# Seconds between two looks for the next turn. MPI's own waits keep a core busy, which other contenders need.
NAP = 0.005


def main():
    parser = protocol.arguments("Times MPI Allreduce")
    parser.add_argument("--link", required=True, help="the transport mpirun was told to use, for the report")
    parser.add_argument("--turns", action="store_true", help="measure what standard input asks for")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD

    def bind(buffer):
        return protocol.Bound(lambda: comm.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM))

    def share(line):
        turn = np.zeros(2, dtype=np.int64)
        if line:
            turn[:] = [int(word) for word in line.split()]
        request = comm.Ibcast(turn, root=0)
        while not request.Test():
            time.sleep(NAP)
        return f"{turn[0]} {turn[1]}" if turn[0] else ""

    try:
        ranks = protocol.Ranks(comm.rank, comm.size, args.link, comm.Barrier, bind, comm.gather)
        if args.turns:
            protocol.take_turns(ranks, args, share)
        else:
            protocol.measure(ranks, args)
    except SystemExit as stop:
        # One rank that stops alone would leave the others waiting in the next barrier.
        print(stop, file=sys.stderr, flush=True)
        comm.Abort(1)


if __name__ == "__main__":
    main()
