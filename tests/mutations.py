"""Do the tests see the faults they are for? `python tests/mutations.py` breaks one line at a time in a copy of the tree
and asserts that the named test then fails.

In: the table below. Out: exit status 0 when every mutant is caught, else 1 with the survivors on stderr.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """One broken line: `original` occurs exactly once in `file`, and `test` goes red when it becomes `mutated`."""

    file: str
    original: str
    mutated: str
    test: str


RL = "composer2/rl"
FAULTS = "tests/faults"
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
    # Mask: prompts trained; the check of first tokens gone; the log-prob read from the token's own logits.
    Mutation(
        f"{RL}/advantage.py",
        "loss_mask=segment.sampled.astype(bool),",
        "loss_mask=np.arange(len(segment.sampled)) > 0,",
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
        f"{RL}/advantage.py",
        "centred = counted - counted.mean()",
        "centred = counted",
        "tests/rl/test_advantage.py",
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
        "            if segment.sampled.any():",
        "            if segment is rollout.segments[-1]:",
        f"{FAULTS}/test_fault_43_summaries_fragment_the_chain.py",
    ),
    Mutation(
        f"{RL}/advantage.py",
        "loss_mask=segment.sampled.astype(bool),",
        "loss_mask=segment.sampled & ~np.isin(\n"
        "            np.arange(len(segment.sampled)),\n"
        "            [t for s in segment.spans if s.kind == 'summary' for t in range(s.start, s.stop)],\n"
        "        ),",
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
        f"{RL}/system/reconciler.py",
        "if task_id in self._offered:",
        "if False:",
        "tests/rl/system/test_reconciler.py",
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
]


def survives(mutation: Mutation, tree: Path) -> str:
    """Empty when the named test fails on the mutant as it should, else what is wrong."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.original) != 1:
        return f"the original line occurs {text.count(mutation.original)} times, accepted is once"
    path.write_text(text.replace(mutation.original, mutation.mutated))
    try:
        return "" if run(mutation.test, tree) == 1 else "the test does not fail"
    finally:
        path.write_text(text)


def run(test: str, tree: Path) -> int:
    """Exit status of pytest on one file of the copied tree: 0 passed, 1 failed, above 1 could not run."""
    # The first entry of the path decides which composer2 is imported: the copy, not an installed one.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False).returncode


def main() -> int:
    """Copy the tree, see that the tests pass there, then try every mutation."""
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in ("composer2", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for test in sorted({mutation.test for mutation in MUTATIONS}):
            if run(test, tree) != 0:
                survivors.append(f"{test}: does not pass before any mutation")
        for mutation in MUTATIONS:
            problem = survives(mutation, tree)
            if problem:
                survivors.append(f"{mutation.file}: {mutation.mutated!r}: {mutation.test}: {problem}")
    sys.stderr.write("".join(f"{line}\n" for line in survivors))
    sys.stderr.write(f"{len(MUTATIONS)} mutations, {len(survivors)} problems\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
