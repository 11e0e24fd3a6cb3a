"""Parses the command line, calls the command, and prints an error as one line."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, NoReturn

import tyro
from tyro.conf import OmitArgPrefixes

from selfconv._memory import keep_memory
from selfconv._text import escape_for_terminal, one_line
from selfconv._version import __version__
from selfconv.cli.commands import COMMANDS
from selfconv.cli.training import train_command
from selfconv.train import RunStopped, is_out_of_memory


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command. Errors of the user are one line on stderr and exit code 2."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print(f"selfconv {__version__}")
        return
    keep_memory()  # for every command: half of an evaluation was page faults without it
    warnings.showwarning = _warn
    for kind in (DeprecationWarning, FutureWarning):  # from libraries: a user can do nothing about them
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", "Image size .* decompression bomb")  # Pillow's, before our own error
    try:
        with _sigterm_raises():
            _call(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `selfconv models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except _Terminated:
        _fail("terminated", 128 + signal.SIGTERM)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)
    except RunStopped as stopped:
        _fail(str(stopped), stopped.code)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _fail(one_line(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail(f"out of memory ({one_line(error)[:100]})", 1)


class _Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does: partial files are removed. Runs replace the handler and save."""

    def end(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _call(args: Sequence[str]) -> None:
    for word in args:  # an empty path would be the working directory
        if not word or (word.startswith("--") and word.endswith("=")):
            raise ValueError(f"expected a value; got an empty one in: {shlex.join(['selfconv', *args])}")
    commands = {"train": train_command(args), **COMMANDS}
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            call = parse(commands, args)
    except SystemExit as stop:
        if stop.code == 2:
            _fail(_condensed(messages.getvalue()), 2)
        raise
    call()


def parse(commands: dict[str, Callable[..., None]], args: Sequence[str]) -> Callable[[], None]:
    """A function that calls the command. Parsing does not call it, so all that is printed then is tyro's."""
    calls: list[Callable[[], None]] = []

    def deferred(command: Callable[..., None]) -> Callable[..., None]:
        from functools import wraps

        @wraps(command)
        def store_call(*given: Any, **options: Any) -> None:
            calls.append(lambda: command(*given, **options))

        return store_call

    tyro.extras.subcommand_cli_from_dict(
        {name: deferred(command) for name, command in commands.items()},
        prog="selfconv",
        description="Affine Self Convolution: networks whose filters depend on the image.",
        args=args,
        config=(OmitArgPrefixes,),
    )
    return calls[0]


def _condensed(box: str) -> str:
    """The message that tyro prints in a box, as one line."""
    lines = [re.sub(r"^[│╭╰─\s]+|[│╮╯─\s]+$", "", line) for line in box.splitlines()]
    first, *rest = [part.split("\n") for part in re.split(r"\n{2,}", "\n".join(lines[1:]).strip())]
    hints = [" ".join(part[:2]) for part in rest if part[0].startswith(("Perhaps", "Available"))]
    # tyro's own name of an argument; the rest of the message has the option's
    first[0] = re.sub(r"Error parsing __tyro-dummy-inner__\.\w+: ", "", first[0])
    return "; ".join([" ".join(first).rstrip("."), *hints]) or "cannot parse the options"


def _fail(message: str, code: int) -> None:
    print(f"selfconv: {escape_for_terminal(message)}", file=sys.stderr)
    raise SystemExit(code)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"selfconv: warning: {escape_for_terminal(' '.join(str(message).split()))}", file=sys.stderr)
