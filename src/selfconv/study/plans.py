"""Plans: lists of runs as data. ``selfconv reproduce PLAN`` trains them.

A plan is a list of labelled networks, each trained with several seeds. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from selfconv._files import earlier_name
from selfconv._text import count
from selfconv.models import at_depth, model_facts, paper_label
from selfconv.study import paper
from selfconv.train import (
    RECIPES,
    DataOptions,
    ModelOptions,
    Recipe,
    RecipeName,
    RunConfig,
    default_recipe,
    paper_recipe,
)


@dataclass(frozen=True)
class Trial:
    """One run of a plan: its configuration, and its row in the report."""

    config: RunConfig
    label: str  # of its line
    table: str  # of networks that are meant to be compared
    recipe: Mapping[str, Any] = field(default_factory=dict)  # what its line changes in the recipe

    @property
    def folder(self) -> str:
        """Its path in the plan's folder: ``resnet29_asc-kernel_size=3-rotate=any/seed-0``."""
        return f"{_folder(self.config.model, self.recipe)}/seed-{self.config.seed}"

    @property
    def line(self) -> tuple[str, str]:
        """The key that it shares with the same network under other seeds."""
        return self.table, self.label

    def __str__(self) -> str:
        return f"{self.label}, seed {self.config.seed}"


def _folder(model: ModelOptions, recipe: Mapping[str, Any]) -> str:
    """The folder name of a line: its model, and what it changes in network and recipe."""
    changed = {key: value for key, value in model.overrides().items() if value is not None} | dict(recipe)
    return "-".join([model.name, *(f"{key}={_text(value)}" for key, value in changed.items())])


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Plan:
    """Trials in the order in which they run: all networks with the first seed, then with the next, …"""

    name: str
    title: str
    source: str | None  # the data that it is meant for; None: any
    trials: tuple[Trial, ...]
    reduced: tuple[str, ...] = ()  # reductions against the full experiment, a line each

    @property
    def data(self) -> DataOptions:
        """The same for all trials."""
        return self.trials[0].config.data

    @property
    def lines(self) -> dict[tuple[str, str], list[Trial]]:
        found: dict[tuple[str, str], list[Trial]] = {}
        for trial in self.trials:
            found.setdefault(trial.line, []).append(trial)
        return found

    def on(self, data: str, train: int, test: int) -> Plan:
        """A copy with the name of the data set and its numbers of images filled in."""
        reduced = list(self.reduced)
        if self.data.subset is not None and self.data.subset < train:
            reduced.insert(0, f"{self.data.subset:,} of {train:,} training images")
        if self.source is not None and data in ("cifar10", "cifar100"):
            if test != paper.TEST_IMAGES:
                reduced.insert(0, f"{test:,} test images instead of {paper.TEST_IMAGES:,}")
            if train != paper.TRAINING_IMAGES:
                reduced.insert(0, f"data of {train:,} training images instead of {paper.TRAINING_IMAGES:,}")
        if self.source not in (None, data):
            reduced.insert(0, f"{data} instead of {self.source}")
        return replace(self, reduced=tuple(reduced))

    def to_json(self, data: str) -> dict[str, Any]:
        """What ``plan.json`` holds; ``data`` is the name of the data set."""
        trials = [PlannedTrial(t.folder, t.config.model.name, t.label, t.table) for t in self.trials]
        return asdict(PlanFile(self.name, self.title, data, list(self.reduced), trials))


# ---- its files ----

PLAN, FAILED = "plan.json", "failed.json"


@dataclass(frozen=True)
class PlannedTrial:
    """A trial in ``plan.json``."""

    folder: str
    model: str
    label: str
    table: str = field(metadata=earlier_name("group"))

    def __post_init__(self) -> None:
        path = PurePosixPath(self.folder)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in self.folder:
            raise ValueError(f"folder: expected one in the plan's folder; got {self.folder!r}")


@dataclass(frozen=True)
class PlanFile:
    """The content of ``plan.json``, which describes the runs in its folder to a report."""

    plan: str
    title: str
    data: str
    reduced: list[str]
    trials: list[PlannedTrial]


@dataclass(frozen=True)
class Failure:
    """The content of ``failed.json``: why a trial failed."""

    error: str


# ---- the plans ----


@dataclass(frozen=True)
class Line:
    """A network of a plan, which is trained with every seed: a row in a table of the report."""

    model: ModelOptions
    label: str
    table: str  # its title
    recipe: Mapping[str, Any] = field(default_factory=dict)  # what it changes in the plan's recipe

    @property
    def names(self) -> tuple[str, str]:
        """The name of the network, which other lines may share, and that of the line's folder."""
        return self.model.name, _folder(self.model, self.recipe)


@dataclass(frozen=True)
class Outline:
    """A plan without a budget."""

    title: str
    lines: Sequence[Line]
    seeds: int
    data: DataOptions = field(default_factory=lambda: DataOptions(source="cifar10"))
    recipe: RecipeName | None = None  # None: the default for the data
    changes: Mapping[str, Any] = field(default_factory=dict)  # to that recipe
    full_seeds: int | None = None  # runs of each network in the full experiment; None: ``seeds``
    reduced: tuple[str, ...] = ()
    of_paper: bool = True  # whether it stands for an experiment of the paper, to be measured against it


def _line_up(table: str, models: Sequence[str]) -> list[Line]:
    return [Line(ModelOptions(name=model), paper_label(model), table) for model in models]


def _ablation(models: Sequence[str], option: str, values: Mapping[Any, str]) -> list[Line]:
    return [
        Line(ModelOptions(name=model, **{option: value}), text, paper_label(model))
        for model in models
        for value, text in values.items()
    ]


def _small(model: str) -> Line:
    """A network of the paper at a third of its depth and half of its width."""
    facts = model_facts(model, depth=11)
    assert facts is not None
    width = 8 if facts.planar else 4
    options = ModelOptions(
        name=model, depth=11, widths=(width, 2 * width, 4 * width), num_heads=4 if facts.attention else None
    )
    return Line(options, facts.label, "digits")


PAPER_MODELS = tuple(paper.TABLES["cifar10"].rows)
# the p4 convolution as exact as p4 attention is: the baseline that p4 ASC has to beat
FAIR_BASELINE = "p4resnet29_pool"
ASC_MODELS = ("resnet29_asc", "p4resnet29_asc")
DEMO_MODELS = (
    "resnet29", "resnet29_se", "resnet29_sasa", "resnet29_simple_asc", "resnet29_asc",
    "p4resnet29", FAIR_BASELINE, "p4resnet29_se", "p4resnet29_simple_asc", "p4resnet29_asc",
)  # fmt: skip


def _rotation_study() -> list[Line]:
    """Networks with and without equivariance, each with and without rotated training images."""
    lines = [
        ("resnet29", "none"), ("resnet29", "any"), ("resnet29_asc", "any"),
        (FAIR_BASELINE, "none"), ("p4resnet29_asc", "none"), ("p4resnet29_asc", "any"),
        ("c8resnet29_asc", "none"),
    ]  # fmt: skip
    return [
        Line(
            ModelOptions(name=model),
            paper_label(model) + ", rotated in training" * (rotate != "none"),
            "rotation",
            {} if rotate == "none" else {"rotate": rotate},
        )
        for model, rotate in lines
    ]


def _controls() -> list[Line]:
    """What else could explain the accuracy of ASC: its affine part, its window, its training."""
    lines: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("resnet29_asc", {}, {}, "ResNet29+ASC"),
        ("resnet29_affine", {}, {}, "without attention (α = 1)"),
        ("resnet29_asc", {"scale": "head"}, {}, "score divided by the channels of a head"),
        ("resnet29", {}, {}, "ResNet29, convolution 3×3"),
        ("resnet29", {"kernel_size": 5}, {}, "convolution 5×5"),
        ("resnet29_depthwise", {}, {}, "depthwise convolution 5×5"),
        ("resnet29", {"zero_gamma": True}, {"warmup": 0.2}, "convolution 3×3, zero γ and warm-up as ASC has"),
        ("p4resnet29_asc", {}, {}, "p4ResNet29+ASC"),
        ("p4resnet29_asc", {"scale": "head"}, {}, "score divided by the channels of a head"),
        (FAIR_BASELINE, {}, {}, "p4ResNet29+pool, convolution 3×3"),
    ]
    return [
        Line(
            ModelOptions(name=model, **options),
            label,
            "planar networks" if (facts := model_facts(model)) is None or facts.planar else "p4 networks",
            recipe,
        )
        for model, options, recipe, label in lines
    ]


OUTLINES: dict[str, Outline] = {
    "cifar10": Outline("CIFAR-10, ResNet29", _line_up("cifar10", (*PAPER_MODELS, FAIR_BASELINE)), paper.RUNS),
    "cifar100": Outline(
        "CIFAR-100, ResNet29",
        _line_up("cifar100", tuple(paper.TABLES["cifar100"].rows)),
        paper.RUNS,
        DataOptions(source="cifar100"),
    ),
    # the paper's figure has no table, so which of the nine it shows is not known
    "resnet83": Outline(
        "CIFAR-10, ResNet83",
        _line_up("resnet83", [at_depth(model, 83) for model in PAPER_MODELS]),
        1,
    ),
    "ablation-kernel": Outline(
        "Size of the window",
        _ablation(ASC_MODELS, "kernel_size", {k: f"{k}×{k}" for k in (3, 5, 7)}),
        3,
    ),
    "ablation-heads": Outline(
        "Heads of attention",
        _ablation(ASC_MODELS, "num_heads", {1: "1 head", 4: "4 heads", 8: "8 heads"}),
        3,
    ),
    "ablation-filters": Outline(
        "Parts of the affine maps",
        _ablation(ASC_MODELS, "affine", {"psi": "ψ only", "beta": "β only", "both": "ψ and β"}),
        3,
    ),
    "ablation-psi": Outline(
        "ψ per channel or dense",
        _ablation(ASC_MODELS, "psi", {"channel": "ψ per channel", "dense": "ψ dense"}),
        3,
    ),
    "ablation-pool": Outline(
        "Pooling over the group",
        _ablation(
            ("p4resnet29", "p4resnet29_asc"),
            "pool",
            {"mean": "mean", "group_max": "maximum over the group", "max": "maximum over space and group"},
        ),
        3,
    ),
    "rotation": Outline(
        "Images at every angle",
        _rotation_study(),
        1,
        DataOptions(source="digits"),
        "short",
        {"epochs": 12, "sizes": None, "flip": False},
        of_paper=False,
    ),
    "controls": Outline(
        "Controls: what else could explain the accuracy",
        _controls(),
        3,
        DataOptions(source="digits"),
        of_paper=False,
    ),
    "demo": Outline(
        "The paper's line-up in small, on digits",
        [_small(model) for model in DEMO_MODELS],
        3,
        DataOptions(source="digits", image_size=8),
        "fast",
        {"epochs": 6, "warmup": 0.1},
        paper.RUNS,
        (
            "handwritten digits of 8×8 pixels instead of CIFAR-10",
            "depth 11 instead of 29, half the width, 4 heads instead of 8",
        ),
    ),
}


# ---- how much of a plan ----


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The part of a plan to run. None: the plan's default."""

    epochs: int | None = None
    """Epochs per run; the learning rate schedule scales with it."""
    seeds: int | None = None
    """Runs per network: seeds 0, 1, …"""
    subset: int | None = None
    """Number of training images to use."""
    data: str | None = None
    """A different data set, or the same from a file: a name, a folder of images, or an .npz file."""
    image_size: int | None = None
    """Resize and centre-crop images to this many pixels."""
    range: str | None = None
    """Values that map to 0 and 1: LOW,HIGH; dtype: the limits of each file's type; None: from the images."""
    group_by: str | None = None
    """Keep images of one group in one split: a regular expression for the path, or the name of a column."""
    models: str = "*"
    """Wildcard for the names of the networks, or of their folders, such as `*-rotate=any`."""
    recipe: RecipeName | None = None
    """Recipe to use instead of the plan's: paper, fast or short."""

    def __post_init__(self) -> None:
        for name in ("epochs", "seeds", "subset", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected an integer ≥ 1; got {value}")


def make_plan(name: str, budget: Budget | None = None) -> Plan:
    """The plan with this name, reduced to the budget.

    Raises:
        ValueError: there is no such plan, or the budget excludes all of its runs.
    """
    if name not in OUTLINES:
        near = get_close_matches(name, OUTLINES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown plan {name!r}: expected one of {', '.join(OUTLINES)}{hint}")
    budget = Budget() if budget is None else budget
    outline = OUTLINES[name]
    lines = [line for line in outline.lines if any(fnmatchcase(n, budget.models) for n in line.names)]
    if not lines:
        known = ", ".join(dict.fromkeys(line.model.name for line in outline.lines))
        raise ValueError(f"models: no network of the plan {name!r} matches {budget.models!r}; it has {known}")
    data = replace(outline.data, subset=budget.subset)
    if budget.data is not None:
        data = replace(data, source=budget.data, image_size=None)
    if budget.image_size is not None:
        data = replace(data, image_size=budget.image_size)
    data = replace(data, group_by=budget.group_by)
    if budget.range is not None:
        data = replace(data, pixel_range=budget.range)
    seeds = outline.seeds if budget.seeds is None else budget.seeds
    trials = []
    for seed in range(seeds):
        for line in lines:
            recipe = replace(_recipe(outline, budget, line.model.name, data.source), **line.recipe)
            config = RunConfig(model=line.model, data=data, recipe=recipe, seed=seed)
            trials.append(Trial(config, line.label, line.table, line.recipe))
    full_seeds = outline.seeds if outline.full_seeds is None else outline.full_seeds
    epochs = [(t.config.recipe.epochs, _full_epochs(outline, t.config)) for t in trials]
    other = outline.of_paper and budget.recipe not in (None, "paper")
    reduced = [
        *outline.reduced,
        *([f"the recipe {budget.recipe!r} instead of the paper's"] * other),
        *(f"{count(ours, 'epoch')} instead of {full}" for ours, full in epochs if ours < full),
        *([f"{count(seeds, 'run')} of each network instead of {full_seeds}"] * (seeds < full_seeds)),
        *([f"{len(lines)} of {len(outline.lines)} lines"] * (len(lines) < len(outline.lines))),
    ]
    source = outline.data.source if outline.of_paper else None
    return Plan(name, outline.title, source, tuple(trials), tuple(dict.fromkeys(reduced)))


def _full_epochs(outline: Outline, config: RunConfig) -> int:
    """Epochs of an unreduced run."""
    if outline.of_paper:
        return paper_recipe(config.model.name).epochs
    return _recipe(outline, Budget(), config.model.name, config.data.source).epochs


def _recipe(outline: Outline, budget: Budget, model: str, source: str) -> Recipe:
    """The budget's recipe without the plan's changes; else the plan's with them; else the default for the
    data, with the plan's changes."""
    name = budget.recipe or outline.recipe or default_recipe(_data_name(source))
    changes = {} if budget.recipe is not None else dict(outline.changes)
    if budget.epochs is not None:
        changes["epochs"] = budget.epochs
    return replace(RECIPES[name](model), **changes)


def _data_name(source: str) -> str:
    """The name of a data set: of a file or a folder, and on the Hub, the last part of the path."""
    return PurePosixPath(source.removeprefix("hf:")).stem.partition(":")[0]
