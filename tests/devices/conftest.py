"""The emulated device or a GPU, in processes with the variable TORCHCALIB_TEST_DEVICE."""

import os

import pytest
import torch
from helpers import emulated_device


@pytest.fixture(scope="session")
def device():
    name = os.environ["TORCHCALIB_TEST_DEVICE"]
    return emulated_device.register() if name == emulated_device.NAME else torch.device(name, 0)
