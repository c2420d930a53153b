"""Published tables have the numbers of the results files, and compare them with goals. Nothing is timed.

Also `cuda_check.py` and the jobs for a GPU, as far as a CPU can run them.
"""

import ast
import inspect
import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
import torch
import torchmetrics
from processes import ROOT, run_python

import cuda_check
from benchmarks import (
    by_hand,
    device,
    everyday,
    first_seconds,
    kernels,
    measure,
    one_pass,
    peers,
    power,
    readme,
    run,
    samples,
    study,
)
from benchmarks.job import EVERYDAY, FAMILIES, OURS, REASONS, Job, alternative, jobs_of, named
from benchmarks.record import Line, compared, figure, growth_lines, lines, missed, recorded, share
from torchcalib import CostMatrix
from torchcalib.ops.dispatch import Op

PEER = "a peer"
FILES = readme.results()
MODULES = [path.stem for path in Path(study.__file__).parent.glob("*.py") if "\nSTUDY = " in path.read_text()]
STUDIES = [power.POWER, power.FEW, power.CLASSES, *(import_module(f"benchmarks.{name}").STUDY for name in MODULES)]
STUDIES = {each.page: each for each in sorted(STUDIES, key=lambda each: each.page)}
TIMES = {
    "seconds": {OURS: [0.3, 0.1, 0.2], PEER: [0.8, 0.4, 0.5]},
    "shares": {},
    "differences": {},
    "state_bytes": {},
}


def no_data(n=1):
    return ()


@alternative(title=PEER)
def alternative_of_7():
    return {"a": torch.tensor([1.1]), "b": 7}


def test_readme_contains_the_results():
    assert FILES
    text = readme.README.read_text(encoding="utf-8")
    assert text == readme.with_section(text, FILES)
    assert readme.ALL.read_text(encoding="utf-8") == readme.all_results(FILES)
    with pytest.raises(ValueError, match="benchmarks: begin"):
        readme.with_section("A page without markers", FILES)
    for family in FAMILIES:
        names = [each.name for each in jobs_of(family)]
        assert len(set(names)) == len(names)
    rows = [row for row in readme.machine_tables({"machine": {}, "families": {}}).splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| job |", "| ---"))]
    assert rows
    assert all("not yet measured" in row for row in rows)
    measured = [record for content in FILES for record in content["families"].get("kernels", [])]
    assert measured
    of_missed = {each["job"] for each in measured if missed(named(kernels.JOBS, each["job"]), each)}
    assert of_missed <= REASONS["kernels"].keys()


def test_medians_memory_and_states_are_compared_with_goals():
    goals = {"seconds": 0.1, "extra_bytes": 10_000_000, "updates": (1, 9)}
    given = Job("a job", no_data, dict, {alternative_of_7: 0.5}, **goals)
    state = {OURS: {"1": 368, "9": 368}, PEER: {"1": 8, "9": 72}}
    points = [{"n": 10, "num_classes": 4, "seconds": [2e-6, 4e-6]}]
    memory = {OURS: 12_500_000, PEER: 200_000_000}
    record = recorded(given, TIMES | {"state_bytes": state}, memory, points)
    assert lines(given, record) == [
        Line("time", "200 ms [100 ms, 300 ms]", goal="100 ms", verdict="MISSED: 2 times the goal"),
        Line(PEER, "200 ms [100 ms, 300 ms]", "500 ms [400 ms, 800 ms]", "0.4", "0.5", "met"),
        Line("extra memory", "12.5 MB", "200 MB", goal="10 MB", verdict="MISSED by 25 %"),
        Line("state after 1 to 9 updates", "368 B to 368 B", "8 B to 72 B", goal="constant", verdict="met"),
    ]
    assert list(growth_lines(record)) == ["n 10, num_classes 4: 0.003 ms, 300 ns a row, 75 ns an entry"]
    assert missed(given, record)
    fast = Job("a job", no_data, dict, given.against, seconds=1.0)
    assert not missed(fast, recorded(fast, TIMES, {}, []))
    record["state_bytes"][OURS] = {"1": 368, "9": 376}
    assert lines(given, record)[-1].verdict == "MISSED"
    assert {line.what for line in lines(given, None)} == {line.what for line in lines(given, record)}
    assert [figure(x) for x in (0.12345, 999.4, 12345.6)] == ["0.123", "999", "12,346"]
    assert [share(x) for x in (0.75, 0.2, 1 / 7, 1 / 1234, None)] == ["0.75", "0.2", "1/7", "1/1,234", ""]


@pytest.mark.parametrize("job", everyday.WITH_NUMBA, ids=lambda job: job.name)
def test_everyday_jobs_compute_the_values_of_their_alternatives(job):
    assert not job.peers[0].name.startswith("torch ") or job.on_device
    calls = job.calls(n=200)
    for call in calls.values():
        call()
    assert measure.differences(job, calls).keys() == set(job.sides[1:])


@pytest.mark.cuda
def test_everyday_jobs_on_a_gpu_compute_the_values_of_their_alternatives():
    for job in run.runnable(everyday.JOBS, "cuda"):
        small = replace(job, data=partial(job.data, n=200))
        assert measure.times(small, 1, "cuda")["seconds"].keys() == set(job.sides)


def test_alternatives_of_everyday_jobs_have_at_most_ten_lines():
    used = {peer.name for job in everyday.JOBS for peer in job.peers}
    functions = [node for node in ast.parse(inspect.getsource(by_hand)).body if isinstance(node, ast.FunctionDef)]
    for node in functions:
        body = node.body[1:] if ast.get_docstring(node) else node.body
        lines = sum(
            each.end_lineno - each.lineno + 1 for each in body if not isinstance(each, ast.ImportFrom | ast.Import)
        )
        assert lines <= 10, node.name
    others = {name for name in used if not name.startswith("torchcalib ")}
    assert others <= {node.name.replace("_", " ") for node in functions}


def test_measurements_of_different_values_fail():
    job = Job("a job", no_data, lambda: {"a": 1.0}, {alternative_of_7: None}, tolerance=0.01, repeats=2)
    with pytest.raises(ValueError, match=r"`a job`: the values must agree to 0\.01 with a peer, got 0\.091"):
        measure.times(job, 1)
    same = replace(job, ours=alternative_of_7, tolerance=0.0)
    assert measure.times(same, 1)["differences"] == {PEER: 0}


def test_everyday_jobs_are_shown_side_by_side():
    """Also a GPU, whose results have a file of their own and no column without numba."""
    cpu = {"cpu": "a CPU", "cores": 2, "torch": "2", "numba": "1", "torchmetrics": "1", "scikit-learn": "1"}
    gpu = cpu | {"device": "A GPU 80GB"}
    records = []
    for k, job in enumerate(everyday.JOBS):
        peer = job.peers[0].name
        k = k % (2 * len(everyday.WITH_NUMBA))
        records.append(recorded(job, TIMES | {"seconds": {OURS: [1.0 + k] * 3, peer: [40.0, 41.0, 39.0]}}, {}, []))
    files = [{"machine": gpu, "families": {EVERYDAY: records}}, {"machine": cpu, "families": {EVERYDAY: records}}]
    of_gpu, of_cpu = map(readme.machine_tables, files)
    assert of_gpu.startswith("On A GPU 80GB, torch 2, numba 1:")
    assert of_cpu.startswith("On a CPU, 2 cores, torch 2, numba 1:")
    first = everyday.WITH_NUMBA[0].name
    assert (
        f"| {first} | {everyday.WITH_NUMBA[0].peers[0].name} | 1 s | 40 s | 1/40 | 0.8 | met | 1.02, goal 1: MISSED"
        in of_cpu
    )
    why = REASONS[EVERYDAY][f"{first}, without numba"]
    assert f"MISSED by 2.5 % ({why}) |" in of_cpu
    assert "not yet measured" not in of_gpu
    shown = readme.with_section(f"{readme.BEGIN}{readme.END}", files).splitlines()
    ranks = [row.split(" | ")[0] for row in shown if row.startswith("| ")]
    assert ranks == ["|", "| best", "| median", "| worst", "| worst without numba"]
    assert [each.ratio for each in compared(records, numba=True)][-1] == 1
    assert run.path_of(gpu).name == "a-gpu-80gb.json"
    assert run.path_of(cpu).name == "a-cpu-2-cores.json"
    assert run.runnable(everyday.JOBS, "cpu") == everyday.JOBS
    assert all(job.on_device and job.numba for job in run.runnable(everyday.JOBS, "cuda"))


def test_jobs_that_share_a_process_are_recorded_in_turn(monkeypatch):
    """Each job is a line of the process, and other jobs have processes of their own."""
    started = []

    def measured(family, jobs, quantity, *options):
        started.append(([job.name for job in jobs], quantity, options))
        return iter([TIMES for _ in jobs])

    monkeypatch.setattr(run, "measured", measured)
    alone = {"a": False, "b": False, "c": True, "d": True}
    jobs = [Job(name, no_data, dict, {alternative_of_7: None}, alone=each) for name, each in alone.items()]
    assert [record["job"] for record in run.run("a family", jobs, 2)] == ["a", "b", "c", "d"]
    assert [names for names, *_ in started] == [["a", "b"], ["c"], ["d"]]
    assert started[0][1:] == (measure.times, (2, "cpu"))


def test_records_of_other_jobs_and_their_versions_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    first, second, *_ = everyday.JOBS
    here = {"cpu": "a CPU", "cores": 2, "relplot": "1"}
    run.save(here, EVERYDAY, [{"job": first.name}, {"job": "a removed job"}])
    path = run.save(here | {"relplot": None}, EVERYDAY, [{"job": second.name}])
    found = {"machine": here, "families": {EVERYDAY: [{"job": first.name}, {"job": second.name}]}}
    assert json.loads(path.read_text()) == found


def test_every_operation_has_a_limit_and_every_reason_a_kernel():
    assert {op for op, *_ in kernels.KERNELS} == set(get_args(Op))
    assert REASONS["kernels"].keys() <= {job.name for job in kernels.JOBS}


@pytest.mark.extended
def test_every_kernel_is_called_by_its_job():
    for job in kernels.JOBS:
        for call in job.calls(n=2_000).values():
            call()
    pytest.importorskip("numba")
    assert 10**6 <= kernels.exponentials(None, 10**6) < 1.1 * 10**6


@pytest.mark.extended
def test_one_pass_jobs_compute_the_values_of_their_peers():
    logits, target = one_pass.network_logits(200, 7)

    def ours(name, **sizes):
        return named(one_pass.JOBS, name).calls(**sizes)[OURS]()

    found = ours("the same and class-wise ECE, 50,000 x 1,000", n=200, num_classes=7)
    expected = peers.torchmetrics_ece(logits, target)
    streamed = named(one_pass.JOBS, "ECE in batches of 256, 50,000 x 1,000").calls(n=200, num_classes=7, rows=64)[OURS]
    one = ours("ECE, 50,000 x 1,000", n=200, num_classes=7)
    for value in (found["ECE"], one, streamed().compute()):
        torch.testing.assert_close(value.float(), expected.float())
    accuracy = torchmetrics.functional.classification.multiclass_accuracy(logits, target, 7, average="micro")
    torch.testing.assert_close(found["Accuracy"].float(), accuracy)
    torch.testing.assert_close(peers.softmax_in_chunks(logits, rows=64), logits[192:].softmax(-1))
    kinds = ("one collection", "two functions")
    together, separate = (ours(f"gradient of ECE + NLL, {k}, 50,000 x 1,000", n=50, num_classes=5) for k in kinds)
    torch.testing.assert_close(together, separate)
    p, y = samples.binary(500)
    index = (15 * p.double()).long().clamp(max=14)
    exact = torch.bincount(index, p.double() - y, minlength=15).abs().sum() / 500
    assert abs(ours("binary ECE, 50,000", n=500) - exact) <= 1e-7
    assert measure.state_bytes(streamed(1)) == measure.state_bytes(streamed(3))


@pytest.mark.parametrize("page", STUDIES)
def test_pages_of_studies_are_those_of_their_records(page):
    """Names of cells are unique. Without a record, the study computes as many tables as its page has."""
    tasks = study.tasks_of(STUDIES[page], STUDIES[page].sets)
    assert len({task.name for task in tasks}) == len(tasks)
    assert all(task.sets > 0 for task in tasks)
    text, record = ((study.RESULTS / f"{page}.{kind}") for kind in ("md", "json"))
    if record.is_file():
        assert study.page_of(STUDIES[page], json.loads(record.read_text())) == text.read_text()


PAGE = (
    "# Page\n\nIn 0 of 7 cells.\n\n| law | N | mean |\n|---|---:|---|\n| old | 1 | 2.0 |\n\nEnd with torch 2.0.0+cpu.\n"
)


def mean_of(law, n, n_sets):
    torch.randn(1)
    return {"mean": n / n_sets if law == "half" else None}


def page_of_means(found):
    yield f"In {sum(each.values['mean'] is not None for each in found.values())} of {len(found):,} cells."
    yield [(*cell, each.values["mean"]) for cell, each in found.items()]


@pytest.mark.parametrize("processes", [1, 2])
def test_studies_write_their_page_and_resume_from_their_record(processes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    part = study.Part([("half", 4_000), ("none", 3)], mean_of, page_of_means, lambda cell: 1 if cell[1] == 3 else 2)
    given = study.Study("page", 5, [part])
    study.run(given, 5, "half", processes)
    study.run(given, 1, processes=processes)
    assert page.read_text() == PAGE
    assert "| half | 4,000 | 2000.0 |" in capsys.readouterr().out
    expected = PAGE.replace("| old | 1 | 2.0 |", "| half | 4,000 | 400.0 |\n| none | 3 | – |").replace(
        "0 of 7", "1 of 2"
    )
    expected = expected.replace("2.0.0+cpu", torch.__version__)
    record = study.run(given, 5, processes=processes)
    assert page.read_text() == expected
    assert record == json.loads((tmp_path / "page.json").read_text())
    assert record["half, 4000"] == {"sets": 10, "found": {"mean": 400.0}}
    (tmp_path / "page.json").write_text(json.dumps(record | {"half, 4000": {"sets": 10, "found": {"mean": 7.0}}}))
    study.run(given, 5, processes=processes, resume=True)
    assert "| half | 4,000 | 7.0 |" in page.read_text()
    for wrong, text in (
        ([[("a", 1)]], "rows must have the columns"),
        (["In no cell.", []], "must have the sentence"),
        ([[], []], "must have 2 tables, got 1"),
    ):
        with pytest.raises(ValueError, match=text):
            study.with_results(PAGE, wrong)
    with pytest.raises(SystemExit, match="no cell with 'third' in its name"):
        study.run(given, 5, "third")


def test_first_seconds_are_those_of_new_processes():
    """A case returns its exit code, and the table compares it with the goal."""
    case = first_seconds.CASES["missing file"]
    record = first_seconds.measured("missing file", 1)
    assert record["seconds"][0] > 0
    assert 0 < record["modules"] < 60
    assert not {"torch", "numpy"} & set(record["imports"])
    with pytest.raises(RuntimeError, match="must return 0, got 2"):
        first_seconds.run(case._replace(code=0))
    other = [1.0, 3.0, 2.0]
    packages = {"torch": 2.0, "torchcalib": 0.1}
    times = {"seconds": [2.4] * 3, "other": other, "imports": packages, "modules": 31}
    ece = first_seconds.row("`ece` of a list", times)
    assert ece[1:] == ("2.4 s [2.4 s, 2.4 s]", "1.20", "1.3, 30 modules", "MISSED", 31, "torch 2.00, torchcalib 0.10")
    times = {"seconds": [5.5], "other": [3.0], "imports": {}, "modules": 9}
    cold = first_seconds.row("`ece`, 50,000 x 1,000, nothing compiled", times)
    assert cold[2:5] == ("2.50 s more", "3 s more", "met")


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_check_does_nothing_without_a_device():
    done = run_python(ROOT / "cuda_check.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout


def test_failed_tests_are_counted_and_named_in_the_page():
    cases = "".join(f'<testcase classname="a" name="{name}">{found}</testcase>' for name, found in (
        ("b", ""), ("c", "<failure/>"), ("d", "<error/>"), ("e", "<skipped/>")
    ))  # fmt: skip
    checks = cuda_check.found_in(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert checks == {"n": 3, "failed": ["a: c", "a: d"]}
    content = {"machine": {"device": "A GPU", "torch": "2"}, "checks": checks, "families": {"device": []}}
    assert "On A GPU, torch 2 (3 checks of `cuda_check.py`, 2 failed)" in readme.section([content])


@pytest.mark.parametrize("job", device.JOBS[:8] + device.JOBS[-2:], ids=lambda job: job.name)
def test_jobs_for_a_gpu_run_with_small_sizes(job):
    assert job.on_device
    calls = job.calls(n=40) if "event bins" in job.name else job.calls(n=20, num_classes=5)
    for call in calls.values():
        call()


@pytest.mark.cuda
def test_graphs_of_jobs_are_timed_on_a_gpu():
    for job in device.JOBS[:8]:
        assert measure.times(job, 1, "cuda")["seconds"].keys() == set(job.sides)


@pytest.mark.cuda
def test_costs_copied_in_inference_mode_support_a_backward_pass():
    costs = CostMatrix.zero_one(3)
    with torch.inference_mode():
        costs.tensor(torch.device("cuda"))
    priors = torch.full((3,), 1 / 3, dtype=torch.float64, device="cuda", requires_grad=True)
    (priors @ costs.tensor(priors.device)).sum().backward()
    assert priors.grad.tolist() == [2, 2, 2]
