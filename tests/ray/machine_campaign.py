"""Kills random nodes of a cluster while a run goes on, adds others, and compares the results.

`PYTHONPATH=tests:tests/cli python tests/ray/machine_campaign.py --kills 20` tells whether the
results are complete, nothing is there twice, and all is as one process has it but for `slot` and
`steps`.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from nodes import Nodes
from running import alone, command_in, fill, results_of

MODEL = ("--model", "killing:sleepy", "-b", 4)


def kill_some(run, nodes, options, generator):
    """Kill so many nodes while the run goes on, and add as many; return how many were."""
    killed = 0
    while killed < options.kills and run.poll() is None:
        time.sleep(generator.uniform(0, options.seconds))
        while nodes.others and generator.random() < 0.6 and killed < options.kills:
            nodes.lose(generator.choice(nodes.others))
            killed += 1
        while len(nodes.others) < options.nodes and generator.random() < 0.8:
            nodes.add(num_cpus=1)
    return killed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3, help="beside the head, at most")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="between kills, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Nodes(num_cpus=1) as nodes:
        folder = fill(Path(name), options.requests)
        for _ in range(options.nodes):
            nodes.add(num_cpus=1)
        more = ("-o", "out.jsonl", "--workers", options.nodes + 1, *nodes.on)
        run = command_in(folder, *MODEL, *more)
        killed = kill_some(run, nodes, options, random.Random(options.seed))
        _, told = run.communicate()
        found = results_of((folder / "out.jsonl").read_bytes())
        expected = alone(folder, *MODEL)
    print(f"{killed} kills of nodes, exit status {run.returncode}")
    print(f"{len(found)} results of {len(expected)}, {len(found) - len(set(found))} twice")
    print("the same as one process" if found == expected else "DIFFERENT")
    sys.stderr.write(told.decode())


if __name__ == "__main__":
    main()
