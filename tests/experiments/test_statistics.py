"""Verdicts against intervals computed by hand from tables of Student's t."""

import math
import random

import pytest

from experiments.statistics import Difference, deviation, mean, paired_difference


def test_mean_and_deviation():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert deviation([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2), rel=1e-15)
    assert deviation([1.0]) is None
    assert mean([1e16, 1.0, -1e16]) == pytest.approx(1 / 3)  # a plain sum gives 0


def test_three_pairs_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1. t of 2 degrees at 97.5 % is 4.302653 (tables).
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert found.mean == 2.0
    assert found.pairs == 3
    assert found.low == pytest.approx(2 - half, abs=1e-6)
    assert found.high == pytest.approx(2 + half, abs=1e-6)
    assert not found.distinguishable  # 2 - 2.484


def test_the_pairing_is_what_counts():
    # Seeds differ by far more than the mechanisms do.
    a, b = [10.0, 20.0, 30.0], [9.0, 19.0, 28.9]
    found = paired_difference(a, b)
    spread = math.sqrt(2 * (1 / 30) ** 2 + (2 / 30) ** 2) / math.sqrt(2)
    assert found.mean == pytest.approx(1 + 1 / 30)
    assert found.low == pytest.approx(1 + 1 / 30 - 4.302653 * spread / math.sqrt(3), abs=1e-6)
    assert found.distinguishable


def test_bonferroni_by_hand():
    # 5 comparisons: 99 % each. t of 2 degrees at 99.5 % is 9.924843 (tables).
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], comparisons=5)
    assert found.high == pytest.approx(2 + 9.924843 / math.sqrt(3), abs=1e-6)
    # Four pairs, two comparisons: 97.5 % each. t of 3 degrees at 98.75 % is 4.176535 (tables).
    found = paired_difference([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0], comparisons=2)
    assert found.high == pytest.approx(2.5 + 4.176535 * math.sqrt(5 / 3) / 2, abs=1e-5)


@pytest.mark.parametrize("pairs", [1, 2])
def test_two_seeds_never_give_a_verdict(pairs):
    found = paired_difference([1.0] * pairs, [100.0] * pairs)
    assert found == Difference(-99.0, None, None, pairs)
    assert not found.distinguishable


def test_unequal_numbers_of_seeds_are_a_mistake():
    with pytest.raises(ValueError, match="zip"):
        paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])


def test_both_directions_and_equality():
    assert paired_difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).distinguishable is False
    assert paired_difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.1]).distinguishable is True
    assert paired_difference([2.0, 3.0, 4.1], [1.0, 2.0, 3.0]).distinguishable is True


@pytest.mark.parametrize("seeds", [3, 5])
def test_a_variant_against_itself_is_rarely_told_apart(seeds):
    """At 95 % one in twenty of 400: 20 expected, and above 30 in less than one case in a hundred."""
    draw = random.Random(7)
    told = 0
    for _ in range(400):
        level = [draw.gauss(2.0, 0.3) for _ in range(seeds)]  # what a seed does to both
        a = [each + draw.gauss(0, 0.05) for each in level]
        b = [each + draw.gauss(0, 0.05) for each in level]
        told += paired_difference(a, b).distinguishable
    assert 5 <= told <= 30


def test_a_real_difference_is_told():
    draw = random.Random(8)
    told = 0
    for _ in range(100):
        level = [draw.gauss(2.0, 0.3) for _ in range(5)]
        told += paired_difference([each + draw.gauss(0.5, 0.05) for each in level], level).distinguishable
    assert told >= 95
