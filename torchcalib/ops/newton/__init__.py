"""Maximum likelihood fits of softmax(alpha s + beta) to labels, by Newton's method in float64.

Axes: `R` replicate weights (folds, bootstrap replicates), `S` batch elements, `N` samples, `C` classes. All fits of a
call are solved as one batch, in pieces that fit into the cache. The scores are not copied for the replicates.

The mean negative log-likelihood (NLL) is convex in (alpha, beta), so the starting point only affects the number of
iterations. This point is a float32 fit to the mean replicate weights. Scores are divided by their scale, so that a
factor of the logits does not change the number of iterations. Results are in units of the original scores.

Solvers:

- `temperature`: alpha alone, by a bracketed search for the root of the slope. It needs no likelihood, and thus no
  logarithm per row.
- `affine`: alpha and beta, by damped Newton steps with a regularised Cholesky factor.
- `logistic`: intercept and slope for binary outcomes, differentiable in the scores, with variances.
"""
