"""What our results are held against. The only file that imports competitors."""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.isotonic import IsotonicRegression

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


def one_test_per_prediction(p: Floats, positives: Ints, n: Ints, alpha: float = 0.05) -> int:
    """The procedure of the authors of TCE: one call of scipy's test for each prediction, against its block."""
    rows = zip(positives.tolist(), n.tolist(), p.tolist(), strict=True)
    return sum(binomtest(k, size, value).pvalue <= alpha for k, size, value in rows)


def quantile_calibration_curve(y: Ints, p: Floats, n_bins: int) -> tuple[Floats, Floats]:
    """Equal-mass bins of scikit-learn: mean outcome and mean prediction of each."""
    curve: tuple[Floats, Floats] = calibration_curve(y, p, n_bins=n_bins, strategy="quantile")
    return curve


def isotonic_fit(y: Ints, p: Floats) -> IsotonicRegression:
    """Isotonic fit of scikit-learn; its values at the predictions are not asked for."""
    return IsotonicRegression().fit(p, y)
