"""Report of simulated rows through Dask: time, memory and bytes moved, and the projection for more machines.

`python -m benchmarks.engines --rows 1000000000` needs `pip install 'torchcalib[dask]'`. The rows of a partition are
generated in its worker, so that neither memory nor disk limits their number.
"""

import argparse
import json
import os
import threading
import time
from functools import partial

import distributed
import numpy as np
import psutil
import pyarrow as pa
import torch

from benchmarks.measure import seconds
from torchcalib.integrations.dask import report
from torchcalib.integrations.partitions import SPLIT_EVERY, Partitions

PARTITION = 1_000_000
ROWS = 10**9  # rows of the projection; shorter runs have the same states
OPTIONS = {"task": "binary", "with_calibration": False}


def rows_of(number, n=PARTITION):
    """Return n probabilities, and outcomes that are slightly less frequent than these."""
    g = np.random.default_rng(number)
    probs = g.random(n, dtype=np.float32)
    return pa.table({"prob": probs, "target": (g.random(n, dtype=np.float32) < probs**1.05).astype(np.int8)})


class Simulated:
    """Table whose partitions exist only in the workers, with the method of a Dask collection that `report` calls."""

    def __init__(self, n_rows):
        self.sizes = [min(PARTITION, n_rows - start) for start in range(0, n_rows, PARTITION)]

    def to_delayed(self):
        from dask import delayed

        generate = delayed(rows_of)
        return [generate(number, n) for number, n in enumerate(self.sizes)]


def measure_steps():
    """Return seconds and bytes of the steps for one partition, measured in one thread of this process."""
    torch.set_num_threads(1)
    partitions = Partitions.of_report(**OPTIONS, n_rows=ROWS)
    states = [partitions.state(number, [rows_of(number, 200_000)]) for number in range(SPLIT_EVERY - 1)]
    rows = rows_of(SPLIT_EVERY - 1)
    states.append(partitions.state(SPLIT_EVERY - 1, [rows]))
    merged = partitions.merged(states)
    return {
        "generation_s": seconds(partial(rows_of, 0)),
        "compute_s": seconds(partial(partitions.state, 0, [rows])),
        "merge_s_per_state": seconds(partial(partitions.merged, states)) / SPLIT_EVERY,
        "report_s": seconds(partial(partitions.report, [merged])),
        "state_bytes": len(states[-1]),
        "merged_bytes": len(merged),
    }


def projected(steps, n_rows, n_machines, n_cores, bytes_per_s=1e9):
    """Return seconds of the phases on machines with `n_cores` each, computed from the steps of one partition.

    Every level of the tree merges `SPLIT_EVERY` states on one core, after it has received them over one network link.
    """
    n = -(-n_rows // PARTITION)
    compute = -(-n // (n_machines * n_cores)) * steps["compute_s"]
    merge = move = moved = 0.0
    while n > 1:
        nodes = -(-n // SPLIT_EVERY)
        waves = -(-nodes // (n_machines * n_cores))
        merge += waves * min(n, SPLIT_EVERY) * steps["merge_s_per_state"]
        moved += n * steps["merged_bytes"]
        move += -(-n // min(n_machines, nodes)) * steps["merged_bytes"] / bytes_per_s
        n = nodes
    phases = {"compute": compute, "merge tree": merge, "transfer": move, "report": steps["report_s"]}
    return {**phases, "total": sum(phases.values()), "bytes moved": moved}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    steps = measure_steps()
    memory = []
    done = threading.Event()
    cluster = distributed.LocalCluster(n_workers=arguments.workers, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())

        def sample():
            while not done.wait(2):
                memory.append(max(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        start = time.perf_counter()
        found = report(Simulated(arguments.rows), **OPTIONS, n_rows=max(arguments.rows, ROWS))
        taken = time.perf_counter() - start
        done.set()
        thread.join()
    quarters = [max(part.tolist(), default=0.0) for part in np.array_split(memory, 4)]
    record = {
        "rows": found.n,
        "seconds": taken,
        "core_ns_per_row": 1e9 * taken * arguments.workers / found.n,
        "largest_worker_MB_by_quarter_of_the_time": [round(each) for each in quarters],
        "ece": found["ece"],
        "p_value": found.main_line.p_value,
        "steps of one partition": steps,
        "projection for 100 machines of 16 cores and 1 GB/s": projected(steps, ROWS, 100, 16),
        "projection for 1 machine of 16 cores": projected(steps, ROWS, 1, 16),
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
