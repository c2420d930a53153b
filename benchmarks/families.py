"""The families of jobs, in the order of the table: each is a module with a list `JOBS`."""

from importlib import import_module

from benchmarks.job import Job

FAMILIES = ("one_pass", "ranked", "canonical", "calibration")


def jobs_of(family: str) -> list[Job]:
    """Return the jobs of a family."""
    jobs: list[Job] = import_module(f"benchmarks.{family}").JOBS
    return jobs
