"""Fault 57: prefix-tree attention drifts from the flat run after the second step; ragged trees lose their short leaves.

A tree of depth three, one branch of which ends at an inner node, trained for three steps beside the flat samples."""

from dataclasses import replace

import numpy as np
import torch

from composer2.rl.loss import loss_denominator, policy_loss
from composer2.rl.prefix_tree import build_tree
from composer2.rl.train import RLConfig, micro_batches, trained_logprobs

CONFIG = RLConfig(prompts_per_step=1, group_size=5, row_length=64, rows_per_batch=4, replay_tau=0.0)
ROOT, LEFT, RIGHT = [1, 2, 3, 4, 5], [6, 7, 8], [9, 10]
PATHS = [
    ROOT + LEFT + [11, 12, 13],
    ROOT + LEFT + [14, 15],
    ROOT + LEFT,  # ends at an inner node
    ROOT + RIGHT + [16],
    ROOT + RIGHT + [16, 17, 18, 19],
]


def samples_of(build):
    rng = np.random.default_rng(0)
    by_prefix: dict[tuple[int, ...], np.ndarray] = {}
    samples = []
    for index, tokens in enumerate(PATHS):
        routes = np.full((len(tokens), 2, 2), -1, np.int16)
        for t in range(len(tokens) - 1):
            chosen = np.stack([rng.permutation(4)[:2] for _ in range(2)])
            routes[t] = by_prefix.setdefault(tuple(tokens[: t + 1]), chosen)
        made = build.sample(len(tokens), num_sampled=len(tokens) - 4, advantage=index - 1.8, logprob=-3.0)
        samples.append(replace(made, token_ids=np.array(tokens, np.int32), routes=routes))
    return samples


def test_the_tree_is_what_the_fault_needs(build):
    tree = build_tree(samples_of(build))
    assert len(tree.token_ids) == len({tuple(p[: t + 1]) for p in PATHS for t in range(len(p) - 1)})
    assert tree.num_route_forks == 0
    inner, longer = tree.index_of[2].tolist(), tree.index_of[0].tolist()
    assert longer[: len(inner)] == inner


def step_of(model, samples, config, optimizer):
    """(log-probs of the trained tokens, sample by sample; loss; gradients), then one step of the optimizer."""
    optimizer.zero_grad()
    denominator = loss_denominator(config.loss, num_rollouts_planned=5)
    logprobs, total = {}, 0.0
    for batch, tree in micro_batches(samples, config, "cpu"):
        logprobs_BT, _, _ = trained_logprobs(model, batch, config, tree=tree)
        loss, _ = policy_loss(logprobs_BT, batch, config.loss, denominator)
        loss.backward()
        total += float(loss.detach())
        for b in range(len(batch.token_ids)):
            for document in batch.document_ids[b][batch.document_ids[b] >= 0].unique():
                where = batch.document_ids[b] == document
                key = tuple(batch.token_ids[b][where].tolist())
                logprobs[key] = logprobs_BT[b][where & batch.loss_mask[b]].detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return logprobs, total, gradients


def test_three_steps_equal_those_of_the_flat_samples(build, policy):
    samples = samples_of(build)
    runs = []
    for merge in (True, False):
        model = policy.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        config = replace(CONFIG, merge_prefixes=merge)
        runs.append([step_of(model, samples, config, optimizer) for _ in range(3)])
    for (ours, loss, gradients), (theirs, flat_loss, flat_gradients) in zip(*runs, strict=True):
        assert ours.keys() == theirs.keys() == {tuple(path) for path in PATHS}
        for path in ours:
            torch.testing.assert_close(ours[path], theirs[path], atol=1e-5, rtol=0)
        assert abs(loss - flat_loss) < 1e-5
        assert gradients.keys() == flat_gradients.keys()
        for name, gradient in flat_gradients.items():
            error = (gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-6)
            assert error <= 1e-5, name
    moved = {path: (runs[1][2][0][path] - runs[1][0][0][path]).abs().max() for path in runs[1][0][0]}
    assert max(moved.values()) > 1e-2  # three steps that did something
