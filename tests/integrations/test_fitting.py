"""Fits to the samples of all ranks."""

import pytest
from helpers import fits

from torchcalib.calibration import TemperatureScaling
from torchcalib.core.inputs import InputFormat
from torchcalib.integrations.lightning import fit_on_all_ranks
from torchcalib.reporting.buffer import PredictionBuffer


class Broken(TemperatureScaling):
    """Calibrator whose fit raises an error."""

    error: BaseException

    def fit_to(self, *_, **__):
        raise self.error


@pytest.mark.parametrize("error", [KeyError("scale"), ZeroDivisionError("by zero"), MemoryError()])
def test_any_error_of_a_fit_is_a_remark(error):
    """Other ranks wait for the result of rank 0, and training continues."""
    logits, target = fits.data(60)
    input_format = InputFormat("multiclass", from_logits=True, num_classes=4)
    empty = PredictionBuffer(input_format)
    buffer = empty + empty.of(input_format.read(logits, target))
    calibrator = Broken()
    calibrator.error = error
    fit, remarks = fit_on_all_ranks(calibrator, buffer)
    assert fit is None
    assert remarks == (f"no calibrator is fitted: {type(error).__name__}: {error}",)
