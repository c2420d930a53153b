"""Files whose arrays cannot be found, do not fit together, or leave open what is meant."""

import numpy as np
import torch
from helpers.refused import HITS, LABELS, LOGITS, PROBS, WEIGHTS, assert_refused, npz, saved, shards, text


def a_directory(folder):
    (folder / "a.npz").mkdir()
    return ["a.npz"]


def mixed(folder):
    return npz(probs=PROBS, y=HITS)(folder) + saved({"probs": torch.ones(2), "y": torch.ones(2)})(folder)


OK = npz(probs=PROBS, y=HITS)
IMAGE = np.zeros((2, 3, 4, 5), np.float32)
NAMES = np.array(list("abcdefg"))[:, None]
BAD = {  # what is written, what the error says, and options
    "no file": (lambda folder: [], "must be a file to read, got none"),
    "missing": (lambda folder: ["b.npz"], "b.npz` must be a file, got nothing of this name"),
    "name too long": (lambda folder: ["b" * 5000 + ".npz"], "got OSError"),
    "directory": (a_directory, "got a directory. Name the files in it"),
    "suffix": (text("a.txt", "x"), "must end in one of .npz, .npy, .pt"),
    "no suffix": (text("predictions", "x"), "must end in one of"),
    "mixed formats": (mixed, "must have one format, got two"),
    "one file twice": (lambda folder: OK(folder) * 2, "got one twice"),
    "no predictions": (
        npz(a=PROBS, y=HITS),
        "must hold predictions under a known name (logits, probs, preds ...), got `a`, `y`",
    ),
    "no targets": (npz(probs=PROBS), "must hold targets under a known name (targets, labels, y ...), got `probs`"),
    "two predictions": (npz(logits=PROBS, probs=PROBS, y=HITS), "got `logits`, `probs`. Choose with --preds NAME"),
    "two targets": (npz(probs=PROBS, y=HITS, labels=HITS), "got `labels`, `y`. Choose with --target NAME"),
    "two weights": (npz(probs=PROBS, y=HITS, weight=PROBS, weights=PROBS), "Choose with --weights NAME"),
    "case only": (npz(probs=PROBS, Probs=PROBS, y=HITS), "got `probs`, `Probs`. Choose"),
    "names that steer a terminal": (npz(**{"\x1b[2J": PROBS}), "got `?[2J`"),
    "many names": (npz(**{f"a{i}": PROBS for i in range(20)}), "`a11` and 8 more"),
    "preds not there": (OK, "--preds must name what is in `a.npz`, got `q` beside `probs`, `y`", {"preds": "q"}),
    "target not there": (OK, "--target must name what is in", {"target": "q"}),
    "weights not there": (OK, "--weights must name what is in", {"weights": "q"}),
    "one array for both": (OK, "must hold predictions, targets, weights and groups apart", {"target": "probs"}),
    "neutral name": (
        npz(preds=PROBS, y=HITS),
        "must be declared as logits or as probabilities, got a name that tells neither. Pass --from-logits or",
    ),
    "unknown name": (npz(a=PROBS, y=HITS), "Pass --from-logits or --from-probs", {"preds": "a"}),
    "binary log_probs": (npz(log_probs=PROBS, y=HITS), "log p is not the logit of p. Store probabilities or logits"),
    "multilabel log_probs": (
        npz(log_probs=LOGITS, y=LOGITS > 0),
        "got multilabel predictions (7, 3)",
        {"task": "multilabel"},
    ),
    "integer predictions": (
        npz(preds=LABELS, y=HITS),
        "must be floating-point predictions, got int64",
        {"from_logits": False},
    ),
    "names of groups in a column": (
        npz(probs=PROBS[:, None], y=HITS, site=NAMES),
        "`site` in `a.npz` must have one axis if it holds text, got shape (7, 1)",
        {"groups": "site"},
    ),
    "names of groups of pixels": (
        npz(probs=LOGITS[:, None], y=LABELS[:, None], site=NAMES),
        "`site` in `a.npz` must have one axis if it holds text, got shape (7, 1)",
        {"groups": "site"},
    ),
    "complex predictions": (npz(probs=PROBS + 0j, y=HITS), "got complex128"),
    "text targets": (npz(probs=PROBS, y=np.array(list("abcdefg"))), "must hold numbers, got str"),
    "text weights": (npz(probs=PROBS, y=HITS, weights=np.array(list("abcdefg"))), "must hold numbers, got str"),
    "row counts": (npz(probs=PROBS, y=HITS[:5]), "must have one row per sample, got shapes (7,) and (5,)"),
    "weight rows": (
        npz(probs=PROBS, y=HITS, weights=WEIGHTS[:5]),
        "must have one row per sample, got shapes (7,) and (5,)",
    ),
    "weight shape": (npz(probs=PROBS, y=HITS, weights=LOGITS), "must be one weight per sample, got shape (7, 3)"),
    "scalar": (npz(probs=np.array(0.5), y=np.array(1)), "`probs` in `a.npz` must be an array, got a single number"),
    "no samples": (npz(probs=PROBS[:0], y=HITS[:0]), "holds no samples"),
    "no classes": (npz(probs=LOGITS[:, :0], y=HITS), "got shape (7, 0) of float32"),
    "float class indices": (npz(logits=LOGITS, y=LABELS.astype(float)), "must be integer class indices"),
    "votes": (
        npz(logits=LOGITS, y=np.abs(LOGITS)),
        "Pass --task multilabel, or --task multiclass (shares or vote counts).",
    ),
    "masks": (npz(probs=IMAGE, y=IMAGE > 0), "(one-hot labels or vote counts), or --task binary (probabilities of 1)"),
    "one-hot integers": (
        npz(logits=LOGITS, y=LOGITS > 0),
        "Targets with a class axis must be whole numbers (vote counts, one-hot labels) or floating",
        {"task": "multiclass"},
    ),
    "binary of two axes": (
        npz(logits=LOGITS, y=LOGITS > 0),
        "Shapes must be (N,) or maps (N, H, ...), with targets of that shape",
        {"task": "binary"},
    ),
    "other widths": (npz(logits=LOGITS, y=LOGITS[:, :2]), "Check what wrote them, or pass --task"),
    "unknown task": (
        OK,
        "must be one of `binary`, `multiclass`, `multilabel`, got `regression`",
        {"task": "regression"},
    ),
    "channels first": (npz(logits=IMAGE, y=np.zeros((2, 4, 5), int)), "Classes must be the last axis in files"),
    "channels first, told": (
        npz(logits=IMAGE, y=np.zeros((2, 4, 5), int)),
        "which looks like (N, C, H, W)",
        {"task": "multiclass"},
    ),
    "shards: names": (
        shards({"probs": PROBS, "y": HITS}, {"logits": PROBS, "y": HITS}),
        "`1.npz` must name its arrays as `0.npz` does",
    ),
    "shards: weights": (
        shards({"probs": PROBS, "y": HITS}, {"probs": PROBS, "y": HITS, "weight": PROBS}),
        "got `probs`, `y`, `weight`",
    ),
    "shards: dtype": (
        shards({"probs": PROBS, "y": HITS}, {"probs": PROBS.astype("f4"), "y": HITS}),
        "`probs` must be alike in all files, got float64 (7,) in `0.npz` and float32 (7,) in `1.npz`",
    ),
    "shards: classes": (
        shards({"probs": LOGITS, "y": HITS}, {"probs": LOGITS[:, :2], "y": HITS}),
        "float32 (7, 2) in `1.npz`",
    ),
    "shards: all empty": (
        shards({"probs": PROBS[:0], "y": HITS[:0]}, {"probs": PROBS[:0], "y": HITS[:0]}),
        "holds no samples",
    ),
    "shards: one damaged": (lambda folder: OK(folder) + text("b.npz", "")(folder), "`b.npz` must be a complete"),
}


def test_bad_files_are_input_errors_in_one_line_that_say_what_to_do(tmp_path, monkeypatch):
    assert_refused(BAD, tmp_path, monkeypatch)
