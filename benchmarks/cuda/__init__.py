"""Steps of `cuda_check.py`: values of operations and metrics against float64, behaviour on a device, and speed.

All functions have a device argument, so that tests run them on the CPU.
"""
