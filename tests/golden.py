"""Record reports of fixed inputs, and compare them with those of another version of the package.

    python tests/golden.py record FOLDER     write the reports of this checkout
    python tests/golden.py compare FOLDER    compare the reports of this checkout with those in the folder

Both versions must run on the same machine, with the same packages. All numbers are then equal to the last digit, unless
a change of the package is meant to change them.
"""

import json
import os
import sys
import warnings
from itertools import islice
from pathlib import Path

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")

import numpy as np
import torch

import torchcalib as tc
from torchcalib.reporting.building import ReportBuilder

RNG = np.random.default_rng(36)


def binary(n, scale=1.6):
    logits = torch.from_numpy(RNG.normal(size=n))
    target = torch.from_numpy(RNG.random(n)) < torch.sigmoid(logits)
    return torch.sigmoid(scale * logits), target.long()


def classes(n, k, scale=1.6):
    logits = torch.from_numpy(RNG.normal(size=(n, k)) * 2)
    target = torch.distributions.Categorical(logits=logits)
    labels = (target.probs.cumsum(-1) < torch.from_numpy(RNG.random((n, 1)))).sum(-1)
    return scale * logits, labels.clamp(max=k - 1)


def labels_of(n, k):
    columns = [binary(n, 1 + j / k) for j in range(k)]
    return torch.stack([p for p, _ in columns], -1), torch.stack([t for _, t in columns], -1)


def streamed(*batches, **options):
    builder = ReportBuilder(**options)
    for batch in batches:
        builder.update(*batch)
    return builder


def reports():
    """Yield the name and the report of each input."""
    p, y = binary(2000)
    yield "binary", tc.report(p, y)
    yield "binary, few", tc.report(*binary(40))
    yield "binary, float32 logits", tc.report(torch.logit(p).float(), y, from_logits=True, with_intervals=False)
    yield "binary, weights", tc.report(p, y, weights=torch.from_numpy(RNG.random(2000)))
    yield "binary, clusters", tc.report(p, y, clusters=torch.arange(2000) // 20)
    yield "binary, groups", tc.report(p, y, groups=torch.arange(2000) % 3, group_names=["a", "b", "c"])
    yield "binary, soft targets", tc.report(p, (p * 0.8 + 0.1), task="binary")
    yield "binary, one class", tc.report(p, torch.ones_like(y))
    yield "binary, sketch", _with_sketch(p, y)
    z, t = classes(1500, 5)
    yield "multi-class", tc.report(z, t, from_logits=True)
    yield "multi-class, names", tc.report(z, t, from_logits=True, class_names=list("abcde"), with_calibration=False)
    yield (
        "multi-class, clusters and groups",
        tc.report(z, t, from_logits=True, clusters=torch.arange(1500) // 10, groups=torch.arange(1500) % 2),
    )
    counts = torch.from_numpy(RNG.multinomial(5, [0.2] * 5, size=1500))
    yield "multi-class, annotator counts", tc.report(z, counts, task="multiclass", from_logits=True)
    q, labels = labels_of(800, 4)
    yield "multi-label", tc.report(q, labels, task="multilabel")
    yield "merged", (streamed((p[:900], y[:900]), task="binary") + streamed((p[900:], y[900:]), task="binary")).report()
    yield "comparison, binary", tc.compare({"a": p, "b": p**1.5}, y)
    yield "comparison, multi-class", tc.compare({"a": z, "b": z / 2, "c": z + 0.3}, t, from_logits=True)
    yield "comparison, clusters", tc.compare({"a": p, "b": p**1.5}, y, clusters=torch.arange(2000) // 20)


def _with_sketch(p, y):
    from torchcalib.core import sample_or_sketch

    most = sample_or_sketch.MAX_SAMPLES
    sample_or_sketch.MAX_SAMPLES = 500
    try:
        return tc.report(p, y)
    finally:
        sample_or_sketch.MAX_SAMPLES = most


def differences(old, new, place=""):
    """Yield the place and both values of each difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key, "missing"), new.get(key, "missing"), f"{place}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for k, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{place}[{k}]")
    elif old != new:
        yield place, old, new


def main():
    command, folder = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    n_different = 0
    for name, report in reports():
        path, content = folder / f"{name}.json", json.loads(report.to_json())
        if command == "record":
            path.write_text(json.dumps(content, indent=1))
            continue
        found = list(differences(json.loads(path.read_text()), content))
        n_different += len(found)
        print(f"{name}: {len(found)} differences")
        for place, old, new in islice(found, 5):
            print(f"    {place}: {str(old)[:60]} -> {str(new)[:60]}")
    sys.exit(n_different > 0)


if __name__ == "__main__":
    main()
