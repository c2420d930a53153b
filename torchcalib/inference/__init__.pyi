from torchcalib.functional.kernel import skce_test as skce_test
from torchcalib.functional.logistic import CoxCalibration as CoxCalibration
from torchcalib.functional.sequential import SequentialEvidence as SequentialEvidence
from torchcalib.inference.resampling import Interval as Interval
from torchcalib.inference.resampling import bootstrap as bootstrap
from torchcalib.inference.testing import CalibrationTest as CalibrationTest
from torchcalib.metrics.errors import calibration_test as calibration_test
