"""The ``selfconv`` command. A new subcommand is a function (its signature: the options) and a line below."""

from __future__ import annotations

import argparse
import io
import json as json_module
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg

from selfconv._extras import require
from selfconv._text import escape_for_terminal, one_line
from selfconv._version import __version__
from selfconv.bench import BenchOptions
from selfconv.study import Budget
from selfconv.train import (
    RECIPES,
    DataOptions,
    Engine,
    ModelOptions,
    Recipe,
    RunConfig,
    RunStopped,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from selfconv.study import Plan, ProcessEngine

BENCH, BUDGET = BenchOptions(), Budget()
TRAINED_HELP = (
    "Folder of a run or of a saved model, or a model that comes with the package: "
    "digits_asc, digits_conv, digits_p4_asc."
)
TrainedPlace = Annotated[str, arg(metavar="TRAINED", help=TRAINED_HELP)]


def evaluate(trained: Positional[TrainedPlace], /, *, json: bool = False) -> None:
    """Test a trained model: accuracy, per class, and on rotated images.

    For a run, also writes evaluation.json and confusion.png to its folder.

    Args:
        json: Print JSON instead of tables.
    """
    from selfconv.trained import evaluate as evaluate_trained
    from selfconv.trained import open_trained

    evaluation = evaluate_trained(open_trained(trained))
    if json:
        print(json_module.dumps(asdict(evaluation)))
    else:
        _print(evaluation.table())


def predict(
    trained: Positional[TrainedPlace],
    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGE…")]],
    /,
    *,
    json: bool = False,
) -> None:
    """Classify image files: prints file, class and probability, one line per image.

    Args:
        images: Image files, folders of images, or quoted wildcards.
        json: Print JSON with the probabilities of all classes.
    """
    from selfconv.trained import open_trained
    from selfconv.trained import predict as predict_images

    if not images:
        raise ValueError("predict: expected at least one image, folder or wildcard; got none")
    predictions = predict_images(open_trained(trained), images)
    if json:
        print(json_module.dumps([asdict(p) for p in predictions]))
        return
    for p in predictions:
        print(f"{escape_for_terminal(p.file)}\t{escape_for_terminal(p.label)}\t{p.probability:.4f}")


def export(trained: Positional[TrainedPlace], /, *, to: Path) -> None:
    """Write a trained model as ONNX or as a torch.export program.

    Args:
        to: File to write: …​.onnx or …​.pt2.
    """
    from selfconv.trained import export as export_trained
    from selfconv.trained import open_trained

    opened = open_trained(trained)
    shape = export_trained(opened, to)
    names = opened.data.class_names
    image = ", ".join(map(str, shape))
    print(f"{escape_for_terminal(to)}: images [N, {image}], pixels in 0..1 -> logits [N, {len(names)}]")
    print(f"classes: {', '.join(map(escape_for_terminal, names))}")


def models(pattern: Positional[str] = "*", /, *, size: int = 32) -> None:
    """List the models with their numbers of parameters and FLOPs.

    Args:
        pattern: Wildcard for the model names.
        size: Image size for which FLOPs are counted, in pixels.
    """
    from selfconv.models import list_models, models_table

    if size < 1:
        raise ValueError(f"size: expected a positive number of pixels; got {size}")
    if not list_models(pattern):
        raise ValueError(f"no model matches {pattern!r}; `selfconv models` lists all")
    _print(models_table(pattern, input_size=size))


def audit(
    model: Positional[Annotated[str, arg(metavar="MODEL")]],
    /,
    *,
    size: int = 32,
    group: str | None = None,
    downsample: Literal["stride", "pool"] | None = None,
) -> None:
    """Check layer by layer whether a network is equivariant; exit code 1 if it is not.

    Args:
        model: Name of a model, with random weights; or a trained model, as `evaluate` takes it.
        size: Image size in pixels.
        group: Name of the group; by default the model's own.
        downsample: Downsampling of convolutions, if not the model's own.
    """
    from selfconv.models import create_model, list_pretrained
    from selfconv.testing import audit as audit_model
    from selfconv.trained import open_trained

    if size < 1:
        raise ValueError(f"size: expected a positive number of pixels; got {size}")
    if not (Path(model).exists() or model in list_pretrained()):
        network = create_model(model, downsample=downsample)
    elif downsample is None:
        network = open_trained(model).model
    else:
        raise ValueError(f"--downsample needs the name of a model; got the trained model {model}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes: the audit itself tells
        result = audit_model(network, size, group, in_channels=network.config["in_channels"])
    _print(result.table())
    if not result.passed:
        raise SystemExit(1)


def bench(options: BenchOptions = BENCH) -> None:
    """Measure speed and memory of the operation and the networks, beside the convolutions they replace."""
    from selfconv.bench import run_bench

    run_bench(options)


def figures(
    trained: Positional[TrainedPlace],
    /,
    *,
    out: Path,
    image: Path | None = None,
    layer: str | None = None,
    pixel: tuple[int, int] | None = None,
    head: int | None = None,
) -> None:
    """Draw figures of a trained model: filters at a pixel, attention, equivariance; as PNG and SVG.

    Args:
        out: Output folder.
        image: Image file; by default the first test image of the model's data set.
        layer: Name of a self-convolution layer; by default the first.
        pixel: Row and column in the layer's feature map; by default at the steepest edge of the image.
        head: Attention head; by default one whose scores are neither uniform nor one-hot at that pixel.
    """
    from selfconv.trained import open_trained
    from selfconv.visualize import write_figures

    for path in write_figures(open_trained(trained), out, image=image, layer=layer, pixel=pixel, head=head):
        print(path)


def report(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUNS…")]],
    /,
    *,
    out: Path = Path("out/report"),
) -> None:
    """Write a report on runs: tables beside the paper's, figures, and a verdict on each claim of the paper.

    Args:
        runs: Run folders, or folders that contain them at any depth.
        out: Output folder for report.html, report.md and the figures.
    """
    from selfconv.study import write_report

    if not runs:
        raise ValueError("report: expected at least one folder of runs; got none")
    for path in write_report(runs, out):
        print(path)


def reproduce(
    plan: Positional[Annotated[str, arg(metavar="PLAN")]],
    /,
    budget: Budget = BUDGET,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    cpus: int | None = None,
    gpus: float | None = None,
    dry_run: bool = False,
) -> None:
    """Reproduce the paper's tables and figures, or run an ablation: all runs of a plan, and a report.

    Plans: cifar10, cifar100, resnet83, ablation-kernel, ablation-heads, ablation-filters, ablation-psi,
    ablation-pool, demo. Finished runs are kept: the same command continues where it stopped.

    Args:
        plan: Name of the plan.
        out: Folder for the runs and the report; by default runs/PLAN.
        jobs: Runs at a time, each a process with its share of the cores. By default one for each core, as
            far as there are 4 GB of memory for each (1 GB on digits): small networks gain little from a
            second thread, and one thread is not stalled by other work. With a GPU, one: they would share it.
        engine: local: here; ray: on a Ray cluster, as many at a time as it has processors.
        address: Of a Ray cluster, such as auto; by default Ray is started on this machine.
        cpus: Processors for each run, with ray; by default 1.
        gpus: GPUs for each run, with ray; by default none.
        dry_run: Print the plan with an estimate of the time it takes, and do nothing.
    """
    from selfconv.study import Engine as PlanEngine
    from selfconv.study import RayEngine, make_plan
    from selfconv.study import reproduce as reproduce_plan

    made = make_plan(plan, budget)
    placed = {"address": address, "cpus": cpus, "gpus": gpus}
    placed = {name: value for name, value in placed.items() if value is not None}
    where: PlanEngine
    if engine == "ray":
        if jobs is not None:
            raise ValueError("--jobs needs --engine local; got --engine ray, which places runs by --cpus")
        require("--engine ray", "ray")
        where = RayEngine(**placed)  # type: ignore[arg-type]
    elif placed:
        raise ValueError(f"--{next(iter(placed))} needs --engine ray; got --engine local")
    else:
        where = _processes(jobs, made)
    options = {**asdict(budget), "out": out, "jobs": jobs, "engine": engine, **placed}
    defaults = {**asdict(BUDGET), "engine": "local"}
    command = _command("reproduce", plan, {k: v for k, v in options.items() if v != defaults.get(k)})
    reproduce_plan(
        made, out if out is not None else Path("runs") / plan, where, command=command, dry_run=dry_run
    )


def demo(
    *,
    out: Path = Path("out/demo"),
    seeds: int | None = None,
    epochs: int | None = None,
    jobs: int | None = None,
) -> None:
    """Train small versions of the paper's networks on digits and compare them: a table and a report.

    Takes a few minutes on a CPU and needs no internet. Run again, it shows the finished results.

    Args:
        out: Folder for the runs and the report.
        seeds: Runs per network; by default 3.
        epochs: Epochs per run; by default 6.
        jobs: Runs at a time, each a process with its share of the cores; by default as in `reproduce`.
    """
    from selfconv.study import make_plan
    from selfconv.study import reproduce as reproduce_plan

    given = {"seeds": seeds, "epochs": epochs, "jobs": jobs, "out": None if out == Path("out/demo") else out}
    command = _command("demo", {name: value for name, value in given.items() if value is not None})
    plan = make_plan("demo", Budget(seeds=seeds, epochs=epochs))
    reproduce_plan(plan, out, _processes(jobs, plan), command=command)


def _processes(jobs: int | None, plan: Plan) -> ProcessEngine:
    from selfconv.study import ProcessEngine, default_jobs

    return ProcessEngine(default_jobs(plan) if jobs is None else jobs)


def _command(*parts: str | Mapping[str, object]) -> str:
    """What to type for a command and its options."""
    words = ["selfconv"]
    for part in parts:
        if isinstance(part, str):
            words.append(part)
        else:
            words += [word for name, value in part.items() for word in (f"--{name}", str(value))]
    return shlex.join(words)


def explore(
    trained: Positional[Annotated[str | None, arg(metavar="[TRAINED]")]] = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    open: bool = True,
) -> None:
    """Inspect a model on a local web page: click a pixel to see its filters, turn the image.

    Args:
        trained: Folder of a run or of a saved model; without one, the models that come with the package.
        host: Address to listen on; any other than 127.0.0.1 gives other machines access.
        port: Port to listen on; 0 for any free port.
        open: Open the page in the browser.
    """
    from selfconv.explorer import explore as serve

    serve(trained, host=host, port=port, open_page=open)


# ---- train: its options are those of a run, and their defaults depend on some of them ----


def _train_command(args: Sequence[str]) -> Callable[..., None]:
    """``train``, with the defaults that follow from some of its options: the data, a config file, …"""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("data", "model", "recipe", "config", "out"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--resume", action="store_true")
    training = len(args) > 0 and args[0] == "train"
    try:
        given = parser.parse_known_args(args[1:] if training else [])[0]
    except argparse.ArgumentError:  # tyro says it better
        given = parser.parse_args([])
    base = RunConfig.of(
        *(
            value if value is not None else default
            for value, default in ((given.data, "digits"), (given.model, "resnet29_asc"))
        )
    )
    if given.config is not None:
        base = RunConfig.load(Path(given.config))
    elif given.resume:
        out = Path(given.out) if given.out is not None else _default_out(base)
        base = RunConfig.load(out) if (out / "config.json").is_file() else base
    recipe = base.recipe
    if given.recipe in RECIPES:
        recipe = RECIPES[given.recipe](given.model if given.model is not None else base.model.name)

    def train(
        model: ModelOptions = base.model,
        data: DataOptions = base.data,
        training: Annotated[Recipe, arg(name="recipe")] = recipe,
        engine: Engine = base.engine,
        *,
        recipe: Literal["paper", "fast"] | None = None,
        seed: int = base.seed,
        out: Path | None = None,
        resume: bool = False,
        config: Path | None = None,
    ) -> None:
        """Train a network on digits, CIFAR or your own images.

        Without options: resnet29_asc on handwritten digits, in a few minutes. All results go to one
        folder, for `evaluate`, `predict` and `export`. --resume continues an interrupted run.

        Args:
            recipe: Recipe that sets the defaults below; by default paper for CIFAR and fast for other data.
            seed: Random seed of the weights, the order of the images, and augmentation.
            out: Folder for the run; by default runs/DATA-MODEL.
            resume: Continue the run in that folder, with its options.
            config: Read the defaults of all options from the config.json of a run.
        """
        from selfconv.train import train as train_run

        run = RunConfig(model=model, data=data, recipe=training, engine=engine, seed=seed)
        train_run(run, out if out is not None else _default_out(run), resume=resume)

    return train


def _default_out(config: RunConfig) -> Path:
    return Path("runs") / f"{Path(config.data.source).resolve().stem}-{config.model.name}"


# ---- the command ----

COMMANDS: dict[str, Callable[..., None]] = {
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
    "models": models,
    "audit": audit,
    "bench": bench,
    "figures": figures,
    "explore": explore,
    "reproduce": reproduce,
    "report": report,
    "demo": demo,
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command. Errors of the user are one line on stderr and exit code 2."""
    args = sys.argv[1:] if args is None else list(args)
    if args == ["--version"]:
        print(f"selfconv {__version__}")
        return
    warnings.showwarning = _warn
    for kind in (DeprecationWarning, FutureWarning):  # of the libraries: nothing that a user could do about
        warnings.simplefilter("ignore", kind)
    try:
        _call(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, as in `selfconv models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except RunStopped as stopped:
        _fail(str(stopped), stopped.code)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        _fail(one_line(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail(f"out of memory ({one_line(error)[:100]})", 1)


def _call(args: Sequence[str]) -> None:
    commands = {"train": _train_command(args), **COMMANDS}
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            call = _parse(commands, args)
    except SystemExit as stop:
        if stop.code == 2:
            _fail(_condensed(messages.getvalue()), 2)
        raise
    call()


def _parse(commands: dict[str, Callable[..., None]], args: Sequence[str]) -> Callable[[], None]:
    """The command's call, not yet made, so that only what tyro prints is taken for a parse error."""
    calls: list[Callable[[], None]] = []

    def deferred(command: Callable[..., None]) -> Callable[..., None]:
        from functools import wraps

        @wraps(command)
        def note(*given: Any, **options: Any) -> None:
            calls.append(lambda: command(*given, **options))

        return note

    tyro.extras.subcommand_cli_from_dict(
        {name: deferred(command) for name, command in commands.items()},
        prog="selfconv",
        description="Affine Self Convolution: networks whose filters depend on the image.",
        args=args,
        config=(OmitArgPrefixes,),
    )
    return calls[0]


def _condensed(box: str) -> str:
    """What tyro explains in a box, as a line."""
    lines = [re.sub(r"^[│╭╰─\s]+|[│╮╯─\s]+$", "", line) for line in box.splitlines()]
    first, *rest = [part.split("\n") for part in re.split(r"\n{2,}", "\n".join(lines[1:]).strip())]
    hints = [" ".join(part[:2]) for part in rest if part[0].startswith(("Perhaps", "Available"))]
    first[0] = re.sub(r"Error parsing __tyro-dummy-inner__\.\w+: ", "", first[0])  # its message says which
    return "; ".join([" ".join(first).rstrip("."), *hints]) or "cannot parse the options"


def _fail(message: str, code: int) -> None:
    print(f"selfconv: {escape_for_terminal(message)}", file=sys.stderr)
    raise SystemExit(code)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"selfconv: warning: {escape_for_terminal(' '.join(str(message).split()))}", file=sys.stderr)


def _print(table: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
