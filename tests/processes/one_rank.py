"""One rank of a gloo process group: `one_rank.py MODULE FUNCTION RANK WORLD FOLDER ...` calls a function."""

import datetime
import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(module, function, rank, world, folder, *more):
    store, timeout = f"file://{folder}/store-{function}", datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(world), timeout=timeout)
    torch.set_num_threads(1)
    call = getattr(importlib.import_module(f"processes.{module}"), function)
    call(int(rank), int(world), Path(folder), *more)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
