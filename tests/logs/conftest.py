"""Logs that lm-eval and Inspect write on this machine, without a network and with models that cost nothing."""

import json
import random

import pytest


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def documents(tmp_path):
    """Write questions with 3 to 5 options, and return them."""
    rng = random.Random(0)
    options = ["blue", "dark red", "green", "né", "bright yellow"]
    rows = []
    for k in range(40):
        n = rng.randint(3, 5)
        rows.append({"id": k, "question": f"Question {k}?", "choices": options[:n], "answer": rng.randrange(n)})
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows
