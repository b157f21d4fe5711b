"""What leaves the ports of four nodes that have a bandwidth budget, which changes while they run.

Run as root, from the repository: python3 measure.py POSEIDON FILE [FLAGS OF EXCHANGE]. Writes the samples to FILE, as
JSON lines, and prints the largest and the smallest second. `python3 measure.py report FILE` prints them again.
"""

import bisect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

NODES, PORT, FIRST, SECOND = 4, "1gbit", 400, 200
PREFIX = os.environ.get("PREFIX", "poseidon")
POSEIDON, FILE = sys.argv[1], Path(sys.argv[2])
ENV = dict(os.environ, PREFIX=PREFIX, POSEIDON_SECRET="budget", POSEIDON_COORDINATOR="10.77.0.1:29501",
           POSEIDON_CLUSTER="budget", MASTER_PORT="29500")
LAB = ["bash", "bench/vcluster.sh"]


class Counter:
    """Bytes that have left a node's port, with all headers of all packets."""

    def __init__(self, node):
        # One process that answers again and again: starting one takes milliseconds, which would shift the samples.
        self.tc = subprocess.Popen(["tc", "-n", f"{PREFIX}-node{node}", "-s", "-batch", "-"], text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self):
        """When, and how many."""
        asked = time.monotonic()
        self.tc.stdin.write("qdisc show dev eth0\n")
        self.tc.stdin.flush()
        lines = [self.tc.stdout.readline() for _ in range(3)]
        return (asked + time.monotonic()) / 2, int(lines[1].split()[1])


def sample(samples, begun, over):
    counters = {node: Counter(node) for node in range(1, NODES + 1)}
    while not over.is_set():
        for node, counter in counters.items():
            at, count = counter.read()
            samples.append((at - begun, node, count))
        # Every 100 ms, whatever the reading took.
        over.wait(0.1 - (time.monotonic() - begun) % 0.1)
    for counter in counters.values():
        counter.tc.stdin.close()
        counter.tc.wait()


def seconds(series, begin, end, budget):
    """Megabits of every second between two times that begins with a sample, and whether it is full of work: no tenth
    of it, nor the tenths before and after it, have less than half of their share. Others are before, between and after
    exchanges, or touch their ends."""
    times = [at for at, _ in series]

    def value(at):
        i = min(max(bisect.bisect_left(times, at), 1), len(times) - 1)
        (t0, b0), (t1, b1) = series[i - 1], series[i]
        return (b0 + (b1 - b0) * (at - t0) / (t1 - t0)) * 8 / 1e6

    for t in (t for t in times if begin <= t and t + 1 <= end):
        tenths = [value(t + (k + 1) / 10) - value(t + k / 10) for k in range(-1, 11)]
        yield value(t + 1) - value(t), min(tenths) >= budget / 20


def main():
    subprocess.run([*LAB, "up", str(NODES), PORT], env=ENV, check=True)
    samples, over, begun = [], threading.Event(), time.monotonic()
    sampler = threading.Thread(target=sample, args=(samples, begun, over))
    sampler.start()
    job = subprocess.Popen([*LAB, "all", POSEIDON, "bench", "exchange", "--in-cluster", "--link", "tcp", "--json", "--bytes", "100MB",
                            "--iters", "2", "--bandwidth-budget", f"{FIRST}mbit", *sys.argv[3:]], env=ENV, stdout=subprocess.PIPE, text=True)
    # In the middle of the third exchange.
    time.sleep(9.5)
    told = subprocess.run(["ip", "netns", "exec", f"{PREFIX}-node2", POSEIDON, "budget", f"{SECOND}mbit"], env=ENV, text=True,
                          capture_output=True, check=True)
    changed = time.monotonic() - begun
    summary, _ = job.communicate()
    over.set()
    sampler.join()
    subprocess.run([*LAB, "down"], env=ENV, check=True)
    facts = {"changed": changed, "told": told.stdout.strip(), "exchange": json.loads(summary)}
    with FILE.open("w") as out:
        print(json.dumps(facts), file=out)
        for at, node, count in samples:
            print(json.dumps({"seconds": round(at, 4), "node": node, "sent": count}), file=out)
    report(facts, samples)


def report(facts, samples):
    """Megabits a second: the largest and the smallest second of every node."""
    changed = facts["changed"]
    end = max(at for at, _, _ in samples)
    # Samples on both sides of the change are of both budgets.
    for budget, begin, until in [(FIRST, 0, changed - 0.1), (SECOND, changed + 0.1, end)]:
        for node in range(1, NODES + 1):
            series = [(at, count) for at, of, count in samples if of == node]
            rates = list(seconds(series, begin, until, budget))
            full = sorted(rate for rate, is_full in rates if is_full)
            print(f"{budget} Mbit/s, node {node - 1}: {len(rates)} seconds, most {max(rate for rate, _ in rates):.1f}; "
                  f"{len(full)} of them full of work: least {full[0]:.1f}, median {full[len(full) // 2]:.1f}, "
                  f"most {full[-1]:.1f}")



def read():
    facts, *samples = [json.loads(line) for line in FILE.read_text().splitlines()]
    return facts, [(sample["seconds"], sample["node"], sample["sent"]) for sample in samples]


if __name__ == "__main__":
    report(*read()) if POSEIDON == "report" else main()
