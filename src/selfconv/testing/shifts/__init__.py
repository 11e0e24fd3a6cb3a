"""Shifts of the input of a network: what moves with it, and whether the border or a fault is in the way."""

from selfconv.testing.shifts.moves import permuted
from selfconv.testing.shifts.shift_test import ShiftReport, tested_shifts

__all__ = ["ShiftReport", "permuted", "tested_shifts"]
