"""Tests whether a network commutes with shifts: what moves with it, and if the border explains errors."""

from selfconv.testing.shifts.moves import permuted
from selfconv.testing.shifts.shift_test import ShiftReport, tested_shifts

__all__ = ["ShiftReport", "permuted", "tested_shifts"]
