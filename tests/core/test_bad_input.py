"""Wrong calls raise an error that names the rule, the value found and the remedy."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.refusals import assert_refused
from processes import run_python
from torch.distributions import Laplace, Normal

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.cli import main

P2, Y2 = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
Q, H = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]), torch.tensor([1, 0, 0])
P40, Y40 = torch.full((40,), 0.5), torch.arange(40) // 39  # a single label is 1
Q40 = torch.full((40, 2), 0.5)
COUNTS = torch.tensor([[1, 3], [4, 0], [2, 2]])
IMAGE, MASK = torch.full((2, 3, 4, 5), 1 / 3), torch.zeros(2, 4, 5, dtype=torch.int64)
NAN, INF = math.nan, math.inf
binary, multi = {"task": "binary"}, {"task": "multiclass"}


def t(*values):
    return torch.tensor(values)


# rows: (description, call, error, parts of the message)
CALLS = [
    # shapes
    ("binary shapes differ", lambda f: f(P2, H, **binary), ValueError, ["`target`", "(2,)", "(3,)"]),
    ("multiclass without classes", lambda f: f(P2, Y2, **multi), ValueError, ["`preds`", "at least 2 axes", "binary"]),
    ("one class", lambda f: f(Q[:, :1], H, **multi), ValueError, ["at least 2 classes", "task='binary'"]),
    ("neither axis", lambda f: f(IMAGE, MASK[..., :3], **multi), ValueError, ["`target`", "(2, 4, 3)"]),
    ("square images", lambda f: f(IMAGE[:, :, 0], IMAGE[:, :, 0], **multi), ValueError, ["`class_axis`", "(2, 3, 5)"]),
    ("class axis out of range", lambda f: f(Q, H, class_axis=2, **multi), ValueError, ["`class_axis`", "got 2"]),
    ("weights too short", lambda f: f(P2, Y2, weights=t(1.0), **binary), ValueError, ["`weights`", "(2,)", "(1,)"]),
    # types and dtypes
    ("text", lambda f: f(["0.2"], t(1), **binary), TypeError, ["`preds`", "must contain numbers", "'0.2'"]),
    ("rows of several lengths", lambda f: f([[0.2], [0.3, 0.7]], t(1), **binary), TypeError, ["`preds`", "equal len"]),
    ("nothing", lambda f: f(None, t(1), **binary), TypeError, ["`preds`", "got None"]),
    ("hard decisions", lambda f: f(t(0, 1), Y2, **binary), TypeError, ["`preds`", "int64", "decisions"]),
    ("float8", lambda f: f(P2.to(torch.float8_e4m3fn), Y2, **binary), TypeError, ["`preds`", "preds.float()"]),
    ("uint64", lambda f: f(t(3, 90).to(torch.uint64), Y2, **binary), TypeError, ["uint64", "from 3 to 90", "/ 100"]),
    ("complex", lambda f: f(P2 + 0j, Y2, **binary), TypeError, ["`preds`", "must be real", "complex64"]),
    ("sparse", lambda f: f(P2.to_sparse(), Y2, **binary), TypeError, ["`preds`", "dense", "to_dense"]),
    ("float class indices", lambda f: f(Q, H.float(), **multi), TypeError, ["`target`", "float32", "target.long()"]),
    ("boolean one-hot", lambda f: f(Q, Q > 0.5, **multi), TypeError,
     ["annotator counts", "soft", "argmax", "target.long()"]),
    ("another device", lambda f: f(P2, Y2.to("meta"), **binary), ValueError, ["device of `preds`", "cpu", "meta"]),
    # values of predictions
    ("NaN", lambda f: f(t(0.2, NAN), Y2, **binary), ValueError, ["`preds`", "NaN", "1 of 2 rows"]),
    ("infinite probability", lambda f: f(t(INF, 0.2), Y2, **binary), ValueError, ["[0, 1]", "inf", "from_logits=True"]),
    ("just above 1", lambda f: f(t(1.0000001, 0.2), Y2, **binary), ValueError, ["[0, 1]", "1 of 2 rows"]),
    ("negative", lambda f: f(t(-0.1, 0.2), Y2, **binary), ValueError, ["[0, 1]", "got -0.1", "from_logits=True"]),
    ("rows that sum to 0.9", lambda f: f(Q * 0.91, H, **multi), ValueError, ["0.001", "got 0.91", "may be missing"]),
    ("rows that sum to 2", lambda f: f(Q * 2.1, H, **multi), ValueError, ["[0, 1]", "got 1.68", "sum to 2.1. Divide"]),
    ("scores of labels", lambda f: f(Q.sqrt(), H, **multi), ValueError, ["sum to 1", "'multilabel'"]),
    ("half rows that sum to 0.9", lambda f: f((Q * 0.9).half(), H, **multi), ValueError, ["sum to 1", "0.02"]),
    ("a row of -inf", lambda f: f(Q * -INF, H, from_logits=True, **multi), ValueError, ["-inf", "3 of 3 rows"]),
    # labels
    ("label 2 of 2", lambda f: f(P40, Y40 * 2, **binary), ValueError, ["[0, 1]", "got 2 (1 of 40", "ignore_index=2"]),
    ("label -100", lambda f: f(Q40, Y40 * -100, **multi), ValueError, ["got -100 (1 of 40", "ignore_index=-100"]),
    ("label C", lambda f: f(Q, t(1, 2, 0), **multi), ValueError, ["class index in [0, 1]", "got 2", "at least 3"]),
    ("soft binary above 1", lambda f: f(P2, t(0.0, 1.5), **binary), ValueError, ["[0, 1]", "1.5", "proportions"]),
    ("soft NaN", lambda f: f(P2, t(0.0, NAN), **binary), ValueError, ["`target`", "NaN"]),
    ("soft rows that sum to 0.5", lambda f: f(Q, Q / 2, **multi), ValueError,
     ["`target`", "sum to 1", "Divide annotator counts"]),
    ("a row without annotator counts", lambda f: f(Q, COUNTS * 0, **multi), ValueError,
     ["at least 1 annotator", "got 0 (3 of 3", "weight 0"]),
    ("a negative count", lambda f: f(Q, -COUNTS, **multi), ValueError, ["annotator counts", "got -3", "class axis"]),
    ("too many annotator counts", lambda f: f(P2, COUNTS[:2] << 60, **binary), ValueError,
     ["annotator counts", "2^53"]),
    ("one annotator too many", lambda f: f(P2, torch.tensor([[2, 2**53], [1, 1]]), **binary), ValueError,
     ["annotator counts", "2^53"]),
    ("bfloat16 above 1", lambda f: f(t(0.5, 1.5).bfloat16(), Y2, **binary), ValueError, ["got 1.5 (1 of 2 rows)"]),
    ("annotator counts and ignored", lambda f: f(P2, COUNTS[:2], ignore_index=0, **binary), ValueError,
     ["`ignore_index`"]),
    ("soft and ignored", lambda f: f(Q, Q, ignore_index=0, **multi), ValueError, ["`ignore_index`", "weight 0"]),
    # weights
    ("negative weight", lambda f: f(P2, Y2, weights=t(1.0, -2.0), **binary), ValueError, ["`weights`", "got -2"]),
    ("NaN weight", lambda f: f(P2, Y2, weights=t(1.0, NAN), **binary), ValueError, ["`weights`", "finite"]),
    ("huge weight", lambda f: f(P2, Y2, weights=P2.double() * 1e300, **binary), ValueError, ["`weights`"]),
    # options
    ("no task", lambda f: f(P2.expand(3, 2), Y2.expand(3, 2)), ValueError, ["`task` must be given", "'multilabel'"]),
    ("unknown option", lambda f: f(P2, Y2, logits=True, **binary), TypeError, ["`logits`", "from_logits"]),
]  # fmt: skip

OTHERS = [
    ("priors of each", lambda: F.nll(P2, Y2, priors=[0.2, 0.8], **binary, reduction="none"), ValueError, ["`priors`"]),
    ("ecd table", lambda: F.ecd(Normal(P2[:, None], 1), P2), ValueError, ["event shape", "(2, 1)", "(2,)"]),
    ("annotator counts and priors", lambda: F.nll(Q, COUNTS, priors=[0.5, 0.5], **multi), TypeError,
     ["labels", "counts (3, 2)"]),
    ("ecd of distribution as logits", lambda: F.ecd(Normal(P2, 1), P2, from_logits=True), ValueError, ["omitted"]),
    ("distribution weights", lambda: F.ecd(Normal(P2, 1), P2, weights=t(1.0)), ValueError, ["`weights`", "(2,)"]),
    ("nees of a Laplace", lambda: F.nees(Laplace(P2, 1), P2), TypeError, ["`distribution`", "Laplace", "use ecd"]),
    ("table index", lambda: F.calibration_curve(P2, Y2, **binary)[0], IndexError,
     ["must have a batch axis", "table.gap"]),
    ("class-wise without C", lambda: tc.ECE(task="multiclass", mode="classwise"), ValueError, ["`num_classes`"]),
    ("normalised without C", lambda: tc.NLL(task="multiclass", normalize="prior"), ValueError, ["`num_classes`"]),
    ("labels without L", lambda: tc.ECE(task="multilabel"), ValueError, ["`num_labels` must be given"]),
    ("C of labels", lambda: tc.ECE(task="multilabel", num_classes=3), ValueError, ["`num_classes` must be None"]),
    ("L of classes", lambda: tc.NLL(task="multiclass", num_labels=2), ValueError, ["`num_labels` must be None"]),
    ("bins by position", lambda: tc.ECE("binary", 10), TypeError, ["other than `task`", "by name", "got 10"]),
    ("batch in update", lambda: tc.ECE(task="binary", batch_shape=(3,)).update(P2, Y2), ValueError, ["batch_shape"]),
    ("priors of others", lambda: tc.NLL(task="multiclass", num_classes=3, priors=[0.5, 0.5]), ValueError, ["`priors`"]),
    ("a soft batch at given priors",
     lambda: tc.NLL(task="multiclass", num_classes=2, priors=[0.5, 0.5]).update(Q, Q), TypeError, ["`priors`"]),
]  # fmt: skip


LONG, MANY = "x" * 900, [0.5] * 900
BATCH = {f"entry {k}": Q for k in range(400)}
LONG_VALUES = [  # rows: (description, call)
    ("text targets", lambda: tc.report(Q, [LONG + str(k) for k in range(3)])),
    ("unknown class names", lambda: tc.report(Q, [LONG] * 3, class_names=["a" * 900, "b" * 900])),
    ("long class names", lambda: tc.report(Q, H, class_names=["a" * 1001, "b"])),
    ("repeated class names", lambda: tc.report(Q, H, class_names=[LONG, LONG])),
    ("class names of a number", lambda: tc.report(Q, H, class_names=[LONG, 3])),
    ("priors", lambda: F.nll(Q[:1].expand(1, 2), H[:1], task="multiclass", priors=[[0.1, 0.2]] * 900)),
    ("entries of a batch", lambda: tc.evaluate(lambda x: x, [BATCH], task="multiclass", from_logits=False)),
    ("outputs of a model", lambda: tc.evaluate(lambda x: BATCH, [(Q, H)], task="multiclass", from_logits=False)),
    ("names of systems", lambda: tc.compare({LONG: Q, "b": 3 * Q[:, :1]}, H, task="multiclass")),
    ("keys of from_logits", lambda: tc.compare({"a": Q, "b": Q}, H, from_logits=dict.fromkeys(BATCH, True))),
    ("group names", lambda: tc.ByGroup(tc.ECE(task="binary"), group_names=["a"]).update(P2, Y2, groups=[LONG] * 2)),
    ("the task", lambda: F.ece(P2, Y2, task=LONG)),
    ("a number", lambda: F.ece(P2, Y2, task="binary", n_bins=10**900)),
    ("a list of numbers", lambda: F.ece(P2, Y2, task="binary", n_bins=MANY)),
    ("a tensor", lambda: F.ece(P2, Y2, task="binary", from_logits=torch.zeros(900))),
    ("the mode", lambda: F.ece(P2, Y2, task="binary", mode=LONG)),
    ("bins", lambda: F.mce(P2, Y2, task="binary", bins=LONG)),
    ("classes", lambda: F.ece(Q, H, task="multiclass", positive_classes=[1] * 900)),
    ("an unknown argument", lambda: F.ece(P2, Y2, task="binary", **{LONG: 1})),
    ("an argument by position", lambda: F.ece(P2, Y2, "binary", MANY)),
    ("the index to ignore", lambda: tc.ECE(task="binary", ignore_index=LONG)),
    ("the batch shape", lambda: tc.ECE(task="binary", batch_shape=LONG)),
]


def test_errors_about_long_values_stay_short():
    assert_refused((what, call, (TypeError, ValueError), ["must", "got"]) for what, call in LONG_VALUES)


def test_wrong_calls_raise_errors():
    for function in (F.nll, F.brier_score, F.ecd, F.ece, F.mce):
        assert_refused((what, partial(call, function), *expected) for what, call, *expected in CALLS)
    assert_refused(OTHERS)


def test_validate_args_false_checks_shapes_and_no_values():
    assert F.brier_score(torch.tensor([2.0]), torch.tensor([1]), task="binary", validate_args=False) == 1
    with pytest.raises(ValueError, match="`target` must have the shape"):
        F.brier_score(P2, H, task="binary", validate_args=False)


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def good(folder):
    return save(folder / "a.npz", probs=P2, targets=Y2)


COMMANDS = [
    ("bad label", lambda d: ["report", save(d / "a.npz", probs=P40, targets=Y40 * 7)], "Pass --ignore-index 7"),
    ("logits as probs", lambda d: ["report", save(d / "a.npz", probs=P2 * 9, targets=Y2)], "Pass --from-logits"),
    ("absurd bins", lambda d: ["report", good(d), "--n-bins", "9" * 23], "`--n-bins`"),
    ("many bins", lambda d: ["report", good(d), "--n-bins", "1001"], "at most 1,000"),
    ("absurd index", lambda d: ["report", good(d), "--ignore-index", "9" * 23], "64 bits"),
    ("out below a file", lambda d: ["report", good(d), "--out", good(d) + "/x"], "a.npz/x"),
    ("out is nothing", lambda d: ["report", good(d), "--out", ""], "--out"),
    ("out is a file", lambda d: ["report", good(d), "--out", good(d)], "--out"),
    ("all ignored", lambda d: ["report", save(d / "a.npz", p=P2, y=t(0, 0)), "--ignore-index", "0"], "at least one"),
    ("no epochs", lambda d: ["demo", "--epochs", "0", "--out", str(d)], "`--epochs`"),
]  # fmt: skip


def test_wrong_commands_give_one_line_on_stderr_and_exit_code_2(tmp_path, capsys):
    failed = []
    for what, arguments, part in COMMANDS:
        code, text = main(arguments(tmp_path)), capsys.readouterr().err
        one_line = text.startswith("torchcalib: error: ") and text.count("\n") == 1 and "Traceback" not in text
        if not (code == 2 and one_line and part in text):
            failed.append(f"{what}: {code}, {text!r}")
    assert not failed
    assert main([]) == 0
    assert "usage: torchcalib" in capsys.readouterr().out
    for arguments in (["report", "a.npz", "--task", "x"], ["report", "a.npz", "--from-logits", "--from-probs"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2, arguments
        assert "usage: torchcalib" in capsys.readouterr().err, arguments
    with pytest.raises(SystemExit):
        main(["report", "a.npz", "--" + LONG])
    assert len(capsys.readouterr().err.splitlines()[-1]) <= 520
    done = run_python("-m", "torchcalib", "report", tmp_path / "none.npz")
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
