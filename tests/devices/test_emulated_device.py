"""The emulated device, and the processes that run the other tests of this folder on it."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import emulated_device
from helpers.emulated_device import NAME, recorded_reads
from processes import ROOT, run_together

FOLDER = Path(__file__).parent
FILES = [(path.name, "not extended") for path in sorted(FOLDER.glob("test_*.py"))]
FILES += [
    pytest.param(path.name, "extended", marks=pytest.mark.extended)
    for path in sorted(FOLDER.glob("test_*.py"))
    if "mark.extended" in path.read_text() and path != Path(__file__)
]
emulated = pytest.mark.emulated


@pytest.mark.skipif(not emulated_device.IS_SUPPORTED, reason="this torch cannot register a device from Python")
@pytest.mark.parametrize(("file", "marks"), FILES)
def test_all_tests_pass_on_the_emulated_device(file, marks):
    # pytest cannot rewrite the assertions of modules that a forked process has already imported.
    options = ["--assert=plain", "-q", "-p", "no:cacheprovider", "-m", f"emulated and {marks}"]
    command = ["-m", "pytest", *options, FOLDER / file]
    codes, output = run_together([command], [{"TORCHCALIB_TEST_DEVICE": "emulated"}], folder=ROOT)
    assert codes == [0], output


MIXED = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "index_select": lambda x, y: x.index_select(0, y.long()),
    "cat": lambda x, y: torch.cat([x, y]),
    "add_": lambda x, y: x.add_(y),
    "matmul": lambda x, y: x @ y,
}


@emulated
@pytest.mark.parametrize("name", MIXED)
def test_operations_refuse_tensors_of_two_devices(device, name):
    here, there = torch.ones(2), torch.ones(2, device=device)
    for pair in ((there, here), (here, there)):
        with pytest.raises(RuntimeError, match=f"{NAME}|cpu"):
            MIXED[name](*pair)


@emulated
def test_numpy_requires_a_copy_to_the_cpu(device):
    x = torch.ones(2, device=device)
    with pytest.raises(TypeError, match="to host memory first"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1]


# Each call with the number of reads, and of copies to the device for which the host waits
WAITS = {
    "arithmetic": (lambda x, mask: x.sum() + x.sort().values.cumsum(0)[x.argsort()].mean(), 0, 0),
    "number on the CPU": (lambda x, mask: x + torch.tensor(2.0), 0, 0),
    "masked_fill": (lambda x, mask: x.masked_fill(mask, 0), 0, 0),
    "write to an element": (lambda x, mask: x.clone()[1].zero_(), 0, 0),
    "repeat of given length": (lambda x, mask: x.repeat_interleave(mask.long() + 1, output_size=5), 0, 0),
    "upload in the background": (lambda x, mask: torch.ones(2).to(x.device, non_blocking=True), 0, 0),
    "upload": (lambda x, mask: torch.tensor([1.0, 2.0], device=x.device), 0, 1),
    "item": (lambda x, mask: x.sum().item(), 1, 0),
    "bool and float": (lambda x, mask: bool(mask.any()) and float(x[0]), 2, 0),
    "tolist and cpu": (lambda x, mask: x.tolist() + x.cpu().tolist(), 2, 0),
    "equal": (lambda x, mask: torch.equal(x, x), 1, 0),
    "mask as index": (lambda x, mask: x[mask], 1, 0),
    "write by mask": (lambda x, mask: x.clone().index_put_((mask,), x[1:]), 1, 0),
    "nonzero": (lambda x, mask: mask.nonzero(), 1, 0),
    "unique": (lambda x, mask: x.unique(), 1, 0),
    "bincount": (lambda x, mask: x.long().bincount(minlength=5), 1, 0),
    "repeat": (lambda x, mask: x.repeat_interleave(mask.long() + 1), 1, 0),
    "cholesky": (lambda x, mask: torch.linalg.cholesky(torch.diag(x.exp())), 1, 0),
}


@emulated
@pytest.mark.parametrize("name", WAITS)
def test_reads_and_uploads_for_which_the_host_waits_are_recorded(device, name):
    call, n_reads, n_uploads = WAITS[name]
    x, mask = torch.arange(3.0).to(device), torch.tensor([False, True, True]).to(device)
    with recorded_reads() as reads:
        call(x, mask)
    assert (len(reads), reads.uploads) == (n_reads, n_uploads), reads


@emulated
def test_copies_and_saved_tensors_stay_on_the_device(device, tmp_path):
    x = torch.arange(6.0).to(device)
    torch.save({"x": x[1:]}, tmp_path / "x.pt")
    for y in (copy.deepcopy(x)[1:], torch.load(tmp_path / "x.pt", weights_only=True)["x"]):
        assert y.device == device
        assert y.tolist() == [1, 2, 3, 4, 5]
        y.zero_()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
