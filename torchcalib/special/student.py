"""Critical values of Student's t-test of a bin's labels, the test that [TCE] compares the binomial one with."""

import math

import torch
from torch import Tensor

from torchcalib.special.beta import in_pieces, lower_tail


def t_critical(df: Tensor, alpha: float) -> Tensor:
    """Return t with P(|T| >= t) = alpha for Student's law of `df >= 1` degrees of freedom; float64.

    Newton's method for log P over log t, which is nearly straight in the tails; from the normal quantile, widened as
    its expansion in 1/df says.
    """
    z = torch.special.ndtri(torch.tensor(1 - alpha / 2, dtype=torch.float64, device=df.device))
    t = z * (1 + (z * z + 1) / (4 * df)) + 1e-3
    log_density_at_0 = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df * math.pi).log()
    for _ in range(30):
        tail = in_pieces(lower_tail, df / 2, torch.full_like(df, 0.5), df / (df + t * t))
        density = (log_density_at_0 - (df + 1) / 2 * torch.log1p(t * t / df)).exp()
        t = t * ((tail.log() - math.log(alpha)) * tail / (2 * density * t)).exp()
    critical: Tensor = t
    return critical


def t_interval(k: Tensor, n: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the ends of the open interval of p that a two-sided t-test of k ones among n labels keeps.

    Labels that are all alike have no variance and keep only p equal to them; one label, or none, keeps every p.
    """
    several = n > 1
    n = n.masked_fill(~several, 2).double()
    mean = k.double() / n
    deviation = (mean * (1 - mean) / (n - 1)).clamp(min=0).sqrt()
    half = t_critical(n - 1, alpha) * deviation
    # Exclusive ends, so that what is kept lies strictly between two numbers next to those that are rejected.
    low, high = mean - half, mean + half
    tiny = torch.full_like(mean, math.inf)
    low = torch.where(half > 0, low.nextafter(tiny), mean)
    high = torch.where(half > 0, high.nextafter(-tiny), mean)
    return low.masked_fill(~several, -math.inf), high.masked_fill(~several, math.inf)
