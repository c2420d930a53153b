"""Workers of a data loader that compute metrics, as a script: `loader_workers.py START_METHOD`. A difference raises.

Before the workers start, the parent has used the threads of torch and the thread pool of torchcalib. A forked worker
has none of these threads, and must not wait for them.
"""

import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchcalib as tc

N, N_CLASSES, N_ITEMS = 55_000, 10, 2
OPTIONS = {"task": "multiclass", "num_classes": N_CLASSES, "from_logits": True}


def metrics():
    """Return metrics whose loops run in the thread pool and in threads of torch."""
    modes = {"ECE": "classwise", "ACE": "top_label", "KS": "top_label"}
    members = [getattr(tc, name)(**OPTIONS, mode=mode) for name, mode in modes.items()]
    return tc.CalibrationCollection([tc.NLL(**OPTIONS), *members])


def value_of(collection, item):
    generator = torch.Generator().manual_seed(item)
    logits = torch.randn(N, N_CLASSES, generator=generator)
    collection.reset()
    collection.update(logits, torch.randint(0, N_CLASSES, (N,), generator=generator))
    return torch.stack(list(collection.compute().values()))


class Items(Dataset):
    """Items are the values of a collection for their number."""

    def __init__(self, collection):
        self.collection = collection

    def __len__(self):
        return N_ITEMS

    def __getitem__(self, item):
        return item, value_of(self.collection, item)


class Collate:
    """Function that adds the values of its own collection."""

    def __init__(self, collection):
        self.collection = collection

    def __call__(self, items):
        return torch.stack([torch.stack((value, value_of(self.collection, item))) for item, value in items])


def fails(items):
    """Update a metric with a target out of range."""
    tc.NLL(**OPTIONS).update(torch.zeros(N, N_CLASSES), torch.full((N,), N_CLASSES))


def main(start_method):
    torch.set_num_threads(2)
    collection = metrics()
    expected = torch.stack([value_of(collection, item) for item in range(N_ITEMS)])
    options = {"num_workers": 2, "multiprocessing_context": start_method, "timeout": 600}
    stop = threading.Event()

    def work():
        own = metrics()
        while not stop.is_set():
            value_of(own, 0)

    busy = threading.Thread(target=work)
    busy.start()  # the thread pool works while the workers start
    try:
        found = torch.cat(list(DataLoader(Items(collection), collate_fn=Collate(metrics()), **options)))
        torch.testing.assert_close(found, torch.stack((expected, expected), 1), rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match="`target` must be a class index"):
            list(DataLoader(range(N_ITEMS), collate_fn=fails, **options))
    finally:
        stop.set()
        busy.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
