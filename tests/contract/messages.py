"""Messages of errors and warnings, by area: rows for the laws in `test_messages.py`.

A row has a call, a text, the type of the error, and optionally the call that follows the advice of the message. The
text contains parts of the message in their order, separated by " ... ".
"""

import math
from functools import cache, partial
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch
from cases import squared_gap
from helpers import fits, hidden
from helpers.blocks import find
from helpers.prediction_files import write_csv, write_npz
from helpers.refusals import Refusal
from helpers.reports import QUICK, miscalibrated_data, quick_report, realistic
from helpers.systems import systems
from sklearn.datasets import make_classification
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, LeaveOneOut, RepeatedKFold, ShuffleSplit, cross_validate
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import LinearSVC
from torch.distributions import Beta, Laplace, Normal

import torchcalib as tc
import torchcalib.functional as F
from torchcalib import plots
from torchcalib.calibration import save_calibrator
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import infer_task, prepare
from torchcalib.functional.binned import ece_from_bins
from torchcalib.inference.testing import ErrorTest, run_error_test
from torchcalib.integrations.outputs import found_by
from torchcalib.results.conditions import Condition
from torchcalib.special import betainc, binomial_test

NAN, INF = math.nan, math.inf
BINARY, MULTI, LABELS = {"task": "binary"}, {"task": "multiclass"}, {"task": "multilabel"}
LOGITS = {"from_logits": True}
LONG, MANY = "x" * 900, [0.5] * 900


def t(*values):
    return torch.tensor(values)


def wrong(call, *rows, works=True):
    """Return a refusal for each row: (wrong arguments, text, error, arguments that follow from the advice).

    The call without the wrong arguments must work, unless the advice contains others.
    """
    right = cache(call) if works else None  # called once for all rows

    def refusal(given, text, error=ValueError, advised=None):
        return Refusal(partial(call, **given), text, error, partial(call, **advised) if advised is not None else right)

    return [refusal(*row) for row in rows]


# Input of metrics: predictions, target, options, text, error, and the input that follows from the advice

N, C = 240, 4
G = torch.Generator().manual_seed(0)
P = (3 * torch.randn(N, generator=G, dtype=torch.float64)).sigmoid()
Y = (torch.rand(N, generator=G, dtype=torch.float64) < P).long()
Z = torch.randn(N, C, generator=G, dtype=torch.float64)
Q, H = Z.softmax(-1), torch.multinomial(Z.softmax(-1), 1, generator=G).squeeze(-1)
M, L = torch.rand(N, C, generator=G), (torch.rand(N, C, generator=G) < 0.4).long()
THIRD, FEW, MOST = torch.arange(N) % 3 == 0, torch.arange(N) % 20 == 7, torch.arange(N) % 20 != 7
ONE_HOT = torch.nn.functional.one_hot(Q.argmax(-1), C)
SWAPPED, DECISIONS = "Pass the predictions first, then the targets", "Pass probabilities: predict_proba(X)"
IGNORE = "Pass ignore_index=-100"
P2, Y2 = t(0.2, 0.7), t(0, 1)
Q3, H3 = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]]), t(1, 0, 0)
P40, Y40, Q40 = torch.full((40,), 0.5), torch.arange(40) // 39, torch.full((40, 2), 0.5)  # a single label is 1
COUNTS = torch.tensor([[1, 3], [4, 0], [2, 2]])
IMAGE, MASK = torch.full((2, 3, 4, 5), 1 / 3), torch.zeros(2, 4, 5, dtype=torch.int64)
OF_P2, OF_Q3 = (P2, Y2, BINARY), (Q3, H3, MULTI)

MISTAKES = [
    # shapes
    (P2, H3, BINARY, "`target` must have the shape of `preds` (2,) ... got (3,)"),
    (P2, Y2, MULTI, "`preds` must ... task='binary'", ValueError, OF_P2),
    (Q3[:, :1], H3, MULTI, "`preds` must ... task='binary'", ValueError, (Q3[:, :1], H3, BINARY)),
    (IMAGE, MASK[..., :3], MULTI, "`target` must ... (2, 4, 3)", ValueError, (IMAGE, MASK, MULTI)),
    (IMAGE[:, :, 0], IMAGE[:, :, 0], MULTI, "`class_axis` ... (2, 3, 5)"),
    (Q3, H3, MULTI | {"class_axis": 2}, "`class_axis` must ... got 2", ValueError, OF_Q3),
    (P2, Y2, BINARY | {"weights": t(1.0)}, "`weights` must ... (2,) ... (1,)", ValueError, OF_P2),
    # types and dtypes
    (["0.2"], t(1), BINARY, "`preds` must contain numbers, got text such as '0.2'", TypeError, ([0.2], t(1), BINARY)),
    ([[0.2], [0.3, 0.7]], t(1), BINARY, "`preds` must have rows of equal length", TypeError),
    (None, t(1), BINARY, "`preds` must be a tensor, an array or a list of numbers, got None", TypeError),
    (t(0, 1), Y2, BINARY, "`preds` must be ... int64 ... decisions", TypeError),
    (P2.to(torch.float8_e4m3fn), Y2, BINARY, "`preds` must be ... preds.float()", TypeError,
     (P2.to(torch.float8_e4m3fn).float(), Y2, BINARY)),
    (t(3, 90).to(torch.uint64), Y2, BINARY, "uint64 ... from 3 to 90 ... / 100", TypeError,
     (t(3, 90) / 100, Y2, BINARY)),
    (P2 + 0j, Y2, BINARY, "`preds` must be real, got ... complex64", TypeError),
    (P2.to_sparse(), Y2, BINARY, "`preds` must be ... dense ... to_dense", TypeError, OF_P2),
    (Q3, H3.float(), MULTI, "`target` must be ... float32 ... target.long()", TypeError, OF_Q3),
    (Q3, Q3 > 0.5, MULTI, "`target` with a class axis must be integer (annotator counts) or floating (soft targets) "
     "... argmax ... target.long()", TypeError, (Q3, (Q3 > 0.5).long().argmax(-1), MULTI)),
    (P2, Y2.to("meta"), BINARY, "device of `preds` ... cpu ... meta", ValueError, OF_P2),
    # values of predictions
    (t(0.2, NAN), Y2, BINARY, "`preds` must not contain NaN ... (1 of 2 rows)", ValueError,
     (t(0.2, NAN), Y2, BINARY | {"nan_policy": "drop"})),
    (t(INF, 0.2), Y2, BINARY, "[0, 1], got inf ... from_logits=True"),
    (t(1.0000001, 0.2), Y2, BINARY, "`preds` must be probabilities in [0, 1] ... 1 of 2 rows ... The excess is "
     "rounding error. Clip the probabilities", ValueError, (t(1.0000001, 0.2).clip(0, 1), Y2, BINARY)),
    (t(-0.1, 0.2), Y2, BINARY, "[0, 1], got -0.1 ... from_logits=True", ValueError,
     (t(-0.1, 0.2), Y2, BINARY | LOGITS)),
    (Q3 * 0.91, H3, MULTI, "0.001 ... got 0.91 ... may be missing"),
    (Q3 * 2.1, H3, MULTI, "[0, 1], got 1.68 ... sum to 2.1. Divide", ValueError, OF_Q3),
    (Q3.sqrt(), H3, MULTI, "sum to 1 ... 'multilabel'"),
    ((Q3 * 0.9).half(), H3, MULTI, "sum to 1 ... 0.02"),
    (Q3 * -INF, H3, MULTI | LOGITS, "-inf ... 3 of 3 rows"),
    # targets
    (P40, Y40 * 2, BINARY, "[0, 1], got 2 (1 of 40 ... ignore_index=2", ValueError,
     (P40, Y40 * 2, BINARY | {"ignore_index": 2})),
    (Q40, Y40 * -100, MULTI, "got -100 (1 of 40 ... ignore_index=-100", ValueError,
     (Q40, Y40 * -100, MULTI | {"ignore_index": -100})),
    (Q3, t(1, 2, 0), MULTI, "class index in [0, 1], got 2 ... at least 3"),
    (P2, t(0.0, 1.5), BINARY, "[0, 1], got 1.5 ... proportions"),
    (P2, t(0.0, NAN), BINARY, "`target` must ... NaN"),
    (Q3, Q3 / 2, MULTI, "`target` must sum to 1 ... Divide annotator counts", ValueError, (Q3, Q3, MULTI)),
    (Q3, COUNTS * 0, MULTI, "at least 1 annotator ... got 0 (3 of 3 ... weight 0"),
    (Q3, -COUNTS, MULTI, "annotator counts ... got -3 ... class axis", ValueError, (Q3, COUNTS, MULTI)),
    (P2, COUNTS[:2] << 60, BINARY, "annotator counts ... 2^53"),
    (P2, torch.tensor([[2, 2**53], [1, 1]]), BINARY, "annotator counts ... 2^53"),
    (t(0.5, 1.5).bfloat16(), Y2, BINARY, "got 1.5 (1 of 2 rows)"),
    (P2, COUNTS[:2], BINARY | {"ignore_index": 0}, "`ignore_index` must", ValueError, (P2, COUNTS[:2], BINARY)),
    (Q3, Q3, MULTI | {"ignore_index": 0}, "`ignore_index` must ... weight 0", ValueError, (Q3, Q3, MULTI)),
    # weights
    (P2, Y2, BINARY | {"weights": t(1.0, -2.0)}, "`weights` must ... got -2", ValueError, OF_P2),
    (P2, Y2, BINARY | {"weights": t(1.0, NAN)}, "`weights` must be finite", ValueError, OF_P2),
    (P2, Y2, BINARY | {"weights": P2.double() * 1e300}, "`weights` must", ValueError, OF_P2),
    # mistakes in values and shapes that are valid on their own
    (Y, P, BINARY, SWAPPED, (TypeError, ValueError), (P, Y, BINARY)),
    (Y.bool(), P, BINARY, SWAPPED, (TypeError, ValueError), (P, Y, BINARY)),
    (Y.double(), P, BINARY, SWAPPED, ValueError, (P, Y, BINARY)),
    (Y[:, None].float(), P[:, None].float(), BINARY, SWAPPED, ValueError, (P, Y, BINARY)),
    (Y.double(), P, BINARY | LOGITS, SWAPPED, ValueError, (P, Y, BINARY)),
    (L, M, LABELS, SWAPPED, (TypeError, ValueError), (M, L, LABELS)),
    (L.float(), M, LABELS, SWAPPED, ValueError, (M, L, LABELS)),
    (H, Q, MULTI, SWAPPED, (TypeError, ValueError), (Q, H, MULTI)),
    (Y, P.logit(), BINARY, SWAPPED, (TypeError, ValueError), (P.logit(), Y, BINARY | LOGITS)),
    (Y.float(), P.logit(), BINARY, SWAPPED, ValueError, (P.logit(), Y, BINARY | LOGITS)),
    (H.float(), Q, MULTI, SWAPPED, ValueError, (Q, H, MULTI)),
    (ONE_HOT.double(), Q, MULTI, SWAPPED, ValueError, (Q, Q.argmax(-1), MULTI)),
    ((P > 0.5).long(), Y, BINARY, DECISIONS, TypeError),
    (P > 0.5, Y, BINARY, DECISIONS, TypeError),
    ((P > 0.5).long(), Y.float(), BINARY, DECISIONS, TypeError),
    (Q.argmax(-1), H, MULTI, DECISIONS, TypeError),
    (ONE_HOT, H, MULTI, DECISIONS, TypeError),
    ((M > 0.5).int(), L, LABELS, DECISIONS, TypeError),
    ((100 * P).long(), Y, BINARY, "pass preds / 100", TypeError, ((100 * P).long() / 100, Y, BINARY)),
    ((9 * Z).long(), H, MULTI, "preds.float()", TypeError, ((9 * Z).long().float(), H, MULTI | LOGITS)),
    (100 * P, Y, BINARY, "Divide percentages by 100", ValueError, (P, Y, BINARY)),
    (100 * Q, H, MULTI, "Divide them by 100", ValueError, (Q, H, MULTI)),
    (100 * M, L, LABELS, "Divide percentages by 100", ValueError, (M, L, LABELS)),
    (Z, H, MULTI, "Pass from_logits=True", ValueError, (Z, H, MULTI | LOGITS)),
    (P.logit(), Y, BINARY, "Pass from_logits=True", ValueError, (P.logit(), Y, BINARY | LOGITS)),
    (M.logit(), L, LABELS, "Pass from_logits=True", ValueError, (M.logit(), L, LABELS | LOGITS)),
    (Q.T, H, MULTI, "Pass class_axis=0", ValueError, (Q.T, H, MULTI | {"class_axis": 0})),
    (H.double(), Y, BINARY, "class indices or ratings"),
    (9 * P, Y, BINARY, "Pass from_logits=True only for the input of a sigmoid", ValueError,
     (9 * P, Y, BINARY | LOGITS)),
    (Q, H.masked_fill(THIRD, 255), MULTI, "Pass ignore_index=255 if", ValueError, (Q[~THIRD], H[~THIRD], MULTI)),
    (Q, (H + 1).masked_fill(THIRD, 255), MULTI | {"ignore_index": 255},
     "count from 1. Subtract 1 from all labels that are not ignored", ValueError, (Q[~THIRD], H[~THIRD], MULTI)),
    (Q, H.masked_fill(FEW, -100), MULTI, IGNORE, ValueError, (Q[~FEW], H[~FEW], MULTI)),
    (Q, H.masked_fill(MOST, -100), MULTI, IGNORE, ValueError, (Q[~MOST], H[~MOST], MULTI)),
    (P, Y.masked_fill(MOST, -100), BINARY, IGNORE, ValueError, (P[~MOST], Y[~MOST], BINARY)),
    (P, Y.double().masked_fill(FEW, -100), BINARY, IGNORE, ValueError, (P[~FEW], Y[~FEW], BINARY)),
]  # fmt: skip

# Input that causes a warning: predictions, target, options, text, and options that silence it
SUSPICIOUS = {
    "probabilities as logits": (Q, H, MULTI | LOGITS, "Omit from_logits=True", MULTI),
    "few probabilities as logits": (Q[:20], H[:20], MULTI | LOGITS, "Omit from_logits=True", MULTI),
    "bfloat16 probabilities as logits": (Q.bfloat16(), H, MULTI | LOGITS, "Omit from_logits=True", MULTI),
    "maps": (Q.reshape(4, 60, C).movedim(-1, 1), H.reshape(4, 60), MULTI | LOGITS, "Omit from_logits=True", MULTI),
    "binary probabilities as logits": (P, Y, BINARY | LOGITS, "Omit from_logits=True", BINARY),
    "multi-label probabilities as logits": (M, L, LABELS | LOGITS, "Omit from_logits=True", LABELS),
    "floating decisions": ((P > 0.5).double(), Y, BINARY, DECISIONS, None),
    "floating decisions as logits": ((P > 0.5).double(), Y, BINARY | LOGITS, DECISIONS, None),
    "floating one-hot decisions": (ONE_HOT.float(), H, MULTI, DECISIONS, None),
    "floating multi-label decisions": ((M > 0.5).float(), L, LABELS, DECISIONS, None),
}

# Options of metrics, and calls beside the input

BATCH = {f"entry {k}": Q3 for k in range(400)}
NAMED = {"preds": P2, "target": Y2, **BINARY}
ece, of_p2, of_q = partial(F.ece, P2, Y2, task="binary"), partial(F.ece, P2, Y2), partial(F.ece, Q, H, **MULTI)
EITHER = (TypeError, ValueError)

LONG_VALUES = [
    (call, "must ... got", EITHER)
    for call in (
        lambda: tc.report(Q3, [LONG + str(k) for k in range(3)]),
        lambda: tc.report(Q3, [LONG] * 3, class_names=["a" * 900, "b" * 900]),
        lambda: tc.report(Q3, H3, class_names=["a" * 1001, "b"]),
        lambda: tc.report(Q3, H3, class_names=[LONG, LONG]),
        lambda: tc.report(Q3, H3, class_names=[LONG, 3]),
        lambda: F.nll(Q3[:1].expand(1, 2), H3[:1], task="multiclass", priors=[[0.1, 0.2]] * 900),
        lambda: tc.evaluate(lambda x: x, [BATCH], task="multiclass", from_logits=False),
        lambda: tc.evaluate(lambda x: BATCH, [(Q3, H3)], task="multiclass", from_logits=False),
        lambda: tc.compare({LONG: Q3, "b": 3 * Q3[:, :1]}, H3, task="multiclass"),
        lambda: tc.compare({"a": Q3, "b": Q3}, H3, from_logits=dict.fromkeys(BATCH, True)),
        lambda: tc.ByGroup(tc.ECE(task="binary"), group_names=["a"]).update(P2, Y2, groups=[LONG] * 2),
        lambda: of_p2(task=LONG),
        lambda: ece(n_bins=10**900),
        lambda: ece(n_bins=MANY),
        lambda: ece(from_logits=torch.zeros(900)),
        lambda: ece(mode=LONG),
        lambda: F.mce(P2, Y2, task="binary", bins=LONG),
        lambda: of_q(positive_classes=[1] * 900),
        lambda: ece(**{LONG: 1}),
        lambda: of_p2("binary", MANY),
        lambda: tc.ECE(task="binary", ignore_index=LONG),
        lambda: tc.ECE(task="binary", batch_shape=LONG),
    )
]


def classwise_auroc():
    metric = tc.CorrectnessAUROC(num_classes=3, mode="classwise")
    metric.update(torch.eye(3), torch.arange(3))
    return metric


OPTIONS = [
    *LONG_VALUES,
    *wrong(partial(tc.ECE, task="multiclass", num_classes=3),
        ({"num_classes": None, "mode": "classwise"}, "`num_classes` must"),
        ({"num_labels": 2}, "`num_labels` must be None"),
        ({"persistent": 1}, "`persistent` must be True or False", TypeError),
    ),
    *wrong(partial(tc.NLL, task="multiclass", num_classes=3),
        ({"num_classes": None, "normalize": "prior"}, "`num_classes` must"),
        ({"priors": [0.5, 0.5]}, "`priors` must"),
    ),
    *wrong(partial(tc.ECE, task="multilabel", num_labels=3),
        ({"num_labels": None}, "`num_labels` must be given"),
        ({"num_classes": 3}, "`num_classes` must be None"),
    ),
    *wrong(ece,
        ({"logits": True}, "`logits` ... from_logits", TypeError, {"from_logits": True}),
        ({"mode": tc.TopK(1)}, "for task='binary'"),
        ({"nan_policy": "skip"}, "`nan_policy` must be one of 'raise', 'drop', got 'skip'"),
        ({"strategy": "quantile"}, "`strategy` must ... Use ace", TypeError),
        ({"groups": Y2}, "Pass them to by_group(function, preds, target, groups)", TypeError),
    ),
    *wrong(of_q,
        ({"top_k": 2}, "`top_k` must ... Pass mode=torchcalib.TopK(k)", TypeError, {"mode": tc.TopK(2)}),
        ({"mode": tc.TopK(7)}, "at most the 4 classes, got", ValueError, {"mode": tc.TopK(3)}),
        ({"mode": "top_5"}, "or TopK(k)", ValueError, {"mode": tc.TopK(4)}),
        ({"average": "micro"}, "None returns a value for each class", ValueError,
         {"mode": "classwise", "average": None}),
    ),
    (lambda: F.ks(Q, H, **MULTI, mode=tc.TopK(7)), "at most the 4 classes, got"),
    (lambda: tc.TopK(0), "`k` must be at least 1, got 0"),
    (lambda: tc.TopK(2.0), "`k` must be an int, got 2.0", TypeError, lambda: tc.TopK(2)),
    (lambda: tc.TopK(2, only=1), "`only` must be True or False, got 1", TypeError, lambda: tc.TopK(2, only=True)),
    (lambda: F.ece(P2.expand(3, 2), Y2.expand(3, 2)), "`task` must be given ... 'multilabel'", ValueError,
     lambda: F.ece(P2.expand(3, 2), Y2.expand(3, 2), task="multilabel")),
    (lambda: tc.ECE("binary", 10), "other than `task` must be given by name, got 10", TypeError,
     lambda: tc.ECE("binary", n_bins=10)),
    (lambda: tc.ECE(task="binary", batch_shape=(3,)).update(P2, Y2), "batch_shape"),
    (lambda: F.nll(P2, Y2, priors=[0.2, 0.8], **BINARY, reduction="none"), "`priors` must"),
    (lambda: F.nll(Q3, COUNTS, priors=[0.5, 0.5], **MULTI), "labels ... counts (3, 2)", TypeError),
    (lambda: tc.NLL(**MULTI, num_classes=2, priors=[0.5, 0.5]).update(Q3, Q3), "`priors`", TypeError),
    (lambda: F.calibration_curve(Y, P, n_bins=10), "Pass the predictions first", EITHER),
    (lambda: F.calibration_curve(P2, Y2, **BINARY)[0], "must have a batch axis ... table.gap", IndexError),
    (lambda: F.brier_score(P2, H3, validate_args=False, **BINARY), "`target` must have the shape"),
    (lambda: F.aurc(Q, H.float(), task="multiclass"), "target.long()", TypeError, lambda: F.aurc(Q, H, **MULTI)),
    (lambda: F.aurc(P2, t(0.3, NAN), task="binary"), "NaN"),
    *wrong(partial(tc.CalibrationCollection([tc.ECE("binary")]).update, P2, Y2),
        ({"groups": Y2}, "`groups` must be None for a collection without"),
        ({"clusters": Y2}, "`clusters` must be None for a collection without"),
    ),
    # bins, blocks and scores
    *[row for call in (partial(F.cox, P, Y), partial(F.spiegelhalter, P, Y), tc.Cox, tc.Spiegelhalter)
      for row in wrong(partial(call, **BINARY), ({"average": None}, "`average` must", EITHER),
                       ({"average": "macro"}, "`average` must", EITHER))],
    *[row for call in (F.canonical_error, F.skce) for row in wrong(partial(call, Q[:10], H[:10], **MULTI),
        ({"average": None}, "`average` must", EITHER), ({"weights": torch.full((10,), 0.5)}, "`weights` must"),
        ({"bandwidth": 0}, "`bandwidth` must"), ({"bandwidth": "mean"}, "`bandwidth` must", TypeError))],
    *wrong(partial(F.canonical_error, Q[:10], H[:10], **MULTI),
        ({"bandwidth": INF}, "`bandwidth` must"), ({"bandwidth": "median"}, "`bandwidth` must", TypeError)),
    *wrong(partial(tc.SKCE, task="binary"),
        ({"estimator": "unbiased"}, "`estimator` must"), ({"bandwidth": "median"}, "`bandwidth` must", TypeError)),
    *wrong(partial(tc.inference.skce_test, Q[:10], H[:10], **MULTI),
        ({"estimator": "biased"}, "`estimator` must")),
    *[Refusal(partial(f, P2, Y2, **BINARY, ties="split", weights=2 * Y2), "`weights` must")
      for f in (F.tce, F.tce_table, F.ace)],
    *[Refusal(partial(f, P[:4], Y[:4], **BINARY, weights=torch.full((4,), 2**52)), "`weights` must")
      for f in (F.ace, F.ks, F.atb, F.corp, F.tce)],
    *[row for f in (F.tce, F.tce_table, F.near_optimal_bins) for row in wrong(partial(f, preds=P, target=Y, **BINARY),
        ({"target": Y.double() / 2}, "`target` must", EITHER),
        ({"n_min": 260, "n_max": 900}, "`n_min` must"))],
    *[Refusal(partial(F.gce, P, Y.double() / 2, **BINARY, loss=squared_gap, bins=bins), "`target` must", EITHER)
      for bins in ("pava", "pava_bc")],
    (lambda: tc.MCE(task="binary", resolution=64), "`resolution` must", EITHER),
    *wrong(F.calibration_curve(P, Y, **BINARY).estimation_error,
        ({"distance": "cosine"}, "`distance` must"), ({"norm": "l3"}, "`norm` must"), ({"delta": -1}, "`delta` must")),
    *[Refusal(partial(F.estimation_error, P, Y, **BINARY, bins="equal_width", distance=distance, norm=norm),
              "`distance` must return ... shape (15,), got")
      for norm in ("l1", "mean")
      for distance in (lambda y, p: (y - p).abs().sum(), lambda y, p: 0.5, lambda y, p: (y - p)[:1])],
    # decisions
    *wrong(partial(F.bayes_risk, **NAMED, cost=[[0, 1], [1, 0]]),
        ({"cost": tc.CostMatrix.zero_one(3)}, "`cost` must have one row per class, 2, got 3 rows"),
        ({"cost": [[0, 1]]}, "`cost` must ... at least 2 rows ... [2]"),
        ({"cost": [[0, 1], [1, 0], [2, 2]]}, "`cost` must ... Transpose", ValueError, {"cost": [[0, 1, 2], [1, 0, 2]]}),
        ({"cost": [[0, 1], [1]]}, "`cost` must ... equal length ... [2, 1]"),
        ({"cost": [[], []]}, "`cost` must ... [0, 0]"),
        ({"cost": [0, 1]}, "`cost` must be ... matrix of numbers", TypeError),
        ({"cost": [[False, True], [True, False]]}, "`cost` must ... numbers", TypeError),
        ({"cost": [[0, INF], [1, 0]]}, "`cost` must ... inf ... large finite cost", ValueError,
         {"cost": [[0, 1e9], [1, 0]]}),
        ({"cost": [[0, 10**400], [1, 0]]}, "`cost` must ... finite ... inf"),
        ({"cost": [[0, 10**300], [1, 0]]}, "`cost` must ... at most 1e+150"),
    ),
    *wrong(partial(tc.BayesRisk, **BINARY, cost=[[0, 1], [1, 0]]),
        ({**MULTI, "num_classes": 3}, "one row per class, 3, got 2"),
        ({"cost": tc.CostMatrix.zero_one(3)}, "one row per class, 2, got 3"),
    ),
    (lambda: F.bayes_decisions(Q3, cost=[[0, 1], [1, 0]], class_axis=2, **MULTI), "`class_axis` must"),
    *wrong(partial(F.expected_cost, decisions=Y2, target=Y2, cost=[[0, 1], [1, 0]]),
        ({"decisions": P2}, "`decisions` must ... bayes_risk", TypeError),
        ({"decisions": Y2 + 1}, "`decisions` must be a column of `cost` in [0, 1], got 2 (1 of 2"),
        ({"decisions": [0, 1]}, "`decisions` must", TypeError),
        ({"decisions": Y2[:1]}, "`target` must"),
        ({"target": Y2 + 1}, "`target` must"),
    ),
    (lambda: F.optimal_threshold_cost(**NAMED, cost=[[0, 1, 0.1], [1, 0, 0.1]]), "`cost` must have 2 columns"),
    (lambda: F.optimal_threshold_cost(Q3, H3, **MULTI), "`task` must be 'binary'"),
    *wrong(partial(F.bayes_risk_curve, **NAMED),
        ({"points": [0.5, 1.0]}, "`points` must be in (0, 1)"),
        ({"points": [[0.5]]}, "`points` must be an int or have the shape (K,)"),
    ),
    (lambda: tc.CostMatrix.from_utilities([[0, NAN], [1, 0]]), "`utilities` must"),
    (lambda: tc.CostMatrix.zero_one(1), "`num_classes` must be at least 2"),
    (lambda: tc.CostMatrix.imbalanced(3, important=5), "`important` must ... got 5"),
    (lambda: tc.CostMatrix.zero_one(3).with_reject([0.1]), "`cost` must ... 3 classes"),
    (lambda: tc.CostMatrix.zero_one(2).with_reject(True), "`cost` must ... True", TypeError),
    (lambda: tc.CostMatrix.imbalanced(2, factor="3"), "`factor` must ... '3'", TypeError),
    (lambda: tc.CostMatrix.imbalanced(2, factor=-3), "`factor` must ... -3"),
    *wrong(partial(F.bayes_risk_area, **NAMED),
        ({"weight": "beta"}, "`weight` must be 'uniform', 'beta22' ... got 'beta'", ValueError, {"weight": "beta22"}),
        ({"weight": Beta(torch.ones(2), torch.ones(2))}, "`weight` must ... of two numbers"),
        ({"weight": lambda _: 1.0}, "`weight` must return a tensor ... got float"),
        ({"weight": lambda c: c - 0.5}, "`weight` must ... at least 0"),
    ),
    *wrong(partial(F.bayes_risk_area, torch.full((2, 3), 1 / 3), Y2, **MULTI),
        ({"weight": lambda c: c}, "shape (1024,) ... got shape (1024, 3) ... rows"),
        ({"weight": "beta22"}, "`weight` must ... for 3 classes ... positive_classes", ValueError,
         {"weight": "beta22", "positive_classes": [1]}),
        ({"weight": lambda c: c[..., 0], "n_points": 2}, "`n_points` must be at least 3"),
        ({"weight": torch.sum, "component": "error"}, "`component` must ... standard_error"),
    ),
    (lambda: tc.BayesRiskArea(num_classes=3, weight="beta22", **MULTI), "`weight` must ... for 3 classes"),
    # distributions
    (lambda: F.ecd(Normal(P2[:, None], 1), P2), "event shape ... (2, 1) ... (2,)"),
    (lambda: F.ecd(Normal(P2, 1), P2, from_logits=True), "omitted", ValueError, lambda: F.ecd(Normal(P2, 1), P2)),
    (lambda: F.ecd(Normal(P2, 1), P2, task="binary"), "`task` must be omitted for a distribution"),
    (lambda: F.ecd(Normal(P2, 1), P2, weights=t(1.0)), "`weights` must ... (2,)"),
    (lambda: F.nees(Laplace(P2, 1), P2), "`distribution` must ... Laplace ... use ecd", TypeError,
     lambda: F.ecd(Laplace(P2, 1), P2)),
    *wrong(partial(F.nees_interval, n=5),
        ({"n": 0}, "`n` must"), ({"dimension": 0}, "`dimension` must"), ({"level": 1}, "`level` must")),
    # label distributions
    *wrong(partial(F.total_variation, Q3, COUNTS, **MULTI),
        ({"component": "corrected"}, "`component` must be one of 'value', 'noise_floor', got 'corrected'")),
    *wrong(partial(tc.KLDivergence, task="binary"),
        ({"component": "b"}, "`component` must be one of 'value', 'noise_floor', 'corrected', got")),
    *wrong(partial(tc.SquaredDistance, task="binary"), ({"priors": [0.5, 0.5]}, "`priors` must be", TypeError)),
    *[row for f in (F.total_variation, F.kl_divergence, F.entropy_gap, F.squared_distance)
      for row in wrong(partial(f, preds=Q3, target=COUNTS, component="noise_floor", **MULTI),
        ({"target": Q3}, "`target` must be annotator counts ... float32", TypeError))],
    *[row for f in (F.kl_divergence, F.entropy_gap, F.squared_distance)
      for row in wrong(partial(f, preds=Q3, target=COUNTS, component="corrected", **MULTI),
        ({"target": Q3}, "`target` must be annotator counts ... float32", TypeError),
        ({"target": H3}, "`target` must be annotator counts ... torch.int64 (3,)", TypeError),
        ({"target": COUNTS.index_put((t(1),), t(0, 1))},
         "`target` must have at least 2 annotators in every row, got 1 (1 of 3"))],
    # tests, intervals and wrappers
    *wrong(partial(tc.inference.calibration_test, metric=tc.ECE(task="binary"), preds=P2, target=Y2),
        ({"level": 95}, "`level` must be between 0 and 1, got 95", ValueError, {"level": 0.95}),
        ({"level": "95%"}, "`level` must be a number", TypeError),
        ({"n_replicates": 0}, "`n_replicates` must be"),
        ({"n_replicates": 99.5}, "`n_replicates` must be an int", TypeError),
        ({"seed": 1.5}, "`seed` must be an int", TypeError),
        ({"metric": tc.NLL(task="binary")}, "`metric` must be a calibration error to have a noise floor", TypeError),
        ({"metric": tc.CORP(task="binary", component="dsc")}, "`component` must be 'mcb' for a test"),
        ({"task": "multiclass"}, "`task` must be an option of the metric", TypeError),
        ({"n_bins": 7}, "`n_bins` must be an option of the metric", TypeError),
    ),
    (lambda: run_error_test(ErrorTest(ece_from_bins), BinStats(torch.ones(3, 4))),
     "`statistic` must contain sums of noise, got bins without"),
    (lambda: tc.inference.calibration_test(tc.ESCE(**MULTI, num_classes=C), Q, H, level=95), "`level` must be between"),
    (lambda: classwise_auroc().curve(), "`mode` must be one of 'top_label'"),
    (lambda: tc.inference.calibration_test(P2), "`target` must be a tensor", TypeError),
    (lambda: tc.inference.calibration_test(tc.ACE(**BINARY), P2, Y2, weights=2.0 * Y2, n_replicates=39),
     "`weights` must be integers ... got floating numbers other than 0 and 1. Convert counts", ValueError,
     lambda: tc.inference.calibration_test(tc.ACE(**BINARY), P2, Y2, weights=2 + Y2, n_replicates=39)),
    (lambda: tc.inference.calibration_test(tc.ECE, P2, Y2), "Pass an error such as ECE(task='binary')", EITHER),
    *wrong(partial(tc.inference.bootstrap, metric=F.nll, preds=P2, target=Y2, task="binary", n_replicates=40),
        ({"metric": "ece"}, "`metric` must be a function such as torchcalib.functional.ece, got 'ece'", TypeError),
        ({"metric": lambda *a, **k: 0.5}, "`metric` must return a tensor", TypeError),
        ({"metric": lambda *a, **k: torch.zeros(())}, "`metric` must return shape (40,) for weights of 40"),
        ({"metric": lambda *a, **k: torch.zeros((), dtype=torch.int64)}, "must return a floating tensor, got",
         TypeError),
        ({"n_replicates": 0}, "`n_replicates` must be"),
        ({"n_replicates": 38}, "`n_replicates` must be at least 39 for level=0.95, got 38", ValueError,
         {"n_replicates": 39}),
        ({"metric": pytest.fail, "level": 0.99}, "`n_replicates` must be at least 199 for level=0.99", ValueError,
         {"level": 0.99, "n_replicates": 199}),
        ({"level": "95%"}, "`level` must be a number, got '95%'. A 95% interval has level 0.95", TypeError),
        ({"level": 95}, "`level` must be between 0 and 1, got 95. A 95% interval has level 0.95", ValueError,
         {"level": 0.95}),
        ({"seed": 0.5}, "`seed` must be an int, got 0.5", TypeError),
        ({"seed": 2**64}, "`seed` must fit in 64 bits"),
        ({"groups": torch.zeros(2)}, "`groups` must be a tensor of integers, got dtype torch.float32", TypeError),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, "`groups` must have one number per sample, shape"),
        ({"weights": torch.ones(40, 2)}, "`weights` must have one value per sample, got shape (40, 2)"),
        ({"metric": tc.calibration.relative_calibration_loss, "calibration": (P2, Y2, torch.ones(3, 2))},
         "`calibration` must have one weight per sample, got replicate axes (3,)"),
        ({"n_bootstrap": 9}, "Did you mean `n_replicates`", TypeError, {"n_replicates": 99}),
    ),
    *wrong(partial(tc.Bootstrapped, metric=tc.NLL(task="binary")),
        ({"metric": F.nll}, "`metric` must be a torchcalib metric, got fun", TypeError),
        ({"metric": tc.TCE(task="binary")}, "Pass `resolution`", ValueError,
         {"metric": tc.TCE(task="binary", resolution=64)}),
        ({"metric": tc.Bootstrapped(tc.NLL(task="binary"))}, "not a wrapper, got Bootstrapped"),
        ({"n_replicates": 10}, "`n_replicates` must be at least 39", ValueError, {"n_replicates": 39}),
        ({"seed": "0"}, "`seed` must be an int", TypeError),
    ),
]  # fmt: skip

# States, groups and clusters

OF_3_GROUPS = {"function": F.ece, "preds": P[:3], "target": Y[:3], "groups": t(0, 1, 2), "task": "binary"}
PIXELS = torch.full((2, 2, 2), 0.5)
OF_2_GROUPS = {"preds": P[:3], "target": Y[:3], "groups": t(0, 1, 1)}
NLL = tc.NLL(task="binary")


def by_group(metric, preds=P[:3], target=Y[:3]):
    metric = tc.ByGroup(metric, num_groups=2)
    metric.update(preds, target, groups=t(0, 1, 1))
    return metric


def of_two_metrics():
    metrics = tc.CalibrationCollection([NLL.clone(), tc.KS(task="binary")])
    metrics.update(P2, Y2)
    return metrics


def of_names(names):
    return tc.ByGroup(tc.ECE(task="binary"), group_names=list(names))


def unsplittable():
    metric = tc.NLL(task="binary")
    object.__setattr__(metric.kind, "accumulator", object())
    return metric


STATES = [
    *wrong(partial(tc.ByGroup, metric=NLL, num_groups=2),
        ({"metric": unsplittable()}, "must store samples, or sums that can be split by group"),
        ({"metric": F.ece}, "be a torchcalib metric, got function", TypeError),
        ({"metric": tc.Bootstrapped(NLL)}, "must be a metric that is not a wrapper"),
        ({"num_groups": 0}, "num_groups"), ({"num_groups": 2**31}, "num_groups"),
        ({"num_groups": None}, "must be", TypeError),
        ({"num_groups": None, "group_names": "ab"}, "must be", TypeError),
        ({"num_groups": 3, "group_names": ["a", "b"]}, "must be", TypeError)),
    (lambda: tc.CalibrationCollection([NLL.clone()]).from_bytes(of_two_metrics().state_bytes()),
     "must contain the states of this collection only, got `KS`", ValueError,
     lambda: of_two_metrics().from_bytes(of_two_metrics().state_bytes())),
    (lambda: of_names("ab").merge_state(of_names("ba")), "must have the configuration ... group_names", ValueError,
     lambda: of_names("ab").merge_state(of_names("ab"))),
    (lambda: tc.Bootstrapped(by_group(NLL)), "`metric` must be a metric that is not a wrapper, got ByGroup"),
    *wrong(partial(by_group(tc.ECE(task="binary")).update, **OF_2_GROUPS),
        ({"groups": P[:3]}, "`groups` must be a tensor of integers, got dtype torch.float64", TypeError),
        ({"groups": t(0, 5, 1)}, "`groups` must be in [0, 1] ... got 5 (1 of 3 rows)"),
        ({"groups": t(0, 1)}, "`groups` must have one number per sample, shape (3,), got (2,)"),
        ({"groups": t(0, 1, 1)[:, None]}, "`groups` must have one number per sample"),
        ({"groups": t(0, 1, 1).to("meta")}, "`groups` must be on the device of `preds`")),
    (lambda: by_group(NLL).update(P[:3], Y[:3]), "groups", TypeError),
    (lambda: by_group(NLL).worst(), "must be a calibration error to have a noise floor, got NLL", TypeError),
    (lambda: by_group(tc.ECE(**LABELS, num_labels=2, average=None), M[:3, :2], L[:3, :2]).worst(n_replicates=39),
     "must have one value for each group, got shape (2, 2)"),
    (lambda: by_group(tc.ECE(task="binary")).worst(by="n"),
     "must be one of 'excess', 'value', 'shrunk', 'p_value', got 'n'"),
    *wrong(partial(F.by_group, **OF_3_GROUPS),
        ({"groups": [0.5, 1.0, 1.0]}, "must be a tensor of integers", TypeError),
        ({"groups": t(0, 1)}, "one number per sample"),
        ({"groups": t(0, -2, 1)}, "`groups` must be in [0, 1]"),
        ({"num_groups": 2}, "`groups` must be in [0, 1]", ValueError, {"num_groups": 3}),
        ({"function": "ece"}, "`function` must be a function such as", TypeError),
        ({"function": lambda *_, **__: 1.0}, "`function` must return a tensor", TypeError),
        ({"target": t(0, 1)}, "as many samples")),
    *wrong(partial(tc.SequentialTest, **BINARY),
        ({"level": 0.95}, "`level` must be above 0 and at most 0.5, got 0.95. It is the probability of a false alarm"),
        ({"level": "1%"}, "`level` must be a number, got '1%'", TypeError),
        ({"restart": 1}, "`restart` must be", TypeError)),
    *wrong(partial(F.sequential_test, P2, Y2, **BINARY), ({"weights": 0.5 * Y2}, "`weights` must be whole numbers")),
    *[(partial(wrapper, tc.SequentialTest(**BINARY, restart=True), **options), text, ValueError,
       partial(wrapper, tc.SequentialTest(**BINARY), **options))
      for wrapper, options, text in ((tc.ByGroup, {"num_groups": 2}, "sums that can be split by group"),
                                     (tc.Bootstrapped, {"n_replicates": 39}, "must have sums as its state"))],
    (lambda: tc.SequentialTest(**BINARY, restart=True).merge_state(tc.SequentialTest(**BINARY, restart=True)),
     "`restart` must be False to add the states of ranks or shards ... in order", ValueError,
     lambda: tc.SequentialTest(**BINARY).merge_state(tc.SequentialTest(**BINARY))),
    *wrong(partial(F.by_group, **{**OF_3_GROUPS, "groups": {"a": ["x", "y", "x"], "b": t(0, 1, 1)}}),
        ({"groups": {"a": ["x", "y"], "b": t(0, 1)}},
         "`groups` must have one value per sample, shape (3,), got (2,) in 'a'")),
    (lambda: tc.ByGroup(NLL, num_groups=2).update(P[:3], Y[:3], groups={"a": ["x", "y", "x"], "b": t(0, 1, 1)}),
     "`groups` must be numbers for a metric without names of groups, got 'a=x, b=0'", TypeError),
    (lambda: tc.ByGroup(NLL, group_names={"a": ["x", "y"], "b": [0]}).update(
        P[:3], Y[:3], groups={"a": ["x", "y", "x"], "b": t(0, 1, 1)}),
     "`groups` must be among `group_names`, got 'a=x, b=1'"),
    *wrong(partial(tc.slices, preds=P, target=Y, columns={"a": Y}, n_replicates=9),
        ({"depth": 0}, "`depth` must be at least 1, got 0"),
        ({"n_bins": 0}, "`n_bins` must be at least 1"),
        ({"n_replicates": 0}, "`n_replicates` must be at least 1"),
        ({"min_size": -1}, "`min_size` must be a number of at least 0, got -1"),
        ({"columns": "a"}, "`columns` must be a DataFrame, a dict of columns or a list of arrays with 240", TypeError),
        ({"columns": {"a": Y[:3]}}, "`columns` must have one value per sample, shape (240,), got (3,) in 'a'"),
        ({"preds": M, "target": L, "task": "multilabel"}, "`task` must be 'binary' or 'multiclass' for slices"),
        ({"columns": {}}, "`columns` must contain at least one column, got none")),
    *wrong(partial(tc.required_n, error=0.1),
        ({"error": 0}, "`error` must be a number other than 0, got 0"),
        ({"error": 0.9}, "`error` must be below 0.5 in absolute value"),
        ({"power": 80}, "`power` must be between 0 and 1, got 80"),
        ({"power": 0.01}, "`power` must be above `level`, 0.05, got 0.01"),
        ({"level": 5}, "`level` must be between 0 and 1, got 5"),
        ({"fault": "slope"}, "`fault` must be one of 'shift', 'temperature', got 'slope'"),
        ({"test": "mce"}, "`test` must be one of 'esce', 'ece', 'rmsce', None, got 'mce'"),
        ({"n_tests": 0}, "`n_tests` must be at least 1"),
        ({"systems": 3}, "`systems` must be at most 2"),
        ({"systems": 2}, "`spread` must be given for two systems", TypeError, {"systems": 2, "spread": 0.5}),
        ({"systems": 2, "spread": 0.5, "test": "ece"}, "`test` must be None for two systems, got 'ece'", ValueError,
         {"systems": 2, "spread": 0.5}),
        ({"design_effect": 0}, "`design_effect` must be finite and above 0"),
        ({"prevalence": 0.05}, "`spread` below sqrt(prevalence * (1 - prevalence))", ValueError,
         {"prevalence": 0.1, "spread": 0.1}),
        ({"preds": Z}, "`preds` must be in [0, 1], got values outside", ValueError, {"preds": Z, "from_logits": True}),
        ({"preds": PIXELS}, "`preds` must have shape (N,) or (N, C) and no NaN")),
    (tc.minimum_detectable_error, "`n` must be given without `preds`, got None", TypeError),
    *wrong(partial(tc.Clustered, metric=tc.ECE(task="binary")),
        ({"metric": tc.SKCE(task="binary")}, "which compares pairs of rows"),
        ({"metric": tc.SequentialTest(**BINARY)}, "one bet for each cluster. Pass clusters to its `update`"),
        ({"metric": tc.Bootstrapped(NLL)}, "not a wrapper"),
        ({"metric": "ece"}, "must be a torchcalib metric", TypeError)),
    *wrong(partial(tc.Clustered(tc.ECE(task="binary")).update, P[:3], Y[:3], clusters=t(0, 1, 1)),
        ({"clusters": P[:3]}, "`clusters` must be integers or text, got dtype torch.float64", TypeError),
        ({"clusters": P[:3] > 0}, "got dtype torch.bool", TypeError),
        ({"clusters": ["a", None, "b"]}, "must name the cluster of each row, got a missing value"),
        ({"clusters": None}, "`clusters` must be passed to every update"),
        ({"clusters": t(0, 1)}, "one identifier per sample, shape (3,)"),
        ({"clusters": t(0, 1, 1)[:, None].expand(3, 2)}, "got (3, 2)")),
]  # fmt: skip

# Values per image

PIXELS = torch.full((2, 3, 4), 1 / 3), torch.zeros(2, 4, dtype=torch.long)
PER_IMAGE = {"num_classes": 3, "mode": "classwise", "per_image": True}
CASES = tc.ECE(**PER_IMAGE)
CASES.update(*PIXELS, case=["a", "b"])
OTHER_CASES = tc.ECE(**PER_IMAGE)
OTHER_CASES.update(*PIXELS)
OF_IMAGES = [
    *wrong(tc.Images,
        ({"classes": 1}, "`classes` must be a list of class indices or names, got 1", TypeError, {"classes": [1]}),
        ({"classes": []}, "`classes` must be a list", TypeError),
        ({"classes": ["liver"]}, "`classes` must be class indices, or names in `class_names`, got 'liver'. Pass "
         "class_names=[...]", ValueError, {"classes": ["liver"], "class_names": ["liver", "spleen"]}),
        ({"classes": ["x"], "class_names": ["a", "b"]}, "`classes` must ... got 'x'. Names are a, b.", ValueError,
         {"classes": ["a"], "class_names": ["a", "b"]}),
        ({"classes": [-1]}, "`classes` must be class indices"),
        ({"classes": [1, 1]}, "`classes` must be distinct, got [1, 1]"),
        ({"classes": [1], "include_background": False}, "`include_background` must be True ... Omit class 0",
         ValueError, {"classes": [1]}),
        ({"class_names": "abc"}, "`class_names` must be distinct names"),
        ({"class_names": ["a", "a"]}, "`class_names` must be distinct names"),
        ({"ignore_empty": 1}, "`ignore_empty` must be True or False", TypeError)),
    *wrong(partial(F.ece, *PIXELS, mode="classwise", class_axis=1, per_image=True),
        ({"per_image": tc.Images(classes=[3])}, "`classes` must be some of the 3 classes, got [3]"),
        ({"per_image": tc.Images(class_names=["a"])}, "`class_names` must have 3 names, got 1"),
        ({"per_image": 2}, "`per_image` must be True, False or Images(...), got 2", TypeError),
        ({"batch_dims": 1}, "`batch_dims` must be 0 with `per_image`, got 1"),
        ({"per_image": tc.Images(include_background=False), "mode": "top_label"},
         "`per_image` must not choose classes ... Pass mode='classwise'", ValueError,
         {"per_image": tc.Images(include_background=False)})),
    *wrong(partial(F.nll, *PIXELS, class_axis=1, per_image=True),
        ({"reduction": "none"}, "`per_image` must be False with reduction='none'"),
        ({"per_image": tc.Images(ignore_empty=True)}, "`per_image` must have ignore_empty=False")),
    *wrong(partial(tc.ECE, **PER_IMAGE),
        ({"batch_shape": (2,)}, "`batch_shape` must be () with `per_image`, got (2,)")),
    *wrong(partial(tc.MCE, **PER_IMAGE), ({"bins": "equal_mass"}, "`per_image` must be False ... bins='equal_width'")),
    Refusal(lambda: tc.ByGroup(CASES, num_groups=2), "`metric` must have no `per_image`"),
    Refusal(lambda: tc.Clustered(CASES), "`metric` must have no `per_image`"),
    Refusal(lambda: tc.Bootstrapped(CASES), "`metric` must have no `per_image`"),
    Refusal(lambda: tc.NLL(num_classes=3).update(*PIXELS, case=1), "`case` must be None without `per_image`, got 1"),
    Refusal(lambda: tc.CalibrationCollection([tc.NLL(num_classes=3)]).update(*PIXELS, case=1),
            "`case` must be None for a collection"),
    *wrong(lambda case: tc.ECE(**PER_IMAGE).update(*PIXELS, case=case),
        ({"case": ["a"]}, "`case` must have one name for each of the 2 images, got 1", ValueError,
         {"case": ["a", "b"]}),
        ({"case": 0.5}, "`case` must be text or an int", TypeError, {"case": 5}),
        ({"case": ["", "b"]}, "`case` must be names", ValueError, {"case": ["a", "b"]}), works=False),
    Refusal(lambda: tc.NLL(num_classes=3).cases(), "`per_image` must be True for a table of images, got False. Create "
            "NLL(..., per_image=True)"),
    *wrong(CASES.cases().test,
        ({"clusters": [1]}, "`clusters` must have one entry for each of the 2 images, got shape (1,)", ValueError,
         {"clusters": [1, 2]}),
        ({"clusters": {"a": 1}}, "`clusters` must have a cluster for each image, got none for 'b'", ValueError,
         {"clusters": {"a": 1, "b": 2}})),
    Refusal(lambda: CASES.cases().difference(OTHER_CASES.cases()), "`other` must have the same images and classes",
            ValueError, lambda: CASES.cases().difference(CASES.cases())),
    *wrong(partial(F.boundary_band, target=torch.zeros(1, 4, dtype=torch.long), width=1),
        ({"target": torch.zeros(1, 4)}, "`target` must be integer labels, got torch.float32", TypeError),
        ({"target": torch.zeros(4, dtype=torch.long)}, "`target` must have at least 2 axes, got shape (4,)"),
        ({"width": 0}, "`width` must be finite and above 0"), ({"width": "1"}, "`width` must be a number", TypeError),
        ({"spacing": [0.0]}, "`spacing` must be finite and above 0"),
        ({"ignore_index": 0.5}, "`ignore_index` must be an int", TypeError)),
    *wrong(partial(F.mean_probabilities, members=[torch.ones(2, 2, 1), torch.zeros(2, 2, 1)]),
        ({"members": torch.ones(2, 2)}, "`members` must be a list or an iterator", TypeError),
        ({"members": []}, "`members` must have at least one prediction, got none"),
        ({"members": [torch.ones(2), torch.ones(3)]}, "`members` must have equal shapes, got (2,) and (3,) of member "
         "1"),
        ({"members": [torch.ones(2), t(NAN, 2.0)]}, "`members` must be probabilities in [0, 1], got 2 in member 1"),
        ({"members": [torch.ones(2).long()]}, "`members` must be floating predictions of samples, got torch.int64 of "
         "shape (2,)", TypeError),
        ({"members": [0.2, 0.4]}, "`members` must be floating predictions of samples, got torch.float64 of shape (",
         TypeError),
        *(({"members": x}, "`members` must be a list or an iterator ... Pass [p1, p2]", TypeError)
          for x in (np.ones((2, 2)), pd.DataFrame({"a": [0.2]}), {"a": [0.2]})),
        ({"members": [pd.DataFrame({"a": [0.2], "b": [0.8]}), pd.DataFrame({"b": [0.8], "a": [0.2]})]},
         "`members` must have the same columns in the same order, got `a`, `b` and `b`, `a` of member 1"),
        ({"task": "binry"}, "`task` must be"),
        ({"from_logits": True}, "`task` must be 'binary', 'multiclass' or 'multilabel', got None", TypeError,
         {"from_logits": True, "task": "binary"}),
        ({"from_logits": True, "task": "multiclass"}, "`class_axis` must be an axis of logits", ValueError,
         {"from_logits": True, "task": "multiclass", "class_axis": 1}),
        ({"from_logits": True, "task": "multiclass", "class_axis": 3}, "`class_axis` must be an axis of logits"),
        ({"from_logits": 1}, "`from_logits` must be", TypeError)),
    Refusal(lambda: tc.ece([PIXELS[0]] * 3, PIXELS[1]), "`preds` must be one tensor for one target, got a list of 3",
            ValueError, lambda: tc.ece(tc.mean_probabilities([PIXELS[0]] * 3), PIXELS[1])),
]  # fmt: skip

# Operations, and special functions

ONES, HALF = torch.ones(40, dtype=torch.int64), torch.tensor(0.5)
OF_INTEGERS = "must be an integer tensor or an int, got"
OPERATIONS = [
    *wrong(partial(find, "pava_bc", ONES, 0 * ONES),
        ({"n_min": 40, "n_max": 40}, "`n_min` must be below the number of samples, got 40 for 40 samples."),
        ({"n_min": 9, "n_max": 8}, "`n_min` must be at most `n_max`, got 9 and 8"),
        ({"n_min": 9}, "`n_min` must be at most `n_max`, got 9 and 8"),
        ({"backend": "rounds"}, "must be one of 'auto', 'numba', 'python' for 'pava_bc' on cpu,"), works=False),
    (lambda: find("pava_bc", ONES[:1], ONES[:1], n_min=1), "below the number of samples, got 1 for 1 samples"),
    (lambda: binomial_test(HALF, 3, HALF), f"`k` {OF_INTEGERS} a tensor of torch.float32", TypeError),
    (lambda: binomial_test(1, 3.0, HALF), f"`n` {OF_INTEGERS} float", TypeError, lambda: binomial_test(1, 3, HALF)),
    (lambda: binomial_test(1, torch.tensor(True), HALF), f"`n` {OF_INTEGERS} a tensor of torch.bool", TypeError),
    (lambda: binomial_test(1, 3, HALF + 1j), "`p` must be a real tensor or number, got a tensor of torch.complex64",
     TypeError),
    (lambda: betainc(1, 1, 0.5), "`x` must be a floating tensor, got float", TypeError, lambda: betainc(1, 1, HALF)),
    (lambda: betainc("1", 1, HALF), "`a` must be a real tensor or number, got str", TypeError),
    # lists of tensors
    (lambda: F.ece([row.to_sparse() for row in Q], H, **MULTI), ".to_dense()", TypeError,
     lambda: F.ece([row.to_sparse().to_dense() for row in Q], H, **MULTI)),
    (lambda: F.ece([Q[0], Q[0, :2]], H, **MULTI), "shapes (4,) and (2,)", TypeError),
    (lambda: F.ece([[0.1], [0.1, 0.2]], H, **MULTI), "must have rows of equal length ... pad_sequence", TypeError),
]  # fmt: skip

# Tasks, names of classes and orders of arguments

NAMES, TEXT = ("cat", "dog", "eel"), ["cat", "cow"] * 3
ARRAY = np.random.default_rng(0).dirichlet([1.0] * 3, 6)
SIX = np.array([0, 1, 2, 2, 1, 0])
COPIES = {"y_true": Y2, "target": Y2, "preds": P2}
SOFT = Q.flip(0).T


def both(preds, target, **options):
    """Compare two systems with equal predictions."""
    return tc.compare({"a": preds, "b": preds}, target, n_replicates=39, **options)


TASKS = [
    *[Refusal(partial(infer_task, torch.zeros(target.shape if text.startswith("`") else (3, 3)), target), text)
      for target, text in (
        (torch.eye(3).long(), "`task` must be given if `target` has the shape of `preds`, got (3, 3) for both"),
        (torch.zeros(3, 3, 2).long(), "annotator counts for no and yes ... Pass task='multilabel'"),
        (torch.zeros(4, 5, 2), "must have one label for each sample"),
    )],
    *wrong(partial(prepare, preds=ARRAY, target=SIX),
        ({"target": ["cat"] * 6}, "must contain numbers if classes have no names, got text: 'cat'", ValueError,
         {"target": ["cat"] * 6, "class_names": NAMES}),
        ({"target": TEXT, "class_names": NAMES}, "the classes `cat`, `dog`, `eel`, got `cat`, `cow`, of which `cow` is",
         ValueError,
         {"target": TEXT, "class_names": ("cat", "cow", "eel")}),
        ({"target": ["cat", None] * 3, "class_names": NAMES}, "every row, got None in row 1"),
        ({"class_names": "abc"}, "`class_names` must be a list of strings, got 'abc'", TypeError),
        ({"class_names": [0.5, 1, 2]}, "`class_names` must be a list of strings, got (0.5, 1, 2)", TypeError),
        ({"class_names": ["a", "b", "a"]}, "got 'a' more than once"),
        ({"preds": [[0.1, 0.9], [1.0]]}, "`preds` must have rows of equal length", TypeError),
        ({"preds": np.array([["x"] * 3] * 6)}, "`preds` must contain numbers, got text such as 'x'", TypeError),
        ({"preds": ARRAY + 1j}, "`preds` must contain numbers, got complex128", TypeError),
    ),
    *wrong(partial(F.nll, preds=pd.DataFrame(ARRAY, columns=NAMES), target=SIX, task="multiclass"),
        ({"target": pd.DataFrame(ARRAY, columns=("cat", "dog", "cow"))},
         "`target` must have the columns of `preds`, 'cat', 'dog', 'eel', got 'cat', 'dog', 'cow'. Rename", ValueError,
         {"target": pd.DataFrame(ARRAY, columns=NAMES)}),
        ({"preds": pd.DataFrame(ARRAY, columns=("p_1", "p_1", "p_2"))}, "unique column names, got `p_1` several times"),
        ({"preds": pd.DataFrame(ARRAY, columns=("p_1", "p.1", "p_2"))}, "`preds` must have columns of different "
         "classes, got 'p_1', 'p.1', 'p_2'"),
        ({"preds": [{"a": 0.3, "b": 0.7}, {"a": 1.0}]}, "`preds` must have the same classes in every row, got 'a', 'b' "
         "in row 0 and 'a' in row 1 (counted from 0)"),
        ({"preds": np.ma.masked_less(ARRAY, 0.05)}, "`preds` must have no masked values, got", TypeError,
         {"preds": np.ma.masked_less(ARRAY, 0)}),
        ({"preds": [torch.full((3, 3, 4), 0.3)] * 3, "target": [torch.zeros(3, 4)] * 3},
         "`preds` must be one tensor, or a list of batches, got a list of shapes (3, 3, 4) with targets (3, 4)"),
        works=False),
    (lambda: tc.report(ARRAY[:, 0], SIX, pred=SIX[:5]), "`pred` must have one predicted label for each target, got "
     "shapes (5,) and (6,)"),
    (lambda: F.ece(ARRAY, np.array(["dog", "owl", "cat"])[SIX], "multiclass"),
     "Pass class indices, for example pandas.Categorical(labels, categories="),
    (lambda: F.ece(ARRAY[:, 0], ["maybe", "yes"] * 3), "if classes have no names, got text: 'maybe', 'yes'", ValueError,
     lambda: F.ece(ARRAY[:, 0], ["no", "yes"] * 3)),
    *wrong(partial(F.brier_score, preds=[90, 5, 100], target=[1.0, 0.5, 1.0], from_logits=True),
        *((given, "`preds` must be float16, bfloat16, float32 or float64, got", TypeError) for given in (
            {"target": [1, 0, 1]},
            {"preds": [30, 5, 10], "target": [1, 0, 1], "from_logits": False},  # ratings
            {"preds": [90, 5, 101], "target": [1, 0, 1], "from_logits": False},
            {"preds": [90, -5, 100], "target": [1, 0, 1], "from_logits": False},
            {"target": [90, 0, 1], "task": "binary", "from_logits": False},  # classes
            {"preds": t(90, 5, 100), "target": [1, 0, 1], "from_logits": False},
        )), works=False),
    (lambda: tc.ECE("binary").update(P2, Y2, P2, sample_weight=P2),
     "`sample_weight` must be omitted if `weights` is given", TypeError),
    *[Refusal(partial(call, **COPIES), "`y_true` must be omitted if `target` is given, got both", TypeError)
      for call in (F.optimal_bins, tc.report)],
    (lambda: F.ece(y_proba=P2), "`target` must be a tensor, an array or a list of numbers, got None", TypeError),
    (lambda: F.ece(Y.double().numpy(), P.numpy()), "The arguments seem to be swapped", EITHER),
    (lambda: tc.compare(Q, Q, H), "compare({'a': preds, 'b': other_preds}, target)", EITHER, lambda: both(Q, H)),
    (lambda: both(Q, H, groups=H), "`groups` must be an argument of compare, got an unknown one. Pass them to by_group",
     TypeError, lambda: both(Q, H)),
    (lambda: F.ece(Q, H, **MULTI, include_background=False), "got an unknown one. Pass per_image=Images(include_back",
     TypeError, lambda: F.ece(Q, H, **MULTI)),
    (lambda: tc.Report.load(5), "`path` must be a str or a pathlib.Path, got 5. Pass the path", TypeError),
    (lambda: tc.evaluate(None, ARRAY, SIX), "torchcalib.Report.from_estimator(clf, X, y)", EITHER),
    (lambda: F.nll(Q.T, SOFT, **MULTI), "class_axis=0 for (C, N)", ValueError,
     lambda: F.nll(Q.T, SOFT, **MULTI, class_axis=0)),
    (lambda: tc.ECE(**MULTI, num_classes=C).update(Q.T, SOFT), "Pass class_axis=0 if", ValueError,
     lambda: tc.ECE(**MULTI, class_axis=0).update(Q.T, SOFT)),
    *[Refusal(partial(way, P, Y, **MULTI), "Pass task='binary' if each value is P") for way in (tc.report, both)],
    *[Refusal(partial(way, preds, target, **MULTI, **given),
              "Check that there are rows, and that `ignore_index`, `weights`")
      for way in (tc.report, both) for preds, target, given in (
        (Q[:0], H[:0], {}), (Q, 0 * H, {"ignore_index": 0}), (Q, H, {"weights": torch.zeros(N)}))],
    *[Refusal(partial(call, P[:6], torch.tensor([0.0, 1.0, 0.3, 1.0, 0.0, 1.0], dtype=P.dtype), task="binary"),
              "must be labels 0 and 1, got 0.3 (1 of 6 rows) ... repeat other")
      for call in (F.aurc, F.tce, F.corp, tc.BayesianBinning().fit)],
    *[Refusal(partial(metric.update, P[:6], torch.tensor([0.0, 1.0, 0.3, 1.0, 0.0, 1.0], dtype=P.dtype)),
              "must be labels 0 and 1, got 0.3 (1 of 6 rows) ... repeat other")
      for metric in (tc.AURC("binary"), tc.TCE("binary"))],
]  # fmt: skip

# Losses

LOSSES = [
    *wrong(partial(tc.losses.mmce, **NAMED),
        ({"bandwidth": 1e-4}, "`bandwidth` must"), ({"weighted": "yes"}, "`weighted` must", TypeError),
        ({"mode": "classwise"}, "`mode` must"), ({"average": None}, "`average` must", EITHER)),
    *wrong(partial(tc.losses.soft_binned_ece, **NAMED),
        ({"temperature": 0.0}, "`temperature` must"), ({"temperature": "cold"}, "`temperature` must", TypeError),
        ({"norm": "max"}, "`norm` must"), ({"n_bins": 0}, "`n_bins` must")),
    *[row for module in (tc.losses.SoftBinnedECELoss, tc.losses.MMCELoss, tc.losses.ECELoss, tc.losses.CanonicalLoss,
                         tc.losses.SKCELoss)
      for row in (
        *wrong(partial(module, task="binary"), ({"task": "any"}, "`task` must"),
               ({"weights": P2}, "Pass weights=... in the call", TypeError),
               ({"sample_weight": P2}, "Pass weights=... in the call", TypeError),
               ({"num_bins": 3}, f"`num_bins` must be an argument of {module.__name__}, got an unknown", TypeError)),
        Refusal(partial(module("binary"), t(0.2, 7.0), Y2), "Pass from_logits=True", ValueError,
                partial(module("binary", from_logits=True), t(0.2, 7.0), Y2)))],
    *[Refusal(partial(function, P2, Y2, task="any"), "`task` must")
      for function in (tc.losses.soft_binned_ece, tc.losses.mmce, F.ece, F.canonical_error, F.skce)],
]  # fmt: skip

# Calibrators and their fits

SIX_P, SIX_Y = torch.tensor([0.2, 0.7, 0.4, 0.9, 0.3, 0.6]), torch.tensor([0, 1, 1, 1, 0, 0])
TURNS = torch.arange(6) % 2
LOSS_OPTIONS = [
    ({"n_folds": 1}, "`n_folds` must be at least 2"),
    ({"seed": 2**70}, "`seed` must fit in 64 bits"),
    ({"folds": torch.arange(5)}, "`folds` must have one number per sample"),
    ({"folds": SIX_P}, "`folds` must be a tensor of integers", TypeError),
    ({"folds": torch.zeros(6, dtype=torch.int64)}, "at least 2 folds"),
    ({"folds": SIX_Y}, "`folds` must leave samples of every class"),
    ({"folds": "strata"}, "`folds` must be 'random', 'stratified'"),
    ({"n_repeats": 0}, "`n_repeats` must be at least 1"),
    ({"n_repeats": 2, "folds": TURNS}, "`n_repeats` must be None"),
    ({"groups": torch.arange(6) % 5, "folds": TURNS}, "`groups` must be None"),
    ({"calibrator": tc.TemperatureScaling}, "`calibrator` must be", TypeError),
    ({"score": "log"}, "`score` must be 'nll', 'brier'"),
    ({"target": SIX_P, "calibrator": tc.BayesianBinning()}, "must be labels 0 and 1"),
]
CALIBRATION = (SIX_P, SIX_Y)
OTHER_DATA = [
    ({"train_on_test": 1}, "`train_on_test` must be True or False", TypeError),
    ({"train_on_test": True, "calibration": CALIBRATION}, "`calibration` must be None"),
    ({"train_on_test": True, "folds": TURNS}, "`folds` must be left out"),
    ({"calibration": CALIBRATION, "seed": 3}, "`seed` must be left out"),
    ({"calibration": (SIX_P,)}, "`calibration` must be (preds, target)", TypeError),
    ({"calibration": (*CALIBRATION, 0 * SIX_P)}, "`calibration` must have samples"),
    ({"calibration": (SIX_P[None], SIX_Y[:5])}, "`target` must have the shape"),
    ({"calibration": (3 * SIX_P, SIX_Y)}, "from_logits=True"),
]
ON_SIX = {"preds": SIX_P, "target": SIX_Y, "task": "binary"}
OF_3, LABELS_OF_3 = fits.data(30, 3)


@cache
def series(calibrator):
    return fits.fresh(calibrator).fit(*fits.single(30, lead=(2,)), batch_dims=1, **fits.binary)


@cache
def of_labels(calibrator):
    return fits.fresh(calibrator).fit(*(x.T for x in fits.single(30, lead=(2,))), task="multilabel", from_logits=True)


def of_calibrator(calibrator):
    """Return the refusals of every calibrator of binary predictions."""
    fit, name = fits.fresh(calibrator).fit, fits.name(calibrator)
    eight = SIX_P.to(torch.float8_e4m3fn)
    return [
        Refusal(lambda: fits.fresh(calibrator)(t(0.5)), f"{name} ... be fitted before use. Call fit", RuntimeError),
        *wrong(partial(fit, preds=SIX_P, target=SIX_Y, task="binary"),
            ({"preds": 3 * SIX_P}, "from_logits=True", ValueError, {"preds": 3 * SIX_P, "from_logits": True}),
            ({"l2": 1}, "l2", TypeError),
            ({"preds": SIX_P.to("meta"), "target": SIX_Y.to("meta")}, "`preds` must have values"),
            ({"preds": eight}, "Convert them with preds.float()", TypeError, {"preds": eight.float()}),
            ({"preds": SIX_Y.to(torch.uint64)}, "got torch.uint64", TypeError),
            *([({"target": SIX_P}, "must be labels 0 and 1")] if calibrator.whole_weights else [])),
        Refusal(lambda: fits.fresh(calibrator).fit(SIX_P, SIX_Y)(eight), "convert them with preds.float()", TypeError),
        Refusal(lambda: fits.fresh(calibrator).fit(**ON_SIX)(SIX_Y), "`preds` must be floating", TypeError),
        Refusal(lambda: series(calibrator)(torch.tensor(0.3)), "at least 1 axes ... got shape ()"),
        Refusal(lambda: series(calibrator)(torch.rand(30)), "leading axes (2,) of the batch ... got ()"),
        Refusal(lambda: series(calibrator)(torch.rand(3, 30)), "leading axes (2,) of ... got (3,)"),
        Refusal(lambda: of_labels(calibrator)(torch.rand(7)), "at least 2 axes"),
        Refusal(lambda: of_labels(calibrator)(torch.rand(2, 7)), "leading axes (2,) ... labels last, got (7,)"),
        of_other_classes(calibrator) if "multiclass" in calibrator.tasks else
        Refusal(lambda: calibrator.fit(torch.eye(3), torch.arange(3), **MULTI),
                "`task` must be one of 'binary', 'multilabel' ... positive_classes"),
    ]  # fmt: skip


def of_other_classes(calibrator):
    return Refusal(lambda: fits.fresh(calibrator).fit(OF_3, LABELS_OF_3, **fits.multi)(torch.rand(30, 4)),
                   "`preds` must have 3 classes")  # fmt: skip


def of_structured(calibrator):
    """Return the refusals of every calibrator of multi-class predictions only."""
    fit, name = partial(fits.fresh(calibrator).fit, from_logits=True), fits.name(calibrator)
    return [
        of_other_classes(calibrator),
        Refusal(partial(fit, OF_3[:, 0], LABELS_OF_3.clamp(max=1), task="binary"),
                f"`task` must be 'multiclass' for {name}, got 'binary'"),
        Refusal(partial(fit, OF_3, (OF_3 > 0).long(), task="multilabel"),
                f"`task` must be 'multiclass' for {name}, got 'multilabel'"),
        Refusal(partial(fit, OF_3, LABELS_OF_3, task="multiclass", positive_classes=[0]),
                "got 'multiclass' with `positive_classes`. Use AffineScaling", ValueError,
                partial(tc.AffineScaling().fit, OF_3, LABELS_OF_3, positive_classes=[0], **fits.multi)),
        *[Refusal(partial(type(calibrator), **{penalty: 0}), f"`{penalty}` must be finite and above 0, got 0")
          for penalty in calibrator.settings],
    ]  # fmt: skip


def fitted_to(preds, **given):
    return tc.TemperatureScaling().fit(preds, LABELS_OF_3, **given)


def thousand_classes():
    return torch.randn(2_000, 1_000, generator=G), torch.arange(2_000) % 1_000


HIDDEN = {"hidden": hidden.HIDDEN.reshape(60, 8), "weight": hidden.WEIGHT, "target": torch.arange(60) % 40}
CALIBRATORS = [
    *[row for calibrator in fits.ALL for row in of_calibrator(calibrator)],
    *[row for calibrator in fits.OF_CLASSES for row in of_structured(calibrator)],
    *[Refusal(partial(type(each), from_logits="yes"), "`from_logits` must be", TypeError, partial(type(each)))
      for each in (*fits.ALL, *fits.OF_CLASSES)],
    *[Refusal(partial(each, **{option: value}), f"`{option}` must", error, each) for each, option, value, error in (
        (tc.QuadraticScaling, "ridge", -1, ValueError), (tc.QuadraticScaling, "ridge", INF, ValueError),
        (tc.QuadraticScaling, "ridge", "1", TypeError), (tc.HistogramBinning, "n_bins", 0, ValueError),
        (tc.HistogramBinning, "right", 1, TypeError), (tc.HistogramBinning, "empty", "mean", ValueError),
        (tc.BayesianBinning, "prior_size", 0, ValueError), (tc.BayesianBinning, "factor", 0.5, ValueError),
        (tc.SplineCalibration, "n_knots", 1, ValueError))],
    *wrong(partial(tc.BayesianBinning().fit, P2, Y2, task="binary"),
        ({"weights": P2}, "`weights` must be whole numbers")),
    (lambda: fitted_to(OF_3.softmax(-1))(OF_3),
     "`preds` must be probabilities in [0, 1], as in the fit of Temperature"),
    (lambda: tc.BiasCorrection().fit(P, Y)(100 * P), "Divide percentages by 100"),
    *[Refusal(partial(getattr, fitted_to(OF_3), name), f"no attribute '{name}'. Call the fitted calibrator with pred",
              AttributeError) for name in ("transform", "fit_transform", "predict")],
    *[row for call in (tc.calibration.calibration_loss, tc.calibration.relative_calibration_loss,
                       tc.calibration.score_divergence)
      for row in (*wrong(partial(call, **ON_SIX, n_folds=2, seed=0), *LOSS_OPTIONS, works=False),
                  *wrong(partial(call, **ON_SIX), *OTHER_DATA, works=False))],
    (lambda: tc.calibration.cross_val_calibrate(**ON_SIX, n_repeats=2), "`n_repeats` must be 1 here"),
    (lambda: type("Own", (tc.IsotonicCalibration,), {"tasks": ("binary",)})().fit(Q, H, **MULTI),
     "`task` must be one of 'binary' for ... positive_classes"),
    (lambda: tc.calibration.recommend(**ON_SIX, calibrators=[]), "`calibrators` must contain"),
    (lambda: tc.calibration.recommend(SIX_P[None], SIX_Y[None], **BINARY, batch_dims=1),
     "`preds` must have no batch axes"),
    *wrong(partial(tc.calibration.expected_score, **ON_SIX),
        ({"folds": "stratified"}, "`folds` must be left out without a calibrator"),
        ({"normalize": "classes"}, "`normalize` must be None or 'prior'"),
        ({"priors": [0.5, 0.6]}, "`priors`"),
        ({"score": "crps"}, "`score` must be 'nll', 'brier' or a function")),
    *wrong(tc.EnsembleTemperatureScaling().fit_from_hidden,
        (HIDDEN, "needs all class probabilities", TypeError), works=False),
    *[Refusal(partial(call, *thousand_classes(), **fits.multi),
              "got 2,000 rows and 1,000 classes. Use StructuredVectorScaling") for call in (
        tc.DirichletCalibration().fit, partial(tc.calibration.recommend, calibrators=[tc.DirichletCalibration()]))],
    (lambda: save_calibrator(torch.nn.Identity(), "cal.pt"),
     "`calibrator` must be a fitted calibrator, got Identity", TypeError),
    (lambda: save_calibrator(tc.AffineScaling(), "cal.pt"), "`calibrator` must be fitted, got AffineScaling()"),
]  # fmt: skip

# The command line: command, text, and the command that follows from the advice; files by name

FAST = "--no-calibration --no-intervals"
SYSTEMS, TARGETS = systems("multiclass", 90)
RNG = np.random.default_rng(0)
PROBS, RATES = RNG.dirichlet(np.ones(3), 40), RNG.random(40)
ONE_OF_3 = np.eye(3, dtype=np.int64)[RNG.integers(0, 3, 40)]
FIVE = {"prob": np.full(5, 0.5), "target": np.array([0, 1, 0, 1, 1])}
ANIMALS = np.array(["cat", "dog", "eel"])[np.arange(40) % 3]
BY_ANIMAL = {f"p_{name}": PROBS[:, k] for k, name in enumerate(("cat", "dog", "eel"))}


def system(**changes):
    return {"logits": SYSTEMS["calibrated"], "targets": TARGETS, **changes}


def counts(total, *shape):
    return RNG.multinomial(total, np.ones(shape[-1]) / shape[-1], shape[:-1])


FILES = {
    "a.npz": {"probs": P2, "targets": Y2},
    "big.npz": {"probs": P2 * 9, "targets": Y2},
    "sevens.npz": {"probs": P40, "targets": Y40 * 7},
    "zeros.npz": {"p": P2, "y": t(0, 0)},
    "fair.npz": dict(zip(("logits", "targets"), realistic("multiclass", scale=1, n=1000), strict=True)),
    "sharp.npz": dict(zip(("logits", "targets"), realistic("multiclass"), strict=True)),
    "probs.npz": {"probs": realistic("multiclass")[0].softmax(-1)},
    "two.npz": {"x": P2, "y": P2},
    "x/a.npz": {"logits": Z[:90, 0], "targets": Y[:90]},
    "y/a.npz": {"logits": Z[:90, 1], "targets": Y[:90]},
    "s.npz": system(),
    "sure.npz": system(logits=SYSTEMS["sure"]),
    "targets.npz": system(targets=torch.where(torch.arange(90) == 41, 3 - TARGETS, TARGETS)),
    "fewer.npz": system(logits=Z[:80], targets=TARGETS[:80]),
    "classes.npz": system(logits=Z[:90, :3], targets=TARGETS % 3),
    "weights.npz": system(weights=torch.ones(90)),
    "task.npz": system(logits=Z[:90, 0], targets=TARGETS % 2),
    "nan.npz": system(logits=Z[:90] * NAN),
    "one_hot.npz": {"probs": PROBS, "targets": ONE_OF_3},
    "no_yes.npz": {"probs": RATES, "targets": counts(4, 40, 2)},
    "of_labels.npz": {"probs": PROBS, "targets": counts(4, 40, 3, 2)},
    "no_one.npz": {"probs": PROBS, "targets": 0 * ONE_OF_3},
    "negative.npz": {"probs": PROBS, "targets": -ONE_OF_3},
    "doubled.npz": {"probs": PROBS, "targets": 2 * ONE_OF_3},
    "site_float.npz": FIVE | {"site": np.full(5, 0.5), "age": np.arange(5)},
    "site_table.npz": FIVE | {"site": np.zeros((5, 2), np.int64)},
    "site_long.npz": FIVE | {"site": np.array(["a", "b", "c", "d", "e" * 1001])},
    "site_low.npz": FIVE | {"site": np.array([0, 1, -2, 0, 0])},
    "five.npz": FIVE,
    "rows.csv": {"prob": t(0.2, 0.7, 0.9, 0.4), "label": t(0, 1, 1, 0), "row": t(1, 2, 3, 4)},
    "twice.csv": {"prob": t(0.2, 0.7, 0.9, 0.4), "label": t(0, 1, 1, 0), "row": t(2, 1, 2, 4)},
    "other.csv": {"prob": t(0.2, 0.7, 0.9), "label": t(0, 1, 1), "row": t(2, 3, 5)},
    "texts.csv": {"prob": t(0.2, 0.7, 0.9), "label": t(0, 1, 1), "row": np.array(["a", "b", "c"])},
    "animals.csv": BY_ANIMAL | {"sure": PROBS[:, 0], "y": ANIMALS},
    "two.csv": {f"{kind}_{name}": PROBS[:, k] for kind in ("probs", "scores") for k, name in enumerate(NAMES)}
    | {"y": ANIMALS},
    "order.csv": {f"p_{name}": PROBS[:, k] for k, name in enumerate(("dog", "cat", "eel"))} | {"y": ANIMALS},
    "rates.csv": {"p_cat": RATES, "y": np.arange(40) % 2},
    "clusters.csv": {"prob": [0.2, 0.7], "label": [0, 1], "image": ["a", ""]},
}


def write_files(folder):
    """Write all files, and two calibrators that `torchcalib apply` reads."""
    for name, columns in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write = write_csv if name.endswith("csv") else write_npz
        write(folder / name, {key: np.asarray(values) for key, values in columns.items()})
    for name, given in (("c.pt", {}), ("k.pt", {"positive_classes": [0]})):
        fitted = tc.TemperatureScaling().fit(*realistic("multiclass"), from_logits=True, **given)
        tc.calibration.save_calibrator(fitted, folder / name)


COMMANDS = [
    ("report sevens.npz", "Pass --ignore-index 7", f"report sevens.npz --ignore-index 7 {FAST}"),
    ("report big.npz", "Pass --from-logits", f"report big.npz --from-logits {FAST}"),
    (f"report a.npz --n-bins {'9' * 23}", "`--n-bins` must"),
    ("report a.npz --n-bins 1001", "`--n-bins` must ... at most 1,000", f"report a.npz --n-bins 1000 {FAST}"),
    (f"report a.npz --ignore-index {'9' * 23}", "64 bits"),
    ("report a.npz --out a.npz/x", "a.npz/x"),
    ("report a.npz --out ''", "--out"),
    ("report a.npz --out a.npz", "--out"),
    ("report a.npz --diagrams", "`--out` must be a folder with --diagrams, got none. Pass --out DIR",
     f"report a.npz --out one.html {FAST}"),
    ("report a.npz --diagrams --out one.html", "`--out` must be a folder with --diagrams, got 'one.html'"),
    ("report a.npz --out none/one.html", "`--out` must be in a folder that exists"),
    ("audit log.jsonl --pages", "`--out` must be a folder with --pages, got none"),
    *((f"audit log.jsonl --word {word}", f"must be a word and its confidence in [0, 1], as in high=0.9, got '{word}'")
      for word in ("high", "=0.5", "high=2", "high=x")),
    ("metric ece a.npz --mode first", "must be positive, ... or top5 (any number), got 'first'",
     "metric ece a.npz --mode positive"),
    ("audit log.jsonl log.jsonl --out one.html", "`--out` must be a folder for several logs, got 'one.html'"),
    ("report zeros.npz --ignore-index 0", "at least one"),
    ("demo --epochs 0 --out .", "`--epochs` must"),
    ("report a.npz --task x", "--task"),
    ("report a.npz --from-logits --from-probs", "not allowed with"),
    (f"report a.npz --{LONG}", "must be an option of `torchcalib report`"),
    ("report a.npz --class-names -a,b", "`--class-names` must be followed by = if its value starts with a hyphen",
     f"report a.npz --class-names=-a,b {FAST}"),
    ("report none.npz", "none.npz ... Check the path."),
    # calibrators
    ("calibrate fair.npz --out o.pt", "named if none is recommended for the data.",
     "calibrate fair.npz --out o.pt --calibrator TemperatureScaling"),
    ("calibrate sharp.npz --out o.pt --calibrator BetaCalibration", "must support the data"),
    ("apply c.pt probs.npz --out o.npz", "`probs` must be logits, as in the fit of the calibrator",
     "apply c.pt sharp.npz --out o.npz"),
    ("apply c.pt two.npz --out o.npz", "must contain predictions under a known name ... Pass --preds NAME."),
    ("apply k.pt sharp.npz --out o.npz", "must calibrate all classes, got one for positive_classes=[0]"),
    ("apply c.pt sharp.npz --out sharp.npz", "`--out` must not be an input file"),
    ("apply c.pt sharp.npz --out o.txt", "`--out` must be a prediction file"),
    ("apply sharp.npz sharp.npz --out o.npz", "must be a complete calibrator, got"),
    ("apply none.pt sharp.npz --out o.npz", "No such file"),
    # conditions, metrics and diagrams
    ("check sharp.npz --fail-if 'eec > 0.1'", "must name values of the report, got `eec`. Use accuracy, nll",
     "check sharp.npz --fail-if 'nll > 100'"),
    ("check sharp.npz --fail-if 'p(nll) < 0.1'", "`p(nll)` must be defined for this data, got no such value"),
    ("check sharp.npz --fail-if ece", "`--fail-if` must compare report values"),
    ("check sharp.npz --fail-if 'ece > 0 and 1 < 2'", "`--fail-if` must compare report values"),
    ("metric eec sharp.npz", "`NAME` must be a metric, got `eec`. Names are accuracy,", "metric accuracy sharp.npz"),
    ("metric ece sharp.npz --option debiased", "`--option` must be NAME=VALUE, got 'debiased'"),
    ("metric ece sharp.npz --option nbins=3", "Did you mean `n_bins`?", "metric ece sharp.npz --option n_bins=3"),
    ("metric ece sharp.npz --option task=binary", "must be an argument of ECE, got an unknown one"),
    ("plot x/a.npz --out r.gif", "`--out` must end in .svg, .png, .pdf"),
    ("plot x/a.npz --mode classwise", "`--mode` must be one of positive, top_label for task binary"),
    # comparisons
    ("compare x/a.npz", "There must be at least two systems"),
    ("compare b=x/a.npz b=y/a.npz", "must have different names, got `b` twice"),
    ("compare x/a.npz x/a.npz", "must have different names"),
    ("compare x/a.npz =y/a.npz", "must be NAME=FILES with a name"),
    ("compare x/a.npz 'b=y/*.csv'", "`y/*.csv` must match at least one file, got none"),
    ("compare s.npz sure.npz --out ''", "`--out` must be a folder"),
    ("compare s.npz targets.npz", f"must have the same targets, got {TARGETS[41]} in `s` and {3 - TARGETS[41]} in "
     "`targets` in row 42, the first that"),
    ("compare s.npz fewer.npz", "the same number of rows, got 90 in `s` and 80 in `fewer`"),
    ("compare s.npz fewer.npz --id row", "`--id` must name an array in `s.npz`, got `row`"),
    ("compare rows.csv texts.csv --id row", "`--id` must be text in all systems ... Write the ids of all files alike"),
    ("compare rows.csv twice.csv --id row", "rows 1 to 4: system 'twice': `--id` must be distinct in a system, got 2"),
    ("compare rows.csv other.csv --id row", "`--id` must belong to the same target ... got 2 with another one"),
    ("compare s.npz classes.npz", "the same shape of a row of predictions, got (4,)"),
    ("compare s.npz weights.npz", "got none in `s` and some in `weights`"),
    ("compare s.npz task.npz", "the same task, got multiclass in `s` and binary in"),
    ("compare s.npz nan.npz", "in rows 1 to 90: system 'nan'"),
    ("compare animals.csv order.csv --preds 'p_*'", "the same order of classes, got cat, dog, eel in `animals` and"),
    ("compare animals.csv --preds 'a=p_*' --preds 'p_cat,p_dog,p_eel' --from-logits --class-names cat,dog,eel",
     "look like probabilities"),
    ("compare animals.csv", "Name another file, or each system in this file: --preds A --preds B"),
    ("compare animals.csv order.csv --preds a --preds b", "must be given once for several files"),
    ("compare animals.csv --preds a=p_cat --preds a=p_dog", "must be [NAME=]COLUMNS with different names"),
    ("compare rates.csv --preds p_cat --preds p_fox", "--preds` must name an array in"),
    ("report two.csv", "must contain one set of columns of predictions, got `probs_cat..probs_eel`, `scores_cat..",
     f"report two.csv --preds scores_cat..scores_eel {FAST}"),
    # ambiguous targets, groups and clusters
    ("report one_hot.npz", "--task` must be given if `target` has the shape ... Pass --task multiclass if",
     f"report one_hot.npz --task multiclass {FAST}"),
    ("report no_yes.npz", "counts for no and yes ... Pass --task binary if it contains counts",
     f"report no_yes.npz --task binary {FAST}"),
    ("report of_labels.npz", "Pass --task multilabel if it contains counts",
     f"report of_labels.npz --task multilabel {FAST}"),
    ("report no_one.npz --task multiclass", "must have at least 1 annotator in every row, got 0"),
    ("report negative.npz --task multiclass", "must be annotator counts from 0 to 2^53"),
    ("report doubled.npz --task multilabel", "got 2"),
    ("report site_float.npz --groups site", "must contain whole numbers or text as groups, got 0.5"),
    ("report site_table.npz --groups site", "must be one group per sample, got shape"),
    ("report site_long.npz --groups site", "must contain text of at most 1,000 characters"),
    ("report site_low.npz --groups site", "`groups` must be in ["),
    ("report site_float.npz --groups site,age", "`site` in `site_float.npz` must contain whole numbers or text as"),
    ("report site_table.npz --groups site,target", "`site` in `site_table.npz` must be one group per sample, got"),
    ("report five.npz --groups site", "`--groups` must name an array in"),
    (f"report clusters.csv --clusters image {FAST}",
     "must contain the cluster of each row, got an empty text in row 2"),
]  # fmt: skip

# Reports, comparisons, audits and monitors

FORTY = torch.full((40,), 0.5), torch.arange(40) % 2
GROUPS = torch.arange(40) % 8
SITES = [f"site {letter}" for letter in "abcdefgh"]


def builder(*batches, **options):
    """Return a builder of a binary report with batches of 40 rows."""
    made = tc.ReportBuilder(task="binary", **QUICK, **options)
    for columns in batches:
        made.update(*FORTY, **columns)
    return made


def of_two_classes():
    made = tc.ReportBuilder(task="multiclass", **QUICK)
    made.update(torch.full((2, 2), 0.5), t(0, 1))
    return made


def comparison(n_rows=4, **options):
    made = tc.reporting.comparison.building.ComparisonBuilder(["a", "b"], task="binary", n_replicates=39, **options)
    made.update({"a": P[:n_rows], "b": P[:n_rows]}, Y[:n_rows])
    return made


@cache
def small_report():
    return tc.report(P, Y, task="binary", **QUICK)


def stated(n=9, **changes):
    return [{"id": k, "confidence": 0.5 + 0.05 * k, "correct": k % 2 == 0, **changes} for k in range(n)]


def chosen(n=9):
    return [{"id": k, "truth": "yes", "prediction": ("no", "yes")[k % 2], "probability": (0.2, 0.9)[k % 2]}
            for k in range(n)]  # fmt: skip


def unjudged(name, n=9):
    return [{"id": name.format(k), "probs": {"a": 0.6, "b": 0.4}} for k in range(n)]


def of_frame(data=None, target="label", drop=(), **options):
    import pandas as pd

    frame = pd.DataFrame({f"prob_{k}": PROBS[:, k] for k in range(3)} | {"label": ONE_OF_3.argmax(1)})
    return tc.report(frame.drop(columns=list(drop)), target, **QUICK, **options)


REPORTS = [
    *wrong(partial(tc.report, P, Y, task="binary", **QUICK),
        ({"weights": P, "sample_weight": P}, "`sample_weight` must be omitted if `weights` is given", TypeError),
        ({"num_bins": 3}, "Did you mean `n_bins`", TypeError, {"n_bins": 3}),
        ({"batch_dims": 1}, "`batch_dims` must be 0 for a report", TypeError, {"batch_dims": 0}),
        ({"class_names": SITES}, "a name for each of the 2 classes, got 8", ValueError, {"class_names": SITES[:2]}),
        ({"safe_threshold": 0.0}, "`safe_threshold` must be finite and above 0"),
        ({"safe_threshold": NAN}, "`safe_threshold` must be"),
        ({"safe_threshold": "0.1"}, "`safe_threshold` must be", TypeError),
        ({"safe_threshold": True}, "`safe_threshold` must be", TypeError)),
    (lambda: tc.report(Q, H, class_names=["a", "b"], **QUICK), "a name for each of the 4 classes, got 2"),
    (lambda: tc.report(P, **QUICK), "`target` ... report(df, target='y')", TypeError),
    (lambda: small_report()["ec"], "`key` must be one of `accuracy`, `nll`", KeyError, lambda: small_report()["ece"]),
    *wrong(tc.ReportBuilder(task="binary").fit,
        ({"calibrator": tc.AffineScaling()}, "got none: no predictions were added"), works=False),
    *wrong(builder({}).fit, ({"calibrator": tc.AffineScaling()}, "with_calibration is False"), works=False),
    (lambda: of_two_classes().update(torch.full((2, 4), 0.25), t(0, 1)), "must have 2 entries on its class axis"),
    (lambda: tc.ReportBuilder(task="binary", with_calibration=1), "`with_calibration` must", TypeError),
    (lambda: builder({"groups": GROUPS}).update(*FORTY), "`groups` must be passed with all batches"),
    (lambda: builder({}).update(*FORTY, groups=GROUPS), "`groups` must be passed with all batches"),
    (lambda: builder({"groups": GROUPS}).merge(builder({})), "`other` must have groups if this builder has groups"),
    (lambda: builder({"clusters": GROUPS}).update(*FORTY), "`clusters` must be passed with all batches"),
    (lambda: builder({}).update(*FORTY, clusters=GROUPS), "`clusters` must be passed with all batches"),
    (lambda: builder({"clusters": GROUPS}).merge(builder({})),
     "`other` must have clusters if this builder has clusters"),
    (lambda: builder({"clusters": GROUPS[:3]}), "`clusters` must have one identifier per sample"),
    *wrong(partial(builder({"groups": GROUPS, "group_names": SITES}).update, *FORTY, groups=GROUPS, group_names=SITES),
        ({"groups": GROUPS - 2}, "`groups` must be in ["),
        ({"group_names": SITES[:2]}, "`groups` must be in ["),
        ({"groups": GROUPS[:3]}, "one number per sample"),
        ({"group_names": ["x" * 1001] * 8}, "at most 1,000 characters"),
        ({"group_names": "abcdefgh"}, "`group_names` must be a list of strings", TypeError),
        ({"group_names": [1] * 8}, "`group_names` must be a list of strings", TypeError)),
    (lambda: tc.report(torch.full((10_001,), 0.5), torch.arange(10_001) % 2, groups=torch.arange(10_001), **QUICK),
     "`groups` must contain at most 10,000 different groups for a report, got 10,001"),
    *wrong(of_frame,
        ({"target": "labels"}, "got `labels`"),
        ({"target": None, "drop": ["label"]}, "must contain targets under a known name"),
        ({"bins": 3}, "Did you mean `n_bins`", TypeError, {"n_bins": 3}),
        ({"groups": ONE_OF_3.argmax(1)}, "`groups` must be the name of a column", TypeError),
        ({"group_names": ["a", "b"]}, "`group_names` must be None", TypeError),
        ({"safe_threshold": -1}, "`safe_threshold` must be finite and above 0")),
    # comparisons
    *wrong(partial(tc.compare, systems={name: {"prob": [0.2, 0.9], "y": [0, 1], "id": [1, 2]} for name in "ab"},
                   target="y", n_replicates=39),
        ({"ids": t(1, 2, 3, 4)}, "`ids` must be the name of a column of the DataFrame", TypeError, {"ids": "id"}),
        ({"class_axis": -1}, "`class_axis` must be None for a DataFrame with all columns, got -1", TypeError),
        ({"ids": "question"}, "system 'a': `ids` must name an array in `DataFrame`")),
    *wrong(partial(tc.compare, systems={"a": P[:4], "b": P[:4]}, target=Y[:4], task="binary", n_replicates=39),
        ({"systems": {"a": P[:4]}}, "must contain at least two systems, got 1"),
        ({"systems": {"a": P[:4], "": P[:4]}}, "must have non-empty strings as names", EITHER),
        ({"systems": {"a": P[:4], "b": P[:3]}}, "must have the same shape for all systems"),
        ({"systems": {"a": P[:4], "b": P[:4] * 300}}, "system 'b': "),
        ({"from_logits": {"a": True}}, "`from_logits` must have the keys 'a', 'b'", ValueError,
         {"from_logits": {"a": True, "b": True}}),
        ({"n_replicates": 20}, "`n_replicates` must be at least 39", ValueError, {"n_replicates": 39}),
        ({"target": {"a": Y[:4], "b": Y[:4]}}, "`target` must be shared by all systems"),
        ({"weights": torch.zeros(4)}, "at least one sample with a positive weight")),
    *wrong(partial(tc.compare, systems={"a": P[:9], "b": P[:8]}, target={"a": Y[:9], "b": Y[:8]}, task="binary",
                   ids={"a": range(9), "b": range(8)}, n_replicates=39),
        ({"ids": None}, "`target` must be shared by all systems, or contain the name of each with `ids`"),
        ({"ids": range(9)}, "system 'b': `ids` must have one id for each row, shape (8,), got (9,)"),
        ({"ids": {"a": range(9)}}, "`ids` must be shared by all systems, or contain the name of each"),
        ({"ids": {"a": range(9), "b": [*range(7), 0]}}, "system 'b': `ids` must be distinct in a system, got 0"),
        ({"ids": {"a": range(9), "b": [7, *range(1, 8)]}}, "`ids` must be distinct in a system, got 7 twice"),
        ({"ids": {"a": range(9), "b": list("ijklmnop")}}, "`ids` must be text in all systems", TypeError,
         {"ids": {"a": list("abcdefghi"), "b": list("ijklmnop")}}),
        ({"ids": {"a": range(9), "b": [0.5] * 8}}, "system 'b': `ids` must be integers or text", TypeError),
        ({"ids": {"a": list("abcdefghi"), "b": [*"abcdefg", None]}}, "`ids` must identify each row, got a missing"),
        ({"target": {"a": Y[:9], "b": 1 - Y[:8]}},
         "system 'b': `ids` must belong to the same target and cluster in all systems, got 0 with another one in 'a'"),
        ({"clusters": {"a": torch.arange(9), "b": torch.arange(8) // 2}}, "the same target and cluster", ValueError,
         {"clusters": {"a": torch.arange(9) // 2, "b": torch.arange(8) // 2}}),
        ({"clusters": {"a": torch.arange(9)}}, "`clusters` must be shared by all systems, or contain"),
        ({"weights": {"a": torch.ones(9), "b": torch.zeros(8)}}, "system 'b': `preds` must contain at least one"),
        ({"systems": {"a": P[:9], "b": P[:8, None].expand(8, 3)}, "task": None},
         "system 'b': `target` must have the shape of `preds` (8, 3) for task='binary'", ValueError)),
    *[Refusal(partial(comparison, **{name: True}), text, TypeError)
      for name in ("with_calibration", "with_intervals", "safe_threshold", "num_bins")
      for text in (name, "a comparison")],
    (lambda: tc.compare({"a": ARRAY, "b": ARRAY}, ["cat"] * 6, class_names=list("xyz")),
     "system 'a': `target` must contain labels among the classes `x`, `y`, `z`, got `cat`"),
    # audits
    *wrong(partial(tc.audit, stated(), with_calibration=False),
        ({"words": {"high": 90}}, "in [0, 1], got 90 for 'high'"),
        ({"as_published": "mmlu"}, "`as_published` must be")),
    (lambda: tc.audit(iter(stated())), "must be a path, a DataFrame or a list of dicts, got list_iterator"),
    (lambda: tc.audit(chosen(), with_calibration=False),
     "`probability` in `list` must be the confidence of the answer `prediction`, got the probability of `yes`",
     ValueError, lambda: tc.audit(chosen(), confidence="probability", with_calibration=False)),
    (lambda: tc.audit(unjudged("q{}"), gold=dict.fromkeys(range(9), "a"), with_calibration=False),
     "`gold` must have the ids of `list`, got no right answer for the first id 'q0', and the ids `0`, `1`, `2`",
     ValueError, lambda: tc.audit(unjudged("{}"), gold={float(k): "ab"[k % 2] for k in range(9)},
                                  with_calibration=False)),
    (lambda: tc.audit([{**row, "answer": k % 3 - 1} for k, row in enumerate(unjudged("{}"))], with_calibration=False),
     "must have indices of right answers from 0 to 1 (0 for a), got -1 in row 1. Write letters or texts"),
    (lambda: tc.audit([{f"{x}_option{k}_prob": 0.5 for x in "ab" for k in "AB"} | {"answer": "A"}] * 2,
                      with_calibration=False), "must have one column for each option, got `a_optionA_prob`"),
    (lambda: tc.audit(stated(), stated(id="other"), with_calibration=False), "questions in common"),
    (lambda: tc.audit(stated(), [{"id": k, "probs": {"a": 0.6, "b": 0.4}, "answer": "a"} for k in range(9)],
                      with_calibration=False), "a confidence in common, got `reported` and `probabilities`"),
    (lambda: tc.audit(stated(), stated(), names=["a"], with_calibration=False), "2 different names"),
    (lambda: tc.audit(stated(), with_calibration=False)["raw"], "`key` must be one of `reported`", KeyError,
     lambda: tc.audit(stated(), with_calibration=False)["reported"]),
    # monitors, conditions and the gate
    *wrong(partial(tc.Monitor, task="binary"),
        ({"task": "multiclass"}, "`num_classes` must be given for task='multiclass', got None", ValueError,
         {"task": "multiclass", "num_classes": 3}),
        ({"threshold": -1.0}, "`threshold` must be at least 0, got -1.0"),
        ({"task": "ternary"}, "`task` must be one of"),
        ({"metrics": [tc.ECE(task="binary")]}, "must be a dict of metrics by name, got list", TypeError,
         {"metrics": {"ece": tc.ECE(task="binary")}})),
    (lambda: Condition.parse("ece > 0 or low(ece) > 1").outcome(small_report()), "no such value"),
    *wrong(partial(tc.testing.assert_calibrated, P, Y), ({"alpha": 2}, "`alpha` must")),
]  # fmt: skip

# Diagrams

TABLE = F.calibration_curve(P, Y, **BINARY)


def metric_of(cls):
    metric = cls(task="binary")
    metric.update(P, Y)
    return metric


PLOTS = [
    (lambda: plots.reliability_diagram(P), "`target` must be given for predictions, got None", TypeError),
    (lambda: plots.reliability_diagram({}), "`preds` must contain at least one model"),
    (lambda: plots.reliability_diagram(*miscalibrated_data("multiclass"), mode="classwise"),
     "at most 10 curves ... , got 12"),
    (lambda: plots.risk_coverage_curve(quick_report("binary")), "got a report", TypeError),
    (lambda: plots.classwise_reliability_diagrams(quick_report("multiclass")), "got a report", TypeError),
    (lambda: plots.classwise_reliability_diagrams(TABLE), "`preds` must have an axis of classes"),
    (lambda: plots.reliability_diagram(metric_of(tc.SmECE)), "`smooth` must be True for SmECE", ValueError,
     lambda: plots.reliability_diagram(metric_of(tc.SmECE), smooth=True)),
    (lambda: plots.reliability_diagram(metric_of(tc.ECE), smooth=True),
     "`smooth` must be False for ECE, got True: it stores bins", ValueError,
     lambda: plots.reliability_diagram(metric_of(tc.ECE))),
    (lambda: plots.reliability_diagram(TABLE, smooth=True), "`smooth` must be False for BinTable"),
    (lambda: plots.reliability_diagram(quick_report("binary"), smooth=True), "`smooth` must be False for Report"),
    (lambda: quick_report("multiclass").plot(mode="positive"), "`mode` must be one of 'top_label'"),
    (lambda: plots.tce_diagram(TABLE), "must contain test decisions, got a BinTable without them", TypeError),
    (lambda: plots.reliability_diagram(P, Y, n_bin=3), "n_bin", TypeError,
     lambda: plots.reliability_diagram(P, Y, n_bins=3)),
    (lambda: plots.bin_comparison({}), "`tables` must contain at least one table, got none."),
    *[Refusal(partial(plots.score_chart, scores), "`scores` must have the same scores for every system")
      for scores in ({}, {"raw": {}}, {"raw": {"NCE": 1.0}, "cal": {"NBS": 1.0}})],
]  # fmt: skip

# scikit-learn

FEATURES, KINDS = make_classification(150, n_informative=6, n_classes=3, class_sep=0.8, random_state=0)
WORDS, YES = np.array(["pear", "apple", "plum"])[KINDS], np.where(KINDS == 1, "yes", "no")
LINEAR = LogisticRegression()
LINEAR_OF_WORDS = LogisticRegression(max_iter=500).fit(FEATURES, WORDS)
Classifier, Calibration = tc.sklearn.CalibratedClassifier, tc.sklearn.Calibration
from_estimator, display = tc.Report.from_estimator, tc.sklearn.CalibrationDisplay
REPEATED = RepeatedKFold(n_splits=2, n_repeats=2, random_state=0)


@cache
def repeated_folds():
    return cross_validate(GaussianNB(), FEATURES, YES, cv=REPEATED, return_estimator=True, return_indices=True)


class SeveralOutputs:
    """Classifier with two outputs of equal probabilities; not fitted without classes."""

    def __init__(self, *classes):
        if classes:
            self.classes_ = [np.array(classes)] * 2

    def predict_proba(self, features):
        return [np.full((len(features), 2), 0.5)] * 2


SCIKIT_LEARN = [
    *wrong(lambda calibrator="sigmoid", X=(0.1, 0.9), y=(0, 1), classes=None: Calibration(
            calibrator, classes=classes).fit(X, y),
        ({"calibrator": "none"}, "`calibrator` must be a calibrator such as"),
        ({"X": np.eye(4), "y": [0, 1, 2, 1]}, "`X` must have 3 columns of predictions"),
        ({"y": [1, 1]}, "`y` must have at least 2 classes, got one class"),
        ({"classes": [0, 1], "y": [1, 2]}, "must contain only the classes"),
        ({"classes": [1, 1], "y": [1, 1]}, "must be distinct classes, got 1")),
    (lambda: Calibration("isotonic").fit(torch.eye(2), torch.tensor([0, 1])).predict(torch.eye(3)),
     "`X` must have 2 columns as in the fit, got 3"),
    (lambda: Classifier(LINEAR, cv="prefit").fit(FEATURES, WORDS), "fitted and have classes_, got LogisticRegression",
     NotFittedError, lambda: Classifier(LINEAR_OF_WORDS, cv="prefit").fit(FEATURES, WORDS)),
    (lambda: Classifier(LINEAR_OF_WORDS, cv="prefit").fit(FEATURES, np.full(150, "new")),
     "must contain only the classes"),
    (lambda: Classifier(LinearSVC(), response_method="predict_proba").fit(FEATURES, WORDS), "LinearSVC", TypeError),
    (lambda: Classifier(LINEAR, ensemble="yes").fit(FEATURES, WORDS), "`ensemble` must be one of"),
    (lambda: Classifier(LINEAR, cv=LeaveOneOut()).fit(FEATURES[:30], YES[:30]),
     "got 30 in 30 parts. LeaveOneOut cross-validation does not"),
    (lambda: Classifier(LINEAR, cv=KFold(16)).fit(FEATURES[:30], YES[:30]),
     "Requesting 16-fold cross-validation does not"),
    (lambda: Classifier(LINEAR, ensemble=False, cv=ShuffleSplit(2)).fit(FEATURES, WORDS),
     "`cv` must have every row in one test part"),
    *wrong(partial(tc.sklearn.calibration_error, ["no", "yes"], [0.2, 0.7]),
        ({"norm": "l3"}, "`norm` must be one of 'l1', 'l2', 'max'"),
        ({"strategy": "pava"}, "`strategy` must be one of 'uniform', 'quantile'"),
        ({"squared": True}, "`squared` must be False for norm='l1'", ValueError, {"squared": True, "norm": "l2"}),
        ({"labels": ["no"]}, "`labels` must have one label for each of the 2 classes"),
        ({"labels": ["no", "maybe"]}, "must contain only the classes"),
        ({"labels": ["no", "no"]}, "`labels` must be distinct classes, got 'no' several times"),
        ({"pos_label": "maybe"}, "`pos_label` must be one of the classes 'no', 'yes', got 'maybe'"),
        ({"sample_weight": [0.5, 1.0], "strategy": "quantile"}, "must be whole numbers")),
    (lambda: tc.sklearn.get_scorer("roc_auc"), "`scoring` must be one of get_scorer_names()"),
    (lambda: tc.sklearn.get_scorer("neg_ece", mode="classwise", average=None)(LINEAR_OF_WORDS, FEATURES, WORDS),
     "must have one value as a score, got 3 values"),
    (lambda: display.from_cv_results(repeated_folds(), FEATURES, YES),
     "`per_fold` must be True if rows are in several test parts", ValueError,
     lambda: display.from_cv_results(repeated_folds(), FEATURES, YES, per_fold=True)),
    (lambda: display.from_cv_results({"estimator": []}, FEATURES, YES),
     "`cv_results` must contain 'estimator' and 'indices', got no 'indices'"),
    (lambda: display.from_estimator(LinearSVC(), FEATURES, YES), "`estimator` must have predict_proba, got LinearSVC",
     TypeError),
    (lambda: display.from_predictions(np.eye(3, dtype=int), np.eye(3)), "must have one label for each sample"),
    (lambda: display.from_predictions([], []), "must contain at least one label, got none"),
    (lambda: display.from_predictions([0, 1], [0.1, 0.9], strategy="other"), "`strategy` must be one of"),
    (lambda: from_estimator(LinearSVC(), FEATURES, WORDS), "must have predict_proba, got LinearSVC", TypeError),
    (lambda: from_estimator(SeveralOutputs(0, 1), FEATURES, np.full((150, 2), 2)),
     "`y` must contain only 0 and 1 for several labels, got 2", ValueError,
     lambda: from_estimator(SeveralOutputs(0, 1), FEATURES, np.arange(300).reshape(150, 2) % 2, **QUICK)),
    (lambda: from_estimator(SeveralOutputs(1, 2), FEATURES, np.ones((150, 2))),
     "`estimator` must have outputs 0 and 1 for a multi-label report, got classes [1, 2]"),
    (lambda: from_estimator(SeveralOutputs(), FEATURES, WORDS), "`estimator` must be fitted and have classes_",
     TypeError),
    *wrong(partial(from_estimator, LINEAR_OF_WORDS, FEATURES, y=WORDS, **QUICK),
        ({"y": WORDS[:-1]}, "one label for each row of `X`"),
        ({"y": np.arange(150)}, "['apple', 'pear', 'plum'], got '0' (150 of 150 rows)"),
        ({"y": np.where(WORDS == "pear", "z", WORDS)}, "got 'z' ("),
        ({"task": "binary"}, "`task` must not be passed, because the classifier ... got 'binary'", TypeError)),
]  # fmt: skip

# Integrations

IMAGES, CLASSES = torch.randn(70, 4, generator=G), torch.randint(0, 3, (70,), generator=G)
MODEL = torch.nn.Linear(4, 3)
EACH = [(IMAGES, CLASSES)]
STEP = (torch.zeros(4, 7), t(0, 1, 2, 0))
SCORES = torch.zeros(4, 3)


class HuggingFace(torch.nn.Module):
    def forward(self, pixel_values, **_):
        return {"logits": MODEL(pixel_values)}


def partitions(**options):
    return import_module("torchcalib.integrations.partitions").Partitions.of_report(**options)


def of_comparison(*given, **options):
    return import_module("torchcalib.integrations.partitions").Partitions.of_comparison(*given, **options)


INTEGRATIONS = [
    *wrong(partial(tc.evaluate, model=MODEL, dataloader=EACH, progress=False),
        ({}, "these are logits: pass from_logits=True", ValueError, {"from_logits": True, **QUICK}),
        ({"model": torch.nn.Softmax(-1), "dataloader": [(IMAGES[:, :3], CLASSES)]},
         "Pass from_logits=True if the model ends without"),
        ({"dataloader": []}, "`dataloader` must yield at least one batch, got none"),
        ({"dataloader": [(IMAGES, CLASSES, CLASSES)]}, "(inputs, target) or a mapping, got ("),
        ({"dataloader": [{"image": IMAGES}]}, "targets under a known name"),
        ({"dataloader": [{"a": IMAGES, "b": IMAGES, "y": CLASSES}]}, "must yield one input"),
        ({"model": lambda x: (x, x)}, "`model` must return a tensor"),
        ({"predict": lambda m, b: m(b[0])}, "`predict` must return", TypeError),
        ({"model": HuggingFace(), "dataloader": [{"pixel_values": IMAGES, "labels": CLASSES}], "from_logits": False},
         "True for the output 'logits'"),
        ({"model": 3}, "`model` must be callable, got int", TypeError),
        ({"model": type("Clf", (), {"predict_proba": None})()}, "Report.from_estimator", TypeError),
        ({"cluster_by": "scene", "from_logits": True}, "`cluster_by` must be 'batch item' or the name of an entry"),
        works=False),
    *[Refusal(partial(found_by, None, outputs, batch, from_logits), text) for outputs, batch, from_logits, text in (
        (None, STEP, True, "must return predictions under a known name, or ... , got None for the batch"),
        ({"logits": SCORES}, (STEP[1],), True, "must return targets ... got {'logits': float32 (4, 3)}"),
        ({"logits": SCORES, "y": STEP[1]}, None, False, "`from_logits` must be True ... 'logits' ... , got False"),
        ({"probs": SCORES, "y": STEP[1]}, None, True, "`from_logits` must be False ... 'probs' ... , got True"))],
    (lambda: found_by(lambda outputs, batch: outputs, SCORES, STEP, from_logits=True), "`get` must return", TypeError),
    (lambda: tc.integrations.distinct_rows(torch.utils.data.RandomSampler(range(3))),
     "`sampler` must be a torch.utils.data.DistributedSampler, got RandomSampler", TypeError),
    *[Refusal(partial(partitions, **given), text, EITHER) for given, text in (
        ({"n_bins": 0}, "`n_bins` must be at least 1"), ({"n_rows": 0}, "`n_rows` must be at least 1"),
        ({"nonsense": 1}, "nonsense"))],
    (lambda: of_comparison(["prob", "sharp_prob"], clusters="row"),
     "`systems` must be a dict of column names", TypeError),
    (lambda: of_comparison({"a": "prob", "b": "sharp_prob"}), "`ids` or `clusters` must be the name", EITHER),
    (lambda: of_comparison({"a": "prob", "b": "sharp_prob"}, clusters="row", groups="site"),
     "`groups` must be an argument of a comparison", TypeError),
    (lambda: partitions().report([None]), "must contain at least one sample"),
]  # fmt: skip

AREAS = {
    "options": OPTIONS,
    "states": STATES,
    "images": OF_IMAGES,
    "operations": OPERATIONS,
    "tasks": TASKS,
    "losses": LOSSES,
    "calibrators": CALIBRATORS,
    "reports": REPORTS,
    "plots": PLOTS,
    "scikit-learn": SCIKIT_LEARN,
    "integrations": INTEGRATIONS,
}

WARNINGS = [  # call, text, and the advised call
    (lambda: fitted_to(OF_3, **LOGITS)(OF_3.softmax(-1)), "got values that look like probabilities",
     lambda: fitted_to(OF_3, **LOGITS)(OF_3)),
]  # fmt: skip
