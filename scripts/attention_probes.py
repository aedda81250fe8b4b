"""Measures what sliding windows lose: tiny models with full, hybrid and windowed attention on two probe tasks.

    python scripts/attention_probes.py --out DIR [--quick]

In: nothing. Out: `DIR/attention_probes.json` (flat figures) and `DIR/attention_probes.png`. Four layers of
grouped-query attention, trained alike on rows of arrows between nodes and queries about them
(composer2/model/pretrain/probes.py): retrieval follows one arrow, multi-hop two. Arms:

    full     every layer sees everything          hybrid1  the last of four layers, the others a window of 12
    hybrid   every second layer                   window   no layer

    retrieval_acc_{ARM}, multihop_acc_{ARM}          accuracy where every arrow to read lies beyond the window
    …_acc_inside_{ARM}                               where every arrow lies inside it
    …_acc_beyond_reach_{ARM}                         further away than all windows together reach, layers * (window - 1)
    retrieval_loss_of_{ARM}, multihop_loss_of_{ARM}  accuracy of `full` less that of the arm, beyond the window
    chance                                           accuracy of a guess among the row's other nodes

Source: row M10.
Choice: training begins with retrieval alone; the same rows mixed from the start were not learned in this budget. Half
of the rows have no gap, so that every arm meets queries whose arrows its window holds, and can learn the task there.
Read `…_acc_inside` first: an arm at chance there has not learned the task at all, and what it loses beyond the window
is then no measure of the window alone.
Choice: one seed an arm in the quick form, medians over three seeds otherwise; everything else is equal. Accuracies
have a standard error of about 0.01 (thousands of queries), which does not include the spread between trainings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F

from composer2.log import Console, Stage
from composer2.model.config import ModelConfig
from composer2.model.pretrain.optim import OptimConfig, clip_gradients, make_optimizer
from composer2.model.pretrain.probes import NO_ANSWER, ProbeBatch, ProbeConfig, probe_batch
from composer2.model.transformer import Transformer, init_weights

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAYERS = 4
WINDOW = 12
ARMS = {"full": 1, "hybrid": 2, "hybrid1": 4, "window": 0}
"""Name -> of how many consecutive layers the last sees everything."""
PROBE = ProbeConfig(num_nodes=8, num_arrows=4, num_queries=12, max_gap=40)
NEAR = replace(PROBE, max_gap=0, num_queries=4)
"""Rows whose queries have their arrows inside the window, but for a few."""
ROWS = 32
"""Rows of a training step."""
RETRIEVAL_FRAC = 0.4
"""Part of the training, at its beginning, that asks for one arrow only."""
EVAL_ROWS = 2000
TASKS = {"retrieval": 1, "multihop": 2}


def build(every: int, seed: int) -> Transformer:
    """An untrained model of an arm."""
    config = ModelConfig(
        vocab_size=PROBE.vocab_size,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        intermediate_size=128,
        attention="grouped",
        num_attention_heads=4,
        num_key_value_heads=2,
        qk_norm="head",
        sliding_window=None if every == 1 else WINDOW,
        full_attention_every=every,
        n_shared_experts=0,
        num_nextn_predict_layers=0,
        initializer_range=0.03,
    )
    model = Transformer(config)
    init_weights(model, seed)
    return model


def answers(model: Transformer, batch: ProbeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over the nodes [N, nodes] and right answers [N] at the N queries of a batch, row by row."""
    labels_BT = torch.from_numpy(batch.answers_BT)
    asked_BT = labels_BT != NO_ANSWER
    hidden_BTD = model(torch.from_numpy(batch.token_ids_BT), with_logits=False).hidden_BTD
    return model.lm_head(hidden_BTD[asked_BT])[:, : PROBE.num_nodes], labels_BT[asked_BT]


def train(model: Transformer, optim: OptimConfig, seed: int, stage: Stage, done: int) -> None:
    """Cross-entropy at the queries; rows of all lengths, first of retrieval, then of both tasks."""
    rng = np.random.default_rng(seed)
    optimizer = make_optimizer(model.named_parameters(), optim)
    for step in range(optim.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = optim.lr_at(step)
        hops = 1 if step < RETRIEVAL_FRAC * optim.num_steps else None
        far, near = (
            F.cross_entropy(*answers(model, probe_batch(probe, ROWS // 2, rng, hops=hops))) for probe in (PROBE, NEAR)
        )
        loss = (far + near) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(optimizer, optim.clip)
        optimizer.step()
        if step % 20 == 0:
            stage.update(done + step, loss=float(loss.detach()))


@torch.no_grad()
def evaluate(model: Transformer) -> dict[str, np.ndarray]:
    """For each query of the longest rows: hops, nearest and farthest arrow, and whether the answer is right.

    Half of the rows have no gap, for queries whose arrows all lie inside the window."""
    parts = []
    for seed in range(EVAL_ROWS // 100):
        batch = probe_batch(PROBE if seed % 2 else NEAR, 100, np.random.default_rng([7, seed]), is_longest=True)
        logits, labels = answers(model, batch)
        asked = batch.answers_BT != NO_ANSWER
        right = (logits.argmax(-1) == labels).numpy()
        parts.append((batch.hops_BT[asked], batch.nearest_BT[asked], batch.farthest_BT[asked], right))
    names = ("hops", "nearest", "farthest", "right")
    return {name: np.concatenate(columns) for name, columns in zip(names, zip(*parts, strict=True), strict=True)}


def accuracies(found: dict[str, np.ndarray]) -> dict[str, float]:
    """Figures of one trained model."""
    figures = {}
    places = {
        "acc": found["nearest"] >= WINDOW,
        "acc_inside": found["farthest"] < WINDOW,
        "acc_beyond_reach": found["nearest"] > LAYERS * (WINDOW - 1),
    }
    for task, hops in TASKS.items():
        for name, place in places.items():
            chosen = place & (found["hops"] == hops)
            if not chosen.any():
                raise RuntimeError(f"no {task} query falls into {name}")
            figures[f"{task}_{name}"] = float(found["right"][chosen].mean())
    return figures


def draw(curves: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Accuracy against the distance of the nearest arrow, one panel a task."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, (task, hops) in zip(panels, TASKS.items(), strict=True):
        for arm, found in curves.items():
            chosen = found["hops"] == hops
            bins = found["nearest"][chosen] // 3
            shown = [b for b in np.unique(bins) if (bins == b).sum() >= 30]
            heights = [found["right"][chosen][bins == b].mean() for b in shown]
            panel.plot([3 * b + 1 for b in shown], heights, "o-", ms=3, label=arm)
        panel.axhline(PROBE.chance, ls=":", color="0.5")
        panel.axvline(WINDOW, ls="--", color="0.7")
        panel.axvline(LAYERS * (WINDOW - 1), ls="--", color="0.7")
        panel.set_title(task)
        panel.set_xlabel("tokens back to the nearest arrow")
    panels[0].set_ylabel("accuracy")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="one seed instead of three")
    parser.add_argument("--steps", type=int, default=1400, help="training steps of an arm")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    seeds = 1 if arguments.quick else 3
    optim = OptimConfig(
        lr=2e-3, betas=(0.9, 0.98), schedule="wsd", schedule_steps=arguments.steps, warmup_steps=50, decay_frac=0.3
    )
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    curves: dict[str, dict[str, np.ndarray]] = {}
    total = len(ARMS) * seeds * arguments.steps
    with Console().stage("attention probes", total=total) as stage:
        done = 0
        for arm, every in ARMS.items():
            for seed in range(seeds):
                model = build(every, seed)
                train(model, optim, seed, stage, done)
                done += arguments.steps
                found = evaluate(model)
                measured[arm].append(accuracies(found))
                curves.setdefault(arm, found)
                stage.update(done, arm=arm, **measured[arm][-1])
    figures: dict[str, float] = {"chance": PROBE.chance, "window": WINDOW, "reach": LAYERS * (WINDOW - 1)}
    figures |= {"seeds": seeds, "steps": arguments.steps}
    for arm, runs in measured.items():
        figures |= {f"{name}_{arm}": statistics.median(run[name] for run in runs) for name in runs[0]}
    for task in TASKS:
        for arm in ARMS:
            figures[f"{task}_loss_of_{arm}"] = figures[f"{task}_acc_full"] - figures[f"{task}_acc_{arm}"]
    draw(curves, arguments.out / "attention_probes.png")
    (arguments.out / "attention_probes.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
