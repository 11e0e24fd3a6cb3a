"""``selfconv bench``: how fast the operation and the networks are, compared with convolution.

Nothing is timed before it agrees with the reference. Each time is the minimum over interleaved repetitions,
so that ratios hold on a noisy machine; memory is the maximum that torch's allocator held.

The operation is timed in a plain Python process, where glibc returns large freed blocks to the system and
every new block is mapped and zeroed again, page by page: most of the cost of attention that unfolds. The
stages of the network are therefore timed a second time with a caching allocator (freed memory is not returned
to the system), which is how ``selfconv train`` runs, and how networks are timed.
"""

from typing import TYPE_CHECKING

from selfconv._lazy import lazy
from selfconv.bench.options import BenchOptions

if TYPE_CHECKING:
    from selfconv.bench.inference import InferenceRow
    from selfconv.bench.models import ModelRow
    from selfconv.bench.ops import Row
    from selfconv.bench.report import Results, read_results
    from selfconv.bench.run import run_bench
    from selfconv.bench.windows import WindowRow
else:
    __getattr__, __dir__ = lazy(
        __name__,
        inference=["InferenceRow"],
        models=["ModelRow"],
        ops=["Row"],
        report=["Results", "read_results"],
        run=["run_bench"],
        windows=["WindowRow"],
    )

__all__ = [
    "BenchOptions",
    "InferenceRow",
    "ModelRow",
    "Results",
    "Row",
    "WindowRow",
    "read_results",
    "run_bench",
]
