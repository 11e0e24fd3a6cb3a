"""Studies of many runs: plans, the engines that run them, statistics, and the report."""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.study.plans import Budget, Plan, Trial, make_plan

if TYPE_CHECKING:
    from selfconv.study.board import Board
    from selfconv.study.process_engine import ProcessEngine, default_jobs
    from selfconv.study.ray_engine import RayEngine
    from selfconv.study.report import write_report
    from selfconv.study.sweep import Engine, InProcessEngine, PlanFailed, reproduce
else:
    __getattr__, __dir__ = lazy(
        __name__,
        board=["Board"],
        process_engine=["ProcessEngine", "default_jobs"],
        ray_engine=["RayEngine"],
        report=["write_report"],
        sweep=["Engine", "InProcessEngine", "PlanFailed", "reproduce"],
    )

__all__ = [
    "Board",
    "Budget",
    "Engine",
    "InProcessEngine",
    "Plan",
    "PlanFailed",
    "ProcessEngine",
    "RayEngine",
    "Trial",
    "default_jobs",
    "make_plan",
    "reproduce",
    "write_report",
]
