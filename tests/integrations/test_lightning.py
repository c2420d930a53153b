"""`CalibrationMonitor` and metrics in a real Trainer, for `lightning` and `pytorch_lightning`."""

import importlib
import json
import math
import pickle
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fits
from processes import SCRIPTS, run_python

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration import AffineScaling, IsotonicCalibration, TemperatureScaling, load_calibrator
from torchcalib.core.inputs import InputFormat
from torchcalib.reporting.buffer import PredictionBuffer

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
pytestmark = [
    # Lightning recommends worker processes, which a tiny data set does not need.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Lightning uses a deprecated name of torch.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
]
N_CLASSES, N_TRAIN, N_VALID = 3, 24, 26
GIVEN = {"task": "multiclass", "from_logits": True}


@pytest.fixture(params=[PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.extended)])
def package(request):
    return lightning(request.param)


@pytest.fixture
def pl():
    return lightning(PACKAGES[0])


def lightning(name):
    pytest.importorskip(name)
    return importlib.import_module(name)


def callback():
    """Return the module of the callback, which needs Lightning."""
    lightning(PACKAGES[0])
    return importlib.import_module("torchcalib.integrations.lightning")


def rows(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return x, (x[:, :N_CLASSES] + torch.randn(n, N_CLASSES, generator=g)).argmax(-1)


class Loader(torch.utils.data.DataLoader):
    """Data loader that can resume in the middle of an epoch."""

    first = done = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for self.done, batch in enumerate(super().__iter__(), 1):
            if self.done > first:
                yield batch

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, saved):
        self.first = saved["done"]


def loader(n, seed, batch_size=8):
    return Loader(torch.utils.data.TensorDataset(*rows(n, seed)), batch_size=batch_size)


def model(pl):
    """Return a linear model that logs metrics, and stores its predictions in `seen[validation][loader]`."""

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, N_CLASSES)
            with torch.no_grad():
                self.linear.weight.copy_(torch.eye(3, 4) / 2)
                self.linear.bias.zero_()
            self.seen = []
            self.ece, self.train_ece = (tc.ECE(**GIVEN, num_classes=N_CLASSES) for _ in range(2))
            members = [cls(**GIVEN, num_classes=N_CLASSES) for cls in (tc.NLL, tc.MCE)]
            self.all = tc.CalibrationCollection(members, prefix="all/")

        def training_step(self, batch, batch_idx):
            x, y = batch
            logits = self.linear(x)
            self.last_batch = logits.detach(), y
            self.train_ece(logits, y)
            self.log("train/ece", self.train_ece, on_step=True, on_epoch=True)
            return torch.nn.functional.cross_entropy(logits.float(), y)

        def on_validation_epoch_start(self):
            self.seen.append({})

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            x, y = batch
            logits = self.linear(x)
            self.seen[-1].setdefault(dataloader_idx, []).append((logits, y))
            if dataloader_idx == 0:
                self.ece.update(logits, y)
                self.all.update(logits, y)
                self.log("own/ece", self.ece, on_step=False, on_epoch=True, add_dataloader_idx=False)
                self.log_dict(self.all, on_step=False, on_epoch=True, add_dataloader_idx=False)
            return {"logits": logits, "target": y}

        def on_validation_epoch_end(self):
            if self.trainer.sanity_checking:
                self.seen.clear()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/nll"}}

        def validation(self, epoch, loader=0):
            logits, target = zip(*self.seen[epoch][loader], strict=True)
            return torch.cat(logits), torch.cat(target)

    return Model()


def monitor(**options):
    return tc.integrations.CalibrationMonitor(**GIVEN, num_classes=N_CLASSES, **{"threshold": math.inf, **options})


def trainer(pl, tmp_path, *callbacks, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    usual = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "max_epochs": 3}
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **usual, "default_root_dir": tmp_path, **options})


def functions(logits, target):
    of = {name: getattr(F, name) for name in ("accuracy", "ecd", "ece", "esce", "mce")}
    of |= {"nce": partial(F.nll, normalize="prior"), "brier": F.brier_score}
    values = {name: float(function(logits, target, **GIVEN)) for name, function in of.items()}
    nll = torch.nn.functional.cross_entropy(logits.double(), target).item()
    return values | {"nll": nll, "confidence": logits.double().softmax(-1).amax(-1).mean().item()}


@pytest.mark.extended
def test_values_are_logged_before_the_callbacks_that_use_them(package, tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    callbacks, loggers = package.callbacks, package.loggers
    watched, net = monitor(diagrams_every=2), model(package)
    # min_delta=-1 requires the metric to exist, but never stops
    stop = callbacks.EarlyStopping("val/ece", patience=0, min_delta=-1, mode="min")
    best = callbacks.ModelCheckpoint(tmp_path / "best", monitor="val/ece", save_top_k=1)
    logs = [loggers.TensorBoardLogger(tmp_path, "board"), loggers.CSVLogger(tmp_path, "csv")]
    run = trainer(package, tmp_path, stop, watched, best, enable_checkpointing=True, logger=logs)
    run.fit(net, loader(N_TRAIN, 0), loader(N_VALID, 1))

    assert isinstance(watched, package.Callback)
    assert [row.epoch for row in watched.history.rows] == [0, 1, 2], "the sanity check does not count as an epoch"
    assert [row.step for row in watched.history.rows] == [3, 6, 9]
    for epoch, row in enumerate(watched.history.rows):
        assert row.values == pytest.approx(functions(*net.validation(epoch)), abs=1e-7)
    for name, value in watched.history.rows[-1].values.items():
        assert run.callback_metrics[f"val/{name}"].item() == value, "equal float64 values"
    assert best.best_model_score.item() == min(watched.history.column("ece"))
    assert stop.best_score.item() in watched.history.column("ece")

    events = tensorboard.EventAccumulator(logs[0].log_dir, size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("val/reliability")] == [3, 9], "every second validation"
    logged = [event.value for event in events.Scalars("val/ece")]
    assert logged == pytest.approx(watched.history.column("ece"), abs=1e-7)
    assert "val/ece" in (Path(logs[1].log_dir) / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "precision", ["32-true", *(pytest.param(x, marks=pytest.mark.extended) for x in ("bf16-mixed", "bf16-true"))]
)
def test_logged_metrics_equal_the_functions_of_the_logits(pl, tmp_path, precision):
    watched, net = monitor(), model(pl)
    epochs, steps = [], []

    class Record(pl.Callback):
        def on_validation_end(self, trainer, module):
            if not trainer.sanity_checking:
                epochs.append({name: value.item() for name, value in trainer.callback_metrics.items()})

        def on_train_batch_end(self, trainer, module, *args):
            steps.append((trainer.callback_metrics["train/ece_step"].item(), *module.last_batch))

    run = trainer(pl, tmp_path, watched, Record(), precision=precision, max_epochs=2)
    run.fit(net, loader(N_TRAIN, 0), loader(N_VALID, 1))
    assert (len(epochs), len(steps)) == (2, 6)
    for epoch, found in enumerate(epochs):
        logits, target = net.validation(epoch)
        assert logits.dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)
        expected = functions(logits, target)
        assert watched.history.rows[epoch].values == pytest.approx(expected, abs=1e-7)
        for logged, name in {"own/ece": "ece", "all/NLL": "nll", "all/MCE": "mce"}.items():
            assert found[logged] == pytest.approx(expected[name], abs=1e-7)
    for value, logits, target in steps:
        assert value == pytest.approx(float(F.ece(logits, target, **GIVEN)), abs=1e-7)
    _, logits, target = zip(*steps[3:], strict=True)
    whole = float(F.ece(torch.cat(logits), torch.cat(target), **GIVEN))
    assert run.callback_metrics["train/ece_epoch"].item() == pytest.approx(whole, abs=1e-7), "epochs are separate"
    assert net.ece.state.dtype == watched.monitors[0]._metrics["ece"].state.dtype == torch.float64
    assert net.ece.state.sum() == 0, "Lightning resets logged metrics"


def test_monitor_accepts_logits_that_are_never_written(pl, tmp_path):
    head, histories = torch.nn.Linear(N_CLASSES, 5), []
    for make in (head, lambda x: tc.integrations.linear_logits(x, head.weight, bias=head.bias)):
        watched, net = tc.integrations.CalibrationMonitor(**GIVEN, num_classes=5, threshold=math.inf), model(pl)

        def step(batch, batch_idx, make=make, net=net):
            return {"logits": make(net.linear(batch[0])), "target": batch[1]}

        net.validation_step = step
        trainer(pl, tmp_path, watched).validate(net, loader(N_VALID, 1))
        histories.append(watched.history.rows[0].values if watched.history.rows else None)
    written, linear = histories
    assert linear == pytest.approx(written, abs=1e-6)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_resumed_training_continues_its_history_and_calibrator(pl, tmp_path):
    def fitted(checkpoint=None):
        watched, net = monitor(calibrate=AffineScaling(), diagrams_every=0), model(pl)
        keep = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, monitor="val/nll")
        run = trainer(pl, tmp_path, watched, keep, enable_checkpointing=True, val_check_interval=0.34)
        run.fit(net, loader(N_TRAIN, 0), loader(N_VALID, 1), ckpt_path=checkpoint)
        return watched, net

    whole, net = fitted()
    path = tmp_path / "epoch=1-step=5.ckpt"  # in the middle of an epoch
    saved = torch.load(path, weights_only=True)
    assert len(saved["callbacks"][whole.state_key]["histories"][0]["rows"]) == 5
    resumed, _ = fitted(path)
    assert [(row.epoch, row.step) for row in whole.history.rows] == [(k // 3, k + 1) for k in range(9)]
    assert resumed.history == whole.history, "every step occurs once, with the same model"

    logits, target = net.validation(4)
    expected, loaded = AffineScaling().fit(logits, target, **GIVEN), load_calibrator(path)
    assert loaded.alpha.item() == pytest.approx(expected.alpha.item(), rel=1e-9)
    torch.testing.assert_close(loaded(logits), expected(logits))
    again = monitor(calibrate=AffineScaling())
    again.on_load_checkpoint(None, None, saved)
    assert again.calibrator.alpha == loaded.alpha
    validated = trainer(pl, tmp_path, again).validate(net, loader(N_VALID, 1), verbose=False)
    assert validated[0]["val/nll"] == whole.history.column("nll")[-1]
    assert len(again.history) == 0, "validation alone adds no row"


@pytest.mark.extended
def test_monitor_is_a_callback_of_every_installed_package(pl, monkeypatch):
    from torchcalib.integrations.lightning import _callback_classes

    assert all(
        issubclass(tc.integrations.CalibrationMonitor, importlib.import_module(name).Callback) for name in PACKAGES
    )
    for name, other in (PACKAGES, PACKAGES[::-1]):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            assert _callback_classes() == (importlib.import_module(other).Callback,)
            patched.setitem(sys.modules, other, None)
            with pytest.raises(ImportError, match=r"pip install 'torchcalib\[lightning\]'"):
                _callback_classes()
    watched = monitor()
    watched.load_state_dict({"histories": [{"version": 1, "rows": []}] * 2})
    again = pickle.loads(pickle.dumps(watched))  # as in spawning strategies
    assert [one.history for one in again.monitors] == [one.history for one in watched.monitors]
    assert again.state_key == watched.state_key == "CalibrationMonitor{'prefix': 'val/'}"


def test_incompatible_arguments_raise_errors_before_training(pl, tmp_path):
    class BinaryCalibration(IsotonicCalibration):
        tasks = ("binary",)

    with pytest.raises(ValueError, match="`calibrate` must be a calibrator for task='multiclass', got Binary"):
        monitor(calibrate=BinaryCalibration())
    with pytest.raises(ValueError, match="`diagrams_every` must be at least 0, got -1"):
        monitor(diagrams_every=-1)
    two = [monitor(calibrate=TemperatureScaling(), prefix=prefix) for prefix in ("a/", "b/")]
    with pytest.raises(ValueError, match="`calibrate` must be given to one CalibrationMonitor at most, got 2"):
        trainer(pl, tmp_path, *two).fit(model(pl), loader(N_TRAIN, 0), loader(N_VALID, 1))


def test_a_metric_per_image_is_logged(pl, tmp_path):
    class Segmentation(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 2, 3, padding=1)
            options = {"task": "multiclass", "num_classes": 2, "from_logits": True, "class_axis": 1}
            self.ece = tc.ECE(**options, mode="classwise", per_image=True)

        def validation_step(self, batch, batch_idx):
            self.ece.update(self.conv(batch[0]), batch[1])
            self.log("val/ece", self.ece)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(5, 1, 8, 6, generator=g), torch.randint(0, 2, (5, 8, 6), generator=g)
    net = Segmentation()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=2)
    (found,) = trainer(pl, tmp_path).validate(net, data, verbose=False)
    probs = net.conv(images).detach().softmax(1).double()
    expected = [
        F.ece(probs[k, c].flatten(), (labels[k] == c).flatten().long(), task="binary") for k in range(5) for c in (0, 1)
    ]
    assert found["val/ece"] == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)


@pytest.mark.extended
def test_fast_dev_run_gives_one_row_of_history(package, tmp_path):
    watched = monitor()
    run = trainer(package, tmp_path, watched, fast_dev_run=True)
    run.fit(model(package), loader(N_TRAIN, 0), loader(N_VALID, 1))
    assert len(watched.history) == 1
    assert run.callback_metrics["val/ece"].item() == watched.history.column("ece")[0]


@pytest.mark.extended
def test_every_validation_loader_has_a_separate_history(pl, tmp_path):
    watched, net = monitor(prefix="v/"), model(pl)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.5)
    run = trainer(pl, tmp_path, watched, max_epochs=2)
    run.fit(net, loader(N_TRAIN, 0), [loader(N_VALID, 1), loader(9, 2)])
    for index, one in enumerate(watched.monitors):
        assert len(one.history) == 2
        assert one.history.rows[-1].values == pytest.approx(functions(*net.validation(1, index)), abs=1e-7)
        assert run.callback_metrics[f"v/nll/dataloader_idx_{index}"].item() == one.history.column("nll")[-1]
    assert "v/nll" not in run.callback_metrics
    run.validate(net, loader(9, 2), verbose=False)  # a single loader has a name without an index
    assert "v/nll" in run.callback_metrics
    assert [len(one.history) for one in watched.monitors] == [2, 2]


@pytest.mark.extended
def test_two_processes_give_the_values_of_one_and_repeated_rows_count_once(tmp_path):
    lightning(PACKAGES[0])
    done = run_python(SCRIPTS / "lightning_ranks.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found["epochs"]) == found["stopped"] == 2
        for epoch in found["epochs"]:
            expected = epoch["expected"]
            assert {name: epoch["values"][name] for name in expected} == pytest.approx(expected, abs=1e-12)
            assert abs(expected["own"] - expected["val/nll/dataloader_idx_0"]) > 1e-4, (
                "torchmetrics counts one of 13 rows twice"
            )
        assert found["alpha"] == pytest.approx(found["alpha expected"], rel=1e-9)


@pytest.mark.extended
def test_repeated_rows_get_weight_0_or_a_warning(pl):
    distinct, given = torch.tensor([1, 1, 0]), torch.tensor([0.5, 2.0, math.nan])
    labels = torch.zeros(3, 5, dtype=torch.int64)
    for of_axis in (monitor(class_axis=1), monitor()):
        pixels = of_axis._without_repeats(torch.zeros(3, N_CLASSES, 5), labels, None, distinct)
        assert pixels.tolist() == [[1] * 5, [1] * 5, [0] * 5]
    rows = torch.zeros(3, N_CLASSES)
    assert monitor()._without_repeats(rows, labels[:, 0], given, distinct).tolist() == [0.5, 2.0, 0.0]
    with pytest.warns(UserWarning, match=r"repeats 1 rows of a batch of 3 .* shape \(15, 3\) .* cannot be identified"):
        assert monitor()._without_repeats(torch.zeros(15, N_CLASSES), labels.view(-1), None, distinct) is None
    five = torch.utils.data.TensorDataset(torch.zeros(5))
    sampler = torch.utils.data.DistributedSampler(five, num_replicas=2, rank=1, shuffle=False)
    plain = torch.utils.data.DataLoader(five, batch_size=2, sampler=sampler)
    assert [part.tolist() for part in monitor()._distinct_of(plain)] == [[1, 1], [0]]
    assert monitor()._distinct_of(torch.utils.data.DataLoader(five, batch_size=2)) is None
    own = type("Sorted", (torch.utils.data.BatchSampler,), {})(sampler, 2, drop_last=False)
    with pytest.warns(UserWarning, match="In batches of Sorted they cannot be identified, and count twice"):
        assert monitor()._distinct_of(torch.utils.data.DataLoader(five, batch_sampler=own)) is None


def test_figures_are_logged_by_every_supported_logger():
    log_picture, as_array = callback().log_picture, callback().as_array

    class Files:  # an MLflow experiment with a run, and a Comet experiment without
        def log_figure(self, *args, **kwargs):
            self.given = args, kwargs

    ax = tc.plots.ecd_curve()
    comet, mlflow = SimpleNamespace(experiment=Files()), SimpleNamespace(experiment=Files(), run_id="run")
    assert log_picture(comet, "val/reliability", ax, 7)
    assert comet.experiment.given == ((), {"figure_name": "val/reliability", "figure": ax.figure, "step": 7})
    assert log_picture(mlflow, "val/reliability", ax, 7)
    assert mlflow.experiment.given == (("run", ax.figure, "val/reliability_00000007.png"), {})
    assert not log_picture(SimpleNamespace(experiment=object()), "val/reliability", ax, 7)
    pictures = []
    assert log_picture(SimpleNamespace(log_image=lambda **given: pictures.append(given)), "val/reliability", ax, 7)
    assert (pictures[0]["key"], pictures[0]["images"][0].shape[2], pictures[0]["step"]) == ("val/reliability", 3, 7)
    pixels = as_array(ax)
    assert (pixels.dtype.name, pixels.shape[2]) == ("uint8", 3)
    assert pixels.min() < 100 < 255 == pixels.max()


class Broken(TemperatureScaling):
    """Calibrator whose fit raises an error."""

    error: BaseException

    def fit_to(self, *_, **__):
        raise self.error


@pytest.mark.parametrize("error", [KeyError("scale"), ZeroDivisionError("by zero"), MemoryError()])
def test_any_error_of_a_fit_is_a_remark(error):
    """Other ranks wait for the result of rank 0, and training continues."""
    fit_on_all_ranks = callback().fit_on_all_ranks
    logits, target = fits.data(60)
    input_format = InputFormat("multiclass", from_logits=True, num_classes=4)
    empty = PredictionBuffer(input_format)
    buffer = empty + empty.from_predictions(input_format.read(logits, target))
    calibrator = Broken()
    calibrator.error = error
    fit, remarks = fit_on_all_ranks(calibrator, buffer)
    assert fit is None
    assert remarks == (f"no calibrator is fitted: {type(error).__name__}: {error}",)
