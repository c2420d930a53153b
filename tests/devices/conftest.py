"""The emulated device, in processes with the variable TORCHCALIB_TEST_DEVICE."""

import pytest
from helpers import emulated_device


@pytest.fixture(scope="session")
def device():
    return emulated_device.register()
