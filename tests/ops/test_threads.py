"""Parallel work on index ranges."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchcalib.ops import threads


@pytest.fixture(autouse=True)
def on_three_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "_N_CPUS", 3)


def test_threads_write_to_inference_tensors_of_the_caller():
    with torch.inference_mode():
        out = torch.zeros(10)
        threads.in_threads(lambda begin, end: out[begin:end].add_(1), 10, 10, 1)
    assert torch.equal(out, torch.ones(10))


@pytest.mark.parametrize("taken", [0, 1])
def test_caller_does_the_work_if_the_executor_has_shut_down(taken, monkeypatch):
    class Ending(ThreadPoolExecutor):
        """Executor that accepts `taken` tasks, then shuts down."""

        left = taken

        def submit(self, *arguments):
            if self.left == 0:
                self.shutdown()
            self.left -= 1
            return super().submit(*arguments)

    done = []
    monkeypatch.setattr(threads, "_workers", Ending)
    threads.in_threads(lambda begin, end: done.extend(range(begin, end)), 10, 10, 1)
    assert sorted(done) == list(range(10))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "200000"}, 8),
    ],
)
def test_threads_are_not_more_than_the_quota_of_the_container(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert threads.available_cpus(tmp_path) == expected


@pytest.mark.parametrize(("n_cpus", "n_ranges"), [(1, 1), (2, 8), (8, 12)])
def test_work_is_divided_into_four_ranges_for_each_thread(n_cpus, n_ranges, monkeypatch):
    monkeypatch.setattr(threads, "_N_CPUS", n_cpus)
    ranges = []
    threads.in_threads(lambda begin, end: ranges.append((begin, end)), 120, 120, 1)
    assert sorted(ranges) == [(120 * k // n_ranges, 120 * (k + 1) // n_ranges) for k in range(n_ranges)]


@pytest.mark.parametrize(("per_range", "n_ranges"), [(61, 1), (60, 2), (30, 3), (17, 6), (14, 6)])
def test_fewer_values_are_fewer_ranges_and_as_many_for_each_of_three_threads(per_range, n_ranges):
    ranges = []
    threads.in_threads(lambda begin, end: ranges.append((begin, end)), 120, 120, per_range)
    assert sorted(ranges) == [(120 * k // n_ranges, 120 * (k + 1) // n_ranges) for k in range(n_ranges)]


def test_caller_does_the_work_of_threads_that_do_not_start(monkeypatch):
    monkeypatch.setattr(ThreadPoolExecutor, "_adjust_thread_count", lambda _: None)
    monkeypatch.setattr(threads, "_workers", ThreadPoolExecutor)
    done = []
    threads.in_threads(lambda begin, end: done.extend(range(begin, end)), 10, 10, 1)
    assert done == list(range(10))


@pytest.mark.parametrize("failing", [0, 9])
def test_errors_are_raised_after_all_threads_have_finished(failing):
    running, done = [], []

    def work(begin, end):
        running.append(begin)
        try:
            if begin <= failing < end:
                raise ZeroDivisionError
        finally:
            done.append(begin)

    with pytest.raises(ZeroDivisionError):
        threads.in_threads(work, 10, 10, 1)
    assert sorted(running) == sorted(done)
