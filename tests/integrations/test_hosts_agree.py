"""The same predictions have the same values in every host."""

import numpy as np
import pytest
import torch

import torchcalib as tc
import torchcalib.torchmetrics as drop_in

RNG = np.random.default_rng(0)
PROBS = RNG.dirichlet(np.ones(3), 120)
TARGET = np.array([RNG.choice(3, p=p) for p in PROBS])


class Constant:
    """Classifier of scikit-learn whose input are its probabilities."""

    classes_ = np.arange(3)
    _estimator_type = "classifier"

    def fit(self, _x, _y):
        return self

    def predict_proba(self, x):
        return x

    def predict(self, x):
        return x.argmax(-1)

    def __sklearn_tags__(self):
        from sklearn.base import BaseEstimator, ClassifierMixin

        return type("Tagged", (ClassifierMixin, BaseEstimator), {})().__sklearn_tags__()


def of_sklearn():
    pytest.importorskip("sklearn")
    return -tc.sklearn.get_scorer("neg_ece")(Constant(), PROBS, TARGET)


def of_sklearn_function():
    pytest.importorskip("sklearn")
    return tc.sklearn.calibration_error(TARGET, PROBS)


def of_torchmetrics():
    metric = drop_in.MulticlassCalibrationError(3)
    for rows in np.array_split(np.arange(120), 7):
        metric.update(torch.tensor(PROBS[rows]), torch.tensor(TARGET[rows]))
    return metric.compute().item()


def of_ignite():
    pytest.importorskip("ignite")
    from ignite.engine import Engine

    engine = Engine(lambda _, batch: batch)
    tc.integrations.IgniteMetric(tc.ECE(num_classes=3)).attach(engine, "ece")
    batches = [(torch.tensor(PROBS[k::4]), torch.tensor(TARGET[k::4])) for k in range(4)]
    return engine.run(batches).metrics["ece"]


def of_a_loop_of_torch():
    metric = tc.ECE(num_classes=3)
    for k in range(5):
        metric.update(torch.tensor(PROBS[k::5]), torch.tensor(TARGET[k::5]))
    return metric.compute().item()


def of_arrays():
    return float(tc.ece(PROBS, TARGET))


HOSTS = (of_arrays, of_a_loop_of_torch, of_sklearn, of_sklearn_function, of_torchmetrics, of_ignite)


@pytest.mark.parametrize("host", HOSTS)
def test_ece_is_the_mean_distance_in_all_hosts(host):
    confidence, correct = PROBS.max(-1), PROBS.argmax(-1) == TARGET
    index = np.minimum((confidence * 15).astype(int), 14)
    gaps = [abs((correct - confidence)[index == k].sum()) for k in range(15)]
    rounding = 1e-7 if host is of_torchmetrics else 1e-12  # torchmetrics returns float32
    assert host() == pytest.approx(sum(gaps) / 120, rel=rounding)


def reports():
    """Yield the report of each host."""
    yield tc.report(PROBS, TARGET)
    builder, other = tc.ReportBuilder(task="multiclass"), tc.ReportBuilder(task="multiclass")
    builder.update(torch.tensor(PROBS[:50]), torch.tensor(TARGET[:50]))
    other.update(torch.tensor(PROBS[50:]), torch.tensor(TARGET[50:]))
    builder.merge(tc.ReportBuilder.from_bytes(other.state_bytes()))
    yield builder.report()
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.dataset")
    from torchcalib.integrations import arrow

    columns = {f"prob_{k}": PROBS[:, k] for k in range(3)} | {"target": TARGET}
    yield arrow.report(pa.dataset.dataset(pa.table(columns)))
    pytest.importorskip("ignite")
    from ignite.engine import Engine

    engine = Engine(lambda _, batch: batch)
    tc.integrations.IgniteMetric(tc.ReportBuilder(task="multiclass")).attach(engine, "report")
    batches = [(torch.tensor(PROBS[rows]), torch.tensor(TARGET[rows])) for rows in (slice(70), slice(70, None))]
    yield engine.run(batches).metrics["report"]


def test_reports_of_all_hosts_have_equal_values_floors_and_p_values():
    first, *others = reports()
    assert len(others) == 3
    for other in others:
        assert other.flat() == pytest.approx(first.flat(), rel=1e-9, nan_ok=True)
        assert other.decision.verdict == first.decision.verdict
