"""MPI: Allreduce in place on a numpy buffer. Start it with mpirun, which chooses the transport."""

import sys

from mpi4py import MPI

import protocol


def main():
    parser = protocol.arguments("Times MPI Allreduce")
    parser.add_argument("--link", required=True, help="the transport mpirun was told to use, for the report")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD

    def bind(buffer):
        return lambda: comm.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)

    try:
        ranks = protocol.Ranks(comm.rank, comm.size, args.link, comm.Barrier, bind, comm.gather)
        protocol.measure(ranks, args)
    except SystemExit as stop:
        # One rank that stops alone would leave the others waiting in the next barrier.
        print(stop, file=sys.stderr, flush=True)
        comm.Abort(1)


if __name__ == "__main__":
    main()
