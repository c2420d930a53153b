"""A check that Triton can launch kernels. Only modules of Triton kernels import it."""

import torch
import triton


def check_launch() -> None:
    """Raise ImportError if Triton cannot build its launcher, so that `dispatch` falls back.

    Building it needs a C compiler, which is not installed on every machine with a CUDA device.
    """
    if torch.cuda.is_available():
        try:
            triton.runtime.driver.active.get_current_device()
        except Exception as error:  # any error of the build
            raise ImportError(f"no kernel can be launched: {error}") from error
