"""One optimizer step: what changes, what does not, and log-probs against the plain forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.kl import KLConfig
from composer2.rl.loss import LossConfig
from composer2.rl.pack import pack, to_tensors
from composer2.rl.reward import RewardComponent, RewardConfig
from composer2.rl.train import (
    RLConfig,
    make_optimizer,
    reference_k1,
    reference_logprobs,
    score_groups,
    train_step,
    trained_logprobs,
    update,
)
from composer2.types import Span, SpanKind

CONFIG = RLConfig(
    prompts_per_step=2,
    group_size=4,
    row_length=24,
    rows_per_batch=2,
    lr=1e-2,
    replay_tau=0.0,
    reward=RewardConfig(components=(RewardComponent(name="correctness", weight=1.0),)),
)


def mixed_groups(policy, model, **fields):
    """Two scored groups in which some rollouts passed and some did not."""
    sampler = policy.engine(model)
    groups = [policy.group(sampler, f"task{seed}", 4, seed=seed, **fields) for seed in (0, 1, 2, 3, 4, 5)]
    mixed = [group for group in groups if 0 < sum(rollout.passed for rollout in group.rollouts) < 4]
    return score_groups(mixed[:2], CONFIG, 0, 0)


def samples_of(groups, config=CONFIG):
    return [sample for group in groups for sample in group_samples(group, config.advantage, policy_version=0)]


def test_no_samples_change_nothing(policy):
    model = policy.model()
    optimizer, before = make_optimizer(model, CONFIG), policy.weights(model)
    assert update(model, optimizer, [], CONFIG, 0) == {"num_tokens": 0.0, "loss": 0.0, "grad_norm": 0.0}
    assert policy.same_weights(policy.weights(model), before)
    assert not optimizer.state


def test_mtp_layers_and_router_bias_stay_as_they_are(policy):
    model = policy.model()
    optimizer, before = make_optimizer(model, CONFIG), policy.weights(model)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) not in held}
    assert names == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    assert names
    update(model, optimizer, samples_of(mixed_groups(policy, model)), CONFIG, 0)
    changed = {name for name, tensor in policy.weights(model).items() if not torch.equal(tensor, before[name])}
    assert "lm_head.weight" in changed
    assert "embed_tokens.weight" in changed
    assert not any(name.startswith("mtp.") or name.endswith("e_score_correction_bias") for name in changed)


def test_a_step_tells_how_full_its_rows_were(policy):
    """Row R12, by counting: slots and quadratic costs of the batches, from the samples alone."""
    model = policy.model()
    samples = samples_of(mixed_groups(policy, model))
    config = replace(CONFIG, row_length=11, rows_per_batch=1)
    metrics = update(model, make_optimizer(model, config), samples, config, 0)
    slots, costs = 0, []
    for batch in pack(samples, row_length=11, rows_per_batch=1):
        slots += batch.token_ids.size
        lengths = [int((batch.document_ids == d).sum()) for d in range(batch.document_ids.max() + 1)]
        costs.append(sum(n + 1e-3 * n * n for n in lengths))
    assert metrics["pack_efficiency"] == pytest.approx(sum(len(s.token_ids) for s in samples) / slots)
    assert metrics["pack_imbalance"] == pytest.approx(max(costs) / np.mean(costs))
    assert metrics["pack_imbalance"] > 1
    assert (metrics["num_batches"], metrics["num_rows"]) == (len(costs), len(costs))


def test_logprobs_are_those_of_the_full_logits(policy):
    model = policy.model()
    samples = samples_of(mixed_groups(policy, model, temperature=0.7))
    samples = [replace(sample, temperature=0.7) for sample in samples]
    packed = pack(samples, row_length=24, rows_per_batch=2)
    found = 0
    for batch in map(to_tensors, packed):
        logprobs_BT, entropy_BT, _ = trained_logprobs(model, batch, CONFIG, with_entropy=True)
        assert entropy_BT is not None
        out = model(
            batch.token_ids,
            position_ids_BT=batch.position_ids,
            document_ids_BT=batch.document_ids,
            routes_BTLK=batch.routes,
        )
        full_BTV = torch.log_softmax(out.logits_BTV / 0.7, dim=-1)
        for b, t in batch.loss_mask.nonzero().tolist():
            row_V = full_BTV[b, t - 1]
            assert logprobs_BT[b, t].item() == pytest.approx(row_V[batch.token_ids[b, t]].item(), abs=1e-5)
            assert entropy_BT[b, t].item() == pytest.approx(-(row_V.exp() * row_V).sum().item(), abs=1e-4)
            found += 1
        assert (logprobs_BT[~batch.loss_mask] == 0).all()
    assert found == sum(int(sample.loss_mask.sum()) for sample in samples)


def test_packing_does_not_change_the_gradient(policy):
    samples = samples_of(mixed_groups(policy, policy.model()))
    results = []
    for row_length, rows in ((11, 1), (64, 8)):
        model = policy.model()
        config = replace(CONFIG, row_length=row_length, rows_per_batch=rows)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        update(model, optimizer, samples, config, 0)
        results.append(policy.weights(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], atol=1e-5, rtol=1e-4)


def test_the_step_raises_what_was_better_than_the_mean(policy):
    model = policy.model()
    groups = mixed_groups(policy, model)
    optimizer = make_optimizer(model, CONFIG)
    metrics = train_step(model, optimizer, groups, CONFIG, step=0)
    assert metrics["grad_norm"] > 0
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
    gains = {True: [], False: []}
    for group, logprobs in zip(groups, reference_logprobs(model, groups, CONFIG), strict=True):
        for rollout, (after,) in zip(group.rollouts, logprobs, strict=True):
            part = rollout.segments[0]
            gains[rollout.passed].append(float((after - part.logprobs)[part.sampled].sum()))
    assert np.mean(gains[True]) > 0 > np.mean(gains[False])


def test_replay_uses_the_recorded_routes(policy):
    model = policy.model()
    samples = samples_of(mixed_groups(policy, model))
    swapped = [
        replace(sample, routes=np.where(sample.routes < 0, sample.routes, 3 - sample.routes)) for sample in samples
    ]
    batch = to_tensors(pack(swapped, row_length=64, rows_per_batch=8)[0])
    used = trained_logprobs(model, batch, CONFIG)[2].expert_ids_BTLK.long()
    given = batch.routes >= 0
    assert (used[given] == batch.routes[given]).all()
    off = trained_logprobs(model, batch, replace(CONFIG, replay=False))[2]
    assert int(off.num_replayed) == 0
    assert (off.expert_ids_BTLK.long()[given] != batch.routes[given]).any()

    metrics = update(policy.model(), make_optimizer(model, CONFIG), swapped, CONFIG, 0)
    assert metrics["replaced_expert_frac"] == 0
    assert metrics["mismatch_max"] > 1e-3
    right = update(policy.model(), make_optimizer(model, CONFIG), samples, CONFIG, 0)
    assert right["mismatch_max"] < 1e-4


def test_the_replaced_fraction_is_of_recorded_experts(policy):
    model = policy.model()
    samples = samples_of(mixed_groups(policy, model))
    swapped = [
        replace(sample, routes=np.where(sample.routes < 0, sample.routes, 3 - sample.routes)) for sample in samples
    ]
    config = replace(CONFIG, replay_tau=0.99, row_length=64, rows_per_batch=8, merge_prefixes=False)
    dropped = recorded = 0
    for batch in map(to_tensors, pack(swapped, row_length=64, rows_per_batch=8)):
        used = trained_logprobs(model, batch, config)[2].expert_ids_BTLK.long()
        given = batch.routes >= 0
        kept = (batch.routes[..., None] == used[..., None, :]).any(-1)
        dropped += int((given & ~kept).sum())
        recorded += int(given.sum())
    assert 0 < dropped < recorded
    metrics = update(model, make_optimizer(model, config), swapped, config, 0)
    assert metrics["replaced_expert_frac"] == pytest.approx(dropped / recorded)


def test_tokens_without_recorded_experts_are_counted(policy):
    """Experts of the first three tokens are recorded, in one layer of the third other ones than the router's own."""
    model = policy.model()
    sample = samples_of(mixed_groups(policy, model))[0]
    ran = int(np.flatnonzero(sample.loss_mask)[-1]) + 1
    routes = sample.routes.copy()
    routes[3:] = -1
    routes[2, 0] = 3 - routes[2, 0]
    config = replace(CONFIG, merge_prefixes=False)
    metrics = update(model, make_optimizer(model, config), [replace(sample, routes=routes)], config, 0)
    assert metrics["free_route_frac"] == pytest.approx((ran - 3) / ran)
    assert metrics["differing_token_frac"] == pytest.approx(1 / ran)
    off = replace(config, replay=False)
    metrics = update(model, make_optimizer(model, off), [replace(sample, routes=routes)], off, 0)
    assert (metrics["free_route_frac"], metrics["differing_token_frac"]) == (1.0, 0.0)


def test_equal_rewards_move_nothing(policy):
    model = policy.model()
    groups = [policy.group(policy.engine(model), "t", 4)]
    groups = [
        replace(group, rollouts=tuple(replace(r, passed=True, reward=1.0) for r in group.rollouts)) for group in groups
    ]
    before = policy.weights(model)
    train_step(model, make_optimizer(model, CONFIG), groups, CONFIG, step=0)
    assert policy.same_weights(policy.weights(model), before)


def test_permuted_rewards_keep_each_group_and_depend_on_seed_and_step(build):
    groups = [build.group([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], lost=(2,))] * 4
    config = replace(CONFIG, permute_rewards=True)

    def rewards(config, step=0, seed=0):
        return [[r.reward for r in group.rollouts] for group in score_groups(groups, config, step, seed)]

    plain = rewards(CONFIG)
    assert plain == [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]] * 4
    shuffled = rewards(config)
    assert shuffled == rewards(config)
    assert shuffled != plain
    assert shuffled != rewards(config, step=1)
    assert shuffled != rewards(config, seed=1)
    assert [sum(values) for values in shuffled] == [3.0] * 4
    assert all(values[2] == 0.0 for values in shuffled)


def test_a_policy_has_no_distance_to_itself(policy):
    model = policy.model()
    groups = mixed_groups(policy, model)
    config = replace(CONFIG, reference_every=2)
    optimizer = make_optimizer(model, config)
    assert train_step(model, optimizer, groups, config, step=0, reference=policy.model())[
        "reference_k1"
    ] == pytest.approx(0.0, abs=1e-5)
    assert "reference_k1" not in train_step(model, optimizer, groups, config, step=1, reference=policy.model())


def test_kl_weight_trains_degenerate_groups_too(policy):
    config = replace(CONFIG, advantage=AdvantageConfig(kl=KLConfig(weight=0.5)))
    model = policy.model()
    groups = [policy.group(policy.engine(model), "t", 4)]
    before = policy.weights(model)
    train_step(model, make_optimizer(model, config), groups, config, step=3, reference=policy.model(1))
    assert not policy.same_weights(policy.weights(model), before)


def test_warmup_is_linear(policy):
    model = policy.model()
    samples = samples_of(mixed_groups(policy, model))
    config = replace(CONFIG, warmup_steps=4)
    optimizer = make_optimizer(model, config)
    rates = []
    for step in range(6):
        update(model, optimizer, samples, config, step)
        rates.append(optimizer.param_groups[0]["lr"] / config.lr)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts_per_step", 0),
        ("max_staleness", -1),
        ("replay_tau", 1.0),
        ("lr", 0.0),
        ("checkpoint_every", 0),
        ("grad_clip", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
    ],
)
def test_config_is_checked(field, value):
    with pytest.raises(ValueError, match=rf"RLConfig.{field} is {value}, accepted is"):
        RLConfig(**{field: value})


def test_learning_rate_by_hand():
    falling = RLConfig(num_steps=10, warmup_steps=2, lr=1.0, final_lr_frac=0.2)
    assert [falling.lr_at(step) for step in (0, 1, 2, 6, 10, 12)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert {RLConfig(num_steps=10, lr=0.5).lr_at(step) for step in range(12)} == {0.5}
    with pytest.raises(ValueError, match=r"RLConfig.final_lr_frac is 1.5, accepted is in \[0, 1\]"):
        RLConfig(final_lr_frac=1.5)


def test_tokens_of_groups_without_gradient_stay_in_the_token_normaliser(policy):
    """A group of equal rewards adds nothing to the gradient of `tokens` but its tokens to what it is divided by."""
    sampler = policy.engine(policy.model())
    drawn = [policy.group(sampler, f"task{seed}", 4, seed=seed) for seed in range(6)]
    scored = score_groups(drawn, CONFIG, 0, 0)
    mixed = next(g for g in scored if len({r.reward for r in g.rollouts}) > 1)
    flat = replace(mixed, rollouts=tuple(replace(rollout, reward=0.5) for rollout in mixed.rollouts))
    config = replace(CONFIG, loss=LossConfig(normaliser="tokens"), grad_clip=1e9)
    moved = []
    for groups in ([mixed], [mixed, flat]):
        model = policy.model()
        before = policy.weights(model)
        train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), groups, config, step=0)
        moved.append({name: tensor - before[name] for name, tensor in policy.weights(model).items()})
    assert moved[0]["lm_head.weight"].abs().max() > 1e-4
    torch.testing.assert_close(moved[0]["lm_head.weight"], 2 * moved[1]["lm_head.weight"], atol=1e-6, rtol=1e-4)


def test_the_token_normaliser_counts_trained_tokens_alone(policy):
    """The last token of every window called a summary and left out of the loss is left out of the divisor too."""
    sampler = policy.engine(policy.model())
    scored = score_groups([policy.group(sampler, f"task{seed}", 4, seed=seed) for seed in range(6)], CONFIG, 0, 0)
    mixed = next(g for g in scored if len({r.reward for r in g.rollouts}) > 1)

    def summed_up(rollout):
        parts = []
        for segment in rollout.segments:
            last = int(np.flatnonzero(segment.sampled)[-1])
            span = Span(kind=SpanKind.SUMMARY, start=last, stop=last + 1)
            parts.append(replace(segment, spans=(span,)))
        return replace(rollout, segments=tuple(parts))

    group = replace(mixed, rollouts=tuple(summed_up(rollout) for rollout in mixed.rollouts))
    config = replace(CONFIG, loss=LossConfig(normaliser="tokens"), grad_clip=1e9)
    config = replace(config, advantage=AdvantageConfig(train_summaries=False))
    sampled = sum(int(segment.sampled.sum()) for rollout in group.rollouts for segment in rollout.segments)
    model, by_hand = policy.model(), policy.model()
    before = policy.weights(model)
    train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), [group], config, step=0)
    samples = group_samples(group, config.advantage, policy_version=0)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert 0 < trained == sampled - len(samples)
    update(by_hand, torch.optim.SGD(by_hand.parameters(), lr=1.0), samples, config, 0, num_tokens=trained)
    moved = [policy.weights(m)["lm_head.weight"] - before["lm_head.weight"] for m in (model, by_hand)]
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[0], moved[1], atol=1e-7, rtol=1e-4)


def test_the_step_is_divided_by_the_planned_rollouts(policy):
    """Samples that are missing (lost, or without gradient) do not make those that are there weigh more."""
    samples = samples_of(mixed_groups(policy, policy.model()))
    moved = []
    for chosen, prompts in ((samples, 2), (samples, 4), (samples[:3], 2), (samples[3:], 2)):
        model = policy.model()
        before = policy.weights(model)["lm_head.weight"]
        config = replace(CONFIG, prompts_per_step=prompts, grad_clip=1e9)
        update(model, torch.optim.SGD(model.parameters(), lr=1.0), chosen, config, 0)
        moved.append(policy.weights(model)["lm_head.weight"] - before)
    assert moved[0].abs().max() > 1e-4
    torch.testing.assert_close(moved[1], moved[0] / 2, atol=1e-7, rtol=1e-3)
    torch.testing.assert_close(moved[2] + moved[3], moved[0], atol=1e-7, rtol=1e-3)


@pytest.mark.parametrize("replay", [True, False])
def test_the_reference_scores_at_the_sampling_temperature_and_replays(policy, replay):
    reference = policy.model(1)
    group = policy.group(policy.engine(policy.model()), "t", 2, temperature=0.7)
    config = replace(CONFIG, temperature=0.7, replay=replay)
    ((found, _),) = reference_logprobs(reference, [group], config)
    part = group.rollouts[0].segments[0]
    tokens, routes = (torch.from_numpy(values.astype(np.int64))[None] for values in (part.token_ids, part.routes))
    by_replay = {}
    for replayed in (True, False):
        out = reference(tokens, routes_BTLK=routes if replayed else None)
        scored_TV = torch.log_softmax(out.logits_BTV[0, :-1] / 0.7, dim=-1).detach().numpy()
        by_replay[replayed] = scored_TV[np.arange(len(part.token_ids) - 1), part.token_ids[1:]]
    assert np.abs(by_replay[True] - by_replay[False]).max() > 1e-3
    np.testing.assert_allclose(found[0][1:], by_replay[replay], atol=1e-5)


def test_distance_to_the_reference_by_hand(build):
    """log q = -1 at sampled tokens, log p = -3 and -2: k1 = log q - log p is 2 and 1. Prompts do not count."""
    group = build.group([0.0, 0.0], segments=[(build.segment(5, 3),), (build.segment(4, 1),)])
    logprobs = [[[np.array([9, 9, -3, -3, -3.0])], [np.array([9, 9, 9, -2.0])]]]
    assert reference_k1([group], logprobs) == pytest.approx((3 * 2 + 1) / 4)


def test_the_age_of_tokens_is_counted_from_the_step(policy):
    config = replace(CONFIG, advantage=AdvantageConfig(max_token_age=2))
    for step, is_trained in ((2, True), (3, False)):
        model = policy.model()
        groups = mixed_groups(policy, model)  # sampled by version 0
        metrics = train_step(model, make_optimizer(model, config), groups, config, step=step)
        assert (metrics["num_tokens"] > 0) is is_trained


def test_rewards_have_the_weights_of_their_step(build):
    component = RewardComponent(name="correctness", weight=1.0, schedule=((5, 3.0),))
    config = replace(CONFIG, reward=RewardConfig(components=(component,)))
    for step, expected in ((4, [1.0, 0.0]), (5, [3.0, 0.0])):
        (group,) = score_groups([build.group([1.0, 0.0])], config, step, 0)
        assert [rollout.reward for rollout in group.rollouts] == expected
        assert [rollout.reward_components["correctness"] for rollout in group.rollouts] == [1.0, 0.0]
