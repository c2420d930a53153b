"""Table of states: every object that collects rows, with rows for it and everything that is computed from it.

A new kind of state is tested by a row: see `STATES`, and the laws in test_laws_of_states.py.
"""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, covering, path_of, paths
from helpers import fits
from helpers.reports import QUICK, TASKS, realistic
from helpers.shards import data_set
from helpers.systems import FEW, systems

import torchcalib as tc
from torchcalib import torchmetrics as names_of_torchmetrics
from torchcalib.calibration import load_calibrator, save_calibrator
from torchcalib.core.state import SumState
from torchcalib.integrations import linear_logits
from torchcalib.reporting.comparison.building import ComparisonBuilder

# Replacements of a state by an equal one: functions of the function that makes an empty state, and of the state
COPIES = {"pickle": lambda _, x: pickle.loads(pickle.dumps(x)), "deepcopy": lambda _, x: copy.deepcopy(x)}


def from_state_dict(make, x):
    x.persistent(True)
    again = make()
    again.persistent(True)
    again.load_state_dict(x.state_dict())
    return again


def in_module(make, x):
    """Return a metric after a checkpoint of a module that contains it."""
    x.persistent(True)
    again = torch.nn.ModuleDict({"m": make()})
    again["m"].persistent(True)
    with TemporaryDirectory() as folder:
        torch.save(torch.nn.ModuleDict({"m": x}).to(torch.bfloat16).state_dict(), Path(folder) / "module.pt")
        again.load_state_dict(torch.load(Path(folder) / "module.pt", weights_only=True))
    return again["m"]


def from_file(make, x, save, load):
    with TemporaryDirectory() as folder:
        save(x, Path(folder) / "state")
        return load(Path(folder) / "state")


OF_METRICS = {
    **COPIES,
    "clone": lambda _, x: x.clone(),
    "cast": lambda _, x: x.clone().to(torch.bfloat16),
    "state_dict": from_state_dict,
    "module": in_module,
    "bytes": lambda make, x: make().from_bytes(x.state_bytes()),
}
OF_BUILDERS = {"deepcopy": COPIES["deepcopy"], "bytes": lambda _, x: type(x).from_bytes(x.state_bytes())}
IN_EVERY_WAY = {
    **COPIES,
    **OF_BUILDERS,
    "state": lambda _, x: type(x).of_state(x.state()),
    "file": lambda make, x: from_file(make, x, tc.ReportBuilder.save, tc.ReportBuilder.load),
}
OF_CALIBRATORS = {
    **COPIES,
    "state_dict": lambda make, x: loaded(make(), x.state_dict()),
    "file": lambda make, x: from_file(make, x, save_calibrator, load_calibrator),
}
OF_HISTORIES = {**COPIES, "state_dict": lambda make, x: loaded(make(), x.state_dict())}


def loaded(x, state):
    x.load_state_dict(state)
    return x


def members_of(x):
    return list(x.values()) if isinstance(x, tc.CalibrationCollection) else [x]


def merge_metrics(mine, theirs, of=lambda metric: metric):
    for one, other in zip(members_of(mine), members_of(theirs), strict=True):
        one.merge_state(of(other))


# Additions of a second state to a first one, which is changed
MERGES_METRICS = {"metric": merge_metrics, "state": partial(merge_metrics, of=lambda metric: metric.metric_state)}
MERGES_BUILDERS = {"builder": lambda mine, theirs: mine.merge(theirs)}


@dataclass(frozen=True)
class State:
    """A kind of state: how to make an empty one, rows for it, and everything that is computed from it.

    Attributes:
        name: unique name, which begins with the kind.
        make: function that returns an empty state. For metrics, it accepts their other arguments.
        columns: arguments of `add`: tensors, arrays of text, or dicts of them; the first axis has the rows.
        value: function of a state that returns everything that is computed from it, as tensors and plain values.
        copies: functions that return an equal state; see `COPIES`.
        merges: functions that add a second state to a first one; none if states cannot be merged.
        add: function of a state and columns that adds rows.
        order: `"any"`; `"rows"` if values depend on the order of rows; `"batches"` if states also cannot be merged;
            None if an addition replaces earlier rows.
        block: batches have multiples of so many rows.
        content: function of a state that returns all that a failed call must not change.
        rtol: relative and absolute tolerance of values.
        wrong: changes of a batch that must be refused: name of the column, and value of one of its rows.
        unlike: function that returns a state with other options, which cannot be merged.
        is_bounded: whether the size of the state does not depend on the number of rows.
        examples: number of random examples of a law; few for slow values.
        patches: values of module attributes while the state is used.
        marks: marks of the tests.
    """

    name: str
    make: Callable[..., Any]
    columns: dict[str, Any]
    value: Callable[[Any], Any]
    copies: dict[str, Callable[..., Any]] = field(default_factory=lambda: COPIES)
    merges: dict[str, Callable[..., Any]] = field(default_factory=dict)
    add: Callable[..., Any] = lambda state, columns: state.update(**columns)
    order: str | None = "any"
    block: int = 1
    content: Callable[[Any], Any] = lambda state: state.state_bytes()
    rtol: float = 1e-12
    wrong: tuple[tuple[str, Any], ...] = ()
    unlike: Callable[[], Any] | None = None
    is_bounded: bool = False
    examples: int = 3
    patches: dict[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()

    @property
    def n(self):
        return n_rows(self.columns)

    @property
    def has_classes(self):
        """Whether predictions have an axis of classes, and targets have none."""
        preds = self.columns["preds"]
        preds = next(iter(preds.values())) if isinstance(preds, dict) else preds
        target = self.columns["target"]
        return type(preds) is type(target) is torch.Tensor and (preds.dim(), target.dim()) == (2, 1)

    def after(self, *batches, state=None):
        """Return an empty or the given state after batches of rows: indices, or columns."""
        state = self.make() if state is None else state
        for batch in batches:
            self.add(state, batch if isinstance(batch, dict) else rows_of(self.columns, batch))
        return state

    def __str__(self):
        return self.name


def n_rows(columns):
    first = next(iter(columns.values()))
    return n_rows(first) if isinstance(first, dict) else len(first)


def rows_of(column, rows):
    """Return some rows of a column, or of a dict of columns."""
    if isinstance(column, dict):
        return {name: rows_of(each, rows) for name, each in column.items()}
    return column[rows]


# Metrics and their wrappers


def value_of_metric(metric):
    return {"value": metric.compute(), "n_dropped": metric.n_dropped()}


def value_of_groups(metric):
    return {**value_of_metric(metric), "n": metric.n()}


def value_of_bootstrap(metric):
    interval = metric.interval()
    return {**value_of_metric(metric), "replicates": interval.replicates, "n_clusters": interval.n_clusters}


def value_of_clusters(metric):
    interval = metric.interval(n_replicates=59)
    found = {**value_of_metric(metric), "ends": (interval.low, interval.high), "n": interval.n_clusters}
    return found if isinstance(metric.metric, tc.NLL) else {**found, **value_of_test(metric)}


def value_of_test(metric):
    found = metric.test(n_replicates=59)
    fields = {name: getattr(found, name) for name in ("statistic", "noise_floor", "p_value", "low", "high")}
    return fields if found.n_clusters is None else {**fields, "n_clusters": found.n_clusters, "merged": found.n_merged}


def value_of_noise(metric):
    """Return the value, and the sums that determine the noise floor, which differ between labels and soft labels."""
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn):
        statistic = metric.statistic()
    return value_of_test(metric) if isinstance(metric, tc.KS) else {"value": metric.compute(), "noise": statistic.noise}


def columns_of(case, n=40, weighted=True):
    preds, target = case.data(n=n)
    weights = {"weights": case.weights(n)} if weighted else {}
    return {"preds": preds, "target": target, **weights}


def binary(n=40):
    """Return columns of a binary task, with whole weights, which every metric supports."""
    return {**columns_of(BINARY, n), "weights": 1 + torch.arange(n) % 3}


BAD = (("preds", torch.nan), ("target", 99), ("weights", -1))


def of_metric(name, make, columns, value=value_of_metric, **more):
    """Return the row of a metric or a wrapper."""
    more = {"copies": OF_METRICS, "merges": MERGES_METRICS, "wrong": BAD, "unlike": other_metric, **more}
    return State(name, make, columns, value, **more)


def other_metric():
    metric = tc.ECE(task="binary", n_bins=13)
    metric.update(torch.tensor([0.3]), torch.tensor([1]))
    return metric


def plain_metrics():
    for param in paths():
        case = param.values[0]
        more = {"marks": param.marks, "is_bounded": isinstance(case.example.kind, SumState)}
        if case.in_blocks:
            more |= {"order": "rows", "block": case.options.get("block_size", 2)}
        yield of_metric(f"metric {case}", case.metric, columns_of(case, weighted=not case.in_blocks), **more)
    for cls in (tc.KS, tc.ACE, tc.CORP):
        make = partial(cls, task="binary", resolution=64)
        yield of_metric(f"metric {cls.__name__} in a sketch", make, binary(), is_bounded=True)


BINARY = next(case for case in CASES if case.name == "nll-binary-probs")
FOUR = next(case for case in CASES if case.name == "nll-multiclass-logits")


def dropping_metrics():
    """Yield metrics that ignore labels and drop rows with NaN."""
    columns = binary()
    columns["preds"][[8, 13]], columns["target"][11] = torch.nan, -100
    options = {"task": "binary", "nan_policy": "drop", "ignore_index": -100}
    for cls in (tc.NLL, tc.ECE, tc.KS):
        more = {"value": lambda x: (value_of_metric(x), x.n_dropped()), "wrong": BAD[1:]}
        yield of_metric(f"metric {cls.__name__} with missing rows", partial(cls, **options), columns, **more)


def metrics_of_soft_labels():
    """Yield metrics of shares, and of labels as floating numbers, whose sampling noise differs."""
    preds = FOUR.data()[0].softmax(-1)
    labels = torch.nn.functional.one_hot(torch.arange(40) % 4, 4).double()
    some = torch.where((torch.arange(40) < 20).unsqueeze(-1), labels, preds.roll(1, 0))
    metrics = [(cls.__name__, partial(cls, task="binary"), 0) for cls in (tc.ECE, tc.SmECE, tc.KS)]
    metrics.append(("classwise ECE", partial(tc.ECE, num_classes=4, mode="classwise"), slice(None)))
    for kind, target in (("labels", labels), ("shares", some)):
        for name, make, which in metrics:
            columns = {"preds": preds[:, which], "target": target[:, which]}
            more = {"value": value_of_noise, "wrong": BAD[:1], "rtol": 1e-9}
            yield of_metric(f"metric {name} of soft {kind}", make, columns, **more)


def metrics_of_torchmetrics():
    preds, target = FOUR.data(n=40, dtype=torch.float32)
    given = {"preds": preds, "target": target}, {"preds": preds[:, 0].sigmoid(), "target": target % 2}
    classes = ("MulticlassCalibrationError", (4,)), ("BinaryCalibrationError", ())
    for columns, (cls, args) in zip(given, classes, strict=True):
        make = partial(getattr(names_of_torchmetrics, cls), *args)
        yield of_metric(f"metric {cls}", make, columns, wrong=BAD[1:2], is_bounded=True)


def sequential_tests():
    """Yield tests whose results depend on the batches, each of which is a look, and one of clusters."""
    for name, restart in (("looks", False), ("restarts", True)):
        make = partial(tc.SequentialTest, task="binary", restart=restart)
        more = {"order": None, "merges": {}, "is_bounded": True}
        yield of_metric(f"sequential test with {name}", make, binary(), lambda x: x.result()._asdict(), **more)
    columns = {**binary(), "clusters": torch.arange(40)}  # clusters of one row may be in any batch
    yield of_metric("sequential test of clusters", partial(tc.SequentialTest, task="binary"), columns, is_bounded=True)


N_GROUPS = 6


def groups():
    """Yield metrics by group, with missing rows, rows without a group, and a group without rows."""
    for param in covering([case for case in CASES if not case.in_blocks], lambda case: {path_of(case)}, path_of):
        case = param.values[0]

        def make(case=case, **more):
            metric = case.metric(nan_policy="drop", ignore_index=-100)
            return tc.ByGroup(metric, num_groups=N_GROUPS, **more)

        columns = columns_of(case, 60)
        numbers = (torch.rand(60, generator=torch.Generator().manual_seed(1)) ** 2 * N_GROUPS).long()
        numbers[numbers == 4] = 0
        numbers[9], numbers[7], columns["weights"][7] = -1, 99, 0
        columns["preds"][7], columns["target"][11] = torch.nan, -100
        numbers[12], columns["preds"][12] = 2, torch.nan
        columns["weights"][12] = 1
        columns["groups"] = numbers
        is_slow = case.cls is tc.SmECE and case.task != "binary"
        marks = (*param.marks, *(pytest.mark.long,) * is_slow)
        more = {"is_bounded": isinstance(case.example.kind, SumState), "marks": marks}
        wrong = (*BAD[1:], ("groups", N_GROUPS), ("groups", -2))
        yield of_metric(f"groups {case}", make, columns, value_of_groups, wrong=wrong, **more)


def wrapped(wrapper, cls, *, options=None, **own):
    """Return a function that makes a wrapper of a metric of a binary task."""

    def make(**more):
        return wrapper(cls(task="binary", **(options or {})), **own, **more)

    return make


def classes(wrapper, cls, **more):
    return wrapper(cls(task="multiclass", num_classes=4, from_logits=True), **more)


def dependent(n=60):
    """Return columns with clusters of several rows in several batches; a cluster has weight 0."""
    columns = binary(n)
    clusters = torch.arange(n) * 7919 % 23 - 5
    return {**columns, "weights": columns["weights"] * (clusters != 3), "clusters": clusters}


def clusters():
    more = {"value": value_of_clusters, "rtol": 1e-9}
    for cls in (tc.KS, tc.CORP, tc.ECE, tc.NLL):  # clusters of SmECE keep thousands of sums each
        of_sums = cls in (tc.ECE, tc.NLL)
        more |= {"is_bounded": of_sums}
        yield of_metric(f"clusters {cls.__name__}", wrapped(tc.Clustered, cls), dependent(), **more)
        if not of_sums:
            make = wrapped(tc.Clustered, cls, options={"resolution": 16})
            yield of_metric(f"clusters {cls.__name__} in a sketch", make, dependent(), **more)
    # Not in the normal run: some of these states are parts of larger tensors, which their bytes contain before a copy.
    more |= {"marks": (pytest.mark.long,)}
    for limit in (22, 10):  # of the numbers of identifiers that are counted
        patches = {"torchcalib.core.clusters.MAX_DISTINCT": limit}
        make = wrapped(tc.Clustered, tc.ECE)
        yield of_metric(f"clusters ECE, at most {limit}", make, dependent(), **more, patches=patches)
    columns = {**columns_of(FOUR), "clusters": torch.arange(40) // 3}
    make = partial(classes, tc.Clustered, tc.ECE)
    yield of_metric("clusters ECE of classes", make, columns, **more)
    text = dependent()
    text["clusters"] = np.array([f"patient {k}" for k in text["clusters"].tolist()])
    yield of_metric("clusters ECE of text", wrapped(tc.Clustered, tc.ECE), text, **more)


def value_of_images(metric):
    """Return the values of images in an order that does not depend on batches, and what is computed from them."""
    cases = metric.cases()
    rows = sorted((str(row.case) if "" not in cases.parts.names else "", row.n, row.value) for row in cases)
    table = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
    return {**value_of_metric(metric), "pooled": cases.pooled, "table": table, "names": [row[0] for row in rows]}


def images():
    """Yield metrics of images with and without names, of 12 rows of voxels each, and with missing voxels."""
    preds = FOUR.data(n=480)[0].softmax(-1).reshape(40, 12, 4).movedim(-1, 1)
    target = torch.arange(480).reshape(40, 12) * 7 % 11 % 4
    weights = (1 + torch.arange(480) % 3).reshape(40, 12)
    weights[3] = 0
    columns = {"preds": preds, "target": target, "weights": weights}
    named = {**columns, "case": np.array([f"scan {k % 9}" for k in range(40)])}
    options = {"num_classes": 4, "class_axis": 1, "per_image": True}
    more = {"value": value_of_images, "rtol": 1e-9}
    for cls in (tc.ECE, tc.NLL):
        yield of_metric(f"images {cls.__name__}", partial(cls, **options), columns, **more)
    make = partial(tc.MeanBinError, mode="classwise", **options)
    yield of_metric("images MeanBinError of classes", make, columns, **more)
    yield of_metric("images ECE with names", partial(tc.ECE, **options), named, **more)


def bootstraps():
    """Yield bootstraps of rows, whose draws depend on the order of rows, and of clusters."""
    for param in covering([case for case in CASES if has_sums(case)], lambda case: {path_of(case)}, path_of):
        case = param.values[0]

        def make(case=case, **more):
            return tc.Bootstrapped(case.metric(), n_replicates=39, seed=3, **more)

        more = {"order": "batches", "merges": {}, "is_bounded": True, "marks": param.marks}
        yield of_metric(f"bootstrap {case}", make, columns_of(case), value_of_bootstrap, **more)
    for cls in (tc.NLL, tc.ECE):
        make, more = wrapped(tc.Bootstrapped, cls, n_replicates=39), {"is_bounded": True}
        yield of_metric(f"bootstrap {cls.__name__} of clusters", make, dependent(), value_of_bootstrap, **more)


def has_sums(case):
    """Whether a case has sums, of rows. 39 replicates of SmECE are slow, so that only one case is tested."""
    is_slow = case.cls is tc.SmECE and case.name != "smece-wide-binary"
    return isinstance(case.example.kind, SumState) and not case.in_blocks and not is_slow


def value_of_collection(collection):
    return {**collection.compute(), **collection.n_dropped()}


def content_of_collection(collection):
    return {name: metric.state_bytes() for name, metric in collection.items()}


def collections():
    def make(members, prefix="v/", **more):
        return tc.CalibrationCollection({name: each(**more) for name, each in members.items()}, prefix=prefix)

    def of(*classes, **options):
        return {cls.__name__: partial(cls, task="binary", **options) for cls in classes}

    more = {"unlike": lambda: make(of(tc.ECE, n_bins=13)), "content": content_of_collection}
    of_sums = of(tc.NLL, tc.BrierScore, tc.ECE, tc.MCE)
    for name, members in (
        ("sums", of_sums),
        ("samples", of(tc.KS, tc.ACE, tc.TCE)),
        ("both", {**of_sums, **of(tc.KS, tc.CORP), "other": partial(tc.ECE, task="binary", n_bins=7)}),
        ("sums and sketches", {**of_sums, **of(tc.KS, resolution=64)}),
    ):
        more = {
            "is_bounded": "sums" in name,
            "unlike": lambda: make(of(tc.ECE, n_bins=13)),
            "content": content_of_collection,
        }
        yield of_metric(f"collection of {name}", partial(make, members), binary(), value_of_collection, **more)
    members = {
        "groups": wrapped(tc.ByGroup, tc.KS, num_groups=5),
        "clusters": wrapped(tc.Clustered, tc.ECE),
        "bootstrap": wrapped(tc.Bootstrapped, tc.NLL, n_replicates=39),
        **of(tc.NLL, tc.KS),
    }
    columns = {**dependent(), "groups": torch.arange(60) * 7 // 3 % 5}
    more = {
        "wrong": (*BAD, ("groups", 5)),
        "unlike": lambda: make(of(tc.ECE, n_bins=13)),
        "content": content_of_collection,
    }
    yield of_metric("collection of wrappers", partial(make, members), columns, value_of_collection, **more)


# Builders, monitors and calibrators


FEW_REPLICATES = {"torchcalib.reporting.testing._REPLICATES": (39,) * 4}
SEVEN_BINS = {**QUICK, "n_bins": 7, "right": True}


def report_of(builder):
    return {**builder.report().to_dict(), "created": None}


def columns_of_task(task, n, weights="none", soft=False):
    arrays = data_set(task, n, weights, soft)
    names = {"logits": "preds", "targets": "target"}
    return {names.get(name, name): torch.from_numpy(np.array(values)) for name, values in arrays.items()}


def of_report(name, task, columns, value=report_of, settings=SEVEN_BINS, **more):
    make = partial(tc.ReportBuilder, task=task, from_logits=True, **settings)
    more = {"patches": {}, "wrong": BAD[:2], **more}
    more["patches"] = FEW_REPLICATES | more["patches"]
    how = {"copies": OF_BUILDERS, "merges": MERGES_BUILDERS, "unlike": other_report, "examples": 1}
    return State(f"report {name}", make, columns, value, **{**how, **more})


def other_report():
    builder = tc.ReportBuilder(task="binary", n_bins=13)
    builder.update(torch.tensor([0.3, 0.4]), torch.tensor([1, 0]))
    return builder


def reports():
    for task in TASKS:  # calibrators and intervals depend on the order of rows
        marks = (pytest.mark.long,) * (task != "binary")
        columns = columns_of_task(task, 60)
        yield of_report(f"{task} with intervals", task, columns, settings={}, order="rows", marks=marks)
    for task, weights, soft in (
        ("binary", "real", False),
        ("multiclass", "counts", False),
        ("multiclass", "real", True),
        ("multilabel", "counts", True),
    ):
        name = f"{task} {weights} {'soft' if soft else 'labels'}"
        more = {"wrong": BAD[: 3 - 2 * soft], "copies": IN_EVERY_WAY if task == "binary" else OF_BUILDERS}
        yield of_report(name, task, columns_of_task(task, 120, weights, soft), **more)
    columns = columns_of_task("binary", 60, "counts")
    columns["weights"] = columns["weights"].double()
    columns["weights"][50] = 0.5  # omits rank-based lines of all parts
    yield of_report("binary with a real weight", "binary", columns, wrong=BAD[1:2])
    for task in ("binary", "multilabel"):
        columns = columns_of_task(task, 80, "counts")
        columns["weights"] += 1  # samples of weight 0 would not count towards the limit
        n_events = columns["target"].numel()
        for limit in (n_events // 40, n_events // 2, n_events - 1, n_events):
            modules = ("core.sample_or_sketch", "reporting.buffer")
            more = {"patches": {f"torchcalib.{module}.MAX_SAMPLES": limit for module in modules}, "order": "rows"}
            more["marks"] = (pytest.mark.long,) * (task != "binary")
            settings = {"with_intervals": False}
            yield of_report(f"{task} of at most {limit} samples", task, columns, settings=settings, **more)
    columns = columns_of_task("binary", 80)
    numbers = torch.arange(80) * 7 // 3 % 5 - 1
    yield of_report("by group", "binary", {**columns, "groups": numbers}, wrong=(*BAD[:2], ("groups", -2)))
    text = ["", "north", "Süd", "an island", "b"]
    yield of_report("by named group", "binary", {**columns, "groups": np.array(text)[numbers]})
    identifiers = torch.arange(80) * 7919 % 23
    yield of_report("of clusters", "binary", {**columns, "clusters": identifiers})
    names = np.array([f"patient {k}" for k in identifiers.tolist()])
    yield of_report("of named clusters", "binary", {**columns, "clusters": names})
    g = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, dtype=torch.float64, generator=g) for n in (60, 9))
    columns = {"preds": linear_logits(hidden, head), "target": torch.arange(60) % 9}
    settings = {**QUICK, "with_classes": False}
    yield of_report("of hidden states", "multiclass", columns, settings=settings, wrong=BAD[1:2])


def comparison_of(builder):
    return builder.comparison().to_dict()


def other_comparison():
    logits, target = systems("binary", 4)
    builder = ComparisonBuilder(tuple(logits), task="binary", from_logits=True, n_bins=13, **FEW)
    builder.update(logits, target, clusters=torch.arange(4))
    return builder


def comparisons():
    for task in TASKS:
        logits, target = systems(task, 60)
        make = partial(ComparisonBuilder, tuple(logits), task=task, from_logits=True, **FEW)
        columns = {"preds": logits, "target": target}
        how = {"copies": OF_BUILDERS, "unlike": other_comparison, "wrong": BAD[:2], "examples": 1}
        marks = (pytest.mark.long,) * (task == "multilabel")
        yield State(f"comparison {task}", make, columns, comparison_of, order="batches", **how, marks=marks)
        columns = {**columns, "clusters": torch.arange(60) // 2}
        more = {**how, "merges": MERGES_BUILDERS, "marks": (pytest.mark.long,) * (task != "binary")}
        yield State(f"comparison {task} of clusters", make, columns, comparison_of, **more)
        rows = {name: torch.arange(60).roll(10 * k) for k, name in enumerate(logits)}
        ids = {name: torch.where(of < 45, of, of + 100 * k) * 7919 for k, (name, of) in enumerate(rows.items())}
        columns = {"preds": {name: logits[name][of] for name, of in rows.items()}}
        columns |= {"target": {name: target[of] for name, of in rows.items()}, "ids": ids}
        yield State(f"comparison {task} of rows with ids", make, columns, comparison_of, **more)
        columns = {**columns, "clusters": {name: of // 7919 // 2 for name, of in ids.items()}}
        yield State(f"comparison {task} of clusters with ids", make, columns, comparison_of, **more)


def monitors():
    for case, task, own in ((BINARY, "binary", {}), (FOUR, "multiclass", {"num_classes": 4})):
        make = partial(tc.Monitor, task=task, from_logits=task != "binary", threshold=torch.inf, **own)
        how = {"wrong": BAD, "content": lambda x: (x._metrics.state_bytes(), x.history)}
        columns = {**columns_of(case), "weights": 1 + torch.arange(40) % 3}
        yield State(f"monitor {task}", make, columns, lambda x: x.compute(), COPIES, **how)

        def epoch(monitor, columns):
            monitor.update(**columns)
            monitor.end_epoch()

        more = {"add": epoch, "order": None, **how}
        yield State(f"history {task}", make, columns, lambda x: x.history.to_dict(), OF_HISTORIES, **more)


def adapters():
    """Yield adapters of ignite, if it is installed, which replace a builder by a new one."""
    try:
        from torchcalib.integrations import IgniteMetric
    except ImportError:
        return
    columns = binary()
    of_ranks = {"state_dict": lambda make, x: loaded(make(), x.state_dict())}
    for name, make, value in (
        ("ece", partial(tc.ECE, task="binary"), lambda x: x.compute()),
        ("collection", lambda: tc.CalibrationCollection([tc.NLL(task="binary"), tc.ACE(task="binary")]), dict_of),
        ("report", partial(tc.ReportBuilder, task="binary", **QUICK), lambda x: dict(x.compute())),
    ):

        def made(make=make):
            return IgniteMetric(make())

        def add(adapter, columns):
            adapter.update((columns["preds"], columns["target"], columns["weights"]))

        more = {"add": add, "wrong": BAD, "content": lambda x: x.metric.state_bytes()}
        yield State(f"adapter {name}", made, columns, value, of_ranks, **more)


def dict_of(adapter):
    return dict(adapter.compute())


def calibrators():
    """Yield calibrators. A fit replaces an earlier one."""
    for calibrator in (*fits.ALL, *fits.OF_CLASSES):
        for task in calibrator.tasks:
            preds, target = realistic(task, 60)
            given = {"task": task, "from_logits": True}

            def add(x, columns, given=given):
                x.fit(columns["preds"], columns["target"], **given)

            def value(x, preds=preds):
                return {"preds": x(preds), "converged": x.converged, "of": (x.task, x.from_logits, x.class_axis)}

            columns = {"preds": preds, "target": target}
            more = {"add": add, "order": None, "wrong": BAD[:2], "content": lambda x: repr(x.state_dict())}
            make = partial(fits.fresh, calibrator)
            yield State(f"calibrator {fits.name(calibrator)} {task}", make, columns, value, OF_CALIBRATORS, **more)


KINDS = (plain_metrics, dropping_metrics, metrics_of_soft_labels, metrics_of_torchmetrics, groups, clusters, bootstraps)
KINDS += (sequential_tests, images, collections, reports, comparisons, monitors, adapters, calibrators)
STATES = [state for kind in KINDS for state in kind()]


def states(where=lambda _: True, each_class=False, asked=None):
    """Return a parameter for each state that meets a condition.

    Metrics have one state per path. With `each_class`, the long run has one per class and path. The normal run has a
    part of the states, and the first one of each kind.

    Args:
        where: condition.
        each_class: whether metrics have one state per class and path.
        asked: number of earlier laws by state, which is increased. The normal run has every sixth law of a state;
            every second law if an addition replaces earlier rows, because few laws hold for such a state.
    """
    asked = Counter() if asked is None else asked
    found, kinds = [], set()
    for k, state in enumerate(STATES):
        is_left_out = not each_class and state.marks and state.name.startswith("metric ")
        if not where(state) or is_left_out:
            continue
        kind, is_in_turn = state.name.split()[0], (k + asked[state.name]) % (6 if state.order else 2) == 0
        asked[state.name] += 1
        marks = [pytest.mark.extended] * (not is_in_turn and kind in kinds)
        if state.marks:
            marks = [pytest.mark.long]
        else:
            kinds.add(kind)
        found.append(pytest.param(state, id=str(state), marks=marks))
    return found
