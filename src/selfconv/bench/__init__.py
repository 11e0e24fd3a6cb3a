"""``selfconv bench``: how fast the operation and the networks are, beside what they stand in for.

Nothing is timed before it agrees with the reference. Times are the least of many turns in one interleaved
run, so that ratios hold on a noisy machine; memory is what torch's allocator held at its height.

The operation is timed in a process as Python starts it, where glibc returns large blocks to the system when
they are freed, and whoever takes hundreds of megabytes pays for every page of them anew. Attention that
unfolds loses most of its time so. The stages of the network are therefore timed once more with freed memory
kept, which is how ``selfconv train`` runs, and how networks are timed.
"""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.bench.options import BenchOptions

if TYPE_CHECKING:
    from selfconv.bench.models import ModelRow
    from selfconv.bench.ops import Row
    from selfconv.bench.report import Results, read_results
    from selfconv.bench.run import run_bench
else:
    __getattr__, __dir__ = lazy(
        __name__, models=["ModelRow"], ops=["Row"], report=["Results", "read_results"], run=["run_bench"]
    )

__all__ = ["BenchOptions", "ModelRow", "Results", "Row", "read_results", "run_bench"]
