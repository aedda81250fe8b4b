"""Fault 37: a turn is merged into the first open row that matches, not into the longest, after a rollback.

Segments name their context explicitly, so nothing is matched when rollouts are recorded. Two places do match prefixes:
the tree of a group's samples, and the sampler's cache."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from composer2.model.engine.sequence import Request
from composer2.rl.prefix_tree import build_tree
from composer2.types import SamplingParams

A, B, C = [5, 6, 7, 8], [5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 11, 12, 13]


def sample_of(build, tokens):
    made = build.sample(len(tokens), num_sampled=1)
    return replace(made, token_ids=np.array(tokens, np.int32), routes=np.zeros_like(made.routes))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_tree_extends_the_longest_row(build, order):
    samples = [sample_of(build, tokens) for tokens in (A, B, C)]
    tree = build_tree([samples[i] for i in order])
    assert len(tree.token_ids) == len(C) - 1  # the last token only is predicted
    path_a, path_b, path_c = (tree.index_of[order.index(i)].tolist() for i in range(3))
    assert path_c[: len(path_b)] == path_b
    assert path_b[: len(path_a)] == path_a
    assert tree.num_route_forks == 0


def test_an_ambiguous_match_is_counted(build):
    """The same tokens with other experts match in one sense only: they stay apart, and the log says so."""
    other = sample_of(build, C)
    routes = other.routes.copy()
    routes[4] = 1
    tree = build_tree([sample_of(build, A), sample_of(build, B), replace(other, routes=routes)])
    assert tree.num_route_forks == 1
    assert len(tree.token_ids) == 6 + (len(C) - 1 - 4)


@pytest.mark.parametrize("order", list(itertools.permutations(("a", "b"))))
def test_the_sampler_takes_the_longest_cached_prefix(policy, order):
    prompts = {"a": A, "b": B, "c": C}
    sampler = policy.engine(policy.model())

    def run(session):
        params = SamplingParams(max_tokens=1)
        sampler.submit(Request(token_ids=tuple(prompts[session]), params=params, session=session, group="g", seed=0))
        before = sampler.stats.copied_tokens
        while sampler.has_work:
            sampler.step()
        return sampler.stats.copied_tokens - before

    for session in order:
        run(session)
    assert run("c") == len(B)
