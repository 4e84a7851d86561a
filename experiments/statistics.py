"""Whether a difference is more than noise: paired over seeds, with an interval, corrected for the number of comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_PAIRS = 3  # two seeds never give a verdict


@dataclass(frozen=True)
class Difference:
    """mean of a - b over shared seeds, with its interval; None where there are too few pairs to tell."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def distinguishable(self) -> bool:
        """The interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def paired_difference(a: Sequence[float], b: Sequence[float], comparisons: int = 1, confidence: float = 0.95) -> Difference:
    """Student's paired interval of a - b, widened by Bonferroni's correction so that all `comparisons` hold together.

    Args:
        a, b: values of the same seeds, in the same order.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    spread = deviation(differences)
    if len(differences) < MIN_PAIRS or spread is None:
        return Difference(mean(differences), None, None, len(differences))
    from scipy.stats import t

    quantile = float(t.ppf(1 - (1 - confidence) / (2 * comparisons), len(differences) - 1))
    half = quantile * spread / math.sqrt(len(differences))
    centre = mean(differences)
    return Difference(centre, centre - half, centre + half, len(differences))
