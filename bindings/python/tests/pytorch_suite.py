"""PyTorch's own tests of torch.distributed, which come with it, run against the backend ``poseidon``.

    python pytorch_suite.py [-k WORD] [--ranks 3]

They are the tests of `torch.testing._internal.distributed.distributed_test`. Each runs on three ranks, forked from
this process so that torch is imported once. Tests that torch limits to Gloo or to MPI are run too; those for NCCL or GPUs
skip themselves; `SKIPPED` names those that would run and do not apply, each with its reason.
"""

import argparse
import collections
import os
import sys
import unittest


class Name(str):
    """The backend's name, to torch's decorators: where a test is only for Gloo or only for MPI, it is for this too."""

    def __eq__(self, other):
        return other in ("poseidon", "gloo", "mpi")

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


class Environment(dict):
    def __getitem__(self, key):
        return Name("poseidon") if key == "BACKEND" else super().__getitem__(key)


# Test name: why it does not apply.
MONITORED = "torch allows monitored_barrier on Gloo only, by name"
SKIPPED = {
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
}


def load(ranks):
    """torch's test class, for this backend."""
    os.environ.update(BACKEND="poseidon", WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("TEMP_DIR", "")
    import torch
    from poseidon._c10d_register import register
    from torch.testing._internal.common_distributed import DistTestCases

    register()
    torch.set_num_threads(1)
    # What torch asks before it runs a test: is it there?
    DistTestCases.backend_feature["plugin"].add("poseidon")
    environment, os.environ = os.environ, Environment(os.environ)
    from torch.testing._internal.distributed import distributed_test

    os.environ = environment

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            reason = SKIPPED.get(self._testMethodName)
            if reason is not None:
                self.skipTest(reason)
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


class Result(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reasons = collections.Counter()

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.reasons[reason] += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only tests whose name contains this")
    parser.add_argument("--ranks", type=int, default=3)
    args = parser.parse_args()
    suite = load(args.ranks)
    names = [name for name in unittest.TestLoader().getTestCaseNames(suite) if args.k in name]
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)
    result = runner.run(unittest.TestSuite(suite(name) for name in names))
    passed = result.testsRun - len(result.failures) - len(result.errors) - len(result.skipped)
    print(f"{passed} passed, {len(result.failures) + len(result.errors)} failed, {len(result.skipped)} skipped")
    for reason, count in result.reasons.most_common():
        print(f"{count:4} skipped: {reason}")
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main()
