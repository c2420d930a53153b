"""Maximum likelihood fits of softmax(alpha s + beta), by Newton's method in float64.

Axes: `R` weightings of one sample (folds, bootstrap replicates), `S` series, `N` samples, `C` classes. All fits of a
call are one solve, in pieces that stay in cache; the scores are never copied R times.

The mean NLL is convex in (alpha, beta), so the start decides about nothing but the number of rounds. It is a float32
fit to the mean of the weightings. Scores are divided by their scale, so that logits a hundred times too large are the
same problem; what is returned is in units of the scores given.
"""

from torchcalib.ops.newton.fits import AffineFit, fit_dp, fit_temperature
from torchcalib.ops.newton.problem import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.standard_form import PIECE

__all__ = [
    "AT_ZERO",
    "CONVERGED",
    "NO_DATA",
    "PIECE",
    "SEPARABLE",
    "STOPPED",
    "AffineFit",
    "fit_dp",
    "fit_temperature",
]
