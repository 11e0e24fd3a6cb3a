"""Concurrent trials on this machine, each in a worker process with its share of the threads.

A worker process runs several trials in sequence, since importing torch takes as long as a small trial. It
reads trials from its standard input, one line of JSON each, and reports progress on its standard output. At
the end of its input, it saves its current trial and exits: this happens when the plan is finished, when it is
stopped, and when the process that runs the plan is killed. When a worker dies, its trial resumes from the
last checkpoint in another worker, once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import Any

from selfconv._files import parse_json
from selfconv._memory import machine_memory
from selfconv._text import escape_for_terminal
from selfconv.study.board import Board
from selfconv.study.plans import Plan, Trial
from selfconv.study.sweep import outcome_of_dead_worker, run_trial_or_reason
from selfconv.train import Interrupted, RunConfig, StopSignals

RETRIES = 1  # of a trial whose process died
PATIENCE = 120.0  # seconds within which running trials must save a checkpoint
POLL = 0.2
PAUSE = 0.1  # seconds between two progress messages of a trial
GB = 2**30

Message = dict[str, Any]  # {"step": [share, text]}, {"warning": text} or {"ended": why it failed or None}


def default_jobs(plan: Plan) -> int:
    """The number of cores, limited by the number of runs and by memory; 1 if runs would share a GPU."""
    import torch

    if torch.accelerator.is_available():
        return 1
    memory = 1 * GB if plan.data.source == "digits" else 4 * GB  # p4resnet29_asc takes 3.4 on CIFAR
    return max(1, int(min(len(plan.trials), _cores(), machine_memory() // memory)))


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ProcessEngine:
    """Runs ``jobs`` trials at a time, each in a separate process.

    Args:
        jobs: the number of concurrent trials.
        threads: per trial; by default its share of torch's threads.
    """

    def __init__(self, jobs: int, threads: int | None = None) -> None:
        import torch

        if jobs < 1:
            raise ValueError(f"jobs: expected an integer ≥ 1; got {jobs}")
        self.jobs = jobs
        self.threads = max(1, torch.get_num_threads() // jobs) if threads is None else threads

    def __enter__(self) -> ProcessEngine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, trials: Sequence[Trial], out: Path, board: Board, stop: StopSignals) -> None:
        waiting, deaths = deque(trials), Counter[str]()
        heard: SimpleQueue[tuple[_Worker, Message | None]] = SimpleQueue()
        idle: list[_Worker] = []
        busy: dict[_Worker, Trial] = {}
        try:
            while (waiting or busy) and not stop.number:
                while waiting and len(busy) < self.jobs:
                    worker = idle.pop() if idle else _Worker(self.threads, heard)
                    busy[worker] = trial = waiting.popleft()
                    board.begin(trial)
                    worker.take(trial, out)
                try:
                    worker, message = heard.get(timeout=POLL)
                except Empty:
                    continue
                if message is None:
                    cause, lost = worker.cause_of_death(), busy.pop(worker, None)
                    worker.end()
                    if lost is None:
                        idle.remove(worker)
                    elif not stop.number:
                        deaths[lost.folder] += 1
                        if deaths[lost.folder] <= RETRIES:
                            board.say(f"{lost}: {cause}; continues from its last checkpoint")
                            waiting.appendleft(lost)
                        else:
                            board.end(lost, outcome_of_dead_worker(out / lost.folder, cause))
                elif "step" in message:
                    board.step(busy[worker], *message["step"])
                elif "warning" in message:
                    warnings.warn(message["warning"], stacklevel=2)
                else:
                    board.end(busy.pop(worker), message["ended"])
                    idle.append(worker)
            _dismiss([*idle, *busy])
        finally:
            for worker in [*idle, *busy]:
                worker.end()


def _dismiss(workers: Sequence[_Worker]) -> None:
    """Asks workers to save their runs and to end."""
    for worker in workers:
        worker.close()
    until = time.monotonic() + PATIENCE
    for worker in workers:
        worker.wait(until)


class _Worker:
    """The parent's side of a worker process. Puts its messages in a queue, and None once it has ended."""

    def __init__(self, threads: int, heard: SimpleQueue[tuple[_Worker, Message | None]]) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115  (open until the process has ended)
        self._process = subprocess.Popen(
            # -P and PYTHONPATH: the worker imports from the same places as this process
            [sys.executable, "-P", "-m", __name__, str(threads)],
            env=os.environ
            | {
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()

    def _listen(self, heard: SimpleQueue[tuple[_Worker, Message | None]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):  # half a line, from a worker that was killed
                heard.put((self, parse_json(line)))
        self._process.wait()
        heard.put((self, None))

    def take(self, trial: Trial, out: Path) -> None:
        assert self._process.stdin is not None
        task = {"config": trial.config.to_json(), "folder": str(out / trial.folder)}
        with suppress(OSError):  # it has died: its listener reports that
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def wait(self, until: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Kills the process if it is still running, and closes its files."""
        self.close()
        self._process.kill()
        self._listener.join()
        for file in (self._process.stdout, self._errors):
            assert file is not None
            file.close()

    def cause_of_death(self) -> str:
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "its process was killed (SIGKILL, possibly out of memory)"
        if code < 0:
            return f"its process was killed ({signal.Signals(-code).name})"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with code {code}" + (f" ({escape_for_terminal(said[-1])})" if said else "")


# ---- in the worker process ----


def work(threads: int) -> int:
    """Runs the received trials one after another; returns the exit code of the process."""
    send = _sender()
    tasks: SimpleQueue[Message | None] = SimpleQueue()
    for kind in (DeprecationWarning, FutureWarning):  # from libraries; ignored as in the command
        warnings.simplefilter("ignore", kind)
    warnings.showwarning = lambda message, *_, **__: send({"warning": " ".join(str(message).split())})
    with StopSignals(insistent=False) as stop:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends the parent, and its input
        threading.Thread(target=_receive, args=(tasks,), daemon=True).start()
        import torch

        torch.set_num_threads(threads)
        while (task := tasks.get()) is not None and not stop.number:
            sent = 0.0

            def watch(share: float, text: str) -> None:
                nonlocal sent
                if time.monotonic() - sent > PAUSE:
                    sent = time.monotonic()
                    send({"step": [share, text]})

            try:
                config, folder = RunConfig.from_json(task["config"]), Path(task["folder"])
                reason = run_trial_or_reason(config, folder, watch, stop)
            except Interrupted as stopped:
                return stopped.code
            send({"ended": reason})
    return 0


def _sender() -> Callable[[Message], None]:
    """Reserves standard output for messages; everything else that is printed goes to standard error."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: Message) -> None:
        with suppress(OSError):  # the parent has ended; the end of input then stops this process
            output.write(json.dumps(message).encode() + b"\n")

    return send


def _receive(tasks: SimpleQueue[Message | None]) -> None:
    """Puts received tasks into the queue; at the end of input it signals the main thread to save and stop."""
    with open(0, "rb", buffering=0) as lines:  # unbuffered: a buffer's lock would be held at exit
        for line in lines:
            tasks.put(parse_json(line))
    tasks.put(None)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(PATIENCE)
    os._exit(1)  # the main thread hangs


if __name__ == "__main__":
    os._exit(work(int(sys.argv[1])))  # skips the teardown of torch, which is slow: all files are written
