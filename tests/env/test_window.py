"""Windows of a harness that cuts, against a search by brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer2.env.window import Window
from composer2.types import Generation, SpanKind


def generation(length, first):
    return Generation(
        token_ids=np.arange(first, first + length, dtype=np.int32),
        logprobs=np.zeros(length, np.float32),
        policy_versions=np.zeros(length, np.int32),
        routes=np.zeros((0, 1, 1), np.int16),
        finish_reason="stop",
    )


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6), st.data())
def test_the_most_newest_turns_that_fit_are_kept(num_prompt, turns, data):
    """Cut twice with different budgets: what stays is the longest suffix of whole turns, never all of them."""
    prompt = list(range(-num_prompt, 0))
    window = Window()
    window.append(SpanKind.PROMPT, prompt)
    token, whole = 100, []
    for num_sampled, num_answer in turns:
        ids = list(range(token, token + num_sampled + num_answer))
        window.append_sampled(SpanKind.ACTION, generation(num_sampled, token))
        window.append(SpanKind.RESULT, ids[num_sampled:])
        whole.append(ids)
        token += len(ids)
    for _ in range(2):
        budget = data.draw(st.integers(num_prompt, num_prompt + 40))
        fitting = [n for n in range(len(whole)) if num_prompt + sum(map(len, whole[len(whole) - n :])) <= budget]
        whole = whole[len(whole) - max(fitting) :] if fitting else []
        window = window.without_oldest(prompt, budget)
        assert window.token_ids == [*prompt, *(i for turn in whole for i in turn)]
        assert [window.token_ids[start] for start in window.turn_starts] == [turn[0] for turn in whole]
        assert [(span.kind, span.start, span.stop) for span in window.spans] == [
            (SpanKind.PROMPT, 0, len(window.token_ids))
        ]
        assert window.generations == []


@pytest.mark.parametrize("missing", [-1, 1, 5])
def test_routes_are_those_of_every_token_seen_or_an_error(missing):
    """A prefix without routes would be trained with routes of the trainer's own, silently."""
    window = Window()
    window.append(SpanKind.PROMPT, [1, 2, 3])
    sampled = replace(generation(2, 10), routes=np.zeros((5 - missing, 1, 1), np.int16))
    window.append_sampled(SpanKind.ACTION, sampled)
    with pytest.raises(ValueError, match=f"routes has {5 - missing} rows, accepted is one for each of 5 tokens"):
        window.segment()
