"""Reports of several processes, started by torchrun or another launcher, equal those of one process."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.prediction_files import write_npz
from helpers.reports import QUICK_COMMAND
from helpers.shards import add_to, assert_same, data_set, shards
from processes import SCRIPTS, environments_of_ranks, free_ports, run_together

import torchcalib as tc
from torchcalib.calibration import load_calibrator
from torchcalib.cli import main
from torchcalib.core import sample_or_sketch
from torchcalib.io.paths import share_of
from torchcalib.reporting import buffer
from torchcalib.reporting.building import ReportBuilder


def launched(n_ranks, folder, calls, *more):
    """Start ranks by environment variables, like any launcher, and return the output of each rank for each call."""
    ports = free_ports(len(calls))
    (folder / "calls.json").write_text(json.dumps([[*call, port] for call, port in zip(calls, ports, strict=True)]))
    environments = environments_of_ranks(n_ranks, ports[0], PYTHONWARNINGS="error")
    codes, outputs = run_together([[SCRIPTS / "report_ranks.py", folder, *more]] * n_ranks, environments)
    n_whole = n_ranks - len(more)
    assert codes == [0] * n_whole + [-signal.SIGKILL] * len(more), outputs
    return list(zip(*(json.loads((folder / f"output-{k}.json").read_text()) for k in range(n_whole)), strict=True))


def with_sites(arrays):
    """Add group names, which differ between shards. Some rows have no group."""
    sites = np.array(["north", "", "Süd", "an island far away"])
    n = len(arrays["targets"])
    return {**arrays, "site": sites[(np.arange(n) // 17 + np.arange(n) % 2) % 4]}


def calls_for(folder):
    """Yield (file for one process, pattern for several), options, and limit of samples for successful calls."""
    in_order = ["--no-intervals"]  # calibrators depend on the order of rows
    saved = ["--right", "--save-calibrator", str(folder / "cal.pt")]
    for k, (task, n, options, ends, most, changes) in enumerate(
        (
            ("binary", 120, QUICK_COMMAND, (5, 50, 100), None, {"weights": "counts", "soft": True}),
            ("multiclass", 120, QUICK_COMMAND, (5, 50, 100), None, {"weights": "real", "soft": True}),
            ("multilabel", 120, QUICK_COMMAND, (5, 50, 100), None, {"weights": "real"}),
            ("binary", 120, [*QUICK_COMMAND, "--groups", "site"], (5, 50, 100), None, {}),
            ("multilabel", 120, [*QUICK_COMMAND, "--groups", "site"], (5, 50, 100), None, {}),
            ("binary", 2000, [*in_order, "--n-bins", "9", *saved], (40,), None, {}),
            ("binary", 60, QUICK_COMMAND, (), None, {}),
            ("multiclass", 60, QUICK_COMMAND, (0, 0, 60), None, {}),
            ("multiclass", 60, QUICK_COMMAND, (0, 20, 30), None, {}),
            ("binary", 60, in_order, (20, 40), 59, {}),
            ("binary", 60, in_order, (20, 40), 5, {}),
        )
    ):
        arrays, suffix = data_set(task, n, **changes), "csv" if ends == (0, 20, 30) else "npz"
        arrays = with_sites(arrays) if "--groups" in options else arrays
        options = [*options, "--task", task] if n == 120 else options
        yield shards(folder / str(k), arrays, *ends, suffix=suffix), options, most
    (folder / "pair").mkdir()
    for name, array in data_set("multiclass", 30).items():
        np.save(folder / "pair" / f"{name}.npy", array)
    yield [str(folder / "pair" / "*.npy")] * 2, QUICK_COMMAND, None


def failing_calls(folder):
    """Return arguments, and text in the one-line error."""
    arrays = data_set("binary", 40)
    _, pattern = shards(folder / "damaged", arrays, 10, 20, 30)
    (folder / "damaged" / "shard-3.npz").write_bytes(b"no archive, but long enough to be a share" * 9)
    _, unlike = shards(folder / "unlike", arrays, 10, 20, 30)
    write_npz(folder / "unlike" / "shard-3.npz", {"logits": np.zeros(300), "targets": np.zeros(300, int)})
    _, fine = shards(folder / "fine", arrays, 20)
    (folder / "text").mkdir()
    texts = {"probs": np.linspace(0, 1, 9), "y": np.array(["no"] * 5 + ["yes"] * 4)}
    for k in range(4):
        write_npz(folder / "text" / f"{k}.npz", texts)
    _, none = shards(folder / "none", {name: values[:0] for name, values in arrays.items()}, 0)
    return [
        ([pattern], "shard-3.npz` must be a complete, readable npz file"),
        ([unlike, *QUICK_COMMAND], "float64"),
        ([none], "must contain at least one sample, got none"),
        ([str(folder / "text" / "*.npz"), *QUICK_COMMAND], "--class-names must be given if several processes"),
        ([fine, "--n-bins", "0"], "`--n-bins` must be at least 1"),
        ([fine, "--save-calibrator", str(folder / "nowhere" / "cal.pt")], "in a folder that exists"),
        ([str(folder / "no?.npz")], "must match at least one file"),
        ([fine, *QUICK_COMMAND, "--from-probs"], "`preds` must be probabilities"),
        ([fine, "--n-bins", "1{rank}"], "every part must have the same arguments, got --n-bins 1"),
    ]


@pytest.mark.extended
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_reports_of_several_ranks_equal_that_of_one_process(n_ranks, tmp_path, capsys, monkeypatch):
    """Each call uses eight small collectives, and one for all states."""
    good, bad = list(calls_for(tmp_path)), failing_calls(tmp_path)

    def command(name, k, options):
        return ["report", name, *options, "--save-state", str(tmp_path / f"state {k}.pt")]

    def saved(k):
        calibrators = [load_calibrator(path)(torch.linspace(-3, 3, 9)) for path in tmp_path.glob("cal.pt")]
        calibrated = [values.tolist() for values in calibrators]
        return ReportBuilder.load(tmp_path / f"state {k}.pt").report().to_dict() | {"calibrated": calibrated}

    calls = [(command(files[1], k, options), most) for k, (files, options, most) in enumerate(good)]
    calls += [(["report", *arguments], None) for arguments, _ in bad]
    answers = launched(n_ranks, tmp_path, calls)
    for k, ((files, options, most), answer) in enumerate(zip(good, answers, strict=False)):
        with monkeypatch.context() as patch:
            for module in (sample_or_sketch, buffer):
                patch.setattr(module, "MAX_SAMPLES", most or module.MAX_SAMPLES)
            found = saved(k)
            assert main(command(files[0], k, options)) == 0, capsys.readouterr().err
            assert_same(found, saved(k), files[0])
        one = {"code": 0, "out": "", "err": "", "collectives": [*["all_gather"] * 8, "all_to_all_single"]}
        names = [path.name for path in sorted(Path(files[1]).parent.glob(Path(files[1]).name))]
        title = f"{names[0]} and {len(names) - 1} more"
        shown = capsys.readouterr().out.replace(Path(files[0]).name, title)
        expected = [{**one, "out": shown}, *[one] * (n_ranks - 1)]
        assert [{**rank, "collectives": sorted(rank["collectives"])} for rank in answer] == expected
    for (_, words), answer in zip(bad, answers[len(good) :], strict=True):
        assert [(rank["code"], rank["out"]) for rank in answer] == [(2, "")] * n_ranks, words
        assert not any(rank["err"] for rank in answer[1:])
        assert words in answer[0]["err"], answer[0]["err"]
        assert answer[0]["err"].count("\n") == 1
    builder = tc.ReportBuilder(task="multiclass", from_logits=True, with_intervals=False)
    add_to(builder, data_set("multiclass", 60))
    assert_same(ReportBuilder.load(tmp_path / "gathered.pt").report().to_dict(), builder.report().to_dict())


@pytest.mark.extended
def test_a_killed_rank_ends_the_command_on_all_ranks(tmp_path):
    _, pattern = shards(tmp_path / "shards", data_set("binary", 40), 10, 20, 30)
    ((*answers,),) = launched(3, tmp_path, [(["report", pattern, *QUICK_COMMAND], None)], "kills")
    for answer in answers:
        assert (answer["code"], answer["out"]) == (2, "")
        assert "all ranks must run the same command, got no answer from another rank" in answer["err"]
        assert answer["err"].count("\n") == 1


def test_files_are_divided_into_consecutive_parts_of_similar_size(tmp_path):
    rng = np.random.default_rng(0)
    for n_files, n_ranks, most in ((1, 4, 1000), (3, 4, 1000), (7, 2, 1000), (40, 4, 1000), (40, 1, 1000), (2, 3, 1)):
        sizes = rng.integers(0, most, n_files)
        paths = [tmp_path / f"{n_files}-{k:02}.npz" for k in range(n_files)]
        for path, size in zip(paths, sizes, strict=True):
            path.write_bytes(bytes(int(size)))
        shares = [share_of(paths, rank, n_ranks) for rank in range(n_ranks)]
        assert [path for share in shares for path in share] == paths
        for share in shares:
            assert abs(sum(path.stat().st_size for path in share) - sizes.sum() / n_ranks) <= sizes.max()
    pair = [tmp_path / "logits.npy", tmp_path / "targets.npy"]
    assert [share_of(pair, rank, 2) for rank in range(2)] == [tuple(pair), ()]
