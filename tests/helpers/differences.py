"""Central differences, with which gradients are compared."""


def central_difference(function, x, at, step=1e-6):
    """Return the slope of `function` in the entry `at` of a tensor."""
    values = []
    for sign in (1, -1):
        moved = x.clone()
        moved[at] += sign * step
        values.append(float(function(moved)))
    return (values[0] - values[1]) / (2 * step)
