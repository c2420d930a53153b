"""What Triton needs before a kernel can be launched. Imported by the modules of kernels alone."""

import torch
import triton


def check_launch() -> None:
    """Raise ImportError where what launches a kernel cannot be built, so that `dispatch` falls back.

    It is built by a C compiler, which a machine with a CUDA device need not have.
    """
    if torch.cuda.is_available():
        try:
            triton.runtime.driver.active.get_current_device()
        except Exception as error:  # whatever the build raises
            raise ImportError(f"no kernel can be launched: {error}") from error
