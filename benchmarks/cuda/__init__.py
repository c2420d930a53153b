"""What `cuda_check.py` does on a GPU: `ops` and `metrics` against float64, how both `conduct` themselves, and `speed`.

Everything takes a device, so that the tests run it on the CPU, with the Triton kernels in Triton's interpreter.
"""
