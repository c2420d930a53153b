"""Calls for everyday tasks as a person types them before reading the documentation, and their results.

The calls were written down before any was tried, and are not changed. A call works, or its error names the remedy, or
it misleads. A call that works has the expected value: nothing silently computes something else.
"""

import ast
import contextlib
import json
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit, logit
from sklearn.calibration import CalibratedClassifierCV
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, make_scorer
from sklearn.model_selection import GridSearchCV, cross_val_score

import torchcalib as tc
from torchcalib.calibration import load_calibrator
from torchcalib.cli import main

WORKS, REMEDY, MISLEADS = "works", "names the remedy", "misleads"

# Area, task, call, result, and an expression that is true for the value `found`, or a part of the message. For a
# command, `found` is its output and `code` its exit code. `said` contains the warnings.
CALLS = [
    ("torch", "ECE of logits", "tc.ece(logits, labels)", REMEDY, "Pass from_logits=True if these are logits"),
    ("torch", "ECE of softmax output", "tc.ece(logits.softmax(-1), labels)", WORKS, "near(found, top_label)"),
    (
        "torch",
        "ECE of bf16 logits",
        "tc.ece(logits.bfloat16(), labels, from_logits=True)",
        WORKS,
        "near(found, top_label)",
    ),
    ("torch", "ECE of fp16 probabilities", "tc.ece(probs.half(), labels)", WORKS, "near(found, top_label)"),
    (
        "torch",
        "import by name",
        "from torchcalib import ece, ECE, TemperatureScaling, report",
        WORKS,
        "ece is tc.functional.ece and near(ece(probs, labels), top_label)",
    ),
    (
        "torch",
        "torchmetrics' name",
        "tc.CalibrationError",
        REMEDY,
        "`torchcalib.torchmetrics.CalibrationError`",
    ),
    (
        "torch",
        "number of bins",
        "tc.ece(probs, labels, n_bins=20)",
        WORKS,
        "near(found, ece_of(*top(probs, labels), 20))",
    ),
    (
        "torch",
        "streaming in a loop",
        "m = tc.ECE(num_classes=4)\nfor p, y in batches:\n    m.update(p, y)\nm.compute()",
        WORKS,
        "near(found, top_label)",
    ),
    (
        "torch",
        "per class",
        "tc.classwise_ece(probs, labels, average='none')",
        REMEDY,
        "`torchcalib.ece` with mode='classwise'",
    ),
    ("torch", "top-2", "tc.ece(probs, labels, top_k=2)", REMEDY, "Pass mode=torchcalib.TopK(k)"),
    ("torch", "multi-label", "tc.ece(z.sigmoid(), multi)", WORKS, "near(found, multi_label)"),
    ("torch", "multi-label from logits", "tc.ece(z, multi, from_logits=True)", WORKS, "near(found, multi_label)"),
    (
        "torch",
        "segmentation",
        "tc.ece(seg.softmax(1), mask, ignore_index=255)",
        WORKS,
        "near(found, ece_of(*top(seg.softmax(1).movedim(1, -1)[mask != 255], mask[mask != 255])))",
    ),
    (
        "torch",
        "train with the metric",
        "tc.soft_ece(probs.requires_grad_(), labels).backward()",
        REMEDY,
        "losses.SoftBinnedECELoss",
    ),
    (
        "torch",
        "diagram with two models",
        "tc.reliability_diagram({'a': probs, 'b': probs2}, labels)",
        WORKS,
        "all(shown(str(found.get_legend().texts), each) for each in (top_label, top_label2))",
    ),
    (
        "torch",
        "temperature",
        "tc.TemperatureScaling().fit(logits, labels).temperature",
        WORKS,
        "near(found, best, 1e-2)",
    ),
    (
        "torch",
        "calibrated probabilities",
        "tc.TemperatureScaling().fit(logits, labels)(logits)",
        WORKS,
        "near(found.softmax(-1), (logits.double() / best).softmax(-1), 1e-2)",
    ),
    (
        "torch",
        "save and load",
        "cal = tc.TemperatureScaling().fit(logits, labels)\ntorch.save(cal.state_dict(), path)\nnew = "
        "tc.TemperatureScaling()\nnew.load_state_dict(torch.load(path))\nnew(logits)",
        WORKS,
        "near(found.softmax(-1), (logits.double() / best).softmax(-1), 1e-2)",
    ),
    (
        "torch",
        "Lightning logging",
        "class M(LightningModule): self.ece = tc.ECE(num_classes=4); self.log('ece', self.ece)",
        WORKS,
        "near(found['ece'], top_label)",
    ),
    (
        "torch",
        "interval",
        "m = tc.ECE(num_classes=4)\nm.update(probs, labels)\nm.confidence_interval()",
        REMEDY,
        "Call test() for the interval",
    ),
    (
        "torch",
        "is it calibrated?",
        "tc.calibration_test(probs, labels).p_value",
        WORKS,
        "abs(found - p_value_of(*top(probs, labels))) < 0.05",
    ),
    ("sklearn", "binary probabilities", "tc.ece(clf.predict_proba(X)[:, 1], y)", WORKS, "near(found, binary)"),
    (
        "sklearn",
        "both columns",
        "tc.ece(clf.predict_proba(X), y)",
        WORKS,
        "near(found, ece_of(*top(clf.predict_proba(X), y)))",
    ),
    (
        "sklearn",
        "keywords",
        "tc.ece(y_true=y, y_proba=clf.predict_proba(X))",
        WORKS,
        "near(found, ece_of(*top(clf.predict_proba(X), y)))",
    ),
    ("sklearn", "scikit-learn's order", "tc.ece(y, clf.predict_proba(X)[:, 1])", REMEDY, "Pass the predictions first"),
    (
        "sklearn",
        "cross_val_score",
        "cross_val_score(clf, X, y, scoring=make_scorer(tc.ece, response_method='predict_proba', "
        "greater_is_better=False), error_score='raise')",
        REMEDY,
        "use torchcalib.sklearn.get_scorer",
    ),
    (
        "sklearn",
        "GridSearchCV",
        "GridSearchCV(clf, {'C': [.1, 1]}, scoring=tc.sklearn.get_scorer('neg_nll')).fit(X, y).best_score_",
        WORKS,
        "near(found, GridSearchCV(clf, {'C': [0.1, 1]}, scoring='neg_log_loss').fit(X, y).best_score_)",
    ),
    (
        "sklearn",
        "CalibratedClassifierCV",
        "tc.ece(CalibratedClassifierCV(clf).fit(X, y).predict_proba(X), y)",
        WORKS,
        "near(found, ece_of(*top(CalibratedClassifierCV(clf).fit(X, y).predict_proba(X), y)))",
    ),
    (
        "sklearn",
        "string labels",
        "tc.ece(clf3.predict_proba(X3), words)",
        REMEDY,
        "pandas.Categorical(labels, categories=class_names).codes",
    ),
    (
        "sklearn",
        "sample weights",
        "tc.ece(P, y, sample_weight=w)",
        WORKS,
        "near(found, ece_of(P.repeat(w), y.repeat(w)))",
    ),
    (
        "sklearn",
        "decision function",
        "tc.ece(clf.decision_function(X), y, from_logits=True)",
        WORKS,
        "near(found, binary)",
    ),
    ("sklearn", "NaN probabilities", "tc.ece(P_nan, y)", REMEDY, "Pass nan_policy='drop'"),
    (
        "sklearn",
        "compare two models",
        "tc.compare({'lr': P, 'nb': P2}, y)",
        WORKS,
        "near(found['ece'].values['nb'], ece_of(P2, y))",
    ),
    (
        "sklearn",
        "display",
        "tc.CalibrationDisplay.from_estimator(clf, X, y)",
        REMEDY,
        "Did you mean `torchcalib.sklearn.CalibrationDisplay`",
    ),
    ("sklearn", "curve", "tc.calibration_curve(y, P, n_bins=10)", REMEDY, "Pass the predictions first"),
    ("sklearn", "Platt", "tc.PlattScaling().fit(P, y)", WORKS, "bool(found.converged)"),
    ("sklearn", "isotonic", "tc.IsotonicRegression().fit(P, y)", REMEDY, "`torchcalib.IsotonicCalibration`"),
    ("sklearn", "Brier", "tc.brier_score_loss(y, P)", REMEDY, "`torchcalib.brier_score` (predictions first)"),
    (
        "sklearn",
        "scorer by name",
        "tc.sklearn.get_scorer('neg_l1_calibration_error')(clf, X, y)",
        WORKS,
        "near(found, -binary)",
    ),
    ("pandas", "report of a frame", "tc.report(df)", WORKS, "near(found['ece'], binary)"),
    ("pandas", "report with a target", "tc.report(frame, target='churned')", WORKS, "near(found['ece'], binary)"),
    ("pandas", "two columns", "tc.ece(df['p'], df['y'])", WORKS, "near(found, binary)"),
    (
        "pandas",
        "class columns, string labels",
        "tc.ece(df3[['cat', 'dog', 'owl']], df3['label'])",
        WORKS,
        "near(found, ece_of(*top(clf3.predict_proba(X3), np.unique(words, return_inverse=True)[1])))",
    ),
    (
        "pandas",
        "groups",
        "tc.report(df['p'], df['y'], groups=df['sex'])",
        WORKS,
        "near(dict(zip(found.groups.group, found.groups.value, strict=True))['f'], by_sex[0])",
    ),
    (
        "pandas",
        "ECE by group",
        "tc.ece(df['p'], df['y'], groups=df['sex'])",
        REMEDY,
        "by_group(function, preds, target, groups)",
    ),
    (
        "pandas",
        "weights by name",
        "tc.report(df, target='y', weights='w')",
        WORKS,
        "near(found['ece'], ece_of(P.repeat(w), y.repeat(w)))",
    ),
    ("pandas", "missing values", "tc.ece(df_missing['p'], df_missing['y'])", REMEDY, "Pass nan_policy='drop'"),
    (
        "pandas",
        "groupby",
        "df.groupby('sex')[['p', 'y']].apply(lambda g: float(tc.ece(g['p'], g['y'])))",
        WORKS,
        "near(found, by_sex)",
    ),
    ("pandas", "bool outcome", "tc.brier_score(df['p'], df['y'] == 1)", WORKS, "near(found, np.mean((P - y) ** 2))"),
    (
        "pandas",
        "diagram",
        "tc.reliability_diagram(df['p'], df['y'])",
        WORKS,
        "near(found.collections[1].get_offsets()[:, 1], frequencies_of(P, y))",
    ),
    (
        "pandas",
        "compare columns",
        "tc.compare({'a': df['p'], 'b': df['p2']}, df['y'])",
        WORKS,
        "near(found['ece'].values['b'], ece_of(P2, y))",
    ),
    (
        "pandas",
        "flat for a table of runs",
        "pd.Series(tc.report(df).flat())",
        WORKS,
        "near(found['ece/positive'], binary)",
    ),
    ("pandas", "yes/no", "tc.report(df['p'], df['y'].map({0: 'no', 1: 'yes'}))", WORKS, "near(found['ece'], binary)"),
    (
        "pandas",
        "nullable columns",
        "tc.ece(df['p'].astype('Float64'), df['y'].astype('Int64'))",
        WORKS,
        "near(found, binary)",
    ),
    (
        "language",
        "confidence and correct",
        "tc.report(conf, ok, task='confidence')",
        WORKS,
        "near(found['ece'], stated)",
    ),
    (
        "language",
        "percent, words",
        "tc.report(pd.DataFrame({'confidence': percent, 'correct': okwords}), task='confidence')",
        WORKS,
        "near(found['ece'], stated) and 'divided by 100' in said",
    ),
    (
        "language",
        "percent list",
        "tc.report(percent, ok, task='confidence')",
        WORKS,
        "near(found['ece'], stated) and 'divided by 100' in said",
    ),
    (
        "language",
        "percent text",
        "tc.report([f'{v}%' for v in percent], okwords, task='confidence')",
        WORKS,
        "near(found['ece'], stated)",
    ),
    ("language", "ECE of confidences", "tc.ece(conf, ok)", WORKS, "near(found, stated)"),
    ("language", "ECE of percent", "tc.ece(percent, ok)", WORKS, "near(found, stated) and 'divided by 100' in said"),
    (
        "language",
        "ragged choices",
        "tc.ece(ragged, answers, from_logits=True)",
        WORKS,
        "near(found, ece_of(*chosen)) and 'logit -inf' in said",
    ),
    (
        "language",
        "ragged choices calibrator",
        "tc.TemperatureScaling().fit(ragged, answers)",
        WORKS,
        "near(found.temperature, ragged_best, 1e-2) and 'logit -inf' in said",
    ),
    (
        "language",
        "choices as log-likelihoods",
        "tc.ece(loglik, answers4, from_logits=True)",
        WORKS,
        "near(found, ece_of(*top(loglik.softmax(-1), answers4)))",
    ),
    (
        "language",
        "letters",
        "tc.ece(pd.DataFrame(loglik.softmax(-1), columns=list('ABCD')), letters)",
        WORKS,
        "near(found, ece_of(*top(loglik.softmax(-1), answers4)))",
    ),
    (
        "language",
        "tokens",
        "tc.ece(lm.view(-1, V), tokens.view(-1), from_logits=True, ignore_index=-100)",
        WORKS,
        "near(found, ece_of(*top(lm.softmax(-1)[tokens >= 0], tokens[tokens >= 0])))",
    ),
    (
        "language",
        "tokens, 3 axes",
        "tc.ece(lm, tokens, from_logits=True, ignore_index=-100)",
        WORKS,
        "near(found, ece_of(*top(lm.softmax(-1)[tokens >= 0], tokens[tokens >= 0])))",
    ),
    (
        "language",
        "epochs/clusters",
        "tc.report(conf, ok, task='confidence', clusters=question)",
        WORKS,
        "near(found['ece'], stated) and found.settings['clusters'] == len(set(question))",
    ),
    ("language", "selective prediction", "tc.aurc(conf, ok)", WORKS, "near(found, risk_area)"),
    ("language", "AUROC", "tc.auroc(conf, ok)", REMEDY, "`torchcalib.correctness_auroc` for confidences"),
    (
        "language",
        "compute_metrics",
        "tc.ece(EvalPrediction.predictions, EvalPrediction.label_ids, from_logits=True)",
        WORKS,
        "near(found, top_label)",
    ),
    (
        "language",
        "log run",
        "json.dumps(tc.report(conf, ok, task='confidence').flat())",
        WORKS,
        "near(json.loads(found)['nll'], log_loss(ok, conf))",
    ),
    ("cli", "report", "report f.csv", WORKS, "shown(found, on_file)"),
    (
        "cli",
        "report json",
        "report f.csv --json",
        WORKS,
        "near({line['key']: line['value'] for line in json.loads(found)['lines']}['ece/positive'], on_file)",
    ),
    ("cli", "number", "metric ece f.csv", WORKS, "near(float(found), on_file)"),
    ("cli", "number json", "metric ece f.csv --json", WORKS, "near(json.loads(found)['value'], on_file)"),
    ("cli", "number, no command", "ece f.csv", WORKS, "near(float(found), on_file)"),
    ("cli", "number, bins", "metric ece f.csv --n-bins 20", WORKS, "near(float(found), ece_of(P_file, y, 20))"),
    ("cli", "typo of metric", "metric ecee f.csv", REMEDY, "Names are accuracy, "),
    ("cli", "plot", "plot f.csv", WORKS, "f'ECE {on_file:#.3g}' in found and Path('reliability.svg').is_file()"),
    ("cli", "compare", "compare a.csv b.csv", WORKS, "shown(found, binary) and shown(found, ece_of(P2, y))"),
    ("cli", "typo of command", "reprot f.csv", REMEDY, "Did you mean `torchcalib report`?"),
    ("cli", "typo of option", "report f.csv --grops sex", REMEDY, "Did you mean --groups?"),
    ("cli", "target", "report frame.csv --target churned", WORKS, "shown(found, binary)"),
    ("cli", "label (other word)", "report frame.csv --label churned", REMEDY, "Did you mean --target?"),
    (
        "cli",
        "groups",
        "report f.csv --groups sex",
        WORKS,
        "shown(found, on_file) and 'no significant difference' in found",
    ),
    (
        "cli",
        "calibrate",
        "calibrate f.csv --out cal.pt",
        WORKS,
        "log_loss(y, load_calibrator('cal.pt')(torch.tensor(P_file))) <= file_nll * 1.001",
    ),
    (
        "cli",
        "apply",
        "apply cal.pt f.csv --out out.csv",
        WORKS,
        "near(pd.read_csv('out.csv')['p'], expit(logit(P_file) / file_best), 1e-2)",
    ),
    (
        "cli",
        "check",
        "check f.csv --fail-if 'p(ece) < 0.01 and ece > 0.02'",
        WORKS,
        "code == 1 and f'ece = {on_file:#.3g}' in found",
    ),
    ("cli", "missing file", "report fcsv", REMEDY, "Check the path."),
    (
        "cli",
        "percent confidences",
        "report answers.csv --task confidence",
        WORKS,
        "shown(found, stated) and 'divided by 100' in said",
    ),
    ("cli", "logits file", "report logits.npz --from-logits", WORKS, "shown(found, top_label)"),
    ("cli", "version", "--version", WORKS, "tc.__version__ in found"),
]

SLOW = ("tc.report", "compare", "LightningModule", "calibrate ", "check ", "plot ", "report ", "CalibratedClassifierCV")
"""Parts of calls that take long if they work."""


def row_of(area, task, call, result, expected):
    """Return the parameters of the test for a row of the table."""
    is_slow = result == WORKS and any(part in call for part in SLOW)
    marks = [pytest.mark.extended] if is_slow else []
    return pytest.param(area, call, result, expected, id=f"{area} {task}", marks=marks)


def ece_of(confidence, outcome, n_bins=15):
    """Expected calibration error in float64, a loop over bins."""
    confidence, outcome = np.asarray(confidence, float), np.asarray(outcome, float)
    bins = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    gaps = [confidence[bins == k].sum() - outcome[bins == k].sum() for k in range(n_bins)]
    return np.abs(gaps).sum() / len(confidence)


def frequencies_of(confidence, outcome, n_bins=15):
    """Frequency of the outcome in each bin with samples."""
    bins = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    return [outcome[bins == k].mean() for k in range(n_bins) if (bins == k).any()]


def p_value_of(confidence, outcome, n_simulated=500):
    """Fraction of simulated outcomes of a calibrated model whose expected calibration error is as large."""
    confidence, draws = np.asarray(confidence, float), np.random.default_rng(0).random((n_simulated, len(confidence)))
    return np.mean([ece_of(confidence, draw < confidence) >= ece_of(confidence, outcome) for draw in draws])


def top(probs, target):
    """Confidence and outcome of the most probable class."""
    probs, target = np.asarray(probs, float), np.asarray(target)
    return probs.max(-1), probs.argmax(-1) == target


def temperature_of(logits, target):
    """Temperature with the smallest cross entropy on a grid, and this cross entropy; logits `(N, C)` in float64."""
    grid = np.linspace(0.3, 8, 7701)
    nll = [float(torch.nn.functional.cross_entropy(logits / t, target)) for t in grid]
    return grid[np.argmin(nll)], min(nll)


def near(found, expected, tolerance=1e-3):
    """Return whether values agree within the rounding of half types and of printed numbers."""
    return np.allclose(np.asarray(found, float), np.asarray(expected, float), rtol=tolerance, atol=tolerance / 10)


def shown(text, value):
    """Return whether a text contains a value with 3 significant digits."""
    return f"{value:#.3g}" in text


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the names that calls and expressions use."""
    rng = np.random.default_rng(0)
    n = 120
    generator = torch.Generator().manual_seed(0)
    # torch
    logits = 2 * torch.randn(n, 4, generator=generator)
    labels = torch.multinomial((logits / 3).softmax(-1), 1, generator=generator).squeeze(1)
    probs, probs2 = logits.softmax(-1), (logits / 2).softmax(-1)
    batches = list(zip(probs.split(50), labels.split(50), strict=True))
    z = torch.randn(n, 5, generator=generator)
    multi = torch.bernoulli(z.sigmoid(), generator=generator).long()
    seg, mask = torch.randn(2, 3, 8, 8, generator=generator), torch.randint(3, (2, 8, 8), generator=generator)
    mask[0, :2] = 255
    path = tmp_path_factory.mktemp("calls") / "calibrator.pt"
    EvalPrediction = SimpleNamespace(predictions=logits.numpy(), label_ids=labels.numpy())
    # scikit-learn
    X = X3 = rng.normal(size=(n, 3))
    y = (X[:, 0] + rng.normal(size=n) > 0).astype(int)
    words = np.array(["cat", "dog", "owl"])[np.digitize(X[:, 1] + rng.normal(size=n), [-0.5, 0.5])]
    clf, clf3 = LogisticRegression().fit(X, y), LogisticRegression().fit(X3, words)
    P = clf.predict_proba(X)[:, 1]
    P2, P_nan, w = P**2, np.where(np.arange(n) == 3, np.nan, P), rng.integers(1, 4, n)
    # pandas
    sex = np.where(X[:, 2] > 0, "f", "m")
    full = pd.DataFrame({"p": P, "y": y, "p2": P2, "w": w, "sex": sex})
    frame, df_missing = full[["p", "y"]].rename(columns={"y": "churned"}), pd.DataFrame({"p": P_nan, "y": y})
    df3 = pd.DataFrame(clf3.predict_proba(X3), columns=["cat", "dog", "owl"]).assign(label=words)
    # language models
    percent = [round(100 * float(max(p, 1 - p))) for p in P]
    conf = [k / 100 for k in percent]
    ok = [bool(value) for value in rng.random(n) < np.array(conf)]
    okwords = ["correct" if value else "incorrect" for value in ok]
    ragged = [[float(v) for v in 2 * rng.normal(size=k)] for k in rng.integers(2, 5, n)]
    answers = [int(rng.choice(len(row), p=np.exp(row) ** 0.5 / (np.exp(row) ** 0.5).sum())) for row in ragged]
    loglik, answers4 = torch.randn(n, 4, generator=generator) - 20, [int(k) for k in rng.integers(4, size=n)]
    letters = ["ABCD"[k] for k in answers4]
    V = 7
    lm, tokens = torch.randn(4, 9, V, generator=generator), torch.randint(V, (4, 9), generator=generator)
    tokens[0, :3] = -100
    question = [k // 4 for k in range(n)]
    # expected values
    top_label, binary, stated = ece_of(*top(probs, labels)), ece_of(P, y), ece_of(conf, ok)
    top_label2 = ece_of(*top(probs2, labels))
    multi_label = np.mean([ece_of(z.sigmoid()[:, k], multi[:, k]) for k in range(5)])
    by_sex = [ece_of(P[sex == each], y[sex == each]) for each in "fm"]
    best, _ = temperature_of(logits.double(), labels)
    most = np.array([max(np.exp(row)) / np.exp(row).sum() for row in ragged])
    chosen = most, [np.argmax(row) == answer for row, answer in zip(ragged, answers, strict=True)]
    padded = torch.full((n, 4), -torch.inf).double()
    for place, row in zip(padded, ragged, strict=True):
        place[: len(row)] = torch.tensor(row)
    ragged_best, _ = temperature_of(padded, torch.tensor(answers))
    P_file = expit(3 * logit(P))  # an over-confident model
    on_file = ece_of(P_file, y)
    two = torch.tensor(np.stack((0 * P, logit(P_file)), -1))
    file_best, file_nll = temperature_of(two, torch.tensor(y))
    order = np.argsort(-np.array(conf), kind="stable")
    # the mean error over prefixes in the order of confidence, with the mean error of each tie
    errors = pd.Series(1.0 - np.array(ok)[order]).groupby(-np.array(conf)[order]).transform("mean")
    risk_area = float((errors.cumsum() / np.arange(1, n + 1)).mean())
    imported = (
        cross_val_score,
        json,
        load_calibrator,
        log_loss,
        make_scorer,
        CalibratedClassifierCV,
        GridSearchCV,
        Path,
    )
    return {**globals(), **{each.__name__: each for each in imported}, **locals()}


@pytest.fixture
def files(data, tmp_path, monkeypatch):
    """Write the files of the commands, and go to their folder."""
    monkeypatch.chdir(tmp_path)
    data["full"][["p", "y", "sex"]].assign(p=data["P_file"]).to_csv("f.csv", index=False)
    data["full"][["p", "y"]].to_csv("a.csv", index=False)
    data["full"][["p", "y"]].assign(p=data["P2"]).to_csv("b.csv", index=False)
    data["frame"].to_csv("frame.csv", index=False)
    answers = pd.DataFrame({"confidence": [f"{k}%" for k in data["percent"]], "correct": data["okwords"]})
    answers.to_csv("answers.csv", index=False)
    np.savez("logits.npz", logits=data["logits"].numpy(), labels=data["labels"].numpy())
    fitted = tc.TemperatureScaling().fit(torch.tensor(data["P_file"]), torch.tensor(data["y"]))
    tc.calibration.save_calibrator(fitted, "cal.pt")


def logged(call, data):
    """Return the values that Lightning logs for a module with the two statements in the class body of `call`.

    The first statement belongs to `__init__`, and the second to `validation_step`.
    """
    import lightning.pytorch as pl

    create, log = (compile(ast.Module([line], []), "call", "exec") for line in ast.parse(call).body[0].body)

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            exec(create, {**data, "self": self})

        def validation_step(self, batch, _):
            self.ece(*batch)
            exec(log, {"self": self})

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    loader = torch.utils.data.DataLoader(list(zip(data["probs"], data["labels"], strict=True)), batch_size=50)
    return pl.Trainer(**quiet).validate(Model(), loader, verbose=False)[0]


def evaluate(call, data):
    """Run the lines of a call. Return all names, and the value of the last line as `found`."""
    if "LightningModule" in call:
        return {**data, "found": logged(call, data)}
    columns = ["p", "y", *(name for name in ("p2", "w", "sex") if f"'{name}'" in call)]
    names, lines = {**data, "df": data["full"][columns]}, ast.parse(call).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), "call", "exec"), names)
    names["found"] = None if last is None else eval(compile(ast.Expression(last.value), "call", "eval"), names)
    return names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("area", "call", "result", "expected"), [row_of(*row) for row in CALLS])
def test_first_call(area, call, result, expected, data, capsys):
    """The call has the result of the table, and `expected` holds for its value or message."""
    names, message = data, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if area == "cli":
            code = 0
            with contextlib.suppress(SystemExit):
                code = main(shlex.split(call))
            printed = capsys.readouterr()
            names, message = {**data, "found": printed.out, "code": code}, " ".join(printed.err.split())
        elif result == WORKS:
            names = evaluate(call, data)
        else:
            with pytest.raises((AttributeError, ImportError, TypeError, ValueError)) as error:
                evaluate(call, data)
            message = str(error.value)
    said = " ".join([message, *(str(each.message) for each in caught)])
    assert eval(expected, {**names, "said": said}) if result == WORKS else expected in message


def test_most_first_calls_work_and_few_mislead():
    """At least 75% of the tasks work as typed (45 of 60), and at most 3% mislead."""
    results = [row[3] for row in CALLS]
    counts = {result: results.count(result) for result in (WORKS, REMEDY, MISLEADS)}
    print(counts)
    assert counts == {WORKS: 70, REMEDY: 22, MISLEADS: 0}
    assert counts[WORKS] >= 0.75 * len(CALLS) == 69
    assert counts[MISLEADS] <= 0.03 * len(CALLS)
    assert len({row[2] for row in CALLS}) == len(CALLS)
