"""Fault 53: parity was tested on one dense sequence only; the packed path was wrong by a factor of hundreds.

Here at least three packed sequences of unlike lengths go through the same model as each of them alone, with replay."""

from dataclasses import replace

import pytest
import torch

from composer2.rl.loss import policy_loss
from composer2.rl.pack import fill, to_tensors
from composer2.rl.train import RLConfig, trained_logprobs

CONFIG = RLConfig(replay_tau=0.0)
LENGTHS = (5, 17, 9, 23)


def samples_of(build):
    return [
        build.sample(length, num_sampled=2 + index, advantage=index - 1.4, seed=index, layers=2, experts=2)
        for index, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[3, 1], [2, 0]], [[1, 0, 2], [3]]])
def test_packed_unequal_sequences_equal_each_alone(build, policy, rows):
    model = policy.model().double()
    vocabulary = policy.CONFIG.vocab_size
    samples = [replace(sample, token_ids=sample.token_ids % vocabulary) for sample in samples_of(build)]

    def run(rows):
        batch = to_tensors(fill([[samples[i] for i in row] for row in rows]))
        logprobs_BT, _, _ = trained_logprobs(model, batch, CONFIG)
        loss, sums = policy_loss(logprobs_BT, batch, CONFIG.loss, 7.0)
        return batch, logprobs_BT, loss, sums

    alone = [run([[i]]) for i in range(len(samples))]
    batch, logprobs_BT, loss, sums = run(rows)
    for b, row in enumerate(rows):
        for document, index in enumerate(row):
            where = (batch.document_ids[b] == document).nonzero()[:, 0]
            torch.testing.assert_close(logprobs_BT[b, where], alone[index][1][0], atol=1e-10, rtol=0)
    # The quantity that showed the fault: the k1 between trainer and sampler.
    k1 = sum(part[3]["behaviour_k1"] for part in alone)
    torch.testing.assert_close(sums["behaviour_k1"], k1, atol=1e-9, rtol=1e-9)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("mtp.")]
    ours = torch.autograd.grad(loss, parameters, allow_unused=True)
    theirs = torch.autograd.grad(sum(part[2] for part in alone), parameters, allow_unused=True)
    assert any(g is not None and g.abs().max() > 1e-4 for g in theirs)
    for one, other in zip(ours, theirs, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)
