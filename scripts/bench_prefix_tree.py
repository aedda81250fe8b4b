"""Measures what prefix-tree merging saves: a training step on merged and on separate samples, same loss and gradient.

    python scripts/bench_prefix_tree.py --out DIR [--quick]

In: nothing. Out: `DIR/bench_prefix_tree.json` (flat figures) and `DIR/bench_prefix_tree.png`. Groups of 8 and 16
samples of one prompt share a prefix of 0-95 % of their tokens (at most 512); the router replays recorded experts.

    token_ratio_g{G}_s{S}   tokens of the separate samples / tokens of the tree
    speedup_g{G}_s{S}       CPU time of forward and backward, separate / merged, tree building included
    speedup_over_token_ratio_at_90   smallest ratio of the two over the group sizes at 90 % sharing
    max_rel_grad_error      largest |difference| of any gradient tensor over its largest entry, float32, all settings

Source: MiniMax-M2 report (prefix-tree merging); row R11.
Choice: both sides alternate and the median of paired CPU times is taken, so that a busy machine changes neither side
alone. Separate samples are packed into rows of about the same number of tokens as the tree, as a trainer would.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch

from composer2.log import Console
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.loss import policy_loss
from composer2.rl.train import RLConfig, micro_batches, trained_logprobs
from composer2.types import Sample

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHARES = (0, 25, 50, 75, 90, 95)
"""Percent of a sample's tokens that its whole group has in common."""
GROUPS = (8, 16)
LENGTH = 540
"""Tokens of a sample; 95 % of it is the longest prefix, 512."""
CONFIG = RLConfig(row_length=1152, rows_per_batch=4, replay_tau=0.0)


def group_of(size: int, share: int, config: ModelConfig, rng: np.random.Generator) -> list[Sample]:
    """Samples with a common beginning, tokens and recorded experts at random; what follows the prefix is trained."""
    prefix = max(1, LENGTH * share // 100)
    layers, chosen = config.num_moe_layers, config.num_experts_per_tok

    def routes(count: int) -> np.ndarray:
        scores = rng.random((count, layers, config.n_routed_experts))
        return scores.argsort(axis=-1)[..., :chosen].astype(np.int16)

    tokens, experts = rng.integers(0, config.vocab_size, prefix), routes(prefix)
    samples = []
    for _ in range(size):
        rest = LENGTH - prefix
        mask = np.arange(LENGTH) >= prefix
        samples.append(
            Sample(
                token_ids=np.concatenate([tokens, rng.integers(0, config.vocab_size, rest)]).astype(np.int32),
                loss_mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                behaviour_logprobs=np.where(mask, -np.log(config.vocab_size), 0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                routes=np.concatenate([experts, routes(rest)]),
            )
        )
    return samples


def one_step(model: Transformer, samples: list[Sample], config: RLConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """(CPU seconds, gradients) of packing, forward and backward."""
    model.zero_grad(set_to_none=True)
    started = time.process_time()
    for batch, tree in micro_batches(samples, config, "cpu"):
        logprobs_BT, _, _ = trained_logprobs(model, batch, config, tree=tree)
        loss, _ = policy_loss(logprobs_BT, batch, config.loss, float(len(samples) * LENGTH))
        loss.backward()  # type: ignore[no-untyped-call]
    seconds = time.process_time() - started
    return seconds, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def grad_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor over the largest entry of the other side."""
    if ours.keys() != theirs.keys():
        raise RuntimeError("the two sides have gradients of different parameters")
    return max(float((ours[n] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for n, g in theirs.items())


def measure(model: Transformer, size: int, share: int, repeats: int) -> dict[str, float]:
    """Figures of one setting."""
    samples = group_of(size, share, model.config, np.random.default_rng([size, share]))
    merged, separate = (replace(CONFIG, merge_prefixes=flag) for flag in (True, False))
    trees = [tree for _, tree in micro_batches(samples, merged, "cpu") if tree is not None]
    ratios, error = [], 0.0
    one_step(model, samples, merged)  # warm up
    for _ in range(repeats):
        fast, ours = one_step(model, samples, merged)
        slow, theirs = one_step(model, samples, separate)
        ratios.append(slow / fast)
        error = max(error, grad_error(ours, theirs))
    return {
        "token_ratio": sum(t.num_unmerged for t in trees) / sum(t.num_merged for t in trees),
        "speedup": statistics.median(ratios),
        "grad_error": error,
    }


def draw(figures: dict[str, float], path: Path) -> None:
    """Speed-up against token ratio, for both group sizes."""
    figure, axes = plt.subplots(figsize=(5, 4))
    highest = max(value for name, value in figures.items() if name.startswith("token_ratio"))
    axes.plot([1, highest], [1, highest], "--", color="0.6", label="speed-up = token ratio")
    for size in GROUPS:
        x = [figures[f"token_ratio_g{size}_s{share}"] for share in SHARES]
        y = [figures[f"speedup_g{size}_s{share}"] for share in SHARES]
        axes.plot(x, y, "o-", label=f"groups of {size}")
    axes.set_title("A training step on a prefix tree")
    axes.set_xlabel("separate / merged tokens")
    axes.set_ylabel("separate / merged CPU time")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 9")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model = Transformer(ModelConfig(vocab_size=1024))
    init_weights(model, 0)
    figures: dict[str, float] = {}
    with Console().stage("prefix trees", total=len(GROUPS) * len(SHARES)) as stage:
        for size in GROUPS:
            for share in SHARES:
                measured = measure(model, size, share, 3 if arguments.quick else 9)
                figures |= {f"{name}_g{size}_s{share}": value for name, value in measured.items()}
                stage.update(len(figures) // 3, **measured)
    at_90 = [figures[f"speedup_g{size}_s90"] / figures[f"token_ratio_g{size}_s90"] for size in GROUPS]
    figures["speedup_over_token_ratio_at_90"] = min(at_90)
    figures["max_rel_grad_error"] = max(value for name, value in figures.items() if name.startswith("grad_error"))
    figures["token_ratio"] = max(value for name, value in figures.items() if name.startswith("token_ratio_"))
    figures["speedup"] = max(value for name, value in figures.items() if name.startswith("speedup_g"))
    (arguments.out / "bench_prefix_tree.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(figures, arguments.out / "bench_prefix_tree.png")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
