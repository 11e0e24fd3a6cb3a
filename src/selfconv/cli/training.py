"""``selfconv train``: its options are those of a run; some options determine the defaults of others."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from selfconv.train import RECIPES, DataOptions, Hardware, ModelOptions, Recipe, RecipeName, RunConfig


def train_command(args: Sequence[str]) -> Callable[..., None]:
    """The command ``train``, with the defaults that its options --data, --model, --config, … determine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("data", "model", "init", "recipe", "config", "out"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--resume", action="store_true")
    training = len(args) > 0 and args[0] == "train"
    try:
        given = parser.parse_known_args(args[1:] if training else [])[0]
    except argparse.ArgumentError:  # tyro's message is better
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
    if given.init is not None and given.model is None:
        from selfconv.train import initial_options

        base = replace(base, model=initial_options(given.init))
    recipe = base.recipe
    if given.recipe in RECIPES:
        recipe = RECIPES[given.recipe](given.model if given.model is not None else base.model.name)

    def train(
        model: ModelOptions = base.model,
        data: DataOptions = base.data,
        training: Annotated[Recipe, arg(name="recipe")] = recipe,
        hardware: Hardware = base.hardware,
        *,
        # recipe and config are read above, before tyro parses; here they are only for the help
        recipe: RecipeName | None = None,
        seed: int = base.seed,
        out: Path | None = None,
        resume: bool = False,
        config: Path | None = None,
        lr_range: bool = False,
    ) -> None:
        """Train a network on digits, CIFAR or your own images.

        Without options: resnet29_asc on handwritten digits, in a few minutes. All results go to one
        folder, for `evaluate`, `predict` and `export`. --resume continues an interrupted run. --init starts
        from a trained network instead of random weights; the model is then the same by default.

        Args:
            recipe: Recipe that sets the defaults below: paper (the default for CIFAR), fast (for other data),
                short (10 to 30 epochs of CIFAR on a CPU).
            seed: Random seed of the weights, the order of the images, and augmentation.
            out: Folder for the run; by default runs/DATA-MODEL.
            resume: Continue the run in that folder, with its options.
            config: Read the defaults of all options from the config.json of a run.
            lr_range: Do not train, but test rising learning rates in up to 200 steps: prints one to begin
                with, and writes lr_range.csv and lr_range.png to the folder OUT-lr.
        """
        from selfconv.train import train as train_run

        run = RunConfig(model=model, data=data, recipe=training, hardware=hardware, seed=seed)
        folder = out if out is not None else _default_out(run)
        if lr_range and resume:
            raise ValueError(
                "expected --lr-range or --resume; got both: a test of rates has nothing to continue"
            )
        if not lr_range:
            train_run(run, folder, resume=resume)
            return
        from selfconv.train import find_learning_rate

        folder = folder.with_name(f"{folder.name}-lr")
        found = find_learning_rate(run, folder)
        print(f"the loss falls most steeply at a learning rate of {found.suggestion:.2g}; curve in {folder}")

    return train


def _default_out(config: RunConfig) -> Path:
    return Path("runs") / f"{Path(config.data.source).resolve().stem}-{config.model.name}"
