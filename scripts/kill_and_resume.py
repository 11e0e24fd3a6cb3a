"""Kills runs with SIGKILL at random moments, resumes them, and compares what they end with.

    python scripts/kill_and_resume.py --runs 20

Each run is killed once or twice; all must end with the same bits as one that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPTIONS = "--model resnet29_asc --depth 11 --widths 8 8 8 --epochs 2 --batch-size 64 --ema 0.9"


def train(out: Path, log: Path, *extra: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "selfconv.cli",
        "train",
        *OPTIONS.split(),
        "--checkpoint-minutes=0",
        "--out",
        str(out),
        *extra,
    ]
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})


def outcome(out: Path) -> tuple[bytes, list[tuple[float, float]]]:
    """The weights, and the accuracies of each epoch."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = (out / "model" / "model.safetensors").read_bytes()
    return weights, [(line["train_loss"], line["val_accuracy"]) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(folder / "whole", folder / "whole.log").wait()
        began = time.monotonic()
        train(folder / "timed", folder / "timed.log").wait()
        length = time.monotonic() - began
        expected, failures = outcome(folder / "whole"), 0
        for index in range(arguments.runs):
            out, log = folder / f"run{index}", folder / f"run{index}.log"
            moments = []
            for _ in range(random.randint(1, 2)):
                process = train(out, log, "--resume")
                moments.append(random.uniform(0.2, 1.0) * length)
                time.sleep(moments[-1])
                process.kill()
                process.wait()
            train(out, log, "--resume").wait()
            same = (out / "record.json").exists() and outcome(out) == expected
            failures += not same
            killed = ", ".join(f"{moment:.1f}" for moment in moments)
            print(
                f"run {index + 1}: killed after {killed} s: {'same bits' if same else 'DIFFERS'}", flush=True
            )
            if not same:
                print(log.read_text())
    print(
        f"{arguments.runs - failures} of {arguments.runs} runs ended with the same bits ({length:.1f} s each)"
    )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
