"""Prefix trees: exactly the distinct prefixes run, each token sees exactly its own past, gradients as one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.attend_flex import flex_attend
from composer2.model.attention import sdpa_attend
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.loss import policy_loss, target_logprobs, token_logprobs
from composer2.rl.pack import fill, to_tensors
from composer2.rl.prefix_tree import build_tree, pack_trees, row_sized, tokens_needed
from composer2.rl.train import RLConfig, micro_batches, trained_logprobs
from composer2.types import Sample

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
CONFIG = RLConfig(row_length=24, rows_per_batch=2, replay_tau=0.0)


def made(tokens, *, routes=None, mask=None, group=0, seed=0):
    """A sample with these tokens; without `mask` the later half is trained, without `routes` experts 0 and 1 are."""
    rng = np.random.default_rng(seed)
    length = len(tokens)
    mask = np.arange(length) >= max(1, length // 2) if mask is None else np.array(mask)
    if routes is None:
        routes = np.tile(np.arange(CHOSEN), (length, LAYERS, 1))
    return Sample(
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=mask,
        advantages=np.where(mask, rng.normal(size=length), 0).astype(np.float32),
        behaviour_logprobs=np.where(mask, rng.normal(-2, 0.3, size=length), 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        routes=np.array(routes, dtype=np.int16),
        group=group,
    )


@st.composite
def families(draw):
    """Samples over three tokens and three kinds of routes, one of which differs in one layer only: all ways to share,
    fork and end inside another occur."""
    samples = []
    one, other = np.arange(CHOSEN), np.arange(CHOSEN) + 1
    kinds = [np.stack([one, one]), np.stack([other, other]), np.stack([one, other])]
    for index in range(draw(st.integers(1, 6))):
        steps = draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 0, 0, 1, 2])), min_size=2, max_size=9))
        tokens = [7, *(token for token, _ in steps)]
        routes = np.stack([kinds[0], *(kinds[kind] for _, kind in steps)])
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))]
        if not any(mask):
            mask[-1] = True
        samples.append(made(tokens, routes=routes, mask=mask, group=draw(st.integers(0, 1)), seed=index))
    return samples


def prefixes(sample):
    """What a sample has to run, as the distinct (token, routes) paths that lead to each of its tokens."""
    steps = [(int(t), r.tobytes()) for t, r in zip(sample.token_ids, sample.routes, strict=True)]
    return [tuple(steps[: end + 1]) for end in range(tokens_needed(sample))]


@given(families())
def test_every_distinct_prefix_runs_once_and_sees_its_own_past(samples):
    tree = build_tree(samples)
    expected = {path for sample in samples for path in prefixes(sample)}
    assert len(tree.token_ids) == len(expected)
    assert tree.num_unmerged == sum(tokens_needed(sample) for sample in samples)
    for sample, where in zip(samples, tree.index_of, strict=True):
        needed = tokens_needed(sample)
        assert tree.token_ids[where].tolist() == sample.token_ids[:needed].tolist()
        assert np.array_equal(tree.routes[where], sample.routes[:needed])
        assert tree.position_ids[where].tolist() == list(range(needed))
        for depth, token in enumerate(where):
            index = np.arange(len(tree.token_ids))
            seen = np.flatnonzero((index <= token) & (token < tree.visible_until))
            assert seen.tolist() == where[: depth + 1].tolist()


@given(families())
def test_forks_by_routes_are_counted_by_brute_force(samples):
    children = {}
    for path in {path for sample in samples for path in prefixes(sample)}:
        token, routes = path[-1]
        children.setdefault((path[:-1], token), set()).add(routes)
    assert build_tree(samples).num_route_forks == sum(len(routes) - 1 for routes in children.values())


def test_a_fork_by_routes_alone():
    usual = np.tile(np.arange(CHOSEN), (5, LAYERS, 1))
    other = usual.copy()
    other[3] += 1
    tokens = [5, 6, 7, 8, 9]
    mask = [False, False, False, False, True]
    tree = build_tree([made(tokens, routes=usual, mask=mask), made(tokens, routes=other, mask=mask)])
    assert (len(tree.token_ids), tree.num_route_forks) == (5, 1)  # 5 6 7 shared, 8 twice; 9 is only predicted
    same = build_tree([made(tokens, routes=usual, mask=mask), made(tokens, routes=usual, mask=mask)])
    assert (len(same.token_ids), same.num_route_forks) == (4, 0)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model, batches, config):
    total = 0.0
    for batch, tree in batches:
        logprobs_BT, _, _ = trained_logprobs(model, batch, config, tree=tree)
        total = total + policy_loss(logprobs_BT, batch, config.loss, 10.0)[0]
    return total


def one_by_one(samples):
    return [(to_tensors(fill([[sample]])), None) for sample in samples]


@given(samples=families(), row_length=st.integers(4, 40), replay=st.booleans())
@settings(max_examples=40, deadline=None)
def test_loss_and_every_gradient_equal_the_samples_one_by_one(policy, samples, row_length, replay):
    model = policy.model().double()
    config = replace(CONFIG, row_length=row_length, replay=replay)
    if not replay:  # routing is free, so samples whose recorded experts differ still run the same
        samples = [replace(sample, routes=samples[0].routes[:1].repeat(len(sample.token_ids), 0)) for sample in samples]
    merged = loss_of(model, micro_batches(samples, config, "cpu"), config)
    plain = loss_of(model, one_by_one(samples), config)
    torch.testing.assert_close(merged, plain, atol=1e-12, rtol=1e-10)
    ours, theirs = gradients(model, merged), gradients(model, plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-11, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_merging_is_what_changes_the_rows(policy):
    """The same samples through both settings of the trainer: fewer tokens, the same gradient in float32."""
    prompt = list(np.random.default_rng(0).integers(1, 20, size=12))
    samples = [
        made([*prompt, 3 + i, 5, 6 + i % 2], mask=[False] * 12 + [True] * 3, group=i // 4, seed=i) for i in range(8)
    ]
    model = policy.model()
    merged, plain = (replace(CONFIG, merge_prefixes=flag, row_length=64) for flag in (True, False))
    trees = [tree for _, tree in micro_batches(samples, merged, "cpu")]
    assert sum(tree.num_merged for tree in trees) == 2 * (12 + 4 * 2)
    assert sum(tree.num_unmerged for tree in trees) == 8 * 14
    ours = gradients(model, loss_of(model, micro_batches(samples, merged, "cpu"), merged))
    theirs = gradients(model, loss_of(model, micro_batches(samples, plain, "cpu"), plain))
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-5)


def test_a_wrong_depth_or_a_seen_sibling_changes_the_loss(policy):
    """The comparison above is sensitive to what it is there for."""
    model = policy.model().double()
    samples = [made([1, 2, 3, 4 + i, 9, 8], group=0, seed=i) for i in range(3)]
    ((batch, tree),) = pack_trees(samples, row_length=64, rows_per_batch=1)
    batch = to_tensors(batch)
    right, _, _ = trained_logprobs(model, batch, CONFIG, tree=tree)
    flat = replace(tree, position_ids=torch.arange(tree.token_ids.shape[1])[None])
    leaky = replace(tree, visible_until=torch.full_like(tree.visible_until, tree.token_ids.shape[1]))
    for wrong in (flat, leaky):
        assert (trained_logprobs(model, batch, CONFIG, tree=wrong)[0] - right).abs().max() > 1e-4


def tree_logprobs(policy, attend, samples, device="cpu"):
    model = Transformer(policy.CONFIG, attend=attend)
    init_weights(model, 0)
    model = model.to(device)
    ((batch, tree),) = micro_batches(samples, replace(CONFIG, row_length=64), device)
    return model, trained_logprobs(model, batch, CONFIG, tree=tree)[0]


SHARED = [made([7, 1, 2, 3, 1]), made([7, 1, 2, 1], seed=1), made([7, 1, 2], seed=2), made([7, 2, 2, 3], seed=3)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_trees_as_the_dense_mask_does(policy):
    with torch.no_grad():
        _, dense = tree_logprobs(policy, sdpa_attend, SHARED)
        _, blocks = tree_logprobs(policy, flex_attend, SHARED)
    assert dense.abs().sum() > 0
    torch.testing.assert_close(blocks, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has no backward pass on a CPU")
def test_flex_attention_gives_trees_the_same_gradients_on_a_gpu(policy):
    found = []
    for attend in (sdpa_attend, flex_attend):
        model, logprobs = tree_logprobs(policy, attend, SHARED, device="cuda")
        logprobs.sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for dense, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, dense, rtol=1e-4, atol=1e-5)


def test_prompts_and_temperatures_stay_apart():
    samples = [made([1, 2, 3, 4], group=group) for group in (0, 0, 1)]
    ((_, tree),) = pack_trees(samples, row_length=64, rows_per_batch=1)
    assert tree.num_merged == 2 * 3
    samples[1] = replace(samples[1], temperature=0.5)
    batches = pack_trees(samples, row_length=64, rows_per_batch=1)
    assert [batch.temperature for batch, _ in batches] == [0.5, 1.0]


def test_a_sample_without_trained_tokens_is_refused():
    with pytest.raises(ValueError, match="loss_mask selects nothing"):
        build_tree([made([1, 2, 3], mask=[False] * 3)])
    with pytest.raises(ValueError, match=r"loss_mask selects \[0\]"):
        build_tree([made([1, 2, 3], mask=[True, False, False])])


@given(families(), st.integers(3, 30))
def test_trees_are_as_large_as_a_row_takes(samples, row_length):
    parts = row_sized(samples, row_length)
    assert [id(s) for part in parts for s in part] == [id(s) for s in samples]
    sizes = [len({path for sample in part for path in prefixes(sample)}) for part in parts]
    for part, size, following in zip(parts, sizes, [*parts[1:], None], strict=True):
        assert size <= row_length or len(part) == 1
        if following is not None:  # its first sample did not fit any more
            assert len({path for sample in [*part, following[0]] for path in prefixes(sample)}) > row_length


def test_many_long_samples_are_merged_in_linear_time():
    """300,000 tokens in a deep comb: each sample leaves the one before it ten tokens later."""
    shared = np.arange(1, 3001) % 997 + 1
    samples = []
    for index in range(100):
        tokens = shared.copy()
        tokens[index * 10 + 10 :] = 998 + index
        samples.append(made(tokens.tolist(), mask=np.arange(3000) >= 2990))
    tree = build_tree(samples)
    assert len(tree.token_ids) == 1000 + sum(2999 - (i * 10 + 10) for i in range(100))


def test_a_tree_of_no_samples_is_refused():
    with pytest.raises(ValueError, match="samples is empty"):
        build_tree([])


def test_a_sample_that_no_row_would_hold_as_it_is_is_refused():
    """At temperature nan it was in no tree and no batch, and nothing said so."""
    whole = made([1, 2, 3, 4])
    for wrong, message in (
        ({"temperature": float("nan")}, "sample 1: temperature is nan"),
        ({"advantages": np.ones(1, np.float32)}, r"sample 1: advantages has shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_trees([whole, replace(whole, **wrong)], row_length=8, rows_per_batch=1)


def test_predictors_read_the_trained_tokens_as_documented(policy):
    model = policy.model()
    samples = [made([1, 2, 3, 4], seed=1), made([1, 2, 5, 6, 7], seed=2)]
    ((batch, tree),) = pack_trees(samples, row_length=16, rows_per_batch=1)
    tensors = to_tensors(batch)
    out = model(
        tree.token_ids,
        position_ids_BT=tree.position_ids,
        document_ids_BT=tree.document_ids,
        visible_until_BT=tree.visible_until,
        routes_BTLK=tree.routes,
    )
    found, _ = target_logprobs(out.logits_BTV.flatten(0, 1)[tree.predictors], tensors.token_ids[tensors.loss_mask])
    alone = []
    for sample in samples:
        row = to_tensors(fill([[sample]]))
        logits = model(row.token_ids, routes_BTLK=row.routes).logits_BTV
        alone.append(token_logprobs(logits, row.token_ids)[0][row.loss_mask])
    expected = dict(zip([4, 3, 7, 6, 5], [alone[0][1], alone[0][0], *alone[1].flip(0)], strict=True))
    torch.testing.assert_close(
        found, torch.stack([expected[int(token)] for token in tensors.token_ids[tensors.loss_mask]])
    )
