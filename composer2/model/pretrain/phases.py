"""The phases of continued pretraining, each a function that can be stopped anywhere and called again.

In: a model, a tokenised corpus (or examples by step), a config, a `RunControl`. Out: `PhaseResult`; weights in place.

Source: report §3.1: most compute at short sequences, then a shorter long-context extension, then a short supervised
fine-tuning; MTP layers from scratch on a mid-run checkpoint, jointly in the last two phases. Rows P3 P4 P5.
The order of a whole run:
  run_cpt (phase 1, leaves a checkpoint of the middle)  ->  mid_run_copy, train_mtp_from_scratch, move_mtp
  ->  extend_context, run_long_context (phase 2)  ->  run_sft (phase 3)
Choice: context is extended by YaRN, and by changing the config alone: the weights stay.
Choice: every phase has its own folder and its own optimizer; a phase whose folder says it is finished loads its result
and returns at once, so a recipe resumes by calling the same functions again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.pretrain.config import CptConfig, MtpConfig, SftConfig
from composer2.model.pretrain.data import Example, PackedBatches, PretrainBatch, TokenisedCorpus, pack_examples
from composer2.model.pretrain.loop import AutocastMode, LossFn, StepMetrics, evaluate_loss, next_token_loss, train
from composer2.model.pretrain.mtp import joint_loss, mtp_only_loss, mtp_parameters, trunk_parameters
from composer2.model.pretrain.optim import OptimConfig, make_optimizer
from composer2.model.pretrain.state import list_states, load_state, save_state
from composer2.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class EvalPoint:
    """One held-out evaluation."""

    step: int
    """Steps taken before it."""
    tokens: int
    """Training tokens seen before it, in this phase."""
    loss: float
    """Nats a token."""


@dataclass(frozen=True, kw_only=True)
class RunControl:
    """How a phase saves, reports and stops. The default does none of it."""

    folder: Path | None = None
    """Checkpoints of this phase alone; None saves nothing."""
    save_every: int = 50
    """Steps between checkpoints; the last step is always saved, and so is a stop."""
    keep: int = 2
    """Checkpoints kept."""
    on_step: Callable[[StepMetrics], None] | None = None
    """Called after every step. After a kill, steps since the last checkpoint are taken, and reported, again."""
    on_eval: Callable[[EvalPoint], None] | None = None
    """Called after every held-out evaluation."""
    should_stop: Callable[[], bool] | None = None
    """Asked after every step; True saves and returns."""

    def __post_init__(self) -> None:
        for name in ("save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"RunControl.{name} is {getattr(self, name)}, accepted is 1 or more")


@dataclass(frozen=True, kw_only=True)
class PhaseResult:
    """Where a phase stands when its function returns."""

    step: int
    """Steps taken."""
    num_steps: int
    """Steps the phase has."""
    tokens: int
    """Training tokens seen, padding not counted."""
    evals: tuple[EvalPoint, ...] = ()

    @property
    def finished(self) -> bool:
        """False after a stop: call the phase again to go on."""
        return self.step >= self.num_steps


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """What distinguishes one phase from another."""

    optim: OptimConfig
    batches: Callable[[int], PretrainBatch]
    loss_fn: LossFn
    parameters: Iterable[tuple[str, nn.Parameter]]
    """Those that the optimizer moves."""
    accumulation: int = 1
    autocast: AutocastMode = "off"
    router_bias_rate: float = 0.0
    heldout: PretrainBatch | None = None
    eval_steps: Collection[int] = ()
    after_step: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    """Actions by number of steps taken, done before the checkpoint of that step."""


def run_phase(model: Transformer, spec: PhaseSpec, control: RunControl) -> PhaseResult:
    """Resume from the newest checkpoint of the folder, train to the end or to a stop, save, report."""
    optimizer = make_optimizer(spec.parameters, spec.optim)
    step, tokens, evals = 0, 0, list[EvalPoint]()
    if control.folder is not None:
        saved = load_state(control.folder, model=model, optimizer=optimizer)
        if saved is not None:
            step, tokens = saved.step, saved.metadata["tokens"]
            evals = [EvalPoint(**point) for point in saved.metadata["evals"]]
    saved_step = step if step else None

    def evaluate(at: int) -> None:
        if at in spec.eval_steps and spec.heldout is not None and all(point.step != at for point in evals):
            evals.append(EvalPoint(step=at, tokens=tokens, loss=evaluate_loss(model, spec.heldout)))
            if control.on_eval is not None:
                control.on_eval(evals[-1])

    def save(at: int) -> None:
        nonlocal saved_step
        if control.folder is not None and saved_step != at:
            metadata = {"tokens": tokens, "evals": [vars(point) for point in evals]}
            save_state(control.folder, step=at, model=model, optimizer=optimizer, metadata=metadata, keep=control.keep)
            saved_step = at

    def on_step(metrics: StepMetrics) -> None:
        nonlocal tokens
        taken = int(metrics["step"])
        tokens += int(metrics["tokens"])
        if control.on_step is not None:
            control.on_step(metrics)
        evaluate(taken)
        if taken in spec.after_step:
            spec.after_step[taken]()
        if taken % control.save_every == 0:
            save(taken)

    evaluate(step)
    step = train(
        model,
        optimizer,
        spec.optim.lr_at,
        spec.batches,
        spec.loss_fn,
        num_steps=spec.optim.num_steps,
        start_step=step,
        accumulation=spec.accumulation,
        autocast=spec.autocast,
        clip=spec.optim.clip,
        router_bias_rate=spec.router_bias_rate,
        on_step=on_step,
        should_stop=control.should_stop,
    )
    save(step)
    return PhaseResult(step=step, num_steps=spec.optim.num_steps, tokens=tokens, evals=tuple(evals))


# ---------------------------------------------------------------------------------------------------------------------
# The phases


def run_cpt(
    model: Transformer,
    corpus: TokenisedCorpus,
    config: CptConfig,
    *,
    seed: int,
    control: RunControl,
    mid_folder: Path | None = None,
) -> PhaseResult:
    """Phase 1: short rows, trunk only (the MTP layers stay as they were initialised). Evaluates at log-spaced steps.

    After `config.mid_step` the model is written to `mid_folder`, for `mid_run_copy`.
    """

    def leave_middle() -> None:
        if mid_folder is not None and not list_states(mid_folder):
            save_state(mid_folder, step=config.mid_step, model=model, keep=1)

    heldout = corpus.heldout_rows(config.phase1_seq_len, config.eval_rows) if config.eval_steps else None
    spec = PhaseSpec(
        optim=config.optim(1),
        batches=PackedBatches(corpus, seq_len=config.phase1_seq_len, num_rows=config.phase1_rows, seed=seed),
        loss_fn=next_token_loss,
        parameters=trunk_parameters(model),
        accumulation=config.accumulation,
        autocast=config.autocast,
        router_bias_rate=config.router_bias_rate,
        heldout=heldout,
        eval_steps=config.eval_steps,
        after_step={config.mid_step: leave_middle},
    )
    return run_phase(model, spec, control)


def train_mtp_from_scratch(
    model: Transformer, corpus: TokenisedCorpus, config: MtpConfig, *, seed: int, control: RunControl
) -> PhaseResult:
    """Train only the MTP layers of `model` by self-distillation, on the mix and in the order of phase 1."""
    spec = PhaseSpec(
        optim=config.optim(),
        batches=PackedBatches(corpus, seq_len=config.seq_len, num_rows=config.rows, seed=seed),
        loss_fn=mtp_only_loss,
        parameters=mtp_parameters(model),
        accumulation=config.accumulation,
        autocast=config.autocast,
        router_bias_rate=config.router_bias_rate,
    )
    return run_phase(model, spec, control)


def long_context_config(config: ModelConfig, *, trained_len: int, new_len: int) -> ModelConfig:
    """The config of phase 2: YaRN from `trained_len` to `new_len` positions.

    Both magnitude constants are 1 with latent attention, which puts YaRN's temperature into the softmax scale. Grouped
    attention has it on cos and sin, as Qwen3 does: `mscale_all_dim` 0."""
    if new_len <= trained_len:
        raise ValueError(f"new_len is {new_len}, accepted is more than trained_len {trained_len}")
    yarn = YarnConfig(
        factor=new_len / trained_len,
        original_max_position_embeddings=trained_len,
        mscale=1.0,
        mscale_all_dim=1.0 if config.attention == "latent" else 0.0,
    )
    return replace(config, rope_scaling=yarn, max_position_embeddings=new_len)


def extend_context(model: Transformer, new_config: ModelConfig) -> Transformer:
    """A model of `new_config` with the weights of `model`; only RoPE scaling and length may differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    extended = Transformer(new_config)
    for name, tensor in extended.state_dict().items():
        if shapes.get(name) != tuple(tensor.shape):
            raise ValueError(
                f"the new config gives {name} shape {tuple(tensor.shape)}, accepted is {shapes.get(name)} as before"
            )
    extended.load_state_dict(model.state_dict())
    return extended.to(next(model.parameters()).device)


def run_long_context(
    model: Transformer,
    corpus: TokenisedCorpus,
    config: CptConfig,
    *,
    mtp: MtpConfig | None,
    seed: int,
    control: RunControl,
) -> PhaseResult:
    """Phase 2: long rows on an extended model, MTP layers trained jointly. Evaluates before and after."""
    weight = 0.0 if mtp is None else mtp.joint_weight
    spec = PhaseSpec(
        optim=config.optim(2),
        batches=PackedBatches(corpus, seq_len=config.phase2_seq_len, num_rows=config.phase2_rows, seed=seed),
        loss_fn=next_token_loss if weight == 0 else joint_loss(weight),
        parameters=trunk_parameters(model) if weight == 0 else model.named_parameters(),
        accumulation=config.accumulation,
        autocast=config.autocast,
        router_bias_rate=config.router_bias_rate,
        heldout=corpus.heldout_rows(config.phase2_seq_len, config.eval_rows) if config.eval_steps else None,
        eval_steps=(0, config.phase2_steps),
    )
    return run_phase(model, spec, control)


def run_sft(
    model: Transformer,
    examples: Callable[[int], list[Example]],
    config: SftConfig,
    *,
    pad_id: int,
    mtp: MtpConfig | None,
    control: RunControl,
) -> PhaseResult:
    """Phase 3: `examples(step)` gives (token ids, weights) of that step; weight 0 trains nothing on a token.
    With `mtp` the MTP layers are trained jointly on every `mtp.sft_every`-th step.

    `examples` must be a function of the step alone, or a resumed run will not equal an uninterrupted one.
    """

    weight = 0.0 if mtp is None else mtp.joint_weight

    def batches(step: int) -> PretrainBatch:
        return pack_examples(examples(step), row_len=config.row_len, max_len=config.max_len, pad_id=pad_id)

    spec = PhaseSpec(
        optim=config.optim(),
        batches=batches,
        loss_fn=next_token_loss if mtp is None or weight == 0 else joint_loss(weight, mtp.sft_every),
        parameters=trunk_parameters(model) if weight == 0 else model.named_parameters(),
        accumulation=config.accumulation,
        autocast=config.autocast,
        router_bias_rate=config.router_bias_rate,
    )
    return run_phase(model, spec, control)
