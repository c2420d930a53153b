"""Penalties, one at a time."""

import pytest
from helpers.penalties import PENALTIES


@pytest.fixture(params=PENALTIES)
def penalty(request):
    return PENALTIES[request.param]


@pytest.fixture(params=[name for name in PENALTIES if PENALTIES[name][-1]])
def new_penalty(request):
    """Those that are functions of this package; values and laws of the others are tested where these are."""
    return PENALTIES[request.param]
