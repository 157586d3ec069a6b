from itertools import pairwise

import pytest

from recipes.tiny_hybrid import schedule


def test_learning_rate_warms_up_stays_and_ends_low():
    assert schedule.learning_rate(0, 0.0) == pytest.approx(schedule.PEAK_LR / schedule.WARMUP_STEPS)
    assert schedule.learning_rate(1000, schedule.DECAY_FROM) == pytest.approx(schedule.PEAK_LR)
    rates = [schedule.learning_rate(1000, share / 100) for share in range(35, 101)]
    assert all(a > b for a, b in pairwise(rates))
    assert schedule.learning_rate(1000, 1.0) == schedule.learning_rate(1000, 1.5) == pytest.approx(3e-5)


def test_phases_cover_the_whole_time_with_equal_batches():
    assert schedule.PHASES[-1][2] == 1.0
    assert len({rows * length for rows, length, _ in schedule.PHASES}) == 1


@pytest.mark.parametrize("phases", [[], [[4, 32, 0.5]], [[4, 32, 1.0], [4, 32, 0.5]], [[0, 32, 1.0]]])
def test_phases_that_cannot_be_trained_are_refused(phases):
    with pytest.raises(ValueError, match="until this share of the time"):
        schedule.check_phases(phases)
    schedule.check_phases(list(schedule.PHASES))
