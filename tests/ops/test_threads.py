"""Parallel work on index ranges."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchcalib.ops import threads


@pytest.fixture(autouse=True)
def on_three_threads(monkeypatch):
    monkeypatch.setattr(threads, "PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_threads_write_to_inference_tensors_of_the_caller():
    with torch.inference_mode():
        out = torch.zeros(10)
        threads.in_threads(lambda begin, end: out[begin:end].add_(1), 10, 10)
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
    threads.in_threads(lambda begin, end: done.extend(range(begin, end)), 10, 10)
    assert sorted(done) == list(range(10))
