"""Write small logs of evaluations of language models in the forms that their programs write."""

import json
import math
import random
import struct
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow as pa

from torchcalib.reporting import audit, audit_builder

LETTERS = "ABCDE"


def read(log, open_options=None, **options):
    """Return the builder of an audit after reading a log, which takes much less time than its reports."""
    how = audit_builder.AuditOptions(15, False, False, audit.have_equal_text, None)
    opened = partial(audit.open_log, log, **(open_options or {}))
    return audit.read_log(opened, replace(how, **options), keep=False)[None]


def with_lines_only(monkeypatch):
    """Make reports contain lines only, without tests, calibrators and verdicts, which take most of the time."""

    def report_of(data, *_):
        lines = data.lines()
        main = {line.key.partition("/")[0]: line for line in reversed(lines)}  # keys without a mode
        return SimpleNamespace(line={**main, **{line.key: line for line in lines}}.get)

    monkeypatch.setattr("torchcalib.reporting.building.report_of", report_of)


def questions(n, seed=0):
    """Return options with log-probabilities, and the index of the right one, for n questions with 2 to 5 options."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        scores = [-rng.expovariate(0.4) for _ in range(rng.randint(2, 5))]
        texts = ["é" * rng.randint(1, 3) + "x" * rng.randint(0, 9) + str(k) for k in range(len(scores))]
        found.append((texts, scores, rng.choices(range(len(scores)), [math.exp(s) for s in scores])[0]))
    return found


def lm_eval_row(number, texts, scores, right, **changes):
    """Return a line of a multiple-choice task of lm-eval."""
    chosen = max(range(len(scores)), key=scores.__getitem__)
    responses = [[str(score), "False"] for score in scores]
    return {
        "doc_id": number,
        "doc": {"question": "q"},
        "target": str(right),
        "arguments": {f"gen_args_{k}": {"arg_0": "q", "arg_1": f" {text}"} for k, text in enumerate(texts)},
        "resps": [[response] for response in responses],
        "filtered_resps": responses,
        "filter": "none",
        "metrics": ["acc"],
        "acc": float(chosen == right),
        **changes,
    }


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def inspect_sample(name, epoch, value="C", metadata=None, **changes):
    """Return a sample of Inspect."""
    score = {"value": value, "answer": "A", "metadata": metadata or {}}
    output = {"choices": [{"message": {"content": "ANSWER: A"}}]}
    return {"id": name, "epoch": epoch, "target": "A", "scores": {"choice": score}, "output": output, **changes}


def write_eval(path, samples, zstd=False):
    """Write an archive of Inspect. With `zstd`, members have the compression method 93."""
    members = {"header.json": {"version": 2, "status": "success", "eval": {}}}
    members |= {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED if zstd else zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            text = json.dumps(content).encode()
            archive.writestr(name, pa.compress(text, codec="zstd", asbytes=True) if zstd else text)
    if zstd:
        _declare_zstd(path, [json.dumps(content).encode() for content in members.values()])
    return path


def _declare_zstd(path, texts):
    """Change method, checksum and size in the headers of members that were stored after compression."""
    with zipfile.ZipFile(path) as archive:
        places = [info.header_offset for info in archive.infolist()]
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    for place, text in zip(places, texts, strict=True):
        for begin, method, sums, size in ((place, 8, 14, 22), (at, 10, 16, 24)):
            struct.pack_into("<H", content, begin + method, 93)
            struct.pack_into("<I", content, begin + sums, zlib.crc32(text))
            struct.pack_into("<I", content, begin + size, len(text))
        at = content.find(b"PK\x01\x02", at + 4)
    path.write_bytes(content)


def helm_request(name, text, log_prob, right="B", **changes):
    """Return the state of a request whose answer is the letter of an option."""
    references = [
        {"output": {"text": f"option {letter}"}, "tags": ["correct"] * (letter == right)} for letter in LETTERS[:3]
    ]
    return {
        "instance": {"id": name, "references": references},
        "train_trial_index": 0,
        "output_mapping": {letter: f"option {letter}" for letter in LETTERS[:3]},
        "result": {
            "completions": [{"text": text, "logprob": log_prob, "tokens": [{"text": text, "logprob": log_prob}]}]
        },
        **changes,
    }


def response_row(number, text, tokens, **changes):
    """Return a response with the log-probabilities of its tokens: (token, log-probability, candidates)."""
    content = [
        {"token": token, "logprob": p, "top_logprobs": [{"token": t, "logprob": q} for t, q in candidates.items()]}
        for token, p, candidates in tokens
    ]
    choice = {"message": {"content": text}, "logprobs": {"content": content}}
    return {"custom_id": f"request-{number}", "response": {"body": {"choices": [choice]}}, **changes}
