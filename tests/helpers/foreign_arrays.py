"""Arrays of other libraries with the array API."""

import torch


class OnDevice:
    """Array of another library with the array API, which numpy cannot read, such as CuPy."""

    def __init__(self, values):
        self.values = values

    def __array_namespace__(self, api_version=None):
        return OnDevice

    @staticmethod
    def from_dlpack(values):
        return OnDevice(torch.from_dlpack(values))

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a numpy array is not allowed")
