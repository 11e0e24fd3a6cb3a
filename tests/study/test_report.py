"""Reports on runs that nobody trained: the numbers in them were worked out by hand."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.made_runs import MACHINE, make_plan, make_run
from hypothesis import given
from hypothesis import strategies as st

from selfconv._files import read_as
from selfconv.cli import main
from selfconv.models import count_parameters, create_model, paper_label
from selfconv.study import paper, write_report
from selfconv.study.claims import Outcome, Verdict, signed
from selfconv.study.plans import PlanFile
from selfconv.study.report.read import read
from selfconv.study.report.summary import ResultTable, Study, advice, summarise
from selfconv.study.samples import Sample, difference, t_quantile
from selfconv.train import RunConfig

# 4 runs on either side of 92.18, 0.318040 away: a sample deviation of 0.34
EIGHT = [0.9218 + sign * 0.0034 * math.sqrt(7 / 8) for sign in (1, -1) * 4]


@pytest.fixture(autouse=True)
def expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* left out")
        yield


def studies(*folders: Path) -> list[Study]:
    return summarise(read(folders))


def only_table(*folders: Path) -> ResultTable:
    [study] = studies(*folders)
    [table] = study.tables
    return table


def make_runs(folder: Path, model: str, accuracies: list[float], **options: object) -> None:
    for seed, accuracy in enumerate(accuracies):
        make_run(folder / model / f"seed-{seed}", model, accuracy, seed=seed, **options)  # type: ignore[arg-type]


# ---- statistics ----


@pytest.mark.parametrize(
    ("probability", "degrees", "printed"),
    [  # from printed tables
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.975, 8, 2.306), (0.975, 14, 2.145),
        (0.975, 30, 2.042), (0.975, 120, 1.980), (0.95, 7, 1.895), (0.995, 4, 4.604), (0.9995, 3, 12.924),
        (0.75, 10, 0.700), (0.5, 6, 0.0), (0.975, 1e7, 1.960),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, degrees: float, printed: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(printed, abs=5e-4)


@given(st.floats(0.51, 0.999))
def test_quantiles_where_a_formula_gives_them(probability: float) -> None:
    """One and two degrees of freedom have closed forms."""
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)
    two = (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    assert t_quantile(probability, 2) == pytest.approx(two, rel=1e-9)


@given(st.floats(0.6, 0.999), st.floats(0.5, 200), st.floats(0.01, 50))
def test_quantiles_fall_with_the_degrees(probability: float, degrees: float, more: float) -> None:
    assert t_quantile(probability, degrees + more) <= t_quantile(probability, degrees)


def test_quantiles_of_invalid_arguments() -> None:
    with pytest.raises(ValueError, match=r"got 1.5, 3"):
        t_quantile(1.5, 3)


def check_sample(sample: Sample | None, mean: float, deviation: float, n: int) -> None:
    assert sample is not None
    assert (sample.mean, sample.deviation, sample.n) == (pytest.approx(mean), pytest.approx(deviation), n)


def test_mean_and_deviation() -> None:
    check_sample(Sample.of([2, 4, 4, 4, 5, 5, 7, 9]), 5, math.sqrt(32 / 7), 8)
    assert Sample.of([3]) == Sample(3, None, 1)


def test_welch_interval() -> None:
    """Equal deviations of equal samples: 2(n-1) = 8 degrees; 2.306004 · √(4/5 + 4/5) = 2.916890."""
    change = difference([Sample(10, 2, 5)], [Sample(7, 2, 5)])
    assert change.degrees == pytest.approx(8)
    assert (change.value, change.low, change.high) == pytest.approx((3, 0.083110, 5.916890), abs=1e-6)


def test_welch_interval_of_unequal_samples() -> None:
    """s²/n = 9/4 and 1/10: (2.35)² / (2.25²/3 + 0.1²/9) = 3.270439 degrees of freedom."""
    change = difference([Sample(20, 3, 4)], [Sample(18, 1, 10)])
    assert change.degrees == pytest.approx(3.270439, abs=1e-6)
    assert change.high is not None
    reach = change.high - change.value
    assert t_quantile(0.975, 4) < reach / math.sqrt(2.35) < t_quantile(0.975, 3)


def test_no_interval_without_a_deviation() -> None:
    assert difference([Sample(10, None, 1)], [Sample(7, 2, 5)]).low is None
    assert difference([Sample(10, 0.0, 3)], [Sample(7, 0.0, 3)]).low is None


def test_signed_numbers() -> None:
    assert [signed(x) for x in (0.004, -0.004, 0.1, -0.1)] == ["0.00", "0.00", "+0.10", "−0.10"]


# ---- the paper ----


def test_printed_parameters_are_those_of_the_models() -> None:
    odd = []
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        for model, row in paper.TABLES[name].rows.items():
            ours = round(count_parameters(create_model(model, classes)) / 1000)
            if 1000 * ours != row.parameters:
                odd.append((name, model, ours, row.parameters))
    assert odd == [("cifar10", "p4resnet29", 309, 310_000)]  # the misprint that the note tells of


def test_rows_of_the_paper() -> None:
    assert [len(table.rows) for table in paper.TABLES.values()] == [9, 6, 0]
    best = {
        name: max(t.rows, key=lambda m: t.rows[m].accuracy.mean) for name, t in paper.TABLES.items() if t.rows
    }
    assert best == {"cifar10": "p4resnet29_se", "cifar100": "p4resnet29_asc"}  # what it prints in bold
    fewest = {
        name: min(t.rows, key=lambda m: t.rows[m].parameters) for name, t in paper.TABLES.items() if t.rows
    }
    assert fewest == {"cifar10": "resnet29_simple_asc", "cifar100": "resnet29_simple_asc"}


def test_names_of_networks_in_a_report() -> None:
    assert paper_label("p4mresnet83_asc_se") == "p4mResNet83+ASC+SE"
    assert paper_label("resnet29_simple_asc", depth=11, group="p4") == "p4ResNet11+Simple_ASC"
    assert paper_label("p4resnet29_pool") == "p4ResNet29+pool"
    assert paper_label("mine") == "mine"
    assert paper.table_of("cifar10", "p4resnet29_asc") == "cifar10"
    assert paper.table_of("cifar10", "resnet83_se") == "resnet83"
    assert paper.table_of("cifar100", "resnet83") is None


def claim(start: str, table: str = "cifar10") -> paper.Claim:
    [found] = [c for c in paper.CLAIMS if c.sentence.startswith(start) and c.table == table]
    return found


def outcome(mean: float, deviation: float | None, n: int, parameters: int = 300_000) -> Outcome:
    return Outcome(Sample(mean, deviation, n), parameters)


@pytest.mark.parametrize(
    ("sasa", "verdict"),
    [
        (outcome(89, 1, 5), Verdict.HOLDS),  # 2 below, 1.4584 either way: t(8) · √(1/5 + 1/5)
        (outcome(89.6, 1, 5), Verdict.OPEN),  # 1.4 below: the interval contains 0
        (outcome(90.9, 1, 1000), Verdict.OPEN),  # however many runs
        (outcome(93, 1, 5), Verdict.FAILS),
        (outcome(80, 1, 2), Verdict.FEW),  # however far: two runs are too few
    ],
)
def test_claim_that_sasa_is_lower(sasa: Outcome, verdict: Verdict) -> None:
    finding = claim("Additive").check({"cifar10": {"resnet29": outcome(91, 1, 5), "resnet29_sasa": sasa}})
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("mean", "parameters", "verdict"),
    [
        (90.6, 217_000, Verdict.HOLDS),  # 0.4 below, where the baseline's deviation is 0.5
        (90.4, 217_000, Verdict.FAILS),  # 0.6 below
        (95.0, 217_000, Verdict.HOLDS),  # above is no failure
        (90.6, 240_000, Verdict.FAILS),  # a fifth fewer only
    ],
)
def test_claim_within_one_deviation(mean: float, parameters: int, verdict: Verdict) -> None:
    results = {
        "resnet29": outcome(91, 0.5, 3, 300_000),
        "resnet29_simple_asc": outcome(mean, 0.1, 3, parameters),
    }
    assert claim("Simple_ASC is within").check({"cifar10": results}).verdict is verdict


@pytest.mark.parametrize(
    ("mean", "verdict"), [(90.9, Verdict.HOLDS), (91.1, Verdict.OPEN), (94.0, Verdict.FAILS)]
)
def test_no_gain(mean: float, verdict: Verdict) -> None:
    results = {"resnet29_asc": outcome(91, 0.5, 4), "resnet29_asc_se": outcome(mean, 0.5, 4)}
    assert claim("Squeeze and excite is no gain").check({"cifar10": results}).verdict is verdict


def test_gains_in_two_tables() -> None:
    """5 against 1, each of four means with 1/4 of a unit variance: 4 ± t(12) · 1 = 4 ± 2.178813."""
    ten = {"resnet29": outcome(90, 1, 4), "resnet29_asc": outcome(91, 1, 4), "p4resnet29": outcome(91, 1, 4)}
    hundred = {
        "resnet29": outcome(60, 1, 4),
        "resnet29_asc": outcome(65, 1, 4),
        "p4resnet29": outcome(65, 1, 4),
    }
    finding = claim("The gains", "cifar100").check({"cifar10": ten, "cifar100": hundred})
    assert finding.verdict is Verdict.HOLDS
    assert finding.evidence[0] == (
        "ResNet29+ASC over ResNet29: +5.00 on CIFAR-100, +1.00 on CIFAR-10; difference +4.00 (+1.82 to +6.18)"
    )


def test_one_failure_outweighs_what_is_missing() -> None:
    results = {"resnet29": outcome(95, 1, 5), "p4resnet29": outcome(90, 1, 5)}
    finding = claim("Each p4").check({"cifar10": results})
    assert finding.verdict is Verdict.FAILS
    assert "p4ResNet29+SE: no runs" in finding.evidence


def test_missing_runs_outweigh_an_interval_that_contains_0() -> None:
    results = {"resnet29": outcome(90, 1, 5), "p4resnet29": outcome(90.1, 1, 5)}
    assert claim("Each p4").check({"cifar10": results}).verdict is Verdict.FEW


def test_the_papers_own_numbers() -> None:
    printed = {name: table.rows for name, table in paper.TABLES.items()}
    found = [c.check(printed).verdict for c in paper.CLAIMS]
    assert Verdict.FAILS not in found
    assert claim("Squeeze and excite makes").check(printed).verdict is Verdict.OPEN  # −0.08 to +0.50
    assert claim("Attention, as SE", "resnet83").check(printed).absent


# ---- tables ----


def test_interval_of_the_difference_from_the_paper(tmp_path: Path) -> None:
    """92.18 ± 0.34 and 91.18 ± 0.34, both of 8: 1 ± t(14) · 0.34 · √(2/8) = 1 ± 0.364614."""
    make_runs(tmp_path, "resnet29", EIGHT)
    table = only_table(tmp_path)
    row = table.rows[0]
    check_sample(row.accuracy, 92.18, 0.34, 8)
    change = row.difference
    assert change is not None
    assert (change.value, change.low, change.high) == pytest.approx((1, 0.635386, 1.364614), abs=1e-6)
    assert [r.model for r in table.rows] == list(paper.TABLES["cifar10"].rows)  # those without runs too
    assert [len(r.trials) for r in table.rows] == [8, *[0] * 8]
    [line] = [line for line in report(tmp_path).md.splitlines() if line.startswith("| ResNet29 |")]
    assert line == (
        "| ResNet29 | 92.18 ± 0.34 | 8 | 313,114 | 91.18 ± 0.34 | 8 | 313k | +1.00 | +0.64 to +1.36 | 250 |"
    )


class Written:
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.html, self.md = (path.read_text("utf-8") for path in paths[:2])
        self.bytes = [path.read_bytes() for path in paths]


def report(*folders: Path, out: Path | None = None) -> Written:
    return Written(write_report(folders, folders[0].parent / "written" if out is None else out))


def test_one_run_has_no_interval(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", accuracy=0.9)
    written = report(tmp_path / "runs")
    assert "| 90.00 | 1 | 313,114 | 91.18 ± 0.34 | 8 | 313k | −1.18 | none: one run | 250 |" in written.md
    assert "none: one run" in written.html


def test_too_few_runs_are_called_too_few(tmp_path: Path) -> None:
    for model in paper.TABLES["cifar10"].rows:
        make_runs(tmp_path, model, [0.9, 0.91])
    verdicts = {j.claim.sentence.split()[0]: j.ours.verdict for j in only_table(tmp_path).judged}
    assert verdicts.pop("Every") is Verdict.FAILS  # parameters are counted, and all are the same here
    assert {*verdicts.values()} == {Verdict.FEW, Verdict.FAILS}
    assert verdicts["Additive"] is Verdict.FEW


def test_verdicts_from_records(tmp_path: Path) -> None:
    make_runs(tmp_path, "resnet29", [0.90, 0.91, 0.92])
    make_runs(tmp_path, "resnet29_sasa", [0.80, 0.81, 0.82], parameters=235_162)
    [judged] = [j for j in only_table(tmp_path).judged if j.claim.sentence.startswith("Additive")]
    assert judged.ours.verdict is judged.papers.verdict is Verdict.HOLDS
    assert judged.ours.evidence == (  # t(4) · √(1/3 + 1/3) = 2.776445 · 0.816497
        "ResNet29 91.00 ± 1.00 (n = 3), ResNet29+SASA 81.00 ± 1.00 (n = 3): "
        "difference +10.00 (+7.73 to +12.27)",
    )


def test_other_networks_are_not_the_papers(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "resnet29_asc", options={"kernel_size": 5})  # as the model is named
    make_run(tmp_path / "b", "resnet29_asc", options={"kernel_size": 7})
    table = only_table(tmp_path)
    assert [(row.label, row.paper_table) for row in table.rows] == [
        ("ResNet29+ASC (kernel_size 5)", "cifar10"),
        ("ResNet29+ASC (kernel_size 7)", None),
    ]
    assert table.paper_table is None
    assert table.judged == ()


def test_other_recipes_have_their_own_table(tmp_path: Path) -> None:
    for seed, epochs in enumerate((100, 100, 1)):
        make_run(tmp_path / str(seed), seed=seed, recipe={"epochs": epochs})
    [study] = studies(tmp_path)
    assert [(g.title, len(g.trials)) for g in study.tables] == [("CIFAR-10", 2), ("CIFAR-10, epochs 1", 1)]


def test_options_without_effect_do_not_split_a_table(tmp_path: Path) -> None:
    for seed, memory in enumerate((None, 0.5)):
        folder = make_run(tmp_path / str(seed), seed=seed)
        for path, within in ((folder / "config.json", ()), (folder / "record.json", ("config",))):
            content = json.loads(path.read_text())
            config = content[within[0]] if within else content
            config["hardware"] |= {"memory": memory, "checkpoint_minutes": 3.0 + seed}
            path.write_text(json.dumps(content))
    [study] = studies(tmp_path)
    assert [(g.title, len(g.trials)) for g in study.tables] == [("CIFAR-10", 2)]


def test_other_data_of_the_same_name_have_their_own_table(tmp_path: Path) -> None:
    for seed, digest in enumerate(("a" * 64, "a" * 64, "b" * 64)):
        make_run(tmp_path / str(seed), seed=seed, data="photos", digest=digest)
    [study] = studies(tmp_path)
    assert [(g.title, len(g.trials)) for g in study.tables] == [
        ("photos, data aaaaaaaa", 2),
        ("photos, data bbbbbbbb", 1),
    ]


def test_reduced_budgets_are_told_without_a_plan(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", recipe={"epochs": 1}, images=4500)
    written = report(tmp_path / "runs")
    for line in (
        "1 epoch instead of 100",
        "4,500 training images instead of 45,000",
        "as few as 1 run of a model instead of 8",
    ):
        assert f"> - {line}" in written.md
        assert f"<li>{line}</li>" in written.html
    assert written.html.index("Reduced") < written.html.index("<table>")


def test_depth_83_has_no_numbers_to_compare_with(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", "resnet83", [0.9, 0.9, 0.91])
    written = report(tmp_path / "runs")
    assert "prints no numbers" in written.md
    assert "Paper:" not in written.md


def test_turned_images_and_equivariance(tmp_path: Path) -> None:
    for seed, turned in enumerate((0.5, 0.6, 0.7)):
        turns, error = [turned, turned + 0.1, turned - 0.1], 10.0**-seed
        make_run(tmp_path / str(seed), seed=seed, data="digits", turned=turns, equivariance_error=error)
    [row] = only_table(tmp_path).rows
    check_sample(row.turned, 60, 10, 3)
    assert row.equivariance_error == 1
    make_run(tmp_path / "more", seed=9, data="digits")  # nobody has turned its images
    [row] = only_table(tmp_path).rows
    assert row.turned is not None
    assert (row.turned.n, len(row.trials)) == (3, 4)


def test_entropy_of_attention(tmp_path: Path) -> None:
    for model, entropy in (("resnet29", {}), ("resnet29_asc", {"first": 1.0, "last": 0.5})):
        make_run(tmp_path / "runs" / model, model, data="digits", turned=[0.5] * 3, entropy=entropy)
    table = only_table(tmp_path / "runs")
    entropies = {row.model: row.attention_entropy for row in table.rows}
    assert entropies["resnet29"] is None
    assert entropies["resnet29_asc"] == Sample(0.75, None, 1)
    written = report(tmp_path / "runs")
    assert "Entropy of α" in written.md
    assert "0.750" in written.md


def test_the_rotation_curve_in_a_report(tmp_path: Path) -> None:
    """A column, a figure and a sentence that names a network: the one with the best mean over all angles."""
    for model, accuracy, turned in (("resnet29", 0.9, 0.1), ("p4resnet29_asc", 0.8, 0.8)):
        folder = tmp_path / "runs" / model
        make_run(folder, model=model, data="digits", accuracy=accuracy, turned=[turned] * 3)
    table = only_table(tmp_path / "runs")
    planar = table.rows[0]
    assert planar.at_angles[45].mean == pytest.approx(90)
    assert planar.at_angles[90].mean == pytest.approx(10)
    assert planar.every_angle is not None
    assert planar.every_angle.mean == pytest.approx((20 * 90 + 4 * 10) / 24)
    sentence = advice(table)
    assert sentence is not None
    assert sentence.startswith("For images at any angle: p4ResNet29+ASC, 80.0% on average")
    assert "For upright images: ResNet29, 90.0%" in sentence
    write_report([tmp_path / "runs"], tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Every angle, %" in page
    assert sentence in page
    assert (tmp_path / "out" / "figures" / "rotation-digits.svg").is_file()


def test_rotated_training_images_have_dashed_lines(tmp_path: Path) -> None:
    lines = {"a": ("resnet29", "none"), "b": ("resnet29", "any"), "c": ("resnet29_asc", "any")}
    for name, (model, rotate) in lines.items():
        run = tmp_path / "runs" / name
        make_run(run, model=model, data="digits", turned=[0.5] * 3, recipe={"rotate": rotate})
    trials = [
        {"folder": name, "model": model, "label": name, "table": ""} for name, (model, _) in lines.items()
    ]
    write_report([make_plan(tmp_path / "runs", trials, data="digits")], tmp_path / "out")
    figure = (tmp_path / "out" / "figures" / "rotation.svg").read_text()
    styles = re.findall(r'<path d="(?:[ML] [^"LM]*){25}"[^>]* style="([^"]*)"', figure)
    assert ["stroke-dasharray" in style for style in styles] == [False, True, True]


def test_advice_prefers_the_smaller_of_equal_networks(tmp_path: Path) -> None:
    """100 images tell accuracies of 80% apart by 4 points, not by 1."""
    for model, accuracy, parameters in (("resnet29", 0.81, 313_114), ("resnet29_asc", 0.8, 267_754)):
        turned = [accuracy] * 3
        folder = tmp_path / model
        make_run(folder, model=model, data="digits", accuracy=accuracy, turned=turned, parameters=parameters)
    sentence = advice(only_table(tmp_path))
    assert sentence is not None
    assert "ResNet29+ASC, 80.0% on average" in sentence
    assert "best for upright images too" in sentence


# ---- plans ----


def plan_of(folder: Path, models: dict[str, float], data: str = "digits", **fields: object) -> Path:
    trials = []
    for model, accuracy in models.items():
        make_runs(folder, model, [accuracy - 0.01, accuracy, accuracy + 0.01], data=data)
        trials += [
            {"folder": f"{model}/seed-{seed}", "model": model, "label": f"Small {model}", "table": data}
            for seed in range(3)
        ]
    return make_plan(folder, trials, data=data, **fields)


def test_a_plan_names_and_orders_its_rows(tmp_path: Path) -> None:
    models = {"resnet29_sasa": 0.8, "resnet29": 0.9}
    folder = plan_of(tmp_path, models, title="Digits", reduced=["3 seeds instead of 8", "1 epoch"])
    [study] = studies(folder)
    assert (study.title, study.reduced) == ("Digits", ("3 seeds instead of 8", "1 epoch"))
    [table] = study.tables
    assert [row.label for row in table.rows] == ["Small resnet29_sasa", "Small resnet29"]
    [judged] = table.judged  # of the paper's claims for CIFAR-10 the one that needs no other model
    assert judged.claim.sentence.startswith("Additive")
    assert judged.ours.verdict is Verdict.HOLDS
    assert judged.ours.evidence[0].startswith(
        "Small resnet29 90.00 ± 1.00 (n = 3), Small resnet29_sasa 80.00"
    )


def test_tables_of_an_ablation(tmp_path: Path) -> None:
    folder, trials = tmp_path / "plan", []
    for group, heads in (("Window", None), ("Heads", 4)):
        for size in (3, 5, 7):
            name = f"{group}-{size}"
            make_run(folder / name, "resnet29_asc", options={"kernel_size": size, "num_heads": heads})
            trials.append(
                {"folder": name, "model": "resnet29_asc", "label": f"{size}×{size}", "table": group}
            )
    [study] = studies(make_plan(folder, trials))
    assert [(g.title, [row.label for row in g.rows]) for g in study.tables] == [
        ("Window", ["3×3", "5×5", "7×7"]),
        ("Heads", ["3×3", "5×5", "7×7"]),
    ]
    written = report(folder)
    names = [path.name for path in written.paths]
    assert {"accuracy-a-made-plan.svg", "curves-window.svg", "curves-heads.png"} < {*names}
    assert "<h2>Window</h2>" in written.html


def test_two_plans_and_the_tables_they_share(tmp_path: Path) -> None:
    """A claim about two data sets finds the other one."""
    for data, gain in (("cifar10", 0.0), ("cifar100", 0.1)):
        models = {"resnet29": 0.5, "resnet29_asc": 0.5 + gain, "p4resnet29": 0.5 + gain}
        plan_of(tmp_path / data, models, data=data, plan=data, title=data)
    ten, hundred = studies(tmp_path)
    assert (ten.title, hundred.title) == ("cifar10", "cifar100")
    [judged] = [j for j in hundred.tables[0].judged if j.claim.sentence.startswith("The gains")]
    assert judged.ours.verdict is Verdict.HOLDS


# ---- what cannot be used ----


def broken_folders(root: Path) -> dict[str, str]:
    """Folders with something wrong, and what the report must say of them."""
    make_run(root / "ok")
    make_run(root / "unfinished", seed=1)
    (root / "unfinished" / "record.json").unlink()
    make_run(root / "failed", seed=2)
    (root / "failed" / "record.json").unlink()
    (root / "failed" / "failed.json").write_text(json.dumps({"error": "no space in /home/x/y/run; stop"}))
    make_run(root / "cut", seed=3)
    (root / "cut" / "record.json").write_text('{"model": "res')
    make_run(root / "list", seed=4)
    (root / "list" / "record.json").write_text("[]")
    make_run(root / "nan", accuracy=math.nan, seed=5)
    make_run(root / "above", accuracy=1.5, seed=6)
    make_run(root / "nothing", seed=7, test_accuracy=None)
    make_run(root / "options", seed=8, config={"model": {"colour": "red"}})
    make_run(root / "curve", seed=9)
    (root / "curve" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    make_run(root / "zcopy")
    make_plan(root / "plan", [{"folder": "later/seed-0", "model": "resnet29", "label": "", "table": ""}])
    (root / "badplan").mkdir()
    (root / "badplan" / "plan.json").write_text('{"plan": 3}')
    return {
        "unfinished": "not finished: 2 of 100 epochs",
        "failed": "not finished: 2 of 100 epochs; failed: no space in …/run; stop",
        "cut": "record.json: expected JSON; got something else",
        "list": "record.json: expected an object; got []",
        "nan": "record.json: expected JSON; got something else (NaN is not a finite number)",
        "above": "record.json: test_accuracy: expected a number, 0 to 1; got 1.5",
        "nothing": "record.json: expected model, parameters, ",
        "options": "record.json: model: unknown option 'colour'",
        "curve": "metrics.jsonl, line 1: expected epoch, lr, train_loss, ",
        "zcopy": "the same options and seed as root/ok; counted once",
        "plan/later/seed-0": "planned, but not begun",
        "badplan": "plan.json: expected plan, title, data, reduced, trials; title is missing",
    }


def test_broken_folders_are_listed(tmp_path: Path) -> None:
    expected = broken_folders(tmp_path / "root")
    found = read([tmp_path / "root"])
    assert [trial.name for trial in found.trials] == ["root/ok"]
    problems = dict(found.problems)
    assert problems.keys() == {f"root/{name}" for name in expected}
    for name, reason in expected.items():
        assert problems[f"root/{name}"].startswith(reason)
    with pytest.warns(UserWarning, match="12 folders left out"):
        written = report(tmp_path / "root")
    assert "root/unfinished" in written.html
    assert str(tmp_path) not in written.html + written.md


@pytest.mark.parametrize("content", ["nothing", "unfinished", "missing", "no argument"])
def test_no_finished_runs(content: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    if content == "unfinished":
        make_run(folder / "a")
        (folder / "a" / "record.json").unlink()
    elif content != "missing":
        folder.mkdir()
    arguments = [] if content == "no argument" else [str(folder)]
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    said = {
        "nothing": "expected at least one run that has finished in",
        "unfinished": "runs/a: not finished: 2 of 100 epochs",
        "missing": "got no folder",
        "no argument": "expected at least one folder of runs; got none",
    }
    assert said[content] in error
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert capfd.readouterr().err.strip().endswith("pip install 'selfconv[plot]'")
    assert not (tmp_path / "out").exists()


# ---- files ----


def test_the_report_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "deep" / "er" / "a")
    main(["report", str(tmp_path / "deep"), "--out", str(tmp_path / "out")])
    printed = [Path(line) for line in capfd.readouterr().out.splitlines()]
    assert [path.suffix for path in printed] == [".html", ".md", ".svg", ".png", ".svg", ".png"]
    assert all(path.stat().st_size for path in printed)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    plan_of(tmp_path / "here" / "a", {"resnet29": 0.9, "resnet29_asc": 0.91})
    make_runs(tmp_path / "here" / "b", "resnet29", EIGHT[:3])
    make_runs(tmp_path / "here" / "c", "resnet29_se", EIGHT[:2])
    (tmp_path / "here" / "c" / "resnet29_se" / "seed-1" / "record.json").write_text("{")
    folders = [tmp_path / "here" / name for name in "abc"]
    first = report(*folders, out=tmp_path / "1")
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere" / "further")
    moved = [tmp_path / "elsewhere" / "further" / name for name in "cba"]  # and a run that is named twice
    assert report(*moved, moved[1] / "resnet29", out=tmp_path / "2").bytes == first.bytes
    assert str(tmp_path) not in first.html + first.md


class Page(HTMLParser):
    """Collects what must hold of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


HOSTILE = '<script>alert("1")</script> | `x` $a_b$ ![](http://example.com/x.png) & "\' </style>'


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    trials = []
    for seed, group in enumerate((HOSTILE, "b")):
        make_run(
            root / f"a{seed}", HOSTILE, seed=seed, data=HOSTILE, commit=HOSTILE, versions={HOSTILE: HOSTILE}
        )
        trials.append({"folder": f"a{seed}", "model": HOSTILE, "label": HOSTILE, "table": group})
    make_run(root / "<img src=x onerror=alert(1)>", HOSTILE, config=HOSTILE)
    make_run(root / "bare", HOSTILE, seed=3, data=HOSTILE, machine={**MACHINE, "cpu": HOSTILE})
    make_plan(root, trials, plan=HOSTILE, title=HOSTILE, data=HOSTILE, reduced=[HOSTILE])
    written = report(root)
    page = Page(written.html)
    assert not page.open
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert not [attrs for tag, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert written.html.count("</style>") == 1
    assert "<script" not in written.md
    assert "<img" not in written.md
    pictures = [line for line in written.md.splitlines() if line.startswith("![")]
    assert pictures
    assert all(line.endswith(".svg)") and "](figures/" in line for line in pictures)
    assert "(http" not in written.md.replace("\\](http", "")  # every bracket before it is escaped
    assert {path.parent.name for path in written.paths} == {"written", "figures"}


def test_the_page_stands_alone(tmp_path: Path) -> None:
    plan_of(tmp_path / "runs" / "a", {"resnet29": 0.9, "resnet29_asc": 0.91}, plan="a", title="A")
    plan_of(tmp_path / "runs" / "b", {"resnet29": 0.9}, data="cifar10", plan="b", title="B")
    page = Page(report(tmp_path / "runs").html)
    assert not page.open
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe")
        for name in ("src", "srcset", "href"):
            assert (attrs.get(name) or "#").startswith(("data:image/svg+xml;base64,", "#"))
        if tag == "img":
            assert attrs["alt"]
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_links_of_the_markdown_lead_to_figures(tmp_path: Path) -> None:
    make_runs(tmp_path / "runs", "resnet29", EIGHT[:3])
    written = report(tmp_path / "runs")
    links = re.findall(r"^!\[.*\]\((.*)\)$", written.md, re.MULTILINE)
    assert len(links) == 2
    assert all((written.paths[1].parent / link).is_file() for link in links)
    cells = {
        line.count("|") for line in written.md.splitlines() if line.startswith("| ") and "ResNet" in line[:12]
    }
    assert len(cells) == 1


@pytest.mark.parametrize("table", ["cifar10", "cifar100"])
@pytest.mark.parametrize("size", [(9.6, 4.3), (4.1, 7.2)])
def test_labels_do_not_overlap(table: str, size: tuple[float, float], tmp_path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from selfconv.study.report import figures as _figures

    for model, row in paper.TABLES[table].rows.items():
        make_run(tmp_path / model, model, row.accuracy.mean / 100, data=table, parameters=row.parameters)
    rows = only_table(tmp_path).rows
    points = [(row, paper.TABLES[table].rows[row.model]) for row in rows]
    with _figures._style():
        figure = Figure(figsize=size, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2)[0] if size[0] > 5 else figure.subplots(2, 1)[0]
        _figures._scatter(axes, points)
        figure.draw_without_rendering()
        _figures._place_labels(canvas, axes, points)
        canvas.draw()
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to their points
    assert len(boxes) == len(rows)
    centres = [axes.transData.transform((o.parameters / 1000, o.accuracy.mean)) for _, o in points]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(*centre) for centre in centres)


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """Records that call the hardware "engine", of which ``results`` has some, and a table "group"."""
    files = sorted((ROOT / "results").rglob("record.json"))
    assert any('"engine"' in file.read_text() for file in files)
    folders = {path for path in (ROOT / "results").iterdir() if path.is_dir()}
    for folder in folders - {ROOT / "results/unfinished"}:  # plans of which no run has finished
        assert read([folder]).trials
    earlier = tmp_path / "plan.json"
    earlier.write_text((ROOT / "results/demo/plan.json").read_text().replace('"table"', '"group"'))
    assert read_as(PlanFile, earlier) == read_as(PlanFile, ROOT / "results/demo/plan.json")


def test_a_field_under_both_of_its_names() -> None:
    content = RunConfig().to_json()
    both = content | {"engine": content["hardware"]}
    with pytest.raises(ValueError, match="unknown option 'engine'"):
        RunConfig.from_json(both)
