"""Slow validation of raw input, and slow values for every call: loops over rows of Python floats.

The documented rules for input are implemented a second time. No code is shared with the package.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

import oracles
from oracles import binless, canonical, ranked, selective

SUM_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 2e-2, torch.float32: 1e-3, torch.float64: 1e-3}


SCORES = ("nll", "bayesriskarea", "brierscore", "stratifiedbrierscore", "ecd", "accuracy", "bayesrisk")
SCORES += ("totalvariation", "kldivergence", "entropygap", "squareddistance", "rankingscore")
MODES = {  # the default first
    "binary": ["positive", "top_label"],
    "multiclass": ["top_label", "classwise"],
    "multilabel": ["classwise"],
}


SELECTIVE = ("aurc", "eaurc", "augrc", "correctnessauroc", "riskatcoverage", "accuracyatcoverage", "coverageatrisk")
BINLESS = {"smece": binless.smece, "spiegelhalter": binless.spiegelhalter, "cox": binless.cox, "ici": binless.ici}
OF_PAIRS = {"skce": canonical.skce, "canonicalerror": canonical.canonical_error}
PENALTIES = {
    "mmce": (binless.mmce, {"bandwidth": 0.4, "weighted": False}),
    "softbinnedece": (binless.soft_binned_ece, {"n_bins": 15, "temperature": 0.01, "norm": "l2"}),
}
NEVER_AVERAGED = ("cox", "spiegelhalter")
SELECTIVE_MODES = {
    "binary": ["top_label", "positive"],
    "multiclass": ["top_label"],
    "multilabel": ["top_label", "classwise"],
}


def modes_of(metric, task):
    """Return the modes of a metric, given by its class name in lower case, with the default first."""
    if metric == "correctnessauroc" and task == "multiclass":
        return MODES[task]
    return (SELECTIVE_MODES if metric in SELECTIVE else MODES)[task]


class Illegal(Exception):
    """The input is invalid, and must raise an error."""


class Undecided(Exception):
    """Rounding decides: a sum at its tolerance, a confidence at a bin edge, or two that may be tied."""


@dataclass
class Call:
    function: Any
    cls: type | None
    task: str
    n_classes: int  # or number of labels
    settings: dict[str, Any]  # options of the metric
    reading: dict[str, Any]  # options of the input, except weights
    preds: Any
    target: Any
    weights: Any = None
    lead: tuple[int, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)  # options of the class only
    malformed: str | None = None

    @property
    def metric(self):
        return (self.cls or self.function).__name__.lower().replace("_", "")

    @property
    def needs(self):
        """Return whether the metric requires labels, and whether it requires whole weights."""
        if self.cls is None:
            return False, self.metric in OF_PAIRS
        how = self.streaming().input_format
        return how.hard_targets, how.whole_weights

    @property
    def read_as(self):
        return "binary" if "positive_classes" in self.reading else self.task

    def value(self):
        given = {"task": self.task, "weights": self.weights, **self.settings, **self.reading}
        given |= {"batch_dims": len(self.lead)} if self.lead else {}
        return self.function(self.preds, self.target, **given)

    def streaming(self, batch_shape=()):
        return self.cls(task=self.task, **self.settings, **self.reading, **self.own, batch_shape=batch_shape)


@dataclass
class Row:
    """One sample that counts.

    `order` is the sort key. `q`, `log_q`, `z` and `t` have one entry per class. `z` are the logits, or log_q if
    probabilities were given. `exact` is True if q was given as input.
    """

    order: float
    q: list
    log_q: list
    z: list
    t: list
    w: float
    top: int
    exact: bool
    n: int = 1  # number of annotators


def sigmoid(z):
    small = math.exp(-abs(z))
    return (1 if z >= 0 else small) / (1 + small)


def log_sigmoid(z):
    return min(z, 0) - math.log1p(math.exp(-abs(z)))


def log_sum_exp(zs):
    top = max(zs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(z - top) for z in zs))


def log(x):
    return math.log(x) if x > 0 else -math.inf


def binary_row(x, y, w, from_logits, exact=True):
    """Row for a probability P(y=1) or its log-odds x."""
    if from_logits:
        q, log_q = [sigmoid(-x), sigmoid(x)], [log_sigmoid(-x), log_sigmoid(x)]
        return Row(x, q, log_q, [0.0, x], [1 - y, y], w, int(x > 0), exact)
    log_q = [math.log1p(-x) if x < 1 else -math.inf, log(x)]
    return Row(x, [1 - x, x], log_q, log_q, [1 - y, y], w, int(x > 0.5), exact)


def class_row(x, t, w, from_logits):
    """Row for class probabilities or logits x. Classes with logits of +inf share the probability equally."""
    top = x.index(max(x))
    if not from_logits:
        log_q = [log(q) for q in x]
        return Row(x[top], x, log_q, log_q, t, w, top, True)
    if max(x) == math.inf:
        x = [0.0 if z == math.inf else -math.inf for z in x]
    log_q = [z - log_sum_exp(x) for z in x]
    return Row(math.exp(log_q[top]), [math.exp(z) for z in log_q], log_q, x, t, w, top, False)


def log_odds(row, classes):
    """Log-odds of the event that the class is one of these."""
    inside, outside = [row.z[k] for k in classes], [z for k, z in enumerate(row.z) if k not in classes]
    return log_sum_exp(inside) - log_sum_exp(outside) if outside else math.inf


def set_row(row, chosen, from_logits):
    """Binary row for some classes against the rest."""
    y = min(1.0, math.fsum(row.t[k] for k in chosen))
    rest = [k for k in range(len(row.q)) if k not in chosen]
    if not from_logits:
        p, not_p = (min(1.0, math.fsum(row.q[k] for k in classes)) for classes in (chosen, rest))
        if len(row.q) > 2 and abs(p - not_p) < 1e-12:
            raise Undecided  # rounding of the sums decides which is larger
        log_q = [log(not_p), log(p)]
        return Row(p, [not_p, p], log_q, log_q, [1 - y, y], row.w, int(p > not_p), False)
    x = log_odds(row, chosen)
    inside, outside = ([row.z[k] for k in classes] for classes in (chosen, rest))
    if len(row.z) > 2 and inside != outside and abs(x) < 1e-12 * max(1, *map(abs, filter(math.isfinite, row.z))):
        raise Undecided
    return binary_row(x, y, row.w, True, exact=False)


# Rules


def check_weight(w, whole):
    if whole and not (0 <= w <= 2**53 and w == math.floor(w)):
        raise Illegal(f"weight {w}")
    if not (w == 0 or 1e-150 <= w <= 1e150):
        raise Illegal(f"weight {w}")


def check_numbers(x, from_logits):
    if any(math.isnan(z) for z in x) or (not from_logits and any(not 0 <= z <= 1 for z in x)):
        raise Illegal(f"{x}")


def check_sum(x, tolerance):
    off = abs(math.fsum(x) - 1)
    if abs(off - tolerance) < 1e-5:
        raise Undecided
    if off > tolerance:
        raise Illegal(f"sum of {x}")


def shares(target, shape, task, hard, ignore_index):
    """Convert counts of annotators (integers with one axis more than labels) to fractions. Keep other targets."""
    counts_shape = shape if task == "multiclass" else (*shape, 2)
    if target.is_floating_point() or target.shape != counts_shape:
        return target
    if hard or ignore_index is not None:
        raise Illegal("annotator counts for a metric of labels")
    rows = [(row, sum(row)) for row in target.reshape(-1, counts_shape[-1]).tolist()]
    # Invalid counts give NaN, because the weight of the row is not known here. Rows of weight 0 are not used.
    found = [
        [v / n for v in row] if n > 0 and min(row) >= 0 and n <= 2**53 else [math.nan] * len(row) for row, n in rows
    ]
    found = torch.tensor(found, dtype=torch.float64).reshape(counts_shape)
    return found if task == "multiclass" else found[..., 1]


def series(preds, target, weights, task, *, from_logits, ignore_index, positive_classes, whole, annotators=None):
    """Return a list of the rows that count in one batch element, or one list per label.

    `preds` has shape `(N,)` or `(N, C)`, `target` contains labels or floating soft labels, `weights` is `(N,)` or None.
    `annotators` has their numbers, by default 1, with the shape of labels.
    """
    soft = target.is_floating_point()
    target_tolerance = SUM_TOLERANCE.get(target.dtype)
    if soft:
        target = target.to(torch.promote_types(preds.dtype, torch.float32))
    x, y = preds.double().tolist(), target.double().tolist() if soft else target.long().tolist()
    w = [1.0] * len(preds) if weights is None else weights.double().tolist()
    labels_shape = preds.shape[: 1 if task == "multiclass" else None]
    n = (torch.ones(labels_shape, dtype=torch.int64) if annotators is None else annotators).tolist()

    def counts(label, weight):
        if label == ignore_index and label is not None:
            return False
        check_weight(weight, whole)
        return weight != 0

    def checked(value, label, weight, number):
        check_numbers([value], from_logits)
        if not (0 <= label <= 1):
            raise Illegal(f"label {label}")
        return replace(binary_row(value, label, weight, from_logits), n=number)

    if task == "binary":
        return [[checked(*sample) for sample in zip(x, y, w, n, strict=True) if counts(*sample[1:3])]]
    if task == "multilabel":
        columns = range(preds.shape[-1])
        samples = [[(p[k], t[k], v, of[k]) for p, t, v, of in zip(x, y, w, n, strict=True)] for k in columns]
        return [[checked(*sample) for sample in column if counts(*sample[1:3])] for column in samples]
    rows = []
    for p, t, v, number in zip(x, y, w, n, strict=True):
        if not counts(None if soft else t, v):
            continue
        check_numbers(p, from_logits)
        if from_logits and max(p) == -math.inf:
            raise Illegal("no logit above -inf")
        if not from_logits:
            check_sum(p, SUM_TOLERANCE[preds.dtype])
        if soft:
            check_numbers(t, False)
            check_sum(t, target_tolerance)
        elif not 0 <= t < len(p):
            raise Illegal(f"label {t}")
        row = replace(class_row(p, t if soft else oracles.one_hot(t, len(p)), v, from_logits), n=number)
        rows.append(row if positive_classes is None else set_row(row, positive_classes, from_logits))
    return [rows]


# Scores


def xmul(a, b):
    return a * b if a else 0.0


def ratio(a, b):
    return a / b if b else math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a)


def check_whole(t):
    """Check that soft labels sum to 1. After rounding to a narrow dtype, formulas that assume this differ."""
    if abs(math.fsum(t) - 1) > 1e-12:
        raise Undecided


def score_parts(metric, row, options, binary):
    """Return the terms whose sum is the score of a row."""
    if metric == "nll":
        floor = math.log(options["eps"]) if options.get("eps") else -math.inf
        return [-xmul(t, max(z, floor)) for t, z in zip(row.t, row.log_q, strict=True)]
    if metric == "bayesriskarea":
        return score_parts("nll", row, {}, binary)
    if metric == "ecd":
        return [xmul(q, z) for q, z in zip(row.q, row.log_q, strict=True)] + score_parts("nll", row, {}, binary)
    if metric in ("brierscore", "stratifiedbrierscore"):
        # (p - y)^2 of [ECD] eq. 2, with the sum over the other classes instead of 1 - p
        return [(row.t[0] * row.q[1] - row.t[1] * row.q[0]) ** 2 if binary else oracles.brier_of(row.q, row.t)]
    if metric == "accuracy":
        return [row.t[row.top]]
    halved = 2 if binary and metric == "squareddistance" else 1  # of two classes, the Brier score sums one
    if options.get("component") == "noise_floor":  # a label is a single annotator
        floors = {"totalvariation": oracles.total_variation_floor, "squareddistance": oracles.brier_floor}
        return [floors.get(metric, oracles.entropy_floor)(row.q, row.n) / halved]
    if options.get("component") == "corrected":
        return [oracles.corrected_distance(metric, row.q, row.t, row.n) / halved]
    if metric == "totalvariation":
        return [abs(q - t) / 2 for q, t in zip(row.q, row.t, strict=True)]
    if metric in ("kldivergence", "entropygap"):
        own = [oracles.xlogy(t, t) for t in row.t]
        if metric == "kldivergence":
            return own + score_parts("nll", row, {}, binary)
        return own + [-xmul(q, z) for q, z in zip(row.q, row.log_q, strict=True)]
    if metric == "squareddistance":
        return score_parts("brierscore", row, {}, binary)
    if metric == "rankingscore":
        if binary and not row.exact and abs(row.t[1] - row.t[0]) < 1e-12:
            raise Undecided  # targets are sums over a set of classes, whose rounding decides
        return [float(oracles.same_ranking(row.q if row.z is row.log_q else row.z, row.t))]
    costs = options.get("cost")
    if costs is None:
        check_whole(row.t)  # 1 minus the target of the top class, or the sum of the other targets
        return [1 - row.t[row.top]]
    expected = sorted(math.fsum(q * c[j] for q, c in zip(row.q, costs, strict=True)) for j in range(len(costs[0])))
    if any(b - a < 1e-5 for a, b in pairwise(expected)):
        raise Undecided
    return [oracles.bayes_cost_of(row.q, row.t, costs)]


def score_of_prior(metric, shares, ts, options, binary):
    """Return the score of each sample for the constant prediction `shares`."""
    if metric in ("nll", "bayesriskarea"):
        return [oracles.nll_of(shares, t) for t in ts]
    if metric == "brierscore":
        return [(oracles.binary_brier_of if binary else oracles.brier_of)(shares, t) for t in ts]
    n = len(shares)
    costs = options.get("cost") or [[float(j != k) for j in range(n)] for k in range(n)]
    constant = [
        math.fsum(xmul(share, c[j]) for share, c in zip(shares, costs, strict=True)) for j in range(len(costs[0]))
    ]
    return [min(constant)] * len(ts)


def score_value(metric, rows, options, binary, n_classes):
    """Return the value, and the mean magnitude of its terms."""
    parts = [score_parts(metric, row, options, binary) for row in rows]
    scores, weights, ts = (
        [math.fsum(p) if all(map(math.isfinite, p)) else sum(p) for p in parts],
        [row.w for row in rows],
        [row.t for row in rows],
    )
    size = oracles.mean([sum(map(abs, part)) for part in parts], weights)
    priors = options.get("priors")
    if metric == "stratifiedbrierscore":  # Wallace, Dahabreh (2012): mean of the scores of the classes
        value = oracles.mean_at_priors(scores, [t.index(1.0) for t in ts], weights, [1 / n_classes] * n_classes)
    elif priors is None:
        value = oracles.mean(scores, weights)
    else:
        value = oracles.mean_at_priors(scores, [t.index(1.0) for t in ts], weights, priors)
    if options.get("normalize") == "classes" and not binary:
        value /= n_classes
    elif options.get("normalize") == "prior":
        shares = oracles.class_shares(ts, weights) if priors is None and rows else priors or [math.nan] * n_classes
        for t in ts:
            check_whole(t)
        naive = score_of_prior(metric, shares, ts, options, binary)
        if priors is None or metric == "bayesrisk":
            naive = oracles.mean(naive, weights)
        else:
            naive = oracles.mean_at_priors(naive, [t.index(1.0) for t in ts], weights, shares)
        if metric == "brierscore" and naive < 1e-4 and any(t != ts[0] for t in ts):
            raise Undecided  # cancellation loses digits in the small difference
        value, size = ratio(value, naive), abs(ratio(size, naive))
    return value, size


# Bins and sort keys


def order_of(row, classes):
    """Sort key of the event of these classes: the probability if it was given, otherwise the log-odds."""
    return math.fsum(row.q[k] for k in classes) if row.exact else log_odds(row, classes)


def events(rows, task, mode):
    """Return columns of (order, confidence, outcome, weight, exact)."""
    if task == "binary" and mode == "positive":
        return [[(r.order, r.q[1], r.t[1], r.w, r.exact) for r in rows]]
    if not isinstance(mode, str):
        event_classes = [(oracles.classes_of_top_k(r.z, mode.k, mode.only), r) for r in rows]
        return [[(order_of(r, ks), *oracles.event_of(r.q, r.t, ks), r.w, r.exact) for ks, r in event_classes]]
    if mode == "top_label":
        if task == "binary":
            order = [abs(r.order) if r.q[1] != r.order else r.q[r.top] for r in rows]
        else:
            order = [order_of(r, [r.top]) for r in rows]
        return [[(o, r.q[r.top], r.t[r.top], r.w, r.exact) for o, r in zip(order, rows, strict=True)]]
    classes = range(len(rows[0].q)) if rows else ()
    return [[(order_of(r, [k]), r.q[k], r.t[k], r.w, r.exact) for r in rows] for k in classes]


def at_an_edge(edges, confidences, guard):
    return any(abs(c - e) < guard for c in confidences for e in edges[1:-1])


def may_be_tied(order, guard):
    return any(a != b and b - a < guard * max(1, abs(a)) for a, b in pairwise(sorted(order)))


def distances_of(options):
    return {name: options[name] for name in ("distance", "delta", "norm") if name in options}


def event_value(metric, column, options, guard, copies=True):
    """Return the value of one column of events, or NaN without events. `copies`: weights are integers."""
    if not column:
        return math.nan
    order, confidence, outcome, weights, exact = (list(part) for part in zip(*column, strict=True))
    if metric == "atb":
        return ranked.atb(confidence, outcome, weights)
    if metric in PENALTIES:
        loop, defaults = PENALTIES[metric]
        given = {name: options.get(name, value) for name, value in defaults.items()}
        return loop(list(zip(confidence, outcome, weights, strict=True)), **given)
    if metric in BINLESS:
        taken = ("component", "bandwidth", "eps", "span", "degree")
        more = {name: options[name] for name in taken if name in options}
        return BINLESS[metric](confidence, outcome, weights, **more)
    usual = {"ace": "equal_mass", "tce": "pava_bc", "estimationerror": "pava_bc"}.get(metric, "equal_width")
    bins, n_bins, right = options.get("bins", usual), options.get("n_bins", 15), options.get("right", False)
    computed, by_value = not all(exact), bins == "equal_width" or isinstance(bins, tuple)
    more = {"debiased": True} if options.get("debiased") else {}
    edges = [i / n_bins for i in range(n_bins + 1)] if bins == "equal_width" else bins
    if (
        computed
        and metric not in ("ks", "corp", "cllr", *SELECTIVE)
        and by_value
        and at_an_edge(edges, confidence, guard)
    ):
        raise Undecided
    if (
        metric not in ("ace", "ks", "corp", "cllr", "tce", "gce", "estimationerror", *SELECTIVE)
        and bins == "equal_width"
    ):
        rows = oracles.bins(confidence, outcome, weights, n_bins, right, copies=copies)
        return getattr(oracles, metric)(rows, **more)
    if metric == "estimationerror" and bins == "equal_width":  # sums, which allow any weights
        blocks = ranked.blocks_of(bins, confidence, outcome, weights, n_bins=n_bins, right=right)
        return ranked.estimation_error(blocks, outcome, weights, **distances_of(options))
    weights = [int(w) for w in weights]
    if computed and may_be_tied(order, guard):
        raise Undecided
    if metric == "ks":
        return ranked.ks(confidence, outcome, weights, order, options.get("norm", "max"))
    outcome = [int(y) if y in (0, 1) else y for y in outcome]
    if metric in SELECTIVE:
        if sum(weights) > 10_000:
            raise Undecided  # the loop runs over all copies
        name = {"correctnessauroc": "correctness_auroc", "coverageatrisk": "coverage_at_risk"}.get(metric)
        name = name or metric.replace("atcoverage", "_at_coverage")
        more = {name: options[name] for name in ("coverage", "risk") if name in options}
        return getattr(selective, name)(order, outcome, weights, **more)
    if metric == "cllr":
        if any(min(c, 1 - c) < 1e-12 for c in confidence):
            raise Undecided  # the loop only has the probabilities, not the logits
        return ranked.cllr(confidence, outcome, weights, order)[
            ("value", "min", "loss").index(options.get("component", "value"))
        ]
    if metric == "corp":
        score = options.get("score", "brier")
        if score == "nll" and any(min(c, 1 - c) < 1e-12 for c in confidence):
            raise Undecided  # the loop only has the probabilities, not the logits
        parts = ranked.corp(score, confidence, outcome, weights, order)
        return parts[("score", "mcb", "dsc", "unc").index(options["component"])]
    sorted_by, cut = confidence if by_value else order, {"n_bins": n_bins, "right": right}
    cut |= {name: options[name] for name in ("n_min", "n_max", "variant", "ties") if name in options}
    if metric == "tce":
        tested = {"alpha": options.get("alpha", 0.05), "norm": options.get("norm", "l1"), "order": sorted_by}
        tested |= {name: options[name] for name in ("test",) if name in options}
        return ranked.tce(bins, confidence, outcome, weights, **tested, **cut)
    blocks = ranked.blocks_of(bins, sorted_by, outcome, weights, **cut)
    if metric == "estimationerror":
        return ranked.estimation_error(blocks, outcome, weights, **distances_of(options))
    rows = ranked.rows_of(blocks, confidence, outcome, weights, copies)
    if metric == "gce":
        return ranked.gce(lambda n, c, f: (f - c) ** 2 / (1 + n), rows, options.get("norm", "l1"))
    return getattr(oracles, "ece" if metric == "ace" else metric)(rows, **more)


def log_evidence(column):
    """Return the logarithm of the mean evidence of a column of events, or NaN without events, and its magnitude."""
    if not column:
        return math.nan, 0.0
    order, confidence, outcome, weights, _ = zip(*column, strict=True)
    if any(
        min(c, 1 - c) < 1e-9 and o not in (0, 1, math.inf, -math.inf) for o, c in zip(order, confidence, strict=True)
    ):
        raise Undecided  # the loop only has the probabilities, not the logits
    sums, size = binless.log_ratios(confidence, outcome, weights)
    return binless.log_mean(sums), size


def average_of(metric, values):
    """Return the average over classes or labels: of evidence, not of its logarithm."""
    if metric != "sequentialtest":
        return sum(values) / len(values)
    return binless.log_mean([0.0 if math.isnan(x) else x for x in values]) if any(x == x for x in values) else math.nan


# Calls


def values_of(call, rows):
    """Return (value, size) for one batch element, or one pair per class."""
    binary = call.read_as != "multiclass"
    if call.metric in OF_PAIRS:
        taken = ("estimator", "kernel", "bandwidth", "block_size", "p")
        options = {"estimator": "linear"} if call.cls else {}  # the default of the class
        options |= {name: call.settings[name] for name in taken if name in call.settings}
        return [(OF_PAIRS[call.metric]([r.q for r in rows], [r.t for r in rows], [r.w for r in rows], **options), 1.0)]
    if call.metric in SCORES:
        options = dict(call.settings)
        if options.get("cost") is not None:
            options["cost"] = options["cost"].costs
        return [score_value(call.metric, rows, options, binary, 2 if binary else call.n_classes)]
    mode = call.settings.get("mode", modes_of(call.metric, call.read_as)[0])
    mode = "positive" if call.read_as == "multilabel" and mode == "classwise" else mode
    columns = events(rows, "binary" if binary else "multiclass", mode)
    if call.metric == "fullece":
        columns = [[(0, q, t, r.w, r.exact) for r in rows for q, t in zip(r.q, r.t, strict=True)]]
    columns = columns or [[]] * (call.n_classes if mode == "classwise" else 1)
    guard = 1e-12 if call.preds.dtype == torch.float64 else 1e-5
    size = 100.0 if call.metric == "tce" else 1.0
    if call.metric == "sequentialtest":
        return [log_evidence(column) for column in columns]
    copies = call.weights is None or not call.weights.is_floating_point()
    return [(event_value(call.metric, column, call.settings, guard, copies), size) for column in columns]


def expected(call):
    """Return the value by the slow loops, and the magnitude of its terms, to which rounding is relative."""
    if call.malformed:
        raise Illegal(call.malformed)
    hard_targets, whole_weights = call.needs
    reading = {"ignore_index": None, "positive_classes": None, **call.reading}
    axis = reading.pop("class_axis", -1)
    preds, target, n_series = call.preds, call.target, math.prod(call.lead)
    if call.task != "binary":
        preds = preds.movedim(axis, -1)
        n_axes = preds.dim()
        target = target.movedim(axis % n_axes, n_axes - 1) if target.dim() >= n_axes else target
    with_axis = target.dim() > preds.dim() - (call.task == "multiclass") and not target.is_floating_point()
    annotators = target.sum(-1) if with_axis else None  # counts
    target = shares(target, preds.shape, call.task, hard_targets, reading["ignore_index"])
    if target.is_floating_point() and call.task == "multiclass" and reading["ignore_index"] is not None:
        raise Illegal("soft targets with ignore_index")
    are_labels = call.task != "multiclass" and bool(((target == 0) | (target == 1)).all())
    if target.is_floating_point() and hard_targets and not are_labels:
        raise Illegal("soft targets for a metric of labels")
    separate = call.settings.get("mode") == "classwise" or call.task == "multilabel"
    averaged = not separate or (call.settings.get("average", "macro") is not None and call.metric not in NEVER_AVERAGED)
    values, size = [], 1.0
    given = preds, target, call.weights, annotators
    given = [t if t is None else t.reshape(n_series, *t.shape[len(call.lead) :]) for t in given]
    for k in range(n_series):
        *columns, n = (t if t is None else t[k] for t in given)
        columns = series(*columns, call.task, whole=whole_weights, annotators=n, **reading)
        found = [pair for rows in columns for pair in values_of(call, rows)]
        size = max(size, *(s for _, s in found if math.isfinite(s)), 0)
        of_columns = [value for value, _ in found]
        values.append(average_of(call.metric, of_columns) if averaged else of_columns)
    shape = call.lead if averaged else (*call.lead, call.n_classes)
    return torch.tensor(values, dtype=torch.float64).reshape(shape), size
