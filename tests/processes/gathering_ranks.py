"""One rank of tests/reporting/test_merge.py: `python gathering_ranks.py FOLDER` gathers builders on rank 0.

Results of a rank are in `output-RANK.json`. With a second argument `kills`, the last rank is killed before it gathers.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from helpers.shards import add_to, cut, data_set

import torchcalib
from torchcalib.core import sample_or_sketch
from torchcalib.reporting import buffer

RANK, N_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
QUICK = {"with_calibration": False, "with_intervals": False}
IN_ORDER = {"with_intervals": False}  # calibrators depend on the order of rows

CASES = [  # task, rows, settings, columns, rows before the first row of each rank, limit of samples
    ("binary", 120, QUICK, {"weights": "counts", "soft": True}, (5, 50, 100), None),
    ("multiclass", 120, QUICK, {"weights": "real", "soft": True}, (5, 50, 100), None),
    ("multilabel", 120, QUICK, {"weights": "real"}, (5, 50, 100), None),
    ("multiclass", 120, QUICK, {"parts": True}, (5, 50, 100), None),
    ("binary", 600, {**IN_ORDER, "right": True, "n_bins": 9}, {}, (40, 40, 40), None),
    ("multiclass", 60, IN_ORDER, {}, (10, 30, 60), None),  # the last rank has no rows
    ("binary", 60, IN_ORDER, {}, (20, 40, 50), 59),
    ("binary", 60, IN_ORDER, {}, (20, 40, 50), 5),
]


def builder_of(case):
    task, n, settings, columns, _, _ = case
    builder = torchcalib.ReportBuilder(task=task, from_logits=True, **settings)
    return builder, data_set(task, n, **columns)


def limit(case):
    sample_or_sketch.MAX_SAMPLES, buffer.MAX_SAMPLES = case[-1] or 2**24, case[-1] or 2**20


def run(folder):
    calls, output = [], []
    for name in ("all_gather", "all_to_all_single", "barrier", "all_reduce", "broadcast"):
        record_calls(name, calls)
    for k, case in enumerate(CASES):
        limit(case)
        builder, arrays = builder_of(case)
        part = cut(arrays, *case[-2][: N_RANKS - 1])[RANK]
        if n := len(part["targets"]):
            add_to(builder, part)
        for _ in range(2):  # the builders of all ranks are unchanged
            calls.clear()
            whole = builder.gather()
            assert (whole is None) == (RANK > 0)
        assert not n or case[-1] or builder.report().n > 0
        if whole is not None:
            whole.save(f"{folder}/gathered-{k}")
        output.append(list(calls))
    limit(CASES[0])
    builder = torchcalib.ReportBuilder(task="binary", n_bins=10 + RANK)
    builder.update([0.2, 0.7], [0, 1])
    try:
        builder.gather()
    except RuntimeError as error:
        output.append(str(error))
    Path(f"{folder}/output-{RANK}.json").write_text(json.dumps(output))


def record_calls(name, calls):
    original = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: (calls.append(name), original(*args, **kwargs))[1])


if __name__ == "__main__":
    folder = sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=RANK, world_size=N_RANKS)
    if sys.argv[2:] == ["kills"]:
        if RANK == N_RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            torchcalib.ReportBuilder(task="binary").gather()
        except RuntimeError as error:
            Path(f"{folder}/output-{RANK}.json").write_text(json.dumps(str(error)))
        os._exit(0)  # the process group cannot be destroyed without the killed rank
    run(folder)
    dist.destroy_process_group()
