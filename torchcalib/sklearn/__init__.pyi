from torchcalib.sklearn.display import CalibrationDisplay as CalibrationDisplay
from torchcalib.sklearn.estimators import CalibratedClassifier as CalibratedClassifier
from torchcalib.sklearn.estimators import Calibration as Calibration
from torchcalib.sklearn.scorers import calibration_error as calibration_error
from torchcalib.sklearn.scorers import get_scorer as get_scorer
from torchcalib.sklearn.scorers import get_scorer_names as get_scorer_names
