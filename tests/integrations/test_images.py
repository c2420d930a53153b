"""Pictures for loggers."""

import torchcalib as tc
from torchcalib.integrations.images import as_array, log_picture


def test_pictures_go_to_whoever_takes_them_and_to_no_one_else():
    class Files:  # an experiment as that of MLflow, with a run, and as that of Comet, without
        def log_figure(self, *args, **kwargs):
            self.given = args, kwargs

    class Logger:
        def __init__(self, experiment, **own):
            self.experiment = experiment
            vars(self).update(own)

    ax = tc.ecd_curve()
    comet, mlflow = Logger(Files()), Logger(Files(), run_id="run")
    assert log_picture(comet, "val/reliability", ax, 7)
    assert comet.experiment.given == ((), {"figure_name": "val/reliability", "figure": ax.figure, "step": 7})
    assert log_picture(mlflow, "val/reliability", ax, 7)
    assert mlflow.experiment.given == (("run", ax.figure, "val/reliability_00000007.png"), {})
    assert not log_picture(Logger(object()), "val/reliability", ax, 7)
    assert not log_picture(object(), "val/reliability", ax, 7)
    pixels = as_array(ax)
    assert pixels.dtype.name == "uint8"
    assert pixels.shape[2] == 3
    assert pixels.min() < 100 < 255 == pixels.max()
