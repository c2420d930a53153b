"""Table of surfaces: all ways to ask for a report, a value or a comparison, and the rows that they are asked about.

A new surface is tested by a row: see `REPORTS`, `VALUES`, `COMPARISONS` and `FORMATS`, and the laws in
test_laws_of_surfaces.py. A new kind of rows is an entry of `ROWS`, a metric or an option one of `QUESTIONS`.
"""

import io
import json
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from contract.states import rows_of
from helpers.prediction_files import WRITERS, flat
from helpers.systems import FEW
from sklearn.base import BaseEstimator, ClassifierMixin
from torchmetrics import MetricCollection

import torchcalib as tc
import torchcalib.torchmetrics as drop_in
from torchcalib.cli import main
from torchcalib.core.state import SumState
from torchcalib.io.errors import InputError
from torchcalib.reporting.comparison.building import ComparisonBuilder

N = 60
RNG = np.random.default_rng(3)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows with everything that a report of them is asked for.

    Attributes:
        name: unique name.
        task: name of the task.
        arrays: predictions, targets and other columns, by their names in files. The first axis has the rows.
        roles: names of columns that are weights, groups or clusters, by argument of a report; "a,b" for two columns.
        options: other options of the report.
    """

    name: str
    task: str
    arrays: dict[str, np.ndarray]
    roles: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def preds(self):
        return next(iter(self.arrays.values()))

    @property
    def target(self):
        return self.arrays.get("targets", self.arrays.get("correct"))

    @property
    def from_logits(self):
        return "logits" in self.arrays

    @property
    def given(self):
        """Options of a report of arrays. Files have their classes on the last axis."""
        axis = {"class_axis": -1} if self.preds.ndim > 2 and self.task != "binary" else {}
        return {"task": self.task, "from_logits": self.from_logits, **axis, **self.options}

    @property
    def has_columns(self):
        """Whether tables can represent the rows."""
        return max(self.preds.ndim, self.target.ndim) < 3 and self.target.shape != (N, 1)

    def between(self, start, end):
        return replace(self, arrays={name: x[start:end] for name, x in self.arrays.items()})

    def parts(self):
        """Return the rows in parts, of which one is empty. Some clusters of three rows are in two parts."""
        return [self.between(*ends) for ends in pairwise((0, 16, 16, 31, N))]

    def batch(self, convert=torch.from_numpy):
        """Return the arguments of an update. Several columns of groups are a dict."""
        columns = {"preds": convert(self.preds), "target": convert(self.target)}
        for role, names in self.roles.items():
            arrays = {name: self.arrays[name] for name in names.split(",")}
            found = {name: x if x.dtype.kind == "U" else convert(x) for name, x in arrays.items()}
            columns[role] = found if len(found) > 1 else found[names]
        return columns

    def __str__(self):
        return self.name


def drawn(task, scale=2.0):
    """Return over-confident probabilities of 3 classes or labels, and targets."""
    logits = RNG.normal(size=N if task == "binary" else (N, 3)) * 1.5
    if task == "multiclass":
        odds = np.exp(scale * logits)
        return {
            "probs": odds / odds.sum(-1, keepdims=True),
            "targets": (logits + RNG.gumbel(size=logits.shape)).argmax(-1),
        }
    outcomes = RNG.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return {"probs": 1 / (1 + np.exp(-scale * logits)), "targets": outcomes.astype(np.int64)}


def with_column(task, name, values):
    return {**drawn(task), name: values}


def missing(task):
    """Return arrays with two rows of NaN."""
    arrays = drawn(task)
    arrays["probs"][[3, 40]] = np.nan
    return arrays


RATES = RNG.random(N)
SITE, PATIENT = np.array(["north", "", "Süd"])[RNG.integers(3, size=N)], np.arange(N) // 3
EMPTY = SITE == ""
NAMED, NUMBERED = np.array([f"patient {k}" for k in PATIENT]), PATIENT * 1009 - 7
QUESTION = np.arange(N) * 7919 % 1009
NAMED_QUESTION = np.array([f"question {k}" for k in QUESTION])
REAL, COUNTS = RNG.exponential(size=N), RNG.integers(0, 4, N)
BOTH = {"groups": "site", "clusters": "patient"}
PROBS, ONE_OF_3 = drawn("multiclass")["probs"], np.eye(3, dtype=np.int64)[RNG.integers(0, 3, N)]
PIXELS, MAPS = RNG.dirichlet(np.ones(3), (N, 2)), RNG.random((N, 2, 3))
LOGITS = {"logits": 3 * RNG.normal(size=(N, 3)), "targets": RNG.integers(0, 3, N)}


def of(name, task, preds, targets):
    return Rows(name, task, {"probs": preds, "targets": targets})


ROWS = [
    *(Rows(task, task, drawn(task)) for task in ("binary", "multiclass", "multilabel")),
    Rows("confidence", "confidence", {"confidence": RATES.round(2), "correct": RNG.integers(0, 2, N)}),
    Rows(
        "calibrated and with intervals",
        "binary",
        drawn("binary"),
        {},
        {"with_calibration": True, "safe_threshold": 9.0},
    ),
    Rows("groups", "binary", with_column("binary", "site", SITE), {"groups": "site"}),
    Rows(
        "groups of two columns",
        "binary",
        {**with_column("binary", "site", SITE), "ward": PATIENT % 4 - 1},
        {"groups": "site,ward"},
    ),
    Rows("impossible outcomes", "binary", {"probs": np.array([0.0, 0.3, 0.7, 1.0])[PATIENT % 4], "targets": 1 * EMPTY}),
    Rows("numbered groups", "binary", with_column("binary", "site", PATIENT % 4 - 1), {"groups": "site"}),
    Rows("clusters", "binary", with_column("binary", "patient", NUMBERED), {"clusters": "patient"}, {"right": True}),
    Rows("groups and clusters", "multiclass", {**drawn("multiclass"), "site": SITE, "patient": NAMED}, BOTH),
    Rows("real weights", "multilabel", with_column("multilabel", "weights", REAL), {"weights": "weights"}),
    *(
        Rows(f"missing rows of {task}", task, missing(task), {}, {"nan_policy": "drop"})
        for task in ("binary", "multiclass")
    ),
    Rows("whole weights", "multiclass", {**LOGITS, "weights": COUNTS}, {"weights": "weights"}, {"n_bins": 7}),
    # other kinds of targets, and more axes
    of("annotator counts of classes", "multiclass", PROBS, RNG.multinomial(5, np.ones(3) / 3, N)),
    of("one-hot labels", "multiclass", PROBS, ONE_OF_3),
    of("shares of classes", "multiclass", PROBS, RNG.dirichlet(np.ones(3), N)),
    of("annotator counts for no and yes", "binary", RATES, RNG.multinomial(4, [0.5, 0.5], N)),
    of("shares of yes", "binary", RATES, RNG.random(N)),
    of("annotator counts for each label", "multilabel", PROBS, RNG.multinomial(4, [0.5, 0.5], (N, 3))),
    of("pixels", "multiclass", PIXELS, RNG.integers(0, 3, (N, 2))),
    of("annotator counts of pixels", "multiclass", PIXELS, RNG.multinomial(3, np.ones(3) / 3, (N, 2))),
    of("binary maps", "binary", MAPS, (RNG.random((N, 2, 3)) < MAPS).astype(np.int64)),
    of("annotator counts of binary maps", "binary", MAPS, RNG.multinomial(3, [0.5, 0.5], (N, 2, 3))),
    of("a column", "binary", RATES[:, None], (RNG.random((N, 1)) < 0.5).astype(np.int64)),
    of("a column of annotator counts", "binary", RATES[:, None], RNG.multinomial(4, [0.5, 0.5], (N, 1))),
]
QUICK = {"with_calibration": False, "with_intervals": False}
ROWS = [rows if rows.options.get("with_calibration") else replace(rows, options={**QUICK, **rows.options})
        for rows in ROWS]  # fmt: skip


@dataclass(frozen=True)
class Surface:
    """A way to ask: a function of what is asked and an empty folder, and a condition under which it can answer."""

    ask: Callable[..., Any]
    can: Callable[[Any], bool] = lambda _: True
    rtol: float = 1e-12


def printed(*arguments):
    """Run a command, and return its output. An error of the command is raised."""
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()) as error:
        code = main([str(each) for each in arguments])
    if code:
        raise InputError(error.getvalue().strip())
    return shown.getvalue()


# Reports: functions of rows and a folder


def of_arrays(rows, _, convert=torch.from_numpy):
    return tc.report(**rows.batch(convert), **rows.given)


def of_frame(make):
    def report(rows, _):
        return tc.report(make(flat(rows.arrays)), **rows.roles, **rows.options, task=rows.task)

    return report


def package(name):
    return pytest.importorskip(name)


def frame_of(columns):
    return package("pandas").DataFrame(columns)


def table_of(columns):
    return package("pyarrow").table(columns)


def written(rows, folder, suffix, stem="p"):
    """Write the arrays in the format of a suffix, and return the paths."""
    if suffix != "npy":
        WRITERS[suffix](folder / f"{stem}.{suffix}", rows.arrays)
        return [folder / f"{stem}.{suffix}"]
    paths = [folder / f"{name}.npy" for name in rows.arrays]
    for path, values in zip(paths, rows.arrays.values(), strict=True):
        np.save(path, values)
    return paths


def of_file(suffix):
    def report(rows, folder):
        return tc.Report.from_files(written(rows, folder, suffix), task=rows.task, **rows.roles, **rows.options)

    return report


def of_shards(rows, folder):
    paths = [path for k, part in enumerate(rows.parts()) for path in written(part, folder, "npz", f"{k}")]
    return tc.Report.from_files(*paths, task=rows.task, **rows.roles, **rows.options)


def options_of_command(rows):
    """Return the options of `torchcalib report` for the options of a report."""
    words = ["--task", rows.task]
    for name, value in {**rows.roles, **rows.options}.items():
        name = {"ids": "id"}.get(name, name)
        option = f"--{name.replace('with_', 'no-').replace('_', '-')}"
        words += [option] * (value is not name.startswith("with_")) if isinstance(value, bool) else [option, value]
    return words


def of_command(rows, folder):
    return json.loads(printed("report", *written(rows, folder, "npz"), *options_of_command(rows), "--json"))


def of_saved_state(rows, folder):
    saved = folder / "state.pt"
    printed("report", *written(rows, folder, "npz"), *options_of_command(rows), "--save-state", saved)
    return tc.ReportBuilder.load(saved).report()


def of_merge_command(rows, folder):
    states = []
    for k, part in enumerate(part for part in rows.parts() if len(part.target)):
        states.append(folder / f"{k}.pt")
        printed("report", *written(part, folder, "npz", f"{k}"), *options_of_command(rows), "--save-state", states[-1])
    return json.loads(printed("merge", *states, "--json"))


def builder_of(*parts):
    builder = tc.ReportBuilder(**parts[0].given)
    for part in parts:
        builder.update(**part.batch())
    return builder


def of_builder(rows, _):
    return builder_of(*rows.parts()).report()


def of_merged_builders(rows, _):
    first, *others = [builder_of(part) for part in rows.parts()]
    for other in others:
        first.merge(tc.ReportBuilder.from_bytes(other.state_bytes()))
    return first.report()


def partitions():
    return import_module("torchcalib.integrations.partitions").Partitions


def of_partitions(rows, _):
    """Return the report of partitions, which an engine such as Dask, Ray or Spark merges in this way."""
    of_rows = partitions().of_report(**rows.roles, **rows.options, task=rows.task)
    states = [of_rows.state(k, [table_of(flat(part.arrays))]) for k, part in enumerate(rows.parts())]
    return of_rows.report([of_rows.merged(states[:2]), of_rows.merged(states[2:])])


def of_dataset(rows, folder):
    dataset = package("pyarrow.dataset")
    for k, part in enumerate(rows.parts()):
        written(part, folder, "numbered.parquet", f"{k}")
    report = import_module("torchcalib.integrations.arrow").report
    return report(dataset.dataset(folder), **rows.roles, **rows.options, task=rows.task)


def of_evaluate(rows, _):
    batches = [{"x": part.batch()["preds"], "y": part.batch()["target"],
                **{name: torch.from_numpy(part.arrays[name]) for name in rows.roles.values()}}
               for part in rows.parts() if len(part.target)]  # fmt: skip
    how = {"cluster_by": rows.roles.get("clusters"), "group_by": rows.roles.get("groups"), "progress": False,
           "ignore_index": None}  # fmt: skip
    return tc.evaluate(lambda x: x, batches, **how, **rows.given)


def of_ignite(rows, _):
    engine = package("ignite.engine").Engine(lambda _, batch: batch)
    tc.integrations.IgniteMetric(tc.ReportBuilder(**rows.given)).attach(engine, "report")
    return engine.run([tuple(part.batch().values()) for part in rows.parts()]).metrics["report"]


def has_no_clusters_or_groups(rows):
    return not {"groups", "clusters"} & {*rows.roles}


def has_numbers_only(rows):
    return all(x.dtype.kind != "U" for x in rows.arrays.values())


def has_batches_of_numbers(rows):
    return has_numbers_only(rows) and rows.task != "confidence" and "weights" not in rows.roles


def is_table(rows):
    return rows.has_columns


FORMATS = {suffix: Surface(of_file(suffix), is_table) for suffix in WRITERS}
FORMATS |= {suffix: Surface(of_file(suffix)) for suffix in ("npz", "npy")}
FORMATS |= {suffix: Surface(of_file(suffix), has_numbers_only) for suffix in ("pt", "safetensors")}
REPORTS = {
    "arrays": Surface(partial(of_arrays, convert=lambda x: x)),
    "lists": Surface(partial(of_arrays, convert=np.ndarray.tolist)),
    "pandas": Surface(of_frame(frame_of), is_table),
    "polars": Surface(of_frame(lambda columns: package("polars").DataFrame(columns)), is_table),
    "arrow": Surface(of_frame(table_of), is_table),
    "shards": Surface(of_shards),
    "command": Surface(of_command),
    "saved state": Surface(of_saved_state),
    "merge command": Surface(of_merge_command),
    "builder": Surface(of_builder),
    "merged builders": Surface(of_merged_builders),
    "partitions": Surface(of_partitions, is_table),
    "dataset": Surface(of_dataset, is_table),
    "evaluate": Surface(of_evaluate, has_batches_of_numbers),
    "ignite": Surface(of_ignite, has_no_clusters_or_groups),
    **FORMATS,
}


def with_wrong_value(name, column, value):
    """Return some of the rows above with a wrong value in row 40."""
    rows = BY_NAME[name]
    arrays = {key: x.copy() for key, x in rows.arrays.items()}
    arrays[column][40, ...] = value
    return replace(rows, name=f"{name} with {column} {value}", arrays=arrays)


BY_NAME = {rows.name: rows for rows in ROWS}
WRONG = [
    with_wrong_value("binary", "probs", 1.5),
    with_wrong_value("multiclass", "probs", -0.25),
    with_wrong_value("multilabel", "targets", 7),
    with_wrong_value("multiclass", "targets", 9),
    with_wrong_value("real weights", "weights", -2),
    with_wrong_value("numbered groups", "site", -3),
    with_wrong_value("confidence", "correct", 3),
]


# Values of metrics: functions of a question and a folder


CLASSES = {cls.function.__name__: cls for cls in (getattr(tc, name) for name in tc.__all__) if hasattr(cls, "function")}
KEYS = {name: name for name in ("nll", "ece", "ks", "accuracy", "aurc", "eaurc", "correctness_auroc")}
KEYS["brier_score"] = "brier"


@dataclass(frozen=True, eq=False)
class Question:
    """What is the value of a metric for rows? With options of the function, and of the command line."""

    metric: str
    rows: Rows
    options: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def given(self):
        """Arguments of the function beside predictions, targets and weights."""
        return {"task": self.rows.task, "from_logits": self.rows.from_logits, **self.options}

    @property
    def function(self):
        return getattr(tc, self.metric)

    @property
    def is_weighted(self):
        return "weights" in self.rows.roles

    @property
    def outputs(self):
        sizes = {"multiclass": "num_classes", "multilabel": "num_labels"}
        return {sizes[self.rows.task]: 3} if self.rows.task in sizes else {}

    def make(self, **more):
        """Return an empty metric."""
        return CLASSES[self.metric](**self.given, **self.outputs, **more)

    def updated(self, metric, *parts, **more):
        for part in parts or [self.rows]:
            metric.update(**part.batch(), **more)
        return metric

    def __str__(self):
        return f"{self.metric} {self.rows} {self.command}".strip()


COST = [[0, 1, 1], [5, 0, 1], [1, 1, 0]]
QUESTIONS = [
    *(Question("ece", BY_NAME[task]) for task in ("binary", "multiclass", "multilabel", "confidence")),
    Question("ece", BY_NAME["whole weights"], {"n_bins": 7, "right": True}, "--n-bins 7 --right"),
    Question("ece", BY_NAME["multiclass"], {"mode": "classwise", "average": None},
             "--mode classwise --option average=None"),
    Question("ece", BY_NAME["multiclass"], {"mode": tc.TopK(2)}, "--mode top2"),
    Question("ece", BY_NAME["whole weights"], {"mode": tc.TopK(2)}, "--mode top_k=2"),
    Question("nll", BY_NAME["confidence"]),
    *(Question(name, BY_NAME["confidence"], {"mode": "positive"}) for name in ("aurc", "eaurc", "correctness_auroc")),
    Question("nll", BY_NAME["real weights"]),
    Question("nll", BY_NAME["whole weights"], {"normalize": "prior"}, "--option normalize=prior"),
    Question("brier_score", BY_NAME["multiclass"]),
    Question("accuracy", BY_NAME["multiclass"]),
    Question("smece", BY_NAME["binary"]),
    Question("ks", BY_NAME["binary"]),
    Question("accuracy_at_coverage", BY_NAME["multiclass"], {"coverage": 0.5}, "--option coverage=0.5"),
    Question("bayes_risk", BY_NAME["multiclass"], {"cost": COST}, f"--option 'cost={COST}'"),
]  # fmt: skip


def called(q, convert=torch.from_numpy, **more):
    """Call the function of a question for arrays of a kind."""
    return q.function(**q.rows.batch(convert), **q.given, **more)


def series_or_frame(library):
    def convert(x):
        return package(library).Series(x) if x.ndim == 1 else package(library).DataFrame(x)

    return convert


def with_nullable_columns(q, _):
    frames = series_or_frame("pandas")
    return called(q, lambda x: frames(x).astype("Float64" if x.dtype.kind == "f" else "Int64"))


def in_percent(q, _):
    with pytest.warns(UserWarning, match="percentages, which are divided by 100"):
        return q.function(np.rint(100 * q.rows.preds).astype(int).tolist(), q.rows.target, **q.given)


def in_percent_as_text(q, _):
    texts, outcomes = [f"{100 * p:.0f}%" for p in q.rows.preds.tolist()], np.array(["no", "yes"])[q.rows.target]
    return q.function(texts, outcomes.tolist(), **q.given)


def by_names_of_classes(q, _):
    names = np.array(["cat", "dog", "eel"])
    return q.function(package("pandas").DataFrame(q.rows.preds, columns=names), names[q.rows.target], **q.given)


def by_keywords(q, _):
    """Call with the names of scikit-learn."""
    names = {"preds": "y_proba", "target": "y_true", "weights": "sample_weight"}
    return q.function(**{names[name]: x for name, x in q.rows.batch(np.asarray).items()}, **q.given)


def on_two_axes(q, _):
    """Call with rows on two axes, of which the last one has the classes."""

    def convert(x):
        return torch.from_numpy(x.reshape(2, N // 2, *x.shape[1:]))

    axis = {} if q.rows.preds.ndim == 1 else {"class_axis": -1}
    return called(q, convert, **axis)


def in_batches(q, _):
    return q.updated(q.make(), *q.rows.parts()).compute()


def merged(q, _):
    first, *others = [q.updated(q.make(), part) for part in q.rows.parts()]
    for other in others:
        first.merge_state(q.make().from_bytes(other.state_bytes()))
    return first.compute()


def in_collection(collection):
    def value(q, _):
        other = tc.NLL(task=q.rows.task, from_logits=q.rows.from_logits, **q.outputs)
        metrics = collection({"one": q.make(), "other": other})
        return q.updated(metrics, *q.rows.parts()).compute()["one"]

    return value


def by_one_group(q, _):
    return q.updated(tc.ByGroup(q.make(), num_groups=1), groups=torch.zeros(N, dtype=torch.int64)).compute()[0]


def has_sums(q):
    return isinstance(q.make().kind, SumState)


def tested(q, _):
    return tc.calibration_test(q.make(), **q.rows.batch(), n_replicates=9).statistic


def in_report(ask):
    def value(q, folder):
        rows = replace(q.rows, options={**QUICK, **{name: x for name, x in q.options.items() if name != "mode"}})
        return ask(rows, folder)[KEYS[q.metric]]

    return value


def is_in_reports(q):
    """Whether a report has the line. It ranks answers by the confidence that they are correct."""
    is_ranked = q.rows.task == "confidence" and q.options.get("mode") == "positive"
    return q.metric in KEYS and ({*q.options} <= {"n_bins", "right"} or is_ranked)


def in_comparison(q, _):
    preds = q.rows.batch()
    systems = {"a": preds.pop("preds"), "b": torch.from_numpy(q.rows.preds[::-1].copy())}
    return tc.compare(
        systems,
        **preds,
        task=q.rows.task,
        from_logits=q.rows.from_logits,
        n_replicates=39,
        **{name: x for name, x in q.options.items() if name != "mode"},
    )[KEYS[q.metric]].values["a"]


def monitored(q, _):
    monitor = tc.Monitor(task=q.rows.task, from_logits=q.rows.from_logits, threshold=np.inf, **q.outputs)
    return q.updated(monitor, *q.rows.parts()).end_epoch()[f"val/{KEYS[q.metric]}"]


def by_command(q, folder, *more):
    (path,) = written(q.rows, folder, "npz")
    return printed("metric", q.metric, path, "--task", q.rows.task, *shlex.split(q.command), *more)


def by_images(q, folder):
    """Return the value of `report --per-image`, for parts of the rows as images of one line of voxels."""
    for name in ("preds", "target"):
        (folder / name).mkdir()
        for k, part in enumerate(part for part in q.rows.parts() if len(part.target)):
            array = np.moveaxis(getattr(part, name), -1, 0) if name == "preds" else part.target
            np.save(folder / f"{name}/{k}.npy", array)
    kind = "--from-logits" if q.rows.from_logits else "--from-probs"
    options = options_of_command(replace(q.rows, options={**QUICK, **q.options}))
    found = json.loads(printed("report", "--per-image", folder / "preds", folder / "target", kind, *options, "--json"))
    return next(line["value"] for line in found["lines"] if line["key"].split("/")[0] == KEYS[q.metric])


def is_plain_image(q):
    """Whether rows are voxels with labels, and the report has the line."""
    is_plain = not q.rows.roles and q.rows.target.dtype.kind == "i"
    return is_plain and is_in_reports(q) and q.rows.task in ("binary", "multiclass") and q.rows.target.ndim == 1


class Constant(ClassifierMixin, BaseEstimator):
    """Classifier whose input are its probabilities."""

    classes_ = np.arange(3)

    def predict_proba(self, x):
        return np.stack((1 - x, x), -1) if x.ndim == 1 else x

    def predict(self, x):
        return self.predict_proba(x).argmax(-1)


def classifier_of(q):
    model = Constant()
    model.classes_ = np.arange(3 if q.rows.preds.ndim > 1 else 2)
    return model


def scored(make):
    def value(q, _):
        weights = {"sample_weight": q.rows.arrays["weights"]} if q.is_weighted else {}
        return make(q)(classifier_of(q), q.rows.preds, q.rows.target, **weights)

    return value


def has_scorer(q):
    return (
        q.rows.task in ("binary", "multiclass") and not q.rows.from_logits and q.options.get("average", 1) is not None
    )


def of_estimator(q, _):
    weights = {"sample_weight": q.rows.arrays["weights"]} if q.is_weighted else {}
    report = tc.Report.from_estimator(classifier_of(q), q.rows.preds, q.rows.target, **weights, **q.options, **QUICK)
    return report[KEYS[q.metric]]


def sign(q):
    return 1 if CLASSES[q.metric].better == "higher" else -1


def scorer_of(q):
    scorer = tc.sklearn.get_scorer(("neg_" if sign(q) < 0 else "") + q.metric, **q.options)
    return lambda *given, **weights: sign(q) * scorer(*given, **weights)


def by_sklearn(q, _):
    weights = q.rows.arrays.get("weights") if q.is_weighted else None
    return tc.sklearn.calibration_error(q.rows.target, q.rows.preds, sample_weight=weights)


def is_plain_ece(q):
    return q.metric == "ece" and not q.options and q.rows.task in ("binary", "multiclass")


def by_names_of_torchmetrics(q, _):
    options = {"num_classes": 3} if q.rows.task == "multiclass" else {}
    metric = drop_in.CalibrationError(task=q.rows.task, n_bins=15, **options)
    value = q.updated(metric, *q.rows.parts()).compute()
    function = drop_in.calibration_error(*q.rows.batch().values(), task=q.rows.task, **options)
    torch.testing.assert_close(
        function.double(), value.double(), rtol=1e-6 if function.dtype == torch.float32 else 1e-12, atol=0
    )
    return value


def in_ignite(q, _):
    engine = package("ignite.engine").Engine(lambda _, batch: batch)
    tc.integrations.IgniteMetric(q.make()).attach(engine, "metric")
    return engine.run([tuple(part.batch().values()) for part in q.rows.parts()]).metrics["metric"]


def by_answers(q, _):
    """Return the value that lm-eval and Inspect compute for pairs of confidence and outcome."""
    answers = import_module("torchcalib.integrations.answers")
    return answers.value_of("ece", zip(q.rows.preds.tolist(), q.rows.target.tolist(), strict=True))


def audited(q, _):
    stated = [{"id": k, "confidence": p, "correct": y} for k, (p, y) in
              enumerate(zip(q.rows.preds.tolist(), q.rows.target.tolist(), strict=True))]  # fmt: skip
    return tc.audit(stated, **QUICK)["reported"].value(q.metric)


VALUES = {
    "numpy": Surface(lambda q, _: called(q, np.asarray)),
    "lists": Surface(lambda q, _: called(q, np.ndarray.tolist)),
    "pandas": Surface(lambda q, _: called(q, series_or_frame("pandas"))),
    "polars": Surface(lambda q, _: called(q, series_or_frame("polars"))),
    "nullable columns": Surface(with_nullable_columns, lambda q: q.rows.has_columns),
    "percentages": Surface(in_percent, lambda q: q.rows.task == "confidence"),
    "texts of percentages": Surface(in_percent_as_text, lambda q: q.rows.task == "confidence"),
    "names of classes": Surface(by_names_of_classes, lambda q: q.rows.task == "multiclass" and not q.rows.from_logits),
    "names of scikit-learn": Surface(by_keywords),
    "two axes": Surface(on_two_axes),
    "gradients": Surface(lambda q, _: called(q, lambda x: torch.from_numpy(x).requires_grad_(x.dtype.kind == "f"))),
    "class": Surface(lambda q, _: q.updated(q.make()).compute()),
    "forward": Surface(lambda q, _: q.make()(**q.rows.batch())),
    "batches": Surface(in_batches),
    "merged states": Surface(merged),
    "collection": Surface(in_collection(tc.CalibrationCollection)),
    "collection of torchmetrics": Surface(in_collection(MetricCollection)),
    "group": Surface(by_one_group),
    "bootstrap": Surface(lambda q, _: q.updated(tc.Bootstrapped(q.make(), n_replicates=39)).compute(), has_sums),
    "test": Surface(tested, lambda q: q.metric in ("ece", "smece", "ks") and q.rows.task != "confidence"),
    "report": Surface(in_report(of_arrays), is_in_reports),
    "report of a frame": Surface(in_report(of_frame(frame_of)), is_in_reports),
    "comparison": Surface(in_comparison, is_in_reports),
    "monitor": Surface(monitored, lambda q: q.metric in ("nll", "brier_score", "ece", "accuracy") and not q.options),
    "command": Surface(lambda q, folder: np.array(json.loads(by_command(q, folder, "--json"))["value"], float)),
    "printed command": Surface(lambda q, folder: [float(x) for x in by_command(q, folder).split()], rtol=1e-5),
    "report per image": Surface(by_images, is_plain_image),
    "scorer": Surface(scored(scorer_of), has_scorer),
    "function of scikit-learn": Surface(by_sklearn, is_plain_ece),
    "classifier": Surface(of_estimator, lambda q: has_scorer(q) and is_in_reports(q)),
    "names of torchmetrics": Surface(by_names_of_torchmetrics, is_plain_ece, rtol=1e-7),
    "ignite": Surface(in_ignite),
    "answers": Surface(by_answers, lambda q: q.rows.task == "confidence" and q.metric == "ece"),
    "audit": Surface(audited, lambda q: q.rows.task == "confidence" and q.metric in ("ece", "nll", "accuracy")),
}


# Comparisons of the predictions of rows with those of a second system: functions of rows and a folder


LINKED = {**drawn("multiclass"), "patient": PATIENT}
COMPARED = [
    Rows("binary", "binary", drawn("binary")),
    Rows("clusters", "binary", with_column("binary", "patient", PATIENT), {"clusters": "patient"}, {"right": True}),
    Rows("clusters of classes", "multiclass", LINKED, {"clusters": "patient"}, {"n_bins": 7}),
    Rows("ids", "binary", with_column("binary", "question", QUESTION), {"ids": "question"}),
    Rows(
        "text ids and clusters",
        "multiclass",
        {**LINKED, "question": NAMED_QUESTION},
        {"ids": "question", "clusters": "patient"},
        {"n_bins": 7},
    ),
    *(BY_NAME[name] for name in ("annotator counts of classes", "one-hot labels", "annotator counts for no and yes")),
    Rows("logits with whole weights", "multiclass", {**LOGITS, "weights": COUNTS}, {"weights": "weights"}),
]
COMPARED = [replace(rows, options={k: x for k, x in rows.options.items() if k not in QUICK}) for rows in COMPARED]


def both(rows):
    """Return the predictions of two systems."""
    return {"a": rows.preds, "b": rows.preds[::-1].copy()}


def compared(rows, _, convert=torch.from_numpy):
    """Return the comparison of tensors."""
    given = rows.batch(convert)
    given["preds"] = {name: convert(preds) for name, preds in both(rows).items()}
    how = {**rows.given, **FEW, "from_logits": dict.fromkeys("ab", rows.from_logits)}
    return tc.compare(given.pop("preds"), given.pop("target"), **given, **how)


def of_two_files(rows, folder, suffix):
    name = next(iter(rows.arrays))
    systems = (replace(rows, arrays={**rows.arrays, name: preds}) for preds in both(rows).values())
    paths = [path for stem, each in zip("ab", systems, strict=True) for path in written(each, folder, suffix, stem)]
    return json.loads(printed("compare", *paths, *options_of_command(rows), "--json"))


def in_other_orders(rows, folder):
    """Return the comparison of two files, the second of which has the rows in another order."""
    name, order = next(iter(rows.arrays)), np.arange(N)[::-1] * 7 % N
    systems = (replace(rows, arrays={**rows.arrays, name: preds}) for preds in both(rows).values())
    first, second = systems
    second = replace(second, arrays={name: x[order] for name, x in second.arrays.items()})
    paths = [*written(first, folder, "csv", "a"), *written(second, folder, "parquet", "b")]
    return json.loads(printed("compare", *paths, *options_of_command(rows), "--json"))


def in_frames(rows, _):
    name = next(iter(rows.arrays))
    systems = {k: package("pandas").DataFrame(flat({**rows.arrays, name: preds})) for k, preds in both(rows).items()}
    target = next(key for key in rows.arrays if key in ("targets", "correct"))
    return tc.compare(systems, target, **rows.roles, **rows.options, **FEW, task=rows.task)


def in_one_table(rows):
    """Return the rows with the predictions of the second system in other columns, and the columns of both."""
    name, (first, second) = next(iter(rows.arrays)), both(rows).values()
    arrays = {f"{name}_of_a": first, f"{name}_of_b": second, **{key: rows.arrays[key] for key in [*rows.arrays][1:]}}
    names = [[key for key in flat(arrays) if key.startswith(f"{name}_of_{system}")] for system in "ab"]
    return replace(rows, arrays=arrays), {system: ",".join(each) for system, each in zip("ab", names, strict=True)}


def of_one_file(rows, folder):
    table, columns = in_one_table(rows)
    systems = [word for name, each in columns.items() for word in ("--preds", f"{name}={each}")]
    kind = "--from-logits" if rows.from_logits else "--from-probs"
    (path,) = written(table, folder, "csv")
    return json.loads(printed("compare", path, *systems, kind, *options_of_command(rows), "--json"))


def of_merged_comparisons(rows, _):
    """Return the comparison of merged builders, each of which has the rows between two ends."""
    batch, builders = rows.batch(), []
    batch["preds"] = {name: torch.from_numpy(preds) for name, preds in both(rows).items()}
    how = {**rows.given, **FEW}
    for start, end in pairwise((0, N // 3, N)):
        builders.append(ComparisonBuilder(("a", "b"), **how))
        builders[-1].update(**rows_of(batch, slice(start, end)))
        builders[-1].as_part(f"{start}", "rows")
    builders[0].merge(ComparisonBuilder.from_bytes(builders[1].state_bytes()))
    return builders[0].comparison()


def of_partitions_of_systems(rows, _):
    table, columns = in_one_table(rows)
    of_rows = partitions().of_comparison(columns, **rows.roles, **rows.given, **FEW)
    states = [of_rows.state(k, [table_of(flat(part.arrays))]) for k, part in enumerate(table.parts())]
    return of_rows.comparison([of_rows.merged(states[:2]), of_rows.merged(states[2:])])


def of_dataset_of_systems(rows, folder):
    table, columns = in_one_table(rows)
    for k, part in enumerate(table.parts()):
        written(part, folder, "numbered.parquet", f"{k}")
    dataset, compare = package("pyarrow.dataset"), import_module("torchcalib.integrations.arrow").compare
    return compare(dataset.dataset(folder), columns, **rows.roles, **rows.given, **FEW)


def has_ids(rows):
    return "ids" in rows.roles


def has_keys(rows):
    return not {"clusters", "ids"}.isdisjoint(rows.roles)


COMPARISONS = {
    "arrays": Surface(partial(compared, convert=np.asarray)),
    "lists": Surface(partial(compared, convert=np.ndarray.tolist)),
    "pandas": Surface(partial(compared, convert=series_or_frame("pandas"))),
    "npz files": Surface(partial(of_two_files, suffix="npz")),
    "csv files": Surface(partial(of_two_files, suffix="csv")),
    "one file": Surface(of_one_file),
    "files in other orders": Surface(in_other_orders, has_ids),
    "frames with all columns": Surface(in_frames, has_ids),
    "merged builders": Surface(of_merged_comparisons, has_keys),
    "partitions": Surface(of_partitions_of_systems, has_keys),
    "dataset": Surface(of_dataset_of_systems, has_keys),
}
