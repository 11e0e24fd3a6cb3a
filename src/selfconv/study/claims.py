"""Claims about results as predicates: holds, does not hold, not decided, or too few runs, with the numbers.

Results are a mapping from tables to models to outcomes, of the paper or of run records alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from selfconv.models import paper_label
from selfconv.study.samples import Difference, Sample, difference

TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "resnet83": "CIFAR-10, ResNet83"}  # of tables


@dataclass(frozen=True)
class Outcome:
    """The result of a model in a table: its accuracy in percent over runs, and its parameters."""

    accuracy: Sample
    parameters: int
    name: str | None = None  # if it is not called as in the paper


LEAST_RUNS = 3  # of each model, for a claim about accuracies
Results = Mapping[str, Mapping[str, Outcome]]  # table → model → outcome
Term = tuple[str, str]  # table, model


class Verdict(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "not decided"  # the interval of a difference contains 0
    FEW = "too few runs"  # fewer than LEAST_RUNS of a model


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    evidence: tuple[str, ...]  # the numbers, a line for each comparison
    absent: bool = False  # whether a model in it has no run at all


Judge = Callable[[Difference, list[Outcome]], Verdict]
Explain = Callable[[Difference, list[Outcome]], str]
Rule = Callable[[Results, str], Finding]  # of results, and the table that its models are in


@dataclass(frozen=True)
class Claim:
    table: str  # where the paper makes it
    sentence: str
    rule: Rule

    def check(self, results: Results) -> Finding:
        return self.rule(results, self.table)


RULES = (
    f"A claim about accuracies needs at least {LEAST_RUNS} runs of every model in it; with fewer, it has "
    f"“{Verdict.FEW}”.",
    "Differences of accuracies are in percentage points, with their 95% interval (Welch) in parentheses.",
    "“Higher” or “lower” holds if the interval of the difference lies on that side of 0 and does "
    f"not hold if it lies on the other; with an interval that contains 0 it is “{Verdict.OPEN}”.",
    "“Within one standard deviation” compares the two means: the first may fall short of the second by no "
    "more than the second's deviation.",
    "“No gain” holds if the mean is not higher, does not hold if the interval lies above 0, and is otherwise "
    f"“{Verdict.OPEN}”.",
    "Claims about parameters are counted, and need one run.",
)


def _find(results: Results, terms: Sequence[Term], least: int) -> list[Outcome] | Finding:
    """The outcomes, or why there are too few of them."""
    found = [results.get(table, {}).get(model) for table, model in terms]
    lacking = []
    for (table, model), outcome in zip(terms, found, strict=True):
        n = 0 if outcome is None else outcome.accuracy.n
        if n < least:
            where = f" on {TITLES[table]}" if len({t for t, _ in terms}) > 1 else ""
            lacking.append(f"{paper_label(model)}{where}: {n or 'no'} run{'s' * (n != 1)}")
    if lacking:
        return Finding(Verdict.FEW, tuple(dict.fromkeys(lacking)), absent=None in found)
    return [outcome for outcome in found if outcome is not None]


def all_of(*rules: Rule) -> Rule:
    """A rule that holds if all given rules hold, and fails if one fails.

    Otherwise there are too few runs if that is so for one of them, and else it is not decided.
    """

    def check(results: Results, table: str) -> Finding:
        findings = [rule(results, table) for rule in rules]
        verdicts = {finding.verdict for finding in findings}
        worst = next(v for v in (Verdict.FAILS, Verdict.FEW, Verdict.OPEN, Verdict.HOLDS) if v in verdicts)
        evidence = dict.fromkeys(line for finding in findings for line in finding.evidence)
        return Finding(worst, tuple(evidence), any(finding.absent for finding in findings))

    return check


def _compare(
    results: Results, plus: Sequence[Term], minus: Sequence[Term], judge: Judge, explain: Explain
) -> Finding:
    found = _find(results, [*plus, *minus], LEAST_RUNS)
    if isinstance(found, Finding):
        return found
    cut = len(plus)
    change = difference([o.accuracy for o in found[:cut]], [o.accuracy for o in found[cut:]])
    return Finding(judge(change, found), (explain(change, found),))


def _compare_two(model: str, other: str, judge: Judge) -> Rule:
    """The accuracy of a model against that of another one in the same table."""

    def explain(change: Difference, found: list[Outcome]) -> str:
        first, second = (
            f"{_called(m, o)} {shown(o.accuracy)}" for m, o in zip((model, other), found, strict=True)
        )
        return f"{first}, {second}: {shown_difference(change)}"

    return lambda results, table: _compare(results, [(table, model)], [(table, other)], judge, explain)


def _above_zero(change: Difference, _: list[Outcome]) -> Verdict:
    low, high = _bounds(change)
    return Verdict.HOLDS if low > 0 else Verdict.FAILS if high < 0 else Verdict.OPEN


def _bounds(change: Difference) -> tuple[float, float]:
    """Without any spread there is no interval, and the difference stands for itself."""
    if change.low is None or change.high is None:
        return change.value, change.value
    return change.low, change.high


def higher(model: str, other: str) -> Rule:
    return _compare_two(model, other, _above_zero)


def no_gain(model: str, other: str) -> Rule:
    def judge(change: Difference, _: list[Outcome]) -> Verdict:
        if change.value <= 0:
            return Verdict.HOLDS
        return Verdict.FAILS if _bounds(change)[0] > 0 else Verdict.OPEN

    return _compare_two(model, other, judge)


def within_deviation(model: str, other: str) -> Rule:
    def judge(change: Difference, found: list[Outcome]) -> Verdict:
        return Verdict.HOLDS if change.value >= -(found[1].accuracy.deviation or 0.0) else Verdict.FAILS

    return _compare_two(model, other, judge)


def _called(model: str, outcome: Outcome) -> str:
    return paper_label(model) if outcome.name is None else outcome.name


def higher_than_all(models: Sequence[str], others: Sequence[str]) -> Rule:
    """The lowest mean of some models against the highest of the others."""

    def check(results: Results, table: str) -> Finding:
        found = _find(results, [(table, model) for model in (*models, *others)], LEAST_RUNS)
        if isinstance(found, Finding):
            return found
        means = {m: o.accuracy.mean for m, o in zip((*models, *others), found, strict=True)}
        low, high = min(models, key=means.__getitem__), max(others, key=means.__getitem__)
        finding = higher(low, high)(results, table)
        return Finding(finding.verdict, (f"The lowest and the highest: {finding.evidence[0]}",))

    return check


def larger_gain(here: tuple[str, str], elsewhere: str, there: tuple[str, str]) -> Rule:
    """The gain of one model over another against the like gain of two models of another table."""

    def check(results: Results, table: str) -> Finding:
        (model, base), (other, other_base) = here, there

        def explain(change: Difference, found: list[Outcome]) -> str:
            gain, less = (
                found[0].accuracy.mean - found[2].accuracy.mean,
                found[3].accuracy.mean - found[1].accuracy.mean,
            )
            return (
                f"{paper_label(model)} over {paper_label(base)}: {signed(gain)} on {TITLES[table]}, "
                f"{signed(less)} on {TITLES[elsewhere]}; {shown_difference(change)}"
            )

        plus, minus = [(table, model), (elsewhere, other_base)], [(table, base), (elsewhere, other)]
        return _compare(results, plus, minus, _above_zero, explain)

    return check


def parameters(pairs: Sequence[tuple[str, str]], most: float, *, strict: bool = False) -> Rule:
    """Each first model has at most so many times the parameters of the second."""

    def check(results: Results, table: str) -> Finding:
        found = _find(results, [(table, model) for pair in pairs for model in pair], 1)
        if isinstance(found, Finding):
            return found
        lines, good = [], True
        for (model, other), a, b in zip(pairs, found[::2], found[1::2], strict=True):
            ratio = a.parameters / b.parameters
            good &= ratio < most if strict else ratio <= most
            lines.append(
                f"{_called(model, a)} {a.parameters:,} parameters, {_called(other, b)} {b.parameters:,}: "
                f"{signed(100 * (ratio - 1), 1)}%"
            )
        return Finding(Verdict.HOLDS if good else Verdict.FAILS, tuple(lines))

    return check


def fewest_parameters(models: Sequence[str], others: Sequence[str]) -> Rule:
    """The largest of some models against the smallest of the others."""

    def check(results: Results, table: str) -> Finding:
        found = _find(results, [(table, model) for model in (*models, *others)], 1)
        if isinstance(found, Finding):
            return found
        sizes = [(o.parameters, _called(m, o)) for m, o in zip((*models, *others), found, strict=True)]
        large, small = max(sizes[: len(models)]), min(sizes[len(models) :])
        verdict = Verdict.HOLDS if large[0] < small[0] else Verdict.FAILS
        return Finding(verdict, (f"At most {large[0]:,} ({large[1]}), at least {small[0]:,} ({small[1]})",))

    return check


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; 0 has none."""
    text = f"{abs(value):.{digits}f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else '−'}{text}"


def shown(sample: Sample) -> str:
    return f"{sample} (n = {sample.n})"


def shown_difference(change: Difference) -> str:
    if change.low is None or change.high is None:
        return f"difference {signed(change.value)}"
    return f"difference {signed(change.value)} ({signed(change.low)} to {signed(change.high)})"
