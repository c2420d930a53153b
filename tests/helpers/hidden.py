"""Hidden states and a head of 40 classes, with ignored labels, and their logits."""

import torch

_G = torch.Generator().manual_seed(0)


def _randn(*shape):
    return torch.randn(shape, generator=_G, dtype=torch.float64)


HIDDEN, WEIGHT, BIAS = _randn(3, 20, 8), 0.5 * _randn(40, 8), _randn(40)
TARGET = torch.randint(0, 40, (3, 20), generator=_G)
TARGET[0, :4] = -100
TRANSFORMED = {"logit_scale": 0.7, "softcap": 3.0, "temperature": 1.5}
COMMON = {"task": "multiclass", "from_logits": True, "ignore_index": -100}


def logits(hidden=HIDDEN, weight=WEIGHT, bias=BIAS, logit_scale=1.0, softcap=None, temperature=1.0):
    z = logit_scale * (hidden @ weight.T + bias)
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
