"""The subcommands: each is a function whose signature defines the options, and a line in ``COMMANDS``."""

from __future__ import annotations

import csv
import json as json_module
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from selfconv._extras import require
from selfconv._text import escape_for_terminal, in_utf8
from selfconv.bench import BenchOptions
from selfconv.cli.output import print_table, progress
from selfconv.models import list_models
from selfconv.study import Budget

if TYPE_CHECKING:
    from torch import Tensor

    from selfconv.study import Plan, ProcessEngine
    from selfconv.trained import Prediction

BENCH, BUDGET = BenchOptions(), Budget()
TRAINED_HELP = (
    "Folder of a run or of a saved model, or a model included in the package: "
    f"{', '.join(list_models(pretrained=True))}."
)
TrainedArgument = Annotated[str, arg(metavar="TRAINED", help=TRAINED_HELP)]


def evaluate(
    trained: Positional[TrainedArgument],
    /,
    *,
    data: str | None = None,
    range: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Test a trained model: accuracy, per class, and on images rotated by every multiple of 15°.

    For a run, also writes evaluation.json, predictions.csv (every test image with its probabilities),
    confusion.png, rotation.png and mistakes.png (the most confident ones) to its folder.

    Args:
        data: Data set with the test images; by default the one that the model was trained on.
        range: With --data, values that map to 0 and 1: LOW,HIGH or dtype; by default as in training.
        out: Folder for the files; by default that of the run. Results on other data are saved only if given.
        json: Print JSON instead of tables.
    """
    from selfconv.trained import EvaluationNotSaved, open_trained
    from selfconv.trained import evaluate as evaluate_trained

    if range is not None and data is None:
        raise ValueError(f"--range needs --data; got --range {range} for the data set of the run")
    opened = open_trained(trained)
    unsaved = None
    with progress("evaluating") as watch:
        try:
            evaluation = evaluate_trained(opened, data, pixel_range=range, out=out, watch=watch)
        except EvaluationNotSaved as error:  # the numbers have cost time
            evaluation, unsaved = error.evaluation, error
    if json:
        print(json_module.dumps(asdict(evaluation)))
    else:
        print_table(evaluation.table())
    if unsaved is not None:
        raise unsaved


def predict(
    trained: Positional[TrainedArgument],
    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGE…")]],
    /,
    *,
    format: Literal["text", "csv", "jsonl"] = "text",
    range: str | None = None,
    json: bool = False,
    explain: Path | None = None,
) -> None:
    """Classify image files: prints file, class and probability, one line per image, as they come.

    Files that cannot be read are reported on stderr; the others are classified, and the exit code is 1.

    Args:
        images: Image files, folders of images, or quoted wildcards.
        format: text: file, class and probability; csv and jsonl: with the probabilities of all classes.
        range: Values that map to 0 and 1: LOW,HIGH or dtype; by default as in training.
        json: Print one JSON list, with the probabilities of all classes, at the end.
        explain: Folder for a picture per image: class activation and occlusion maps; stderr names it.
    """
    from selfconv.data import DataError
    from selfconv.trained import open_trained, predict_each

    if not images:
        raise ValueError("predict: expected at least one image, folder or wildcard; got none")
    if json and format != "text":
        raise ValueError(f"predict: expected --json or --format; got both, --format {format}")
    opened = open_trained(trained)
    failed, answers, write = 0, [], _prediction_writer(format, opened.data.class_names)
    see: Callable[[Prediction, Tensor], None] | None = None
    if explain is not None:
        require("drawing pictures", "matplotlib")
        from selfconv.visualize import ExplanationWriter

        writer = ExplanationWriter(opened, explain)

        def write_explanation(prediction: Prediction, pixels: Tensor) -> None:
            nonlocal failed
            try:
                said = f"explained in {writer.write(prediction, pixels)}"
            except (OSError, ValueError) as error:  # the prediction is printed in any case
                failed += 1
                said = f"cannot be explained: {error}"
            print(f"selfconv: {escape_for_terminal(f'{prediction.file}: {said}')}", file=sys.stderr)

        see = write_explanation

    with progress("classifying", hidden=sys.stdout.isatty()) as watch:
        show = (
            None if watch is None else (lambda done, total: watch(done / total, f"{done} of {total} files"))
        )
        for answer in predict_each(opened, images, pixel_range=range, watch=show, see=see):
            if isinstance(answer, DataError):
                failed += 1
                print(f"selfconv: {answer}", file=sys.stderr)
                continue
            answer = replace(answer, file=in_utf8(answer.file))
            if json:
                answers.append(asdict(answer))
            else:
                write(answer)
    if json:
        print(json_module.dumps(answers))
    if failed:
        raise SystemExit(1)


def _prediction_writer(format: str, class_names: Sequence[str]) -> Callable[[Prediction], None]:
    """A function that prints and flushes a prediction."""
    if format == "jsonl":
        return lambda p: print(json_module.dumps(asdict(p)), flush=True)
    if format == "text":
        return lambda p: print(
            f"{escape_for_terminal(p.file)}\t{escape_for_terminal(p.label)}\t{p.probability:.4f}", flush=True
        )
    from selfconv.trained import probability_columns

    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["file", "label", "probability", *probability_columns(class_names)])

    def write(p: Prediction) -> None:
        table.writerow([p.file, p.label, p.probability, *p.probabilities.values()])
        sys.stdout.flush()

    return write


def export(trained: Positional[TrainedArgument], /, *, to: Path, compile: bool = True) -> None:
    """Write a trained model as ONNX or as a torch.export program.

    Args:
        to: File to write, a file name that ends in .onnx or .pt2.
        compile: Compile a .pt2 file too, for processors like this one, if there is a C++ compiler.
    """
    from selfconv.trained import export as export_trained
    from selfconv.trained import open_trained, own_range

    opened = open_trained(trained)
    exported = export_trained(opened, to, compile=compile)
    names = opened.data.class_names
    image, limits = ", ".join(map(str, exported.image_shape)), own_range(opened.data)
    values = "pixels in 0..1" if limits is None else f"values {limits[0]:g}..{limits[1]:g} as in the files"
    print(f"{escape_for_terminal(to)}: images [N, {image}], {values} -> logits [N, {len(names)}]")
    print(f"form: {exported.form}")
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
    print_table(models_table(pattern, input_size=size))


def audit(
    model: Positional[Annotated[str, arg(metavar="MODEL")]],
    /,
    *,
    size: int = 32,
    group: str | None = None,
    downsample: Literal["stride", "pool"] | None = None,
    stem: Literal["conv", "pool4"] | None = None,
    between: float | None = None,
    tolerance: float = 1e-8,
) -> None:
    """Check layer by layer whether a network is equivariant; exit code 1 if it is not.

    Args:
        model: Name of a model, which gets random weights; or a trained model, as for `evaluate`.
        size: Image size in pixels.
        group: Group to test, by name; the network stays as it is. By default the model's group.
        downsample: Downsampling of convolutions; by default the model's.
        stem: First layers; by default the model's.
        between: Largest error that passes under turns between the pixels, relative to the output's deviation.
        tolerance: Largest error of one layer that counts as rounding; of a layer that computes in float32
            or a lower precision, at least the rounding of that.
    """
    from selfconv.models import create_model, list_models
    from selfconv.testing import audit as audit_model
    from selfconv.train import holds_model
    from selfconv.trained import open_trained

    if size < 1:
        raise ValueError(f"size: expected a positive number of pixels; got {size}")
    trained = holds_model(Path(model)) or model in list_models(pretrained=True)
    if not trained and (model in list_models() or not Path(model).exists()):
        network = create_model(model, downsample=downsample, stem=stem)
    elif downsample is None and stem is None:
        network = open_trained(model).model
    else:
        raise ValueError(f"--downsample and --stem need the name of a model; got the trained model {model}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # size warnings; the audit reports sizes itself
        channels = network.config["in_channels"]
        result = audit_model(network, size, group, in_channels=channels, tolerance=tolerance, between=between)
    print_table(result.table())
    if not result.passed:
        raise SystemExit(1)


def bench(options: BenchOptions = BENCH) -> None:
    """Measure speed and memory of the operation and the networks, compared with convolution."""
    from selfconv.bench import run_bench

    run_bench(options)


def figures(
    trained: Positional[TrainedArgument],
    /,
    *,
    out: Path,
    image: Path | None = None,
    range: str | None = None,
    layer: str | None = None,
    pixel: tuple[int, int] | None = None,
    head: int | None = None,
) -> None:
    """Draw figures of a trained model: filters at a pixel, attention, equivariance; as PNG and SVG.

    Args:
        out: Output folder.
        image: Image file; by default the first test image of the model's data set.
        range: With --image, values that map to 0 and 1: LOW,HIGH or dtype; by default as in training.
        layer: Name of a self-convolution layer; by default the first.
        pixel: Row and column in the layer's feature map; by default where attention is selective.
        head: Attention head; by default one whose scores are neither uniform nor one-hot at that pixel.
    """
    from selfconv.trained import open_trained
    from selfconv.visualize import write_figures

    options: dict[str, Any] = {"layer": layer, "pixel": pixel, "head": head}
    for path in write_figures(open_trained(trained), out, image=image, pixel_range=range, **options):
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
    ablation-pool, rotation, controls, demo. Finished runs are kept: the same command continues where it
    stopped.

    Args:
        plan: Name of the plan.
        out: Folder for the runs and the report; by default runs/PLAN.
        jobs: Number of concurrent runs, each a process with its share of the cores. By default the number of
            cores, limited by memory to one run per 4 GB (1 GB on digits): small networks gain little from a
            second thread, and other work on the machine slows a single thread down least. With a GPU, 1,
            since the runs would share it.
        engine: local: on this machine; ray: on a Ray cluster, as many at a time as it has processors.
        address: Address of a Ray cluster, such as auto; by default Ray is started on this machine.
        cpus: Processors per run, with ray; by default 1.
        gpus: GPUs per run, with ray; by default none.
        dry_run: Print the plan with a time estimate, without training.
    """
    from selfconv.study import Engine, RayEngine, make_plan
    from selfconv.study import reproduce as reproduce_plan

    made = make_plan(plan, budget)
    given = {"address": address, "cpus": cpus, "gpus": gpus}
    ray_options = {name: value for name, value in given.items() if value is not None}
    engine_to_use: Engine
    if engine == "ray":
        if jobs is not None:
            raise ValueError("--jobs needs --engine local; got --engine ray, which places runs by --cpus")
        require("--engine ray", "ray")
        engine_to_use = RayEngine(**ray_options)  # type: ignore[arg-type]
    elif ray_options:
        raise ValueError(f"--{next(iter(ray_options))} needs --engine ray; got --engine local")
    else:
        engine_to_use = _processes(jobs, made)
    options = {**asdict(budget), "out": out, "jobs": jobs, "engine": engine, **ray_options}
    defaults = {**asdict(BUDGET), "engine": "local"}
    command = _command("reproduce", plan, {k: v for k, v in options.items() if v != defaults.get(k)})
    folder = out if out is not None else Path("runs") / plan
    reproduce_plan(made, folder, engine_to_use, command=command, dry_run=dry_run)


def demo(
    *,
    out: Path = Path("out/demo"),
    seeds: int | None = None,
    epochs: int | None = None,
    jobs: int | None = None,
) -> None:
    """Train small versions of the paper's networks on digits and compare them: a table and a report.

    Takes a few minutes on a CPU and needs no internet. If it has finished before, it shows the results.

    Args:
        out: Folder for the runs and the report.
        seeds: Runs per network; by default 3.
        epochs: Epochs per run; by default 6.
        jobs: Number of concurrent runs, each a process with its share of the cores; by default as in
            `reproduce`.
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
    """The command line for a command and its options."""
    words = ["selfconv"]
    for part in parts:
        if isinstance(part, str):
            words.append(part)
        else:
            for name, value in part.items():
                words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def explore(
    trained: Positional[Annotated[tuple[str, ...], arg(metavar="[TRAINED…]")]] = (),
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    open: bool = True,
    range: str | None = None,
) -> None:
    """Inspect models on a local web page: where they look, the filters at a pixel, what a rotation changes.

    Args:
        trained: Folders of runs or of saved models, side by side; by default the models in the package.
        host: Address to listen on; any other than 127.0.0.1 gives other machines access.
        port: Port to listen on; 0 for any free port.
        open: Open the page in the browser.
        range: Of your own images, values that map to 0 and 1: LOW,HIGH or dtype; by default as in training.
    """
    from selfconv.explorer import explore as serve

    serve(*trained, host=host, port=port, open_page=open, pixel_range=range)


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
