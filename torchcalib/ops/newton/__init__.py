"""Maximum likelihood fits in float64 by one damped Newton method, `minimise`.

Each fit is a problem given by the sums of its mean negative log-likelihood (NLL), gradient and Hessian:

- `fits`: softmax(alpha s + beta) with a scale alpha and, if wanted, a bias beta for each class.
- `logistic`: one or two unknowns of binary outcomes, differentiable in the scores, with standard errors.
"""
