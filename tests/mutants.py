"""The broken lines of `mutations.py`: what is replaced by what in which file, and the test that has to notice.

Covered are the lines of the algorithm that peers have shipped broken: normaliser, mask, baseline, KL entry, chain mask,
packing and routes, replay gather, tree positions, balance, curriculum, length penalty and the life cycle of groups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One broken line: `original` occurs exactly once in `file`, and `test` goes red when it becomes `mutated`."""

    file: str
    original: str
    mutated: str
    test: str


RL = "composer2/rl"
FAULTS, TO_GO = "tests/faults", "tests/rl/forge/test_reward_to_go.py"
VARIANTS, BALANCE = "tests/rl/test_variants.py", "tests/rl/test_balance.py"
TREE = "tests/rl/test_prefix_tree.py"
MUTATIONS = [
    # Normaliser: by tokens of the micro-batch; by rows; summed instead of divided by the planned rollouts.
    Mutation(
        f"{RL}/loss.py",
        "loss = -terms_N.sum() / denominator",
        "loss = -terms_N.mean()",
        f"{FAULTS}/test_fault_04_short_micro_batches_weigh_more.py",
    ),
    Mutation(
        f"{RL}/loss.py",
        "loss = -terms_N.sum() / denominator",
        "loss = -terms_N.sum() / denominator / len(logprobs_BT)",
        f"{FAULTS}/test_fault_01_accumulation_divides_twice.py",
    ),
    Mutation(
        f"{RL}/loss.py",
        "return num_rollouts_planned * config.norm_length",
        "return config.norm_length",
        f"{FAULTS}/test_fault_03_gradient_scales_with_micro_batch.py",
    ),
    Mutation(
        f"{RL}/train.py",
        "num_rollouts_planned=config.prompts_per_step * config.group_size,",
        "num_rollouts_planned=len(samples),",
        "tests/rl/test_train.py",
    ),
    # One step: the reference routes for itself; tokens of any age are trained; weights of rewards never change.
    Mutation(
        f"{RL}/train.py", "routes = recorded if config.replay else None", "routes = None", "tests/rl/test_train.py"
    ),
    Mutation(f"{RL}/train.py", "            policy_version=step,", "", "tests/rl/test_train.py"),
    Mutation(
        f"{RL}/reward.py",
        "sum(component.weight_at(step) * values",
        "sum(component.weight * values",
        "tests/rl/test_reward.py",
    ),
    # Routes that end before the context does are taken for a prefix without routes.
    Mutation("composer2/env/window.py", "if len(newest) != seen:", "if False:", "tests/env/test_window.py"),
    # Mask: prompts trained; the check of first tokens gone; the log-prob read from the token's own logits.
    Mutation(
        f"{RL}/advantage.py",
        "    mask_T = segment.sampled.astype(bool)",
        "    mask_T = np.arange(len(segment.sampled)) > 0",
        "tests/rl/test_advantage.py",
    ),
    Mutation(
        f"{RL}/loss.py",
        "first[:, 1:] = documents[:, 1:] != documents[:, :-1]",
        "first[:, 1:] = False",
        "tests/rl/test_loss.py",
    ),
    Mutation(
        f"{RL}/loss.py",
        "logits_BTV[:, :-1], token_ids_BT[:, 1:], temperature",
        "logits_BTV[:, 1:], token_ids_BT[:, 1:], temperature",
        "tests/rl/test_loss.py",
    ),
    # Temperature and corrections.
    Mutation(f"{RL}/loss.py", "wide = wide / temperature", "wide = wide * temperature", "tests/rl/test_loss.py"),
    Mutation(
        f"{RL}/loss.py",
        "terms_N = torch.minimum(ratio_N * advantages_N,",
        "terms_N = torch.maximum(ratio_N * advantages_N,",
        "tests/rl/test_loss.py",
    ),
    Mutation(f"{RL}/loss.py", "weight_N = ratio_N.detach()", "weight_N = ratio_N", "tests/rl/test_loss.py"),
    Mutation(
        f"{RL}/loss.py",
        "gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]",
        "_ = sum(1 for _ in parameters)\n"
        "    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]",
        f"{FAULTS}/test_fault_06_clipping_a_used_up_iterator.py",
    ),
    # Baseline: no mean; the dead counted; the masked counted; the std of GRPO by default; rounding in equal groups.
    Mutation(
        f"{RL}/advantage.py", "centred = counted - counted.mean()", "centred = counted", "tests/rl/test_advantage.py"
    ),
    Mutation(
        f"{RL}/advantage.py",
        "if rollout.status is RolloutStatus.INFRASTRUCTURE:",
        "if False:",
        f"{FAULTS}/test_fault_09_sandbox_deaths_bias_the_baseline.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        "return any(bool(segment.sampled.any()) for segment in rollout.segments)",
        "return True",
        f"{FAULTS}/test_fault_07_masked_response_moves_the_mean.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        'if config.baseline == "grpo":',
        'if config.baseline != "rloo":',
        "tests/rl/test_advantage.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        "if is_degenerate(rewards_G, counts_G):",
        "if False:",
        f"{FAULTS}/test_fault_08_equal_rewards_still_step.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        "if not counts_G[index] or is_withheld(rollout, config, policy_version):",
        "if not counts_G[index]:",
        f"{FAULTS}/test_fault_89_one_old_member_cancels_the_group.py",
    ),
    # KL entry: own token only; wrong sign; reference ignored; to-go restarted in every window.
    Mutation(
        f"{RL}/kl.py",
        "return np.cumsum(np.asarray(values_N, dtype=np.float64)[::-1])[::-1]",
        "return np.asarray(values_N, dtype=np.float64)",
        "tests/rl/test_kl.py",
    ),
    Mutation(
        f"{RL}/kl.py",
        "term_T[mask] = -config.weight * to_go_N",
        "term_T[mask] = config.weight * to_go_N",
        f"{FAULTS}/test_fault_12_kl_cannot_act.py",
    ),
    Mutation(
        f"{RL}/kl.py",
        "log_ratio = reference_logprobs - policy_logprobs",
        "log_ratio = -policy_logprobs",
        f"{FAULTS}/test_fault_11_kl_without_gradient.py",
    ),
    Mutation(
        f"{RL}/kl.py",
        "to_go_N = reward_to_go(np.concatenate(per_token))",
        "to_go_N = np.concatenate([reward_to_go(part) for part in per_token])",
        "tests/rl/test_kl.py",
    ),
    # Chain: only the last window trained; summaries left out.
    Mutation(
        f"{RL}/advantage.py",
        "            if trained_T.any():",
        "            if segment is rollout.segments[-1]:",
        f"{FAULTS}/test_fault_43_summaries_fragment_the_chain.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        "if not config.train_summaries:",
        "if True:",
        f"{FAULTS}/test_fault_43_summaries_fragment_the_chain.py",
    ),
    # Packing and routes.
    Mutation(
        f"{RL}/pack.py",
        'fields["document_ids"][b, start:stop] = document',
        'fields["document_ids"][b, start:stop] = 0',
        "tests/rl/test_pack.py",
    ),
    Mutation(
        f"{RL}/pack.py",
        'fields["position_ids"][b, start:stop] = np.arange(stop - start)',
        'fields["position_ids"][b, start:stop] = np.arange(start, stop)',
        "tests/rl/test_pack.py",
    ),
    Mutation(
        f"{RL}/pack.py",
        "fields[name][b, start:stop] = getattr(sample, name)",
        'fields[name][b, start:stop] = np.roll(getattr(sample, name), int(name == "routes"), axis=0)',
        f"{FAULTS}/test_fault_27_routes_shifted_by_padding.py",
    ),
    Mutation(
        f"{RL}/routes.py",
        "if routes_TLK.shape != expected:",
        "if routes_TLK.shape[1:] != expected[1:]:",
        f"{FAULTS}/test_fault_32_routes_one_token_short.py",
    ),
    # Comparisons: length norm of the last window; RLOO's factor; GSPO's mean; CISPO's clip; both normalisers.
    Mutation(
        f"{RL}/advantage.py",
        "divisor = sum(int(segment.sampled.sum()) for segment in rollout.segments)",
        "divisor = int(rollout.segments[-1].sampled.sum())",
        VARIANTS,
    ),
    Mutation(
        f"{RL}/advantage.py",
        "centred = centred * (len(counted) / (len(counted) - 1))",
        "centred = centred * 1.0",
        VARIANTS,
    ),
    Mutation(f"{RL}/loss.py", "(sums_S / counts_S)[index_N]", "sums_S[index_N]", VARIANTS),
    Mutation(f"{RL}/loss.py", '"tis" else 1 + config.eps_high', '"tis" else 1 + config.eps_low', VARIANTS),
    Mutation(f"{RL}/loss.py", "return float(max(num_tokens, 1))", "return float(num_rollouts_planned)", VARIANTS),
    Mutation(
        f"{RL}/variants.py", 'eps_low=0.2, eps_high=0.28, normaliser="tokens"', "eps_low=0.2, eps_high=0.28", VARIANTS
    ),
    # Steps: own reward only; the own return in the baseline of the others; lost rollouts counted.
    Mutation(
        f"{RL}/forge/reward_to_go.py",
        "reward_to_go(rewards_S) - baseline",
        "rewards_S - baseline",
        "tests/rl/forge/test_reward_to_go.py",
    ),
    Mutation(
        f"{RL}/forge/reward_to_go.py",
        "return (returns_G.sum() - returns_G) / (len(returns_G) - 1)",
        "return np.full_like(returns_G, returns_G.mean())",
        "tests/rl/forge/test_reward_to_go.py",
    ),
    Mutation(
        f"{RL}/forge/reward_to_go.py",
        "if counts_in_group(rollout)]",
        "if rollout.segments]",
        "tests/rl/forge/test_reward_to_go.py",
    ),
    # Replay gather: gates of the own experts; the recording ignored; the filter turned round; predictors one off.
    Mutation(
        "composer2/model/moe.py",
        "weights_TK = scores_TE.gather(1, selection.expert_ids_TK)",
        "weights_TK = scores_TE.gather(1, own_TK)",
        f"{FAULTS}/test_fault_29_replayed_expert_without_weight.py",
    ),
    Mutation(
        "composer2/model/moe.py",
        "weights_TK = scores_TE.gather(1, selection.expert_ids_TK)",
        "weights_TK = scores_TE.masked_fill(\n"
        "            ~torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, own_TK, True), 0.0\n"
        "        ).gather(1, selection.expert_ids_TK)",
        f"{FAULTS}/test_fault_29_replayed_expert_without_weight.py",
    ),
    Mutation(
        "composer2/model/router_replay.py",
        "recorded = torch.where(routes_TK < 0, own_TK, routes_TK)",
        "recorded = own_TK",
        f"{FAULTS}/test_fault_25_replay_on_dead_routers.py",
    ),
    Mutation(
        "composer2/model/router_replay.py",
        "(scores_TE.gather(1, recorded) < tau * floor_T1)",
        "(scores_TE.gather(1, recorded) > tau * floor_T1)",
        "tests/model/test_router_replay.py",
    ),
    Mutation(
        f"{RL}/train.py",
        "hidden_ND = out.hidden_BTD[:, :-1][batch.loss_mask[:, 1:]]",
        "hidden_ND = out.hidden_BTD[:, 1:][batch.loss_mask[:, 1:]]",
        f"{FAULTS}/test_fault_57_tree_drifts_from_flat.py",
    ),
    # Balance: unlike counts of micro-batches; ranks by length; a dummy row that is trained; caps ignored.
    Mutation(
        f"{RL}/balance.py",
        "            for members, bins in zip(ranks, tight, strict=True)\n",
        "            for members, bins in zip(ranks, tight, strict=True)\n"
        "            for num_micro_batches in [max(1, len(bins))]\n",
        f"{FAULTS}/test_fault_49_ranks_of_unequal_counts.py",
    ),
    Mutation(
        f"{RL}/balance.py",
        "heapq.heapreplace(heap, (total + float(costs_N[index]), rank))",
        "heapq.heapreplace(heap, (total + 1.0, rank))",
        BALANCE,
    ),
    Mutation(f"{RL}/balance.py", "loss_mask=np.zeros(1, dtype=bool),", "loss_mask=np.ones(1, dtype=bool),", BALANCE),
    Mutation(
        f"{RL}/balance.py",
        "(total + float(costs_N[index]), number, free - length)",
        "(total + float(costs_N[index]), number, free)",
        BALANCE,
    ),
    # What is drawn: a task twice; harder families less often; ratios left to chance.
    Mutation(
        f"{RL}/curriculum.py",
        "order.append(tasks[left[families[family]].pop()])",
        "order.append(tasks[left[families[family]][-1]])",
        "tests/rl/test_curriculum.py",
    ),
    Mutation(
        f"{RL}/curriculum.py",
        "(effort_F**strength).tolist()",
        "(effort_F**-strength).tolist()",
        "tests/rl/test_curriculum.py",
    ),
    Mutation(
        f"{RL}/forge/stages.py",
        "chosen = int(deadline_K.argmin())",
        "chosen = int(due_K.argmax())",
        "tests/rl/forge/test_stages.py",
    ),
    # Length penalty and reward.
    Mutation(
        f"{RL}/length_penalty.py",
        "z = (1.0 - q) * log_term",
        "z = (q - 1.0) * log_term",
        "tests/rl/test_length_penalty.py",
    ),
    Mutation(
        f"{RL}/reward.py",
        "for start, weight in reversed(self.schedule)",
        "for start, weight in self.schedule",
        "tests/rl/test_reward.py",
    ),
    # Life cycle: a task accepted twice; staleness unbounded; ready groups dropped by a restart; late events believed.
    Mutation(
        f"{RL}/system/reconciler.py", "if task_id in self._offered:", "if False:", "tests/rl/system/test_reconciler.py"
    ),
    Mutation(
        f"{RL}/system/reconciler.py",
        "<= self.max_staleness",
        "<= self.max_staleness + 1",
        "tests/rl/system/test_reconciler.py",
    ),
    Mutation(
        f"{RL}/system/reconciler.py",
        'for group in snapshot["groups"]:',
        'for group in snapshot["groups"][:0]:',
        f"{FAULTS}/test_fault_84_generated_but_untrained_samples_vanish.py",
    ),
    Mutation(
        f"{RL}/system/reconciler.py",
        "entry.state is not GroupState.RUNNING or entry.attempt != attempt",
        "entry.state is not GroupState.RUNNING",
        "tests/rl/system/test_reconciler.py",
    ),
    # Prefix trees: positions of the layout instead of depths; branches unseen below, or seen by what follows; merged in
    # spite of other experts; rows, prompts and temperatures mixed up; a trained token read at itself.
    Mutation(
        f"{RL}/prefix_tree.py",
        "np.arange(n.start, n.stop, dtype=np.int32)",
        "np.arange(n.offset, n.offset + n.stop - n.start, dtype=np.int32)",
        TREE,
    ),
    Mutation(
        f"{RL}/prefix_tree.py", "ends[id(n)], dtype=np.int32", "n.offset + n.stop - n.start, dtype=np.int32", TREE
    ),
    Mutation(f"{RL}/prefix_tree.py", "ends[id(n)], dtype=np.int32", "total, dtype=np.int32", TREE),
    Mutation(f"{RL}/prefix_tree.py", "tree.visible_until + start", "tree.visible_until", TREE),
    Mutation(f"{RL}/prefix_tree.py", "np.flatnonzero(~(equal & same_routes))", "np.flatnonzero(~equal)", TREE),
    Mutation(f"{RL}/prefix_tree.py", "(sample.temperature, sample.group), []", "(sample.temperature, 0), []", TREE),
    Mutation(
        f"{RL}/prefix_tree.py",
        "start + where[np.flatnonzero(sample.loss_mask) - 1]",
        "start + where[np.flatnonzero(sample.loss_mask) - 2]",
        TREE,
    ),
    Mutation(
        "composer2/model/attention.py",
        "(index_T[:, None] < visible_until_BT[:, None, :])",
        "(index_T[:, None] <= visible_until_BT[:, None, :])",
        TREE,
    ),
]
