"""One rank of tests/reporting/test_ranks.py, which runs the command several times in one process.

`python report_ranks.py FOLDER` reads the calls from `calls.json`, and writes the results of a rank to
`output-RANK.json`. In arguments, `{rank}` is replaced by the rank. With a second argument `kills`, the last rank is
killed while it reads.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from helpers.shards import add_to, cut, data_set

import torchcalib
from torchcalib.cli import main
from torchcalib.core import sample_or_sketch
from torchcalib.reporting import buffer

RANK, N_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


def run(folder):
    os.chdir(folder)
    collectives, outputs = [], []
    for name in ("all_gather", "all_to_all_single", "barrier", "all_reduce", "broadcast"):
        record_calls(name, collectives)
    for arguments, most, port in json.loads(Path("calls.json").read_text()):
        sample_or_sketch.MAX_SAMPLES, buffer.MAX_SAMPLES = most or 2**24, most or 2**20
        out, err = io.StringIO(), io.StringIO()
        # a separate port for each call: a rank may not have left the previous call yet
        os.environ["MASTER_PORT"] = port
        collectives.clear()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = code_of([word.replace("{rank}", str(RANK)) for word in arguments])
        outputs.append({"code": code, "out": out.getvalue(), "err": err.getvalue(), "collectives": list(collectives)})
    Path(f"output-{RANK}.json").write_text(json.dumps(outputs))


def gather(folder):
    """Gather builders of a training loop. The last rank has no data. The local builders are unchanged."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=RANK, world_size=N_RANKS)
    builder = torchcalib.ReportBuilder(task="multiclass", from_logits=True, with_intervals=False)
    pieces = cut(data_set("multiclass", 60), *[10 + 40 * k // (N_RANKS - 1) for k in range(N_RANKS - 2)])
    if RANK < N_RANKS - 1:
        add_to(builder, pieces[RANK])
    for _ in range(2):
        whole = builder.gather()
        assert (whole is None) == (RANK > 0)
    if whole is not None:
        whole.save(f"{folder}/gathered.pt")
    if RANK < N_RANKS - 1:
        assert builder.report().n == len(pieces[RANK]["targets"])
    dist.destroy_process_group()


def record_calls(name, calls):
    original = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: (calls.append(name), original(*args, **kwargs))[1])


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[2:] == ["kills"]:
        if RANK == N_RANKS - 1:
            torchcalib.ReportBuilder.update = die
        run(sys.argv[1])
        os._exit(0)  # the process group cannot be destroyed without the killed rank
    run(sys.argv[1])
    gather(sys.argv[1])
