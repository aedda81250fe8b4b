"""The report of a run: one self-contained HTML file with the figures of the report redrawn from the run's own files.

In: a run directory. Out: `report.html` in it; nothing is fetched when it is opened, and nothing but the run is read.

Source: report Fig. 2 right, Fig. 5, §3.1 (MTP), §4 (RL), §6.2 (mismatch, staleness); rows P4 P5 R7 V2 X3.
Choice: what a run has not measured is said to be missing, never estimated.

The contract with whoever writes `metrics.jsonl`, by stage:
  cpt   loss, heldout_loss, tokens                     mtp   loss, acceptance                  sft   loss
  rl    reward_mean, best_of_k, pass_rate, response_tokens, turns, entropy, mismatch_p50/_p99/_max, staleness_mean,
        staleness_hist {lag: tokens}, degenerate_frac, replaced_expert_frac, summaries, clip_frac, grad_norm,
        events {name: count}
  eval  split, when (sft, rl-NN, rl), pass_at_1, pass_ci_low, pass_ci_high, best_of_8, tokens, turns,
        by_kind {kind: {n, pass_at_1}}
and `summary.json`: flat numbers; those of KEY_NUMBERS are shown large, mismatch_{p50,p99,max}_{replay_off,replay_on,
replay_filter} become bars, mtp_acceptance_{mid,after_move,end} too, the rest is a table.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from composer2 import report_figures as draw
from composer2.inspect_run import Record, RunFiles, choose_rollouts, load_run
from composer2.log import format_figure
from composer2.report_page import escape, figures, key_numbers, page, rollout_html, section, table

REPORT_FILE = "report.html"
NUM_ROLLOUTS = 6

SAME_AS = {
    "best_of_k": "best_of_group",
    "response_tokens": "sampled_tokens",
    "turns": "num_turns",
    "degenerate_frac": "degenerate_group_frac",
}
"""Names of the contract and the names `rl.metrics` gives to the same quantity."""

KEY_NUMBERS = {
    "cpt_heldout_loss_start": "held-out loss at the start of pretraining, nats per token",
    "cpt_heldout_loss_end": "and at its end",
    "loss_fit_r2": "R² of loss against log tokens",
    "mtp_acceptance": "of first MTP drafts accepted",
    "sft_pass_at_1": "pass@1 before RL, unseen compositions",
    "rl_pass_at_1": "pass@1 after RL",
    "sft_best_of_8": "best of 8 before RL",
    "rl_best_of_8": "best of 8 after RL",
    "staleness_mean": "policy versions a token lags behind, mean",
    "summaries_used": "self-summaries used in training",
}


# ---------------------------------------------------------------------------------------------------------------------
# Data


def contract_records(records: Sequence[Record]) -> list[Record]:
    """Metric records under the names of the contract; `event/x` means per rollout become counts in `events`."""
    renamed = []
    for record in records:
        new = dict(record)
        for name, other in SAME_AS.items():
            if name not in new and other in new:
                new[name] = new[other]
        if "events" not in new and any(key.startswith("event/") for key in new):
            rollouts = new.get("num_rollouts", 1)
            found = {key[6:]: value * rollouts for key, value in new.items() if key.startswith("event/")}
            new["events"] = {name: round(count) for name, count in found.items()}
        renamed.append(new)
    return renamed


def summed(records: Sequence[Record], name: str) -> dict[str, float]:
    """Sum of a dict-valued RL metric over all steps, largest count first."""
    total: Counter[str] = Counter()
    for record in records:
        if record["stage"] == "rl" and isinstance(record.get(name), Mapping):
            total.update({str(key): value for key, value in record[name].items()})
    return dict(total.most_common())


def before_after(records: Sequence[Record]) -> list[list[str]]:
    """One row a split: pass@1, best-of-8, tokens and turns before and after RL."""
    evals = [r for r in records if r["stage"] == "eval"]
    rows = []
    for split in dict.fromkeys(str(r["split"]) for r in evals):
        at = {str(r["when"]): r for r in evals if r["split"] == split}
        cells = [split]
        for name in ("pass_at_1", "best_of_8", "tokens", "turns"):
            cells.append(" → ".join(_cell(at.get(when), name) for when in ("sft", "rl")))
        rows.append(cells)
    return rows


def _cell(record: Record | None, name: str) -> str:
    if record is None or not isinstance(record.get(name), int | float):
        return "–"
    text = f"{record[name]:.3f}" if name in ("pass_at_1", "best_of_8") else f"{record[name]:.1f}"
    if name == "pass_at_1" and "pass_ci_low" in record and "pass_ci_high" in record:
        text += f" [{record['pass_ci_low']:.3f}, {record['pass_ci_high']:.3f}]"
    return text


def kind_rows(records: Sequence[Record], rollouts: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the task-kind table: from the first split that counts kinds, else from the kept rollouts."""
    counted = [r for r in records if r["stage"] == "eval" and isinstance(r.get("by_kind"), Mapping)]
    evals = {str(r["when"]): r for r in counted if r["split"] == counted[0]["split"]}
    if evals:
        whens = [when for when in evals if when in ("sft", "rl")] or list(evals)
        kinds = dict.fromkeys(kind for when in whens for kind in evals[when]["by_kind"])
        rows = []
        for kind in kinds:
            cells = [evals[when]["by_kind"].get(kind) for when in whens]
            counts = [format_figure(cell["n"]) for cell in cells if cell]
            rows.append([kind, counts[0], *(f"{cell['pass_at_1']:.3f}" if cell else "–" for cell in cells)])
        return ["kind of task", "tasks", *(f"pass@1, {when}" for when in whens)], rows
    groups: dict[str, list[Record]] = {}
    for rollout in rollouts:
        groups.setdefault(str(rollout.get("kind") or rollout.get("category") or "other"), []).append(rollout)
    rows = []
    for kind, members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        passed = sum(bool(m.get("passed")) for m in members) / len(members)
        turns = sum(m.get("stats", {}).get("num_turns", 0) for m in members) / len(members)
        rows.append([kind, str(len(members)), f"{passed:.3f}", f"{turns:.2f}"])
    return ["kind of task", "kept rollouts", "share passed", "mean turns"], rows


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def _summary_section(run: RunFiles, records: Sequence[Record]) -> str:
    summary = run.summary
    keys = [(format_figure(summary[name]), label) for name, label in KEY_NUMBERS.items() if name in summary]
    others = [[name, format_figure(value)] for name, value in summary.items() if isinstance(value, int | float | str)]
    all_numbers = table(["figure", "value"], others)
    folded = f"<details><summary>All {len(others)} figures of the summary</summary>{all_numbers}</details>"
    return section(
        "numbers",
        "Key numbers",
        "Pass@1 is the mean over tasks and samples with its 95 % interval over tasks; arrows: before to after RL.",
        key_numbers(keys),
        table(["held-out tasks", "pass@1", "best of 8", "tokens", "turns"], before_after(records)),
        folded if others else None,
    )


def _pretraining_sections(run: RunFiles, records: Sequence[Record]) -> list[str]:
    bars = {
        label: run.summary[f"mtp_acceptance_{key}"]
        for label, key in (("mid-run checkpoint", "mid"), ("after the move", "after_move"), ("end", "end"))
        if isinstance(run.summary.get(f"mtp_acceptance_{key}"), int | float)
    }
    step, nats = "optimizer step", "loss (nats per token)"
    return [
        section(
            "cpt",
            "Continued pretraining",
            "The report finds that evaluation loss falls log-linearly through the run (its Fig. 2, right).",
            figures(
                (
                    draw.styled(draw.loss_fit, records, run.summary),
                    "Held-out loss at log-spaced points; fit after warm-up.",
                ),
                (draw.styled(draw.curves, records, "cpt", {"loss": ""}, x=step, y=nats), "Training loss."),
            ),
        ),
        section(
            "mtp",
            "Multi-token prediction",
            "A draft layer is trained by self-distillation on a checkpoint from the middle of the run, moved to the "
            "trunk at the end of the phase, then trained jointly. Acceptance: how often the first draft stands.",
            figures(
                (draw.styled(draw.acceptance_bars, bars), "Acceptance at the three moments."),
                (draw.styled(draw.acceptance, records), "Acceptance through training."),
                (
                    draw.styled(draw.curves, records, "mtp", {"loss": ""}, x=step, y="KL to the main head (nats)"),
                    "Distillation loss.",
                ),
            ),
        ),
        section(
            "sft",
            "Supervised fine-tuning",
            "Scripted-expert trajectories; the tokens of the expert carry the loss, tool output does not.",
            figures((draw.styled(draw.curves, records, "sft", {"loss": ""}, x=step, y=nats), "Training loss.")),
        ),
    ]


def _rl_sections(run: RunFiles, records: Sequence[Record]) -> list[str]:
    def rl(names: dict[str, str], y: str, *, log: bool = False) -> str | None:
        return draw.styled(draw.curves, records, "rl", names, x="RL step", y=y, log=log)

    hist = draw.styled(
        draw.histogram,
        summed(records, "staleness_hist"),
        x="policy versions behind the trainer",
        y="share of sampled tokens",
        name="staleness",
    )
    events = [[name, format_figure(count)] for name, count in summed(records, "events").items()]
    kind_head, kind_body = kind_rows(records, run.rollouts)
    rewards = {"reward_mean": "mean reward", "best_of_k": "best of group", "pass_rate": "mean pass"}
    gaps = {"mismatch_max": "maximum", "mismatch_p99": "99th percentile", "mismatch_p50": "median"}
    return [
        section(
            "reward",
            "Reward: mean and best of K",
            "The report sees both rise together (its Fig. 5): RL widens what repeated sampling reaches, it does not "
            "only sharpen. A best-of-8 that falls while the mean rises would be the opposite.",
            figures(
                (draw.styled(draw.evaluation, records), "Held-out tasks, 95 % intervals over tasks."),
                (
                    rl(rewards, "per rollout"),
                    "Training groups, each prompt seen once. Light: every step; dark: mean of nine.",
                ),
            ),
        ),
        section(
            "length",
            "Length",
            "A concave penalty makes the first token of effort dearer than the hundredth.",
            figures(
                (rl({"response_tokens": ""}, "sampled tokens per rollout"), "Response length."),
                (rl({"turns": ""}, "turns per rollout"), "Turns."),
                (rl({"summaries": ""}, "summaries of a step"), "Self-summaries."),
            ),
        ),
        section(
            "entropy",
            "Entropy and updates",
            "Entropy of the policy at the tokens it sampled; how much of a step is clipped, and the gradient norm.",
            figures(
                (rl({"entropy": ""}, "entropy (nats per token)"), "Entropy."),
                (rl({"grad_norm": ""}, "gradient norm"), "Gradient norm before clipping."),
                (rl({"clip_frac": ""}, "share of tokens"), "Tokens whose ratio was clipped."),
            ),
        ),
        section(
            "mismatch",
            "Trainer and sampler",
            "The same tokens under the same weights get different log-probs in sampler and trainer; router replay "
            "removes the part that comes from different experts.",
            figures(
                (draw.styled(draw.mismatch_bars, run.summary), "Same rollouts and weights, three settings."),
                (rl(gaps, "|Δ log-prob| (nats)", log=True), "On every training step, replay on; staleness included."),
                (
                    rl({"replaced_expert_frac": ""}, "share of recorded experts"),
                    "Recorded experts that the plausibility filter replaced.",
                ),
            ),
        ),
        section(
            "staleness",
            "Staleness",
            "Samplers run ahead of the trainer and take new weights in mid-rollout; every token knows its version.",
            figures(
                (hist, "All trained tokens."), (rl({"staleness_mean": ""}, "versions, mean over tokens"), "By step.")
            ),
        ),
        section(
            "groups",
            "Degenerate groups and events",
            "A group whose rewards are all equal teaches nothing. Events are what went wrong inside episodes, counted.",
            figures((rl({"degenerate_frac": ""}, "share of groups"), "Groups with equal rewards.")),
            table(["event", "count"], events),
        ),
        section("kinds", "Kinds of tasks", "What is easy and what is not.", table(kind_head, kind_body)),
    ]


def _rollouts_section(run: RunFiles) -> str:
    chosen = choose_rollouts(run.rollouts, NUM_ROLLOUTS)
    parts = [rollout_html(record, is_open=i == 0) for i, record in enumerate(chosen)]
    lead = "Chosen to differ: passed and failed, after feedback, with a summary, from different splits. Not a sample."
    return section("rollouts", "Rollouts, turn by turn", lead, *parts)


# ---------------------------------------------------------------------------------------------------------------------
# The page

ANCHORS = {
    "numbers": "numbers", "cpt": "pretraining", "mtp": "MTP", "sft": "SFT", "reward": "reward", "length": "length",
    "entropy": "entropy", "mismatch": "mismatch", "staleness": "staleness", "groups": "groups", "kinds": "kinds",
    "rollouts": "rollouts",
}  # fmt: skip


def report_html(run: RunFiles) -> str:
    """The whole page of a run as text."""
    records = contract_records(run.metrics)
    name = run.path.resolve().name
    facts = [f"{key} {run.config[key]}" for key in ("name", "preset", "seed", "start") if run.config.get(key, "") != ""]
    nav = "".join(f'<a href="#{anchor}">{label}</a>' for anchor, label in ANCHORS.items())
    head = (
        f"<h1>composer2 run {escape(name)}</h1>\n"
        f'<p class="lead">{escape(" · ".join(facts) or "no config file")}. Drawn from the files of this run alone.</p>'
        f"<nav>{nav}</nav>"
    )
    sections = [
        _summary_section(run, records),
        *_pretraining_sections(run, records),
        *_rl_sections(run, records),
        _rollouts_section(run),
    ]
    return page(f"composer2 run {name}", "\n".join([head, *sections]))


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run directory, in one rename, and return its path. ValueError for a folder without a
    run."""
    run = load_run(run_dir)
    path = run.path / REPORT_FILE
    partial = path.with_name(REPORT_FILE + ".partial")
    partial.write_text(report_html(run), encoding="utf-8")
    os.replace(partial, path)
    return path
