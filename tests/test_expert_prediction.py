"""Predictions of experts for later layers: scored by distance and layer, read for as long as they are often right."""

import numpy as np
import pytest

from effllm.offload.expert_prediction import WORTH, ExpertPredictor


def told(foresight: ExpertPredictor, rights: list[float], distance: int, times: int) -> None:
    """Predictions with these hit rates."""
    rng = np.random.default_rng(0)
    for _ in range(times):
        foresight.guess(5, distance, list(range(len(rights))))
        foresight.judge(5, [place for place, right in enumerate(rights) if rng.random() < right])


def test_all_places_are_worth_reading_at_first() -> None:
    foresight = ExpertPredictor(8, 2)
    assert foresight.worth(1) == foresight.worth(2) == 8


@pytest.mark.parametrize("distance", (1, 2))
def test_places_before_the_first_that_is_wrong_too_often(distance: int) -> None:
    foresight = ExpertPredictor(4, 2)
    told(foresight, [1.0, 0.8, 0.1, 0.9], distance, 100)
    assert foresight.worth(distance) == 2 and foresight.worth(3 - distance) == 4


def test_few_guesses_decide_nothing() -> None:
    foresight = ExpertPredictor(2, 1)
    told(foresight, [0.0, 1.0], 1, 1)
    assert foresight.worth(1) == 2
    told(foresight, [0.0, 1.0], 1, 5)
    assert foresight.worth(1) == 0


def test_what_is_newer_counts_more() -> None:
    foresight = ExpertPredictor(1, 1)
    told(foresight, [1.0], 1, 2000)
    told(foresight, [0.0], 1, 200)
    assert foresight.worth(1) == 0
    told(foresight, [1.0], 1, 200)
    assert foresight.worth(1) == 1


def test_what_is_in_memory_says_nothing() -> None:
    """It is used more often than what is not, and would not be read."""
    foresight = ExpertPredictor(2, 1)
    for _ in range(100):
        foresight.guess(3, 1, [None, 7])
        foresight.judge(3, [1, 7])
    told_nothing = ExpertPredictor(2, 1)
    assert foresight._all[0][0] == told_nothing._all[0][0] and foresight._all[0][1] > told_nothing._all[0][1]


def test_guesses_from_two_layers_are_judged_at_once_and_once() -> None:
    foresight = ExpertPredictor(1, 2)
    foresight.guess(2, 2, [4])
    foresight.guess(2, 1, [5])
    foresight.judge(1, [4, 5])
    assert foresight._all == ExpertPredictor(1, 2)._all, "another layer's need"
    for _ in range(2):
        foresight.judge(2, [4])
    assert foresight._right == [[3.0], [4.0]] and foresight._all == [[5.0], [5.0]]
    assert 0 < WORTH < 1


def test_a_pass_that_was_interrupted_says_nothing() -> None:
    foresight = ExpertPredictor(1, 1)
    foresight.guess(2, 1, [4])
    foresight.forget()
    foresight.judge(2, [5])
    assert foresight._all == ExpertPredictor(1, 1)._all
