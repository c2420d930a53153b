from torchcalib.functional.kernel import skce_test as skce_test
from torchcalib.functional.logistic import CoxCalibration as CoxCalibration
from torchcalib.inference.resampling import Interval as Interval
from torchcalib.inference.resampling import bootstrap as bootstrap
from torchcalib.inference.sample_size import minimum_detectable_error as minimum_detectable_error
from torchcalib.inference.sample_size import required_n as required_n
from torchcalib.inference.testing import CalibrationTest as CalibrationTest
from torchcalib.metrics.errors import calibration_test as calibration_test
