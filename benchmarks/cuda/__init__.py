"""Steps of `cuda_check.py`: values of ops and metrics against float64, their behaviour on a device, and speed.

All functions take a device, so that tests run them on the CPU.
"""
