"""Tables have the numbers of the results files, and measurements are compared with goals. Nothing is timed."""

import sys

import pytest
import torch
import torchmetrics

import torchcalib
import torchcalib as tc
from benchmarks import diagnosis, measure, one_pass, peers, readme, run
from benchmarks.job import FAMILIES, OURS, Job, Peer, Sides, jobs_of
from benchmarks.record import Line, figure, growth_lines, lines, missed, recorded, share

PEER = "a peer"
FILES = readme.results()
TIMES = {"seconds": {OURS: [0.3, 0.1, 0.2], PEER: [0.8, 0.4, 0.5]}, "shares": {}, "error": None, "state_bytes": {}}


def job(**given):
    given = {"name": "a job", "peers": (Peer(PEER, 0.5),), **given}
    return Job(prepare=lambda n=1: Sides(lambda: None, {PEER: lambda: None}), **given)


def test_readme_contains_the_results():
    assert FILES
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.with_section(text, FILES)
    metric = torchcalib.ECE(task="multiclass", num_classes=3)
    assert f"{metric.state.nbytes} bytes, constant" in text
    assert readme.ALL.read_text(encoding="utf-8") == readme.all_results(FILES)
    with pytest.raises(ValueError, match="benchmarks: begin"):
        readme.with_section("A page without markers", FILES)
    for family in FAMILIES:
        names = [each.name for each in jobs_of(family)]
        assert len(set(names)) == len(names)
    rows = [row for row in readme.section([{"machine": {}, "families": {}}]).splitlines() if row.startswith("| ")][1:]
    assert rows
    assert all("not yet measured" in row for row in rows)


def test_decisions_of_benchmarks_equal_those_of_reports():
    """Also for a fault of labels and of groups, whose statistics the benchmark computes itself."""
    names = (
        "logits times 1.6",
        "one group of 6: logits times 2.5",
        "2nd and 3rd class swapped",
        "one of 5 labels plus 1",
    )
    for name in names:
        task, simulate, right = diagnosis.FAULTS[name]
        logits, labels, groups = simulate(torch.Generator().manual_seed(0), 2000)
        found = diagnosis.decided(task, diagnosis.Data(logits, labels, groups))
        report = tc.report(logits, labels, task=task, from_logits=True, groups=groups, with_intervals=False)
        assert found.kind in right
        assert (found.kind, found.verdict) == (report.decision.kind, report.decision.verdict)
        assert diagnosis.cell(task, simulate, right, 2000, 1) == (1, "")


def test_medians_memory_errors_and_states_are_compared_with_goals():
    given = job(seconds=0.1, extra_bytes=10_000_000, error=1e-7, updates=(1, 9), why="a reason")
    state = {OURS: {"1": 368, "9": 368}, PEER: {"1": 8, "9": 72}}
    points = [{"n": 10, "num_classes": 4, "seconds": [2e-6, 4e-6]}]
    memory = {OURS: 12_500_000, PEER: 200_000_000}
    record = recorded(given, TIMES | {"error": 2e-7, "state_bytes": state}, memory, points)
    assert lines(given, record) == [
        Line("time", "200 ms [100 ms, 300 ms]", goal="100 ms", verdict="MISSED: 2 times the goal"),
        Line(PEER, "200 ms [100 ms, 300 ms]", "500 ms [400 ms, 800 ms]", "0.4", "0.5", "met"),
        Line("extra memory", "12.5 MB", "200 MB", goal="10 MB", verdict="MISSED by 25 %"),
        Line("error", "2e-07", goal="1e-07", verdict="MISSED: 2 times the goal"),
        Line("state after 1 to 9 updates", "368 B to 368 B", "8 B to 72 B", goal="constant", verdict="met"),
    ]
    assert list(growth_lines(record)) == ["n 10, num_classes 4: 0.003 ms, 300 ns a row, 75 ns an entry"]
    assert missed(given, record)
    fast = job(seconds=1.0)
    assert not missed(fast, recorded(fast, TIMES, {}, []))
    record["state_bytes"][OURS] = {"1": 368, "9": 376}
    assert lines(given, record)[-1].verdict == "MISSED"
    assert {line.what for line in lines(given, None)} == {line.what for line in lines(given, record)}
    assert [figure(x) for x in (0.12345, 999.4, 12345.6)] == ["0.123", "999", "12,346"]
    assert [share(x) for x in (0.75, 0.2, 1 / 7, 1 / 1234, None)] == ["0.75", "0.2", "1/7", "1/1,234", ""]


def test_peers_that_are_missing_or_need_numba_are_left_out():
    given = job(peers=(Peer(PEER), Peer("another", 0.5, needs=("no-such-package", "numba"))), seconds=1.0)
    assert given.sides == [OURS, PEER]
    record = recorded(given, TIMES, {}, [])
    assert not missed(given, record)
    assert lines(given, record)[2].verdict.startswith("left out: no-such-package")
    plain = given.without_numba(rounds=3)
    assert (plain.name, plain.numba, plain.rounds) == ("a job, without numba", False, 3)
    assert (plain.peers, plain.seconds) == ((Peer(PEER),), None)


def test_sides_alternate_and_the_first_round_is_dropped():
    ran = []
    sides = Sides(lambda: ran.append(OURS), {PEER: lambda: ran.append(PEER)}, {PEER: 0.5}, error=lambda: 0.25)
    measured = measure.times(Job("a job", lambda: sides, (Peer(PEER),)), rounds=2)
    assert ran == 3 * [OURS, PEER]
    assert [len(taken) for taken in measured["seconds"].values()] == [2, 2]
    assert (measured["error"], measured["shares"]) == (0.25, {PEER: 0.5})


def test_trial_writes_nothing_and_missed_goals_and_bad_arguments_set_the_exit_code(monkeypatch, capsys):
    slow = job(seconds=0.1)
    monkeypatch.setattr(run, "jobs_of", lambda _: [slow])
    monkeypatch.setattr(run, "run", lambda *_: recorded(slow, TIMES, {}, []))
    monkeypatch.setattr(run, "save", lambda *_: pytest.fail("a trial was kept"))
    monkeypatch.setattr(sys, "argv", ["run", "ranked", "--trial", "1"])
    assert run.main() == 1
    assert "MISSED: 2 times the goal" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run", "ranked", "--job", "nothing"])
    with pytest.raises(SystemExit):
        run.main()
    assert "no job with 'nothing' in its name" in capsys.readouterr().err


def test_check_names_ratios_that_are_20_percent_above_the_stored_ones_and_writes_nothing(monkeypatch, capsys):
    assert {found["job"] for found in run.stored_records({"cpu": "unknown", "cores": 1})} >= {"ECE, 50,000 x 1,000"}
    assert run.stored_records(FILES[0]["machine"])
    given = job()
    monkeypatch.setattr(run, "jobs_of", lambda _: [given, job(name="alone", peers=())])
    monkeypatch.setattr(run, "save", lambda *_: pytest.fail("--check saved results"))
    monkeypatch.setattr(sys, "argv", ["run", "ranked", "--check"])
    record = recorded(given, TIMES, {}, [])  # 0.2 s and 0.5 s
    monkeypatch.setattr(run, "run", lambda *_, **__: record)
    for stored, code in ((0.41, 0), (0.34, 0), (0.33, 1)):
        peer = {**record["peers"][PEER], "ratio": stored}
        monkeypatch.setattr(run, "stored_records", lambda _, peer=peer: [{**record, "peers": {PEER: peer}}])
        assert run.main() == code
        shown = capsys.readouterr().out
        assert ("worse: a job, a peer: 0.4, stored 0.33" in shown) == bool(code)
        assert f"1 ratios compared, {code} of them more than 20% above the stored one" in shown
        assert "alone" not in shown


@pytest.mark.extended
def test_one_pass_jobs_compute_the_values_of_their_peers():
    logits, target = one_pass.network_logits(200, 7)
    found = one_pass.collection(n=200, num_classes=7, classwise=True).ours()
    expected = peers.torchmetrics_ece(logits, target, 15)
    streamed = one_pass.streamed_ece(n=200, num_classes=7, rows=64)
    for value in (found["ECE"], one_pass.ece(n=200, num_classes=7).ours(), streamed.ours()):
        torch.testing.assert_close(value.float(), expected.float())
    accuracy = torchmetrics.functional.classification.multiclass_accuracy(logits, target, 7, average="micro")
    torch.testing.assert_close(found["Accuracy"].float(), accuracy)
    torch.testing.assert_close(peers.softmax_in_chunks(logits, rows=64), logits[192:].softmax(-1))
    together, separate = (one_pass.gradient(n=50, num_classes=5, together=kind).ours() for kind in (True, False))
    torch.testing.assert_close(together, separate)
    assert one_pass.binary_ece(n=500).error() <= one_pass.ERROR
    assert streamed.states[OURS](1) == streamed.states[OURS](3)
