"""Copies the finished runs of a plan to results/, and their weights to the package:

    python scripts/publish_runs.py runs/cifar10 [--weights] [--unfinished]

``results/PLAN`` gets ``plan.json`` and the record, metrics and evaluation of each finished run, which is what
``selfconv report`` needs. ``--weights`` also copies the weights of each network's first seed to
``models/weights/MODEL.DATA``, with a card that states how they were trained and what they reach.
``--unfinished`` keeps runs that were interrupted, with their last checkpoints, in ``results/unfinished/PLAN``
until they are published as finished. On another machine, copied to the plan's folder, they continue.
"""

from __future__ import annotations

import argparse
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from selfconv._files import read_as, write_json
from selfconv.models import WEIGHTS, paper_label
from selfconv.study.plans import PlanFile
from selfconv.train import Record
from selfconv.train.files.checkpoints import checkpoint_files
from selfconv.trained import Evaluation

RESULTS = Path(__file__).parents[1] / "results"
LINES = re.compile(r"^\d+ of (\d+) lines$")
FILES = ("record.json", "metrics.jsonl", "evaluation.json")
NEEDED = ("config.json", "data.json", "metrics.jsonl")  # to continue a run, beside a checkpoint


def publish(folder: Path, *, weights: bool, unfinished: bool = False) -> list[str]:
    """Copies what has finished; returns the trials that have not."""
    plan = read_as(PlanFile, folder / "plan.json")
    out, missing = RESULTS / plan.plan, []
    for trial in plan.trials:
        run, kept = folder / trial.folder, RESULTS / "unfinished" / plan.plan / trial.folder
        if not all((run / name).exists() for name in FILES):
            missing.append(trial.folder)
            if unfinished and (run / "checkpoints").is_dir():
                keep(run, kept)
            continue
        shutil.rmtree(kept, ignore_errors=True)
        (out / trial.folder).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(run / name, out / trial.folder)
        if weights and trial.folder.endswith("seed-0"):
            ship(run, WEIGHTS / f"{trial.model}.{plan.data}")
    if len(missing) < len(plan.trials):
        write_json(out / "plan.json", asdict(joined(plan, missing, out / "plan.json")))
    return missing


def keep(run: Path, out: Path) -> None:
    """Copies what a run needs to continue."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "checkpoints").mkdir(parents=True)
    for name in NEEDED:
        shutil.copy(run / name, out)
    shutil.copy(checkpoint_files(run / "checkpoints")[-1], out / "checkpoints")


def joined(plan: PlanFile, missing: list[str], published: Path) -> PlanFile:
    """The trials that have finished, with those published before: lines may be trained one at a time."""
    before = read_as(PlanFile, published).trials if published.exists() else []
    finished = [trial for trial in plan.trials if trial.folder not in missing]
    trials = [*{trial.folder: trial for trial in (*before, *finished)}.values()]
    others = [words for words in plan.reduced if not LINES.match(words)]
    counts = [found[1] for words in plan.reduced if (found := LINES.match(words))]
    lines = len({trial.label for trial in trials})
    of = int(counts[0]) if counts else len({trial.label for trial in plan.trials})
    return replace(plan, trials=trials, reduced=[f"{lines} of {of} lines", *others] if lines < of else others)


def ship(run: Path, out: Path) -> None:
    """Copies the weights of a run to the package and writes their card."""
    out.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / "model" / name, out)
    for name in FILES:
        shutil.copy(run / name, out)
    evaluation = read_as(Evaluation, run / "evaluation.json")
    (out / "README.md").write_text(card(out.name, read_as(Record, run / "record.json"), evaluation))


def card(name: str, record: Record, evaluation: Evaluation) -> str:
    """What a user of the weights needs to know, in Markdown."""
    recipe, data, curve = record.config.recipe, record.data, evaluation.rotation
    train, val = data.images["train"], data.images["val"]
    sizes = ", ".join(map(str, dict.fromkeys(recipe.all_sizes(data.size))))
    on = " on convolutions and linear maps" if recipe.decay == "maps" else ""
    entropy = evaluation.mean_entropy
    attention = (
        ""
        if entropy is None
        else f"""
- **Attention**: the entropy of α is {entropy:.3f} of that of equal weights, mean over layers."""
    )
    return f"""# {name}

{paper_label(record.model)}, {record.parameters:,} parameters, trained on {data.name} by `selfconv`.

| test images | accuracy |
|---|---|
| upright ({evaluation.images:,} images) | {evaluation.accuracy:.2%} |
| rotated by 90°, 180°, 270° (mean) | {evaluation.turned_accuracy:.2%} |
| at every 15° in a round mask ({curve.images:,} images, mean) | {curve.mean:.2%} |

- **Data**: {data.name}, {train:,} images to train, {val:,} to validate, {data.in_channels} channels,
  {data.size}×{data.size} pixels, {len(data.class_names)} classes.
- **Recipe**: {record.epochs} epochs, batch size {recipe.batch_size}, learning rate {recipe.lr:g}
  ({recipe.schedule}), weight decay {recipe.weight_decay:g}{on}, training images of {sizes} pixels,
  seed {record.seed}. `record.json` has every option.{attention}
- **Runs**: these weights are of one run (n = 1). The test images were used once, after the last epoch.
- **Versions**: selfconv {record.versions["selfconv"]}, torch {record.versions["torch"]},
  commit {record.commit or "not known"}.
- **Limits**: the paper trains for 100 epochs, so these accuracies are below the paper's. The network
  expects images like its training images: small and centred on one object. It names a class for every
  image, whatever the image shows.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a plan, as selfconv reproduce writes it")
    parser.add_argument("--weights", action="store_true", help="also copy the weights to the package")
    parser.add_argument("--unfinished", action="store_true", help="also keep runs to be continued elsewhere")
    arguments = parser.parse_args()
    for trial in publish(arguments.folder, weights=arguments.weights, unfinished=arguments.unfinished):
        print(f"not finished: {trial}")


if __name__ == "__main__":
    main()
