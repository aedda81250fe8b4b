"""The queue against a plain restatement of its rule, its two limits, and the trade it makes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.forge.windowed_fifo import WindowedFifo, simulate


@settings(deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("pft"), st.integers(0, 20)), max_size=80))
def test_take_is_the_oldest_finished_inside_the_window(window, events):
    """The rule on absolute places: head = oldest not taken; candidates are finished places head .. head + W - 1."""
    queue, started, finished, taken = WindowedFifo(window), 0, set(), set()
    for kind, number in events:
        if kind == "p":
            queue.put(started)
            started += 1
        elif kind == "f" and number < started:
            queue.finish(number)
            finished.add(number)
        elif kind == "t":
            left = [place for place in range(started) if place not in taken]
            inside = [place for place in left if place < left[0] + window]
            expected = next((place for place in inside if place in finished), None)
            assert queue.take() == expected
            if expected is not None:
                taken.add(expected)
        assert len(queue) == started - len(taken)


def test_window_of_one_is_fifo_and_a_long_one_is_greedy():
    durations = [9.0, 1.0, 2.0, 3.0]
    assert simulate(durations, window=1, num_running=4, train_seconds=0.1).order == (0, 1, 2, 3)
    assert simulate(durations, window=4, num_running=4, train_seconds=0.1).order == (1, 2, 3, 0)
    # A window of two: 1 may overtake 0, 2 and 3 may not, until 0 is gone.
    assert simulate(durations, window=2, num_running=4, train_seconds=0.1).order == (1, 0, 2, 3)


def test_idle_time_by_hand():
    # Ends at 9, 1, 2, 3; each is trained for 1 s. FIFO: idle 9 of 13 s. Greedy: idle 1 s, then 1..4, idle 5, 9..10.
    durations = [9.0, 1.0, 2.0, 3.0]
    assert simulate(durations, window=1, num_running=4, train_seconds=1.0).idle_frac == pytest.approx(9 / 13)
    assert simulate(durations, window=4, num_running=4, train_seconds=1.0).idle_frac == pytest.approx(6 / 10)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 50))
def test_nobody_is_trained_a_window_before_its_turn(window, seed):
    durations = np.random.default_rng(seed).lognormal(0, 1.5, 60)
    schedule = simulate(durations.tolist(), window=window, num_running=12, train_seconds=0.05)
    assert sorted(schedule.order) == list(range(60))
    assert schedule.max_lead <= window - 1


def test_the_window_trades_waiting_against_shift():
    """Heavy-tailed durations: from FIFO over a window to greedy, idle time falls and the shift grows."""
    found = []
    for window in (1, 19, 256):
        runs = [
            simulate(
                np.random.default_rng(seed).lognormal(0, 1.5, 256).tolist(),
                window=window,
                num_running=64,
                train_seconds=0.02,
            )
            for seed in range(20)
        ]
        found.append((np.mean([r.idle_frac for r in runs]), np.mean([r.shift for r in runs])))
    (fifo, fifo_shift), (windowed, windowed_shift), (greedy, greedy_shift) = found
    assert fifo >= windowed >= greedy - 1e-9
    assert fifo_shift < windowed_shift < greedy_shift


def test_a_head_that_never_ends_is_told_and_can_be_given_up():
    """Fault 80: the window alone still stalls."""
    queue = WindowedFifo(3)
    for item in range(6):
        queue.put(item)
    for item in range(1, 6):
        queue.finish(item)
    assert [queue.take(), queue.take()] == [1, 2]
    assert queue.take() is None
    assert queue.is_stalled
    assert queue.head == 0
    queue.give_up(0)
    assert not queue.is_stalled
    assert [queue.take() for _ in range(4)] == [3, 4, 5, None]
    queue.finish(0)  # late news
    assert queue.take() is None
    assert queue.head is None


def test_errors():
    with pytest.raises(ValueError, match="window is 0"):
        WindowedFifo(0)
    queue = WindowedFifo(1)
    queue.put("a")
    with pytest.raises(ValueError, match="'a' was put in before"):
        queue.put("a")
    with pytest.raises(ValueError, match="'b' was never put in"):
        queue.finish("b")
    queue.give_up("a")
    with pytest.raises(ValueError, match="'a' is not in the queue"):
        queue.give_up("a")
