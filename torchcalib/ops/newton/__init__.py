"""Maximum likelihood fits of softmax(alpha s + beta), by Newton's method in float64.

Axes: `R` weight vectors of one sample (folds, bootstrap replicates), `S` series, `N` samples, `C` classes. All fits of
a call are one batched solve, in pieces that fit into the cache; the scores are never copied R times.

The mean NLL is convex in (alpha, beta), so the start only affects the number of rounds. It is a float32 fit to the
mean of the weights. Scores are divided by their scale, so that a factor of the logits changes nothing but the unit of
alpha. Results are in units of the original scores.

The three fits have a solver each:

- `affine`: damped Newton steps in C + 1 unknowns, by a Cholesky factor with a ridge.
- `temperature`: one unknown, by a bracketed search on the slope. It evaluates no likelihood, so it takes no logarithm
  for each row, and it cannot leave the bracket.
- `logistic`: one or two unknowns of binary outcomes, differentiable in the scores, with standard errors.
"""
