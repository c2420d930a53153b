"""The README says what the results files say, and what is measured is held against its goals. Nothing is timed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics

from benchmarks import measure, one_pass, peers, readme, run
from benchmarks.cuda.check import Check
from benchmarks.cuda.speed import Speed
from benchmarks.families import FAMILIES, jobs_of
from benchmarks.job import OURS, Job, Peer, Sides
from benchmarks.record import Line, figure, growth_lines, held_against, lines, recorded, share, verdict
from cuda_check import content

PEER = "a peer"
FILES = list(readme.results().values())
TIMES = {"seconds": {OURS: [0.3, 0.1, 0.2], PEER: [0.8, 0.4, 0.5]}, "shares": {}, "error": None, "state_bytes": {}}


def job(**given):
    return Job("a job", lambda n=1: Sides(lambda: None, {PEER: lambda: None}), **{"peers": (Peer(PEER, 0.5),), **given})


def test_readme_says_what_the_results_files_say():
    assert readme.README.read_text() == readme.written(readme.README.read_text(), FILES)


def test_results_files_hold_goals_and_jobs_as_they_are_now():
    assert FILES
    assert [readme.up_to_date(content) for content in FILES] == FILES


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_jobs_and_their_peers_are_their_keys(family):
    names = [each.name for each in jobs_of(family)]
    assert len(set(names)) == len(names)
    assert all(len({peer.name for peer in each.peers}) == len(each.peers) for each in jobs_of(family))


def test_every_line_of_a_job_without_results_is_not_yet_measured():
    bare = {"machine": {}, "families": {}}
    rows = [row for row in readme.section([bare]).splitlines() if row.startswith("| ")][1:]
    assert len(rows) > len([each for family in FAMILIES for each in jobs_of(family) if each.numba])
    assert all("not yet measured" in row for row in rows)
    assert "GPU (`cuda_check.py`): not yet measured" in readme.section([bare])


def test_medians_are_held_against_goals():
    record = recorded(job(seconds=0.1), TIMES, {}, [])
    assert [(goal["what"], goal["value"], goal["met"]) for goal in record["goals"]] == [
        ("seconds", 0.2, False),
        (f"share of {PEER}", 0.2 / 0.5, True),
    ]
    assert lines(job(seconds=0.1), record) == [
        Line("time", "200 ms [100 ms, 300 ms]", goal="100 ms", verdict="MISSED: 2 times the goal"),
        Line(PEER, "200 ms [100 ms, 300 ms]", "500 ms [400 ms, 800 ms]", "0.4", "0.5", "met"),
    ]


def test_memory_error_and_state_are_held_against_goals():
    given = job(extra_bytes=10_000_000, error=1e-7, updates=(1, 9))
    state = {OURS: {"1": 368, "9": 368}, PEER: {"1": 8, "9": 72}}
    record = recorded(given, TIMES | {"error": 2e-7, "state_bytes": state}, {OURS: 12_500_000, PEER: 200_000_000}, [])
    assert lines(given, record)[1:] == [
        Line("extra memory", "12.5 MB", "200 MB", goal="10 MB", verdict="MISSED by 25 %"),
        Line("error", "2e-07", goal="1e-07", verdict="MISSED: 2 times the goal"),
        Line("state after 1 to 9 updates", "368 B to 368 B", "8 B to 72 B", goal="constant", verdict="met"),
    ]
    record["state_bytes"][OURS] = {"1": 368, "9": 376}
    assert lines(given, held_against(given, record))[-1].verdict == "MISSED"
    assert {line.what for line in lines(given, None)} == {line.what for line in lines(given, record)}


def test_a_reason_is_given_where_a_goal_is_missed_and_nowhere_else():
    slow, fast = job(seconds=0.1, why="a reason"), job(seconds=1.0, why="a reason")
    assert recorded(slow, TIMES, {}, [])["why"] == "a reason"
    assert recorded(fast, TIMES, {}, [])["why"] == ""


def test_peer_that_is_not_installed_is_left_out_by_name():
    given = job(peers=(Peer(PEER), Peer("another", 0.5, needs=("no-such-package", "numpy"))))
    assert given.sides == [OURS, PEER]
    record = recorded(given, TIMES, {}, [])
    assert record["goals"] == [{"what": "share of another", "value": None, "at_most": 0.5, "met": None}]
    assert lines(given, record)[1].verdict == "left out: no-such-package"


def test_sides_run_in_turn_and_the_first_round_is_not_counted():
    ran = []
    sides = Sides(lambda: ran.append(OURS), {PEER: lambda: ran.append(PEER)}, {PEER: 0.5}, error=lambda: 0.25)
    measured = measure.times(Job("a job", lambda: sides, (Peer(PEER),)), rounds=2)
    assert ran == 3 * [OURS, PEER]
    assert [len(taken) for taken in measured["seconds"].values()] == [2, 2]
    assert (measured["error"], measured["shares"]) == (0.25, {PEER: 0.5})


@pytest.mark.extended
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system has no high-water mark to start anew"
)
def test_memory_that_a_call_takes_and_gives_back_is_seen():
    def prepare(n=32_000_000):
        return Sides(lambda: np.ones(n, np.uint8), {PEER: lambda: None}, result_bytes=n // 2)

    given = Job("a job", prepare, (Peer(PEER),))
    assert measure.extra_bytes(given, OURS) == pytest.approx(16_000_000, abs=2_000_000)
    assert measure.extra_bytes(given, PEER) <= 2_000_000 - 16_000_000


def test_job_without_numba_has_goals_of_its_own_and_no_peer_that_needs_it():
    given = job(peers=(Peer(PEER, 0.5), Peer("another", 0.5, needs=("numba",))), seconds=1.0, extra_bytes=5)
    plain = given.without_numba(rounds=3)
    assert (plain.name, plain.numba, plain.rounds) == ("a job, without numba", False, 3)
    assert (plain.peers, plain.seconds, plain.extra_bytes) == ((Peer(PEER),), None, 5)


def test_jobs_that_did_not_run_keep_what_they_had(tmp_path, monkeypatch):
    first, second = job(), Job("another", lambda: Sides(lambda: None))
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.setattr(run, "jobs_of", lambda _: [first, second])
    machine = {"cpu": "A CPU", "cores": 2}
    run.save(machine, "a family", [{"job": "another", "run": 1}, {"job": "one that is no more"}])
    path = run.save(machine, "a family", [{"job": "a job", "run": 2}])
    assert path.name == "a-cpu-2-cores.json"
    assert json.loads(path.read_text())["families"] == {
        "a family": [{"job": "a job", "run": 2}, {"job": "another", "run": 1}]
    }


def test_trial_keeps_nothing_and_a_missed_goal_is_the_exit_code(monkeypatch, capsys):
    missed = recorded(job(seconds=0.1), TIMES, {}, [])
    monkeypatch.setattr(run, "jobs_of", lambda _: [job(seconds=0.1)])
    monkeypatch.setattr(run, "run", lambda *_: missed)
    monkeypatch.setattr(run, "save", lambda *_: pytest.fail("a trial was kept"))
    monkeypatch.setattr(sys, "argv", ["run", "ranked", "--trial", "1"])
    assert run.main() == 1
    assert "MISSED: 2 times the goal" in capsys.readouterr().out


def test_readme_without_its_marks_is_an_error():
    with pytest.raises(ValueError, match="must have the lines"):
        readme.written("# No marks", FILES)


def test_gpu_is_described_as_cuda_check_measured_it():
    measured = [
        Speed("row op", "50,000 x 1,000", "float32", 1e-4, share=0.8, goal=0.85),
        Speed("collection", "50,000 x 1,000", "float32", 1.1e-4, ratio=1.1, goal=1.15),
        Speed("torchmetrics", "50,000 x 1,000", "float32", None, how="left out: torchmetrics is not installed"),
    ]
    checks = [Check("rows", "float32", "values", 0.0, 1e-6), Check("rows", "float32", "gradient", 1.0, 1e-6)]
    machine = {"device": "A GPU", "torch": "2.13"}
    table = readme.gpu_table(json.loads(content(machine, checks, measured)))
    assert table.startswith("On A GPU, torch 2.13: 2 checks, 1 failed:")
    assert table.splitlines()[-3:] == [
        "| row op | float32 | 50,000 x 1,000 | 0.8 | 0.85 | MISSED by 0.05 |",
        "| collection | float32 | 50,000 x 1,000 | 1.1 of the row op | 1.15 | met |",
        "| torchmetrics | float32 | 50,000 x 1,000 | left out: torchmetrics is not installed |  |  |",
    ]
    without = readme.gpu_table(json.loads(content(machine, checks, [])))
    assert without == "On A GPU, torch 2.13: 2 checks, 1 failed; speed not yet measured."


def test_growth_is_said_by_row_and_by_entry():
    points = [{"n": 10, "num_classes": 4, "seconds": [2e-6, 4e-6]}, {"n": 10, "n_bins": 5, "seconds": [1e-6]}]
    assert list(growth_lines(recorded(job(), TIMES, {}, points))) == [
        "n 10, num_classes 4: 0.003 ms, 300 ns a row, 75 ns an entry",
        "n 10, n_bins 5: 0.001 ms, 100 ns a row",
    ]


def test_figures_have_three_digits():
    assert [figure(x) for x in (0.12345, 12.345, 999.4, 12345.6)] == ["0.123", "12.3", "999", "12,346"]
    assert [share(x) for x in (0.75, 0.2, 1 / 7, 1 / 1234, None)] == ["0.75", "0.2", "1/7", "1/1,234", ""]
    assert verdict({"met": False, "value": 1.36, "at_most": 1.0}) == "MISSED by 36 %"


@pytest.mark.extended
def test_one_pass_jobs_compute_what_their_peers_compute():
    logits, target = one_pass.network_logits(200, 7)
    found = one_pass.collection(n=200, num_classes=7, classwise=True).ours()
    assert set(found) == {"NLL", "Brier", "ECD", "Accuracy", "ECE", "ESCE", "MCE", "RMSCE", "classwise_ECE"}
    expected = peers.torchmetrics_ece(logits, target, 15)
    torch.testing.assert_close(one_pass.ece(n=200, num_classes=7).ours(), expected)
    for value in (found["ECE"], one_pass.streamed_ece(n=200, num_classes=7, rows=64).ours()):
        torch.testing.assert_close(value.float(), expected)
    accuracy = torchmetrics.functional.classification.multiclass_accuracy(logits, target, 7, average="micro")
    torch.testing.assert_close(found["Accuracy"].float(), accuracy)
    torch.testing.assert_close(peers.logsumexp_in_chunks(logits, rows=64), logits.logsumexp(-1))


@pytest.mark.extended
def test_gradient_of_a_collection_is_that_of_two_functions():
    together = one_pass.gradient(n=50, num_classes=5)
    apart = one_pass.gradient(n=50, num_classes=5, together=False).ours()
    torch.testing.assert_close(together.ours(), apart)
    assert together.result_bytes == apart.nbytes


@pytest.mark.extended
def test_binary_error_is_small_and_state_of_the_stream_constant():
    assert one_pass.binary_ece(n=500).error() <= one_pass.ERROR
    states = one_pass.streamed_ece(n=300, num_classes=5, rows=100).states
    assert states[OURS](1) == states[OURS](3) == (3 + 5 * 15) * 8  # three numbers in front
    assert states[one_pass.TORCHMETRICS_CLASS](3) > states[one_pass.TORCHMETRICS_CLASS](1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nothing"], "no family 'nothing'; there are "),
        (["ranked", "--job", "nothing"], "no job with 'nothing' in its name"),
        (["--trial", "0"], "--trial must be at least 1, got 0"),
    ],
)
def test_a_command_line_that_names_nothing_to_run_is_refused_before_anything_is_written(
    given, message, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["run.py", *given])
    monkeypatch.setattr(run, "measured", None)
    monkeypatch.setattr(run, "save", None)
    with pytest.raises(SystemExit):
        run.main()
    assert message in capsys.readouterr().err
