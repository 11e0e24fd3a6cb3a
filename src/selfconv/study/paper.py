"""The paper's results: the rows of its result tables, and its claims as predicates over results.

Accuracies are percentages on the test images; parameters are in thousands, as printed. Claims are in our own
words; the same rule decides each claim for the paper's numbers and for those of run records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from selfconv.models import at_depth, model_facts
from selfconv.study.claims import (
    TITLES,
    Claim,
    Outcome,
    Rule,
    all_of,
    fewest_parameters,
    higher,
    higher_than_all,
    larger_gain,
    no_gain,
    parameters,
    within_deviation,
)
from selfconv.study.samples import Sample

RUNS = 8  # of each model in both tables
TRAINING_IMAGES = 45_000  # of the 50,000; the other 5,000 validate
TEST_IMAGES = 10_000


@dataclass(frozen=True)
class Table:
    """A result table of the paper, or a table that replaces it."""

    title: str
    data: str
    depth: int
    rows: Mapping[str, Outcome]  # by model
    note: str


def _row(accuracy: float, deviation: float, thousands: int) -> Outcome:
    return Outcome(Sample(accuracy, deviation, RUNS), 1000 * thousands)


TABLES: dict[str, Table] = {
    "cifar10": Table(
        title=TITLES["cifar10"],
        data="cifar10",
        depth=29,
        rows={
            "resnet29": _row(91.18, 0.34, 313),
            "resnet29_se": _row(91.39, 0.15, 347),
            "p4resnet29": _row(93.02, 0.16, 310),
            "p4resnet29_se": _row(93.24, 0.17, 342),
            "resnet29_sasa": _row(89.43, 0.40, 235),
            "resnet29_simple_asc": _row(91.01, 0.24, 217),
            "resnet29_asc": _row(91.24, 0.32, 268),
            "resnet29_asc_se": _row(91.21, 0.11, 301),
            "p4resnet29_asc": _row(93.03, 0.25, 272),
        },
        note="The paper prints 310k for p4ResNet29. Its own 321k for 100 classes means 309k for 10, since "
        "the two differ by the 11,610 parameters of the classifier.",
    ),
    "cifar100": Table(
        title=TITLES["cifar100"],
        data="cifar100",
        depth=29,
        rows={
            "resnet29": _row(68.34, 0.38, 336),
            "resnet29_simple_asc": _row(68.40, 0.78, 240),
            "resnet29_asc": _row(68.68, 0.77, 291),
            "p4resnet29": _row(72.03, 0.46, 321),
            "p4resnet29_se": _row(72.03, 0.45, 354),
            "p4resnet29_asc": _row(72.71, 0.51, 283),
        },
        note="",
    ),
    "resnet83": Table(
        title=TITLES["resnet83"],
        data="cifar10",
        depth=83,
        rows={},
        note="The paper shows ResNet83 in a figure only, from one run of each model, and prints no numbers: "
        "there is nothing to compare with.",
    ),
}


def table_of(data: str, model: str) -> str | None:
    """The table that a model on a data set belongs to, whether or not the paper has a row for it."""
    facts = model_facts(model)
    for name, table in TABLES.items():
        if facts is not None and (table.data, table.depth) == (data, facts.depth):
            return name
    return None


# ---- claims ----

_CONV = ("resnet29", "resnet29_se", "p4resnet29", "p4resnet29_se")
_ATTENTION = ("resnet29_sasa", "resnet29_simple_asc", "resnet29_asc", "resnet29_asc_se", "p4resnet29_asc")
_P4_AND_PLANAR = (
    ("p4resnet29", "resnet29"),
    ("p4resnet29_se", "resnet29_se"),
    ("p4resnet29_asc", "resnet29_asc"),
)
_P4 = [p4 for p4, _ in _P4_AND_PLANAR]

_CLAIMS: Mapping[str, Mapping[str, Rule]] = {  # by table
    "cifar10": {
        "Every attention model has fewer parameters than every convolutional one.": fewest_parameters(
            _ATTENTION, _CONV
        ),
        "Simple_ASC is within one standard deviation of the baseline with at least a quarter fewer "
        "parameters (the paper says about 30%).": all_of(
            within_deviation("resnet29_simple_asc", "resnet29"),
            parameters([("resnet29_simple_asc", "resnet29")], 0.75),
        ),
        **{
            f"{name} is within one standard deviation of the baseline or above it, with fewer "
            "parameters.": all_of(
                within_deviation(model, "resnet29"), parameters([(model, "resnet29")], 1.0, strict=True)
            )
            for name, model in (("ASC", "resnet29_asc"), ("ASC with squeeze and excite", "resnet29_asc_se"))
        },
        "Additive positions are not enough: SASA is lower than the baseline.": higher(
            "resnet29", "resnet29_sasa"
        ),
        "Squeeze and excite makes the convolutional models slightly higher.": all_of(
            higher("resnet29_se", "resnet29"), higher("p4resnet29_se", "p4resnet29")
        ),
        "Squeeze and excite is no gain for ASC.": no_gain("resnet29_asc_se", "resnet29_asc"),
        "Each p4 model is higher than its planar counterpart, with at most 5% more parameters "
        "(the paper says little to none).": all_of(
            *(higher(*pair) for pair in _P4_AND_PLANAR), parameters(_P4_AND_PLANAR, 1.05)
        ),
        "The three p4 models are higher than all others.": higher_than_all(
            _P4, [model for model in (*_CONV, *_ATTENTION) if model not in _P4]
        ),
    },
    "cifar100": {
        "Simple_ASC and ASC are within one standard deviation of the baseline or above it, with fewer "
        "parameters.": all_of(
            *(within_deviation(model, "resnet29") for model in ("resnet29_simple_asc", "resnet29_asc")),
            parameters([("resnet29_simple_asc", "resnet29"), ("resnet29_asc", "resnet29")], 1.0, strict=True),
        ),
        "The p4 models are higher than their planar counterparts.": all_of(
            higher("p4resnet29", "resnet29"), higher("p4resnet29_asc", "resnet29_asc")
        ),
        "p4 ASC is higher than the p4 convolution, with and without SE, and has the fewest "
        "parameters.": all_of(
            *(higher("p4resnet29_asc", model) for model in ("p4resnet29", "p4resnet29_se")),
            fewest_parameters(["p4resnet29_asc"], ["p4resnet29", "p4resnet29_se"]),
        ),
        "The gains of ASC and of p4 are higher than on CIFAR-10, where each class has ten times the "
        "images.": all_of(
            *(
                larger_gain((model, "resnet29"), "cifar10", (model, "resnet29"))
                for model in ("resnet29_asc", "p4resnet29")
            )
        ),
    },
    "resnet83": {
        "Attention, as SE or as ASC, gains more at depth 83 than at depth 29 (the paper says it "
        "might).": all_of(
            *(
                larger_gain((at_depth(model, 83), "resnet83"), "cifar10", (model, "resnet29"))
                for model in ("resnet29_se", "resnet29_asc")
            )
        ),
    },
}
CLAIMS = tuple(
    Claim(table, sentence, rule) for table, rules in _CLAIMS.items() for sentence, rule in rules.items()
)
