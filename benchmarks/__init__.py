"""Statistical studies (`benchmarks.study`), times against other packages (`benchmarks.run`), and checks on a GPU.

This is not part of the package. Tests run the code without measuring times.
"""
