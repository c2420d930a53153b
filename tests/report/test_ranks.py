"""The report of several processes is that of one: real ones, which torchrun or another launcher has started."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.reports import QUICK_COMMAND
from helpers.shards import add_to, assert_same, data_set, shards
from helpers.written import write_npz
from processes import SCRIPTS, environments_of_ranks, free_ports, quick_environment, run_together

import torchcalib as tc
from torchcalib import bounded
from torchcalib.cli import main
from torchcalib.files import share_of
from torchcalib.report import kept


def torchrun(n_ranks, folder, *arguments):
    """The command of the README, but that a free port is chosen."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    return subprocess.run(
        [*launcher, "-m", "torchcalib", *arguments],
        cwd=folder,
        env=quick_environment(PYTHONWARNINGS="ignore"),  # torchrun itself warns
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def launched(n_ranks, folder, calls):
    """Start ranks as any launcher does, by the environment alone, and return what each of them said to each call."""
    ports = free_ports(len(calls))
    numbered = [{**call, "port": port} for call, port in zip(calls, ports, strict=True)]
    (folder / "calls.json").write_text(json.dumps(numbered))
    environments = environments_of_ranks(n_ranks, ports[0], PYTHONWARNINGS="error")
    codes, said = run_together([[SCRIPTS / "report_ranks.py", folder]] * n_ranks, environments)
    assert codes == [0] * n_ranks, said
    return list(zip(*(json.loads((folder / f"said-{k}.json").read_text()) for k in range(n_ranks)), strict=True))


def with_sites(arrays):
    """With names of groups, of which shards have different ones; some rows have none."""
    sites = np.array(["north", "", "Süd", "an island far away"])
    n = len(arrays["targets"])
    return {**arrays, "site": sites[(np.arange(n) // 17 + np.arange(n) % 2) % 4]}


def written(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.extended
def test_torchrun_as_in_the_readme(tmp_path, monkeypatch, capsys):
    """Four ranks, uneven shards, an empty one, groups, calibrators and intervals, which depend on the order of rows."""
    monkeypatch.chdir(tmp_path)
    arrays, options = with_sites(data_set("multiclass", 120)), ["--groups", "site", "--save-calibrator"]
    shards(tmp_path / "shards", arrays, 30, 30, 60, 100, 110, suffix="parquet")
    done = torchrun(4, tmp_path, "report", "shards/shard-*.parquet", "--out", "out/", *options, "cal.pt")
    assert done.returncode == 0, done.stderr
    assert main(["report", "shards/whole.parquet", "--out", "one", *options, "one.pt"]) == 0
    said = capsys.readouterr().out.replace("one/", "out/").replace("one.pt", "cal.pt")
    names = ", ".join(f"shards/shard-{k}.parquet" for k in range(6))
    assert done.stdout == said.replace("shards/whole.parquet", names)
    assert_same(written(tmp_path / "out"), written(tmp_path / "one"))
    assert sorted(written(tmp_path / "out")["groups"]["group"]) == ["Süd", "an island far away", "north"]
    fits = [tc.load_calibrator(name)(torch.from_numpy(arrays["logits"])) for name in ("cal.pt", "one.pt")]
    torch.testing.assert_close(*fits, rtol=1e-12, atol=1e-12)


def calls_for(folder):
    """Files of one process, patterns of several, options and limits of calls that succeed."""

    def with_order(task, n, *ends, sites=False):
        arrays = with_sites(data_set(task, n)) if sites else data_set(task, n)
        return shards(folder / f"{task} {n} {ends} {sites}", arrays, *ends)

    for task, weights, soft in (
        ("binary", "counts", True),
        ("multiclass", "real", True),
        ("multilabel", "real", False),
    ):
        names = shards(folder / task, data_set(task, 120, weights, soft), 5, 50, 100)
        yield names, [*QUICK_COMMAND, "--task", task], {}
    options = ["--n-bins", "9", "--right", "--no-intervals"]  # calibrators depend on the order of rows
    yield with_order("binary", 60, 40), options, {}
    for task in ("binary", "multilabel"):
        yield with_order(task, 120, 5, 50, 100, sites=True), [*QUICK_COMMAND, "--groups", "site", "--task", task], {}
    yield with_order("binary", 60), QUICK_COMMAND, {}
    yield with_order("multiclass", 60, 0, 0, 60), QUICK_COMMAND, {}
    lines = shards(folder / "lines", data_set("multiclass", 60), 0, 20, 30, suffix="csv")
    yield lines, QUICK_COMMAND, {}
    for most in (59, 5):
        too_many = with_order("binary", 60, 20, 40)
        yield too_many, ["--no-intervals"], {"most_in_order": most, "most_kept": most}
    pair = folder / "pair"
    pair.mkdir()
    for name, array in data_set("multiclass", 30).items():
        np.save(pair / f"{name}.npy", array)
    yield [str(pair / "*.npy")] * 2, QUICK_COMMAND, {}


def failing_calls(folder):
    """Arguments, and words of the only line that is said."""
    arrays = data_set("binary", 40)
    _, pattern = shards(folder / "damaged", arrays, 10, 20, 30)
    (folder / "damaged" / "shard-3.npz").write_bytes(b"no archive, but long enough to be a share" * 9)
    _, unlike = shards(folder / "unlike", arrays, 10, 20, 30)
    write_npz(folder / "unlike" / "shard-3.npz", {"logits": np.zeros(300), "targets": np.zeros(300, int)})
    _, fine = shards(folder / "fine", arrays, 20)
    _, none = shards(folder / "none", {name: values[:0] for name, values in arrays.items()}, 0)
    return [
        ([pattern], "shard-3.npz` must be a complete, readable npz file"),
        ([unlike, *QUICK_COMMAND], "float64"),
        ([none], "holds no samples"),
        ([fine, "--n-bins", "0"], "`--n-bins` must be at least 1"),
        ([fine, "--save-calibrator", str(folder / "nowhere" / "cal.pt")], "in a folder that exists"),
        ([str(folder / "no?.npz")], "must match at least one file"),
        ([fine, *QUICK_COMMAND, "--from-probs"], "`preds` must be probabilities"),
    ]


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_any_launcher_all_tasks_weights_targets_formats_and_errors(n_ranks, tmp_path, capsys, monkeypatch):
    """Few collectives, too: agreements of a number for each rank, and one for all states."""
    good, bad = list(calls_for(tmp_path)), failing_calls(tmp_path)

    def command(name, k, options):
        return ["report", name, *options, "--save-state", str(tmp_path / f"state {k}.pt")]

    calls = [{"arguments": command(of[1], k, options), **limits} for k, (of, options, limits) in enumerate(good)]
    calls += [{"arguments": ["report", *arguments]} for arguments, _ in bad]
    answers = launched(n_ranks, tmp_path, calls)
    for k, ((files, options, limits), answer) in enumerate(zip(good, answers, strict=False)):
        with monkeypatch.context() as patch:
            patch.setattr(bounded, "MOST_SAMPLES", limits.get("most_in_order", 2**24))
            patch.setattr(kept, "MOST_SAMPLES", limits.get("most_kept", 2**20))
            found = tc.load_report_state(tmp_path / f"state {k}.pt").report().to_dict()
            assert main(command(files[0], k, options)) == 0, capsys.readouterr().err
            assert_same(found, tc.load_report_state(tmp_path / f"state {k}.pt").report().to_dict(), files[0])
        assert [rank["code"] for rank in answer] == [0] * n_ranks, answer
        assert [rank["out"] for rank in answer] == [capsys.readouterr().out, *[""] * (n_ranks - 1)]
        assert [rank["err"] for rank in answer] == [""] * n_ranks
        for rank in answer:
            assert sorted(rank["collectives"]) == [*["all_gather"] * 7, "all_to_all_single"]
    for (_, words), answer in zip(bad, answers[len(good) :], strict=True):
        assert [said["code"] for said in answer] == [2] * n_ranks, words
        assert [said["out"] for said in answer] == [""] * n_ranks
        assert [said["err"] for said in answer[1:]] == [""] * (n_ranks - 1)
        assert words in answer[0]["err"], answer[0]["err"]
        assert answer[0]["err"].count("\n") == 1
    builder = tc.ReportBuilder(task="multiclass", from_logits=True, with_intervals=False)
    add_to(builder, data_set("multiclass", 60))
    assert_same(tc.load_report_state(tmp_path / "gathered.pt").report().to_dict(), builder.report().to_dict())


def test_law_shares_are_runs_that_are_all_files_in_order_and_alike_in_size(tmp_path):
    rng = np.random.default_rng(0)
    for n_files, n_ranks in ((1, 4), (3, 4), (7, 2), (40, 4), (40, 1)):
        sizes = rng.integers(0, 1000, n_files)
        paths = [tmp_path / f"{n_files}-{k:02}.npz" for k in range(n_files)]
        for path, size in zip(paths, sizes, strict=True):
            path.write_bytes(bytes(int(size)))
        shares = [share_of(paths, rank, n_ranks) for rank in range(n_ranks)]
        assert [path for share in shares for path in share] == paths
        for share in shares:
            assert abs(sum(path.stat().st_size for path in share) - sizes.sum() / n_ranks) <= sizes.max()
    empty = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in empty:
        path.write_bytes(b"")
    assert sum((share_of(empty, rank, 3) for rank in range(3)), ()) == tuple(empty)
    pair = [tmp_path / "logits.npy", tmp_path / "targets.npy"]
    assert [share_of(pair, rank, 2) for rank in range(2)] == [tuple(pair), ()]
