"""Jobs of the planner for tests."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from longspan.core.parallel import ParallelConfig
from longspan.plan import Job


def job_on(mesh: ParallelConfig, **options: Any) -> Job:
    """Return a job on a mesh; `options` are fields of `Job` and of `ParallelConfig`."""
    of_parallel = options.keys() & {field.name for field in fields(ParallelConfig)}
    parallel = replace(mesh, **{name: options.pop(name) for name in of_parallel})
    return Job(parallel=parallel, **options)
