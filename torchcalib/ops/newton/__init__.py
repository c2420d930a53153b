"""Maximum likelihood fits of calibration maps to labels, by Newton's method in float64.

The scores s are logits or log-probabilities. Axes: R replicate weights (folds, bootstrap replicates), S batch elements,
N samples, C classes. All fits of a call are solved together, without copies of the scores for the replicates.

The mean negative log-likelihood (NLL) is convex in the parameters. The starting point affects only the number of
iterations. Scores are divided by their scale, because a factor of the logits would otherwise change the number of
iterations. Results are in units of the original scores.

Modules:

- `descent`: the damped Newton iteration of all fits but one, and its stopping criteria.
- `scores`: standard form of scores.
- `temperature`: fit of alpha in softmax(alpha s), by a bracketed search for the root of the derivative of the NLL.
- `affine`: fit of alpha and beta in softmax(alpha s + beta), or of beta alone.
- `structured`: softmax(W x + b) with a diagonal or full W, with an optional ridge.
- `regression`: logistic regression on several features, with an optional ridge.
- `mixture`: weights of a mixture of distributions.
- `logistic`: fit of intercept and slope to binary outcomes, differentiable in the scores.
"""

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""Outcomes of a fit, defined in `affine.AffineFit`."""
