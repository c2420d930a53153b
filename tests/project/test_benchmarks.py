"""Published tables have the numbers of the results files, and compare them with goals. Nothing is timed."""

import pytest
import torch
import torchmetrics

import torchcalib as tc
from benchmarks import diagnosis, one_pass, peers, readme
from benchmarks.job import FAMILIES, OURS, Job, Peer, Sides, jobs_of
from benchmarks.record import Line, figure, growth_lines, lines, missed, recorded, share

PEER = "a peer"
FILES = readme.results()
TIMES = {"seconds": {OURS: [0.3, 0.1, 0.2], PEER: [0.8, 0.4, 0.5]}, "shares": {}, "error": None, "state_bytes": {}}


def test_readme_contains_the_results():
    assert FILES
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.with_section(text, FILES)
    metric = tc.ECE(task="multiclass", num_classes=3)
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
    faults = (
        "logits times 1.6",
        "one group of 6: logits times 2.5",
        "2nd and 3rd class swapped",
        "one of 5 labels plus 1",
    )
    for name in faults:
        task, simulate, right = diagnosis.FAULTS[name]
        logits, labels, groups = simulate(torch.Generator().manual_seed(0), 2000)
        found = diagnosis.decided(task, diagnosis.Data(logits, labels, groups))
        report = tc.report(logits, labels, task=task, from_logits=True, groups=groups, with_intervals=False)
        assert found.kind in right
        assert (found.kind, found.verdict) == (report.decision.kind, report.decision.verdict)
        assert diagnosis.cell(task, simulate, right, 2000, 1) == (1, "")


def test_medians_memory_errors_and_states_are_compared_with_goals():
    goals = {"seconds": 0.1, "extra_bytes": 10_000_000, "error": 1e-7, "updates": (1, 9), "why": "a reason"}
    given = Job("a job", lambda n=1: Sides(lambda: None, {PEER: lambda: None}), (Peer(PEER, 0.5),), **goals)
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
    fast = Job("a job", given.prepare, given.peers, seconds=1.0)
    assert not missed(fast, recorded(fast, TIMES, {}, []))
    record["state_bytes"][OURS] = {"1": 368, "9": 376}
    assert lines(given, record)[-1].verdict == "MISSED"
    assert {line.what for line in lines(given, None)} == {line.what for line in lines(given, record)}
    assert [figure(x) for x in (0.12345, 999.4, 12345.6)] == ["0.123", "999", "12,346"]
    assert [share(x) for x in (0.75, 0.2, 1 / 7, 1 / 1234, None)] == ["0.75", "0.2", "1/7", "1/1,234", ""]


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
