"""Complete runs as configs: `tiny-smoke`, `tiny`, `tiny-long` on a CPU, `small` and `published` on one GPU.

In: a name. Out: a `RunConfig` with every choice of a run in it; the stages themselves are in `pipeline.py`.

Source: report §3 and §4 (the order of the stages); rows M8 P3 R1 X1.
Choice: the report gives neither learning rates nor data sizes; the values of `tiny` are those at which a policy of
1.7 million parameters learns this task family in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from composer2.config import nearest_names
from composer2.env.chat_formats import CHAT_FORMATS
from composer2.env.harness import EpisodeLimits
from composer2.env.tasks.evalsets import EVAL_SETS
from composer2.env.tasks.expert import ExpertConfig, OwnTriesConfig
from composer2.env.tasks.procedural import VARIANTS, TaskConfig
from composer2.model.config import ModelConfig
from composer2.model.pretrain.config import CptConfig, MtpConfig, SftConfig
from composer2.model.pretrain.corpus import CorpusConfig
from composer2.rl.advantage import AdvantageConfig
from composer2.rl.curriculum import CurriculumConfig
from composer2.rl.evaluate import EvalSpec
from composer2.rl.forge.reward_to_go import StepRewardConfig
from composer2.rl.forge.stages import Stage
from composer2.rl.length_penalty import LengthPenaltyConfig
from composer2.rl.reward import RewardComponent, RewardConfig
from composer2.rl.train import RLConfig
from composer2.runner import EngineConfig, PodsConfig

CreditName = Literal["rollout", "steps"]
CREDITS: tuple[CreditName, ...] = ("rollout", "steps")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated before and after RL, and during it."""

    sets: tuple[EvalSpec, ...] = (
        EvalSpec(name="test", num_tasks=300),
        EvalSpec(name="ood", num_tasks=100),
        EvalSpec(name="humaneval", num_tasks=100),
    )
    """Evaluated on the fine-tuned and on the final policy."""
    during: EvalSpec = EvalSpec(name="dev", num_tasks=64, num_samples=4)
    """Evaluated every `rl.eval_every` steps."""
    mismatch_tasks: int = 110
    """Tasks of the trainer/sampler mismatch measurement, 8 samples each; 0 leaves it out."""
    task_seed: int = 7
    """Evaluation tasks depend on this alone, so that runs of different seeds compare."""

    def __post_init__(self) -> None:
        for spec in (*self.sets, self.during):
            if spec.name not in EVAL_SETS:
                raise ValueError(
                    f"EvalSpec.name is {spec.name!r}, accepted is one of {', '.join(EVAL_SETS)}"
                    f"{nearest_names(spec.name, EVAL_SETS)}"
                )
        names = [spec.name for spec in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"EvalConfig.sets names {', '.join(names)}, accepted are different sets")
        if self.mismatch_tasks < 0:
            raise ValueError(f"EvalConfig.mismatch_tasks is {self.mismatch_tasks}, accepted is 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run; saved with it as config.json."""

    preset: str
    """Name the run began from."""
    seed: int = 0
    """Seed of weights, data order, tasks and sampling."""
    start: str = ""
    """A Hugging Face directory, or the folder of a run, whose model RL begins with; empty: train one from scratch.
    Pretraining and fine-tuning are then left out, and their settings, `model` and `vocab_size` are not read."""
    chat: str = "auto"
    """Chat format of a published start: auto finds it from its tokenizer and chat template; else a name."""
    thinks: bool = True
    """A published start reasons before it acts."""
    device: str = "cpu"
    """Device of the trainer: cpu or cuda. That of the sampler is `engine.device`."""
    vocab_size: int = 1024
    """Tokens of the byte-level BPE, specials included."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """Text of continued pretraining."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy before the context extension; `vocab_size` follows the tokenizer."""
    cpt: CptConfig = field(default_factory=CptConfig)
    """Phases 1 and 2."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    """Multi-token-prediction layers."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Phase 3."""
    tasks: TaskConfig = field(default_factory=TaskConfig)
    """Task family."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Scripted transcripts of phase 3."""
    own_tries: OwnTriesConfig = field(default_factory=OwnTriesConfig)
    """Rounds of phase 3 on the policy's own wrong tries."""
    episode: EpisodeLimits = field(default_factory=EpisodeLimits)
    """Limits of one episode."""
    pods: PodsConfig = field(default_factory=PodsConfig)
    """Where untrusted code runs."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """The sampler."""
    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning."""
    curriculum: CurriculumConfig = field(default_factory=lambda: CurriculumConfig(strength=0.0))
    """Harder variants of tasks late in RL (row R6); strength 0 draws evenly and takes no probes."""
    stages: tuple[Stage, ...] = ()
    """Stages of RL with ratios, contexts and difficulties for each variant of tasks (row R10); none draws evenly."""
    credit: CreditName = "rollout"
    """`rollout`: every token of a chain gets the outcome (row R1). `steps`: reward-to-go of single turns (row R9)."""
    step_rewards: StepRewardConfig = field(default_factory=StepRewardConfig)
    """Rewards of single turns; read with credit `steps` alone."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"RunConfig.seed is {self.seed}, accepted is 0 to {(1 << 31) - 1}")
        if self.chat != "auto" and self.chat not in CHAT_FORMATS:
            raise ValueError(f"RunConfig.chat is {self.chat!r}, accepted is auto or one of {', '.join(CHAT_FORMATS)}")
        for name, value, accepted in (("chat", self.chat, "auto"), ("thinks", self.thinks, True)):
            if value != accepted and not self.start:
                raise ValueError(f"RunConfig.{name} is {value!r}, accepted without a published start is {accepted!r}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"RunConfig.device is {self.device!r}, accepted is 'cpu' or 'cuda'")
        if self.episode.context_budget > self.engine.max_len:
            raise ValueError(
                f"RunConfig.engine.max_len is {self.engine.max_len}, accepted is at least episode.context_budget "
                f"({self.episode.context_budget})"
            )
        self._check_draws()
        if self.engine.num_slots < self.rl.group_size:
            raise ValueError(
                f"RunConfig.engine.num_slots is {self.engine.num_slots}, accepted is at least rl.group_size "
                f"({self.rl.group_size})"
            )

    def _check_draws(self) -> None:
        if self.credit not in CREDITS:
            raise ValueError(f"RunConfig.credit is {self.credit!r}, accepted is one of {CREDITS}")
        if self.credit == "steps" and self.rl.advantage.kl.weight > 0:
            raise ValueError(
                f"rl.advantage.kl.weight is {self.rl.advantage.kl.weight}, accepted with credit steps is 0"
            )
        for name in ("baseline", "length_norm") if self.credit == "steps" else ():
            value, default = getattr(self.rl.advantage, name), getattr(AdvantageConfig(), name)
            if value != default:
                raise ValueError(f"rl.advantage.{name} is {value!r}, accepted with credit steps is {default!r}")
        if self.stages and self.curriculum.strength > 0:
            raise ValueError(
                f"RunConfig.curriculum.strength is {self.curriculum.strength}, accepted with stages is 0: a stage "
                "spreads difficulty itself"
            )
        for stage in self.stages:
            for share in stage.domains:
                if share.domain not in VARIANTS:
                    raise ValueError(
                        f"RunConfig.stages: domain {share.domain!r} of {stage.name!r}, accepted is one of "
                        f"{', '.join(VARIANTS)}{nearest_names(share.domain, VARIANTS)}"
                    )
                least = self.episode.reserve(self.episode.max_summary_tokens if self.episode.max_summaries else 0)
                if share.max_context <= least:
                    raise ValueError(
                        f"RunConfig.stages: max_context {share.max_context} of {share.domain!r} in {stage.name!r}, "
                        f"accepted is above {least}: a turn, its answers and a summary must fit besides the prompt"
                    )
        planned, needed = sum(stage.num_prompts for stage in self.stages), self.rl.num_steps * self.rl.prompts_per_step
        if self.stages and planned != needed:
            raise ValueError(
                f"RunConfig.stages plan {planned} prompts, accepted is rl.num_steps * rl.prompts_per_step: {needed}"
            )


def tiny_reward() -> RewardConfig:
    """Correctness minus the concave length penalty on solved tasks; every behaviour is logged at weight 0.

    Choice: charging failed rollouts for length teaches a weak policy to give up, so only solved ones pay."""
    weights = {
        "correctness": 1.0,
        "length_penalty": -0.1,
        "passed_frac": 0.0,
        "bad_tool_calls": 0.0,
        "invalid_edit": 0.0,
        "repeated_edit": 0.0,
        "unfinished": 0.0,
        "comments_cot": 0.0,
        "terminal_only": 0.0,
        "open_todos": 0.0,
        "style_faults": 0.0,
        "silent_finish": 0.0,
    }
    return RewardConfig(
        components=tuple(RewardComponent(name=name, weight=weight) for name, weight in weights.items()),
        length=LengthPenaltyConfig(apply_to="passed"),
    )


def tiny() -> RunConfig:
    """The quick start: a quarter of an hour on two CPU cores."""
    return RunConfig(
        preset="tiny",
        corpus=CorpusConfig(max_bytes=4_000_000),
        model=ModelConfig(initializer_range=0.04),
        cpt=CptConfig(phase1_steps=150, phase2_steps=20, phase2_seq_len=448, phase2_rows=8),
        sft=SftConfig(num_steps=900, schedule_steps=1300),
        episode=EpisodeLimits(
            max_turns=4,
            max_tokens_per_turn=24,
            max_result_tokens=128,
            context_budget=416,
            max_summaries=1,
            max_summary_tokens=32,
            run_timeout=0.05,
            share_runs=True,
        ),
        engine=EngineConfig(num_slots=160, max_len=416),
        rl=RLConfig(num_steps=220, final_lr_frac=0.1, eval_every=0, reward=tiny_reward()),
    )


def tiny_smoke() -> RunConfig:
    """Every stage in about a minute; nothing is learnt worth the name."""
    base = tiny()
    return replace(
        base,
        preset="tiny-smoke",
        vocab_size=512,
        corpus=CorpusConfig(max_bytes=400_000),
        model=replace(
            base.model,
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_attention_heads=2,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        cpt=CptConfig(
            phase1_steps=24,
            phase1_rows=8,
            phase1_seq_len=128,
            phase2_steps=4,
            phase2_rows=4,
            phase2_seq_len=448,
            warmup_steps=4,
            num_eval_points=10,
            eval_rows=8,
        ),
        mtp=MtpConfig(num_steps=4, seq_len=128),
        sft=SftConfig(num_steps=20, schedule_steps=40, batch_size=8),
        rl=replace(base.rl, num_steps=4, prompts_per_step=4, group_size=4, eval_every=2, checkpoint_every=1),
        eval=EvalConfig(
            sets=(
                EvalSpec(name="test", num_tasks=8, num_samples=4),
                EvalSpec(name="ood", num_tasks=4, num_samples=4),
                EvalSpec(name="humaneval", num_tasks=4, num_samples=4),
            ),
            during=EvalSpec(name="dev", num_tasks=4, num_samples=2),
            mismatch_tasks=4,
        ),
    )


def tiny_long() -> RunConfig:
    """About an hour on two CPU cores: a policy that solves most tasks and learns from its own failures.

    Choice: three times the fine-tuning and two rounds on own wrong tries; a failed run tells its line. RL from there
    takes small steps: at the rate of `tiny` it loses what fine-tuning reached."""
    base = tiny()
    return replace(
        base,
        preset="tiny-long",
        cpt=replace(base.cpt, phase1_steps=300),
        sft=replace(base.sft, num_steps=3000, schedule_steps=3600),
        expert=replace(base.expert, wrong_frac=0.5),
        own_tries=OwnTriesConfig(num_rounds=2),
        episode=replace(base.episode, locate_failures=True),
        rl=replace(base.rl, num_steps=150, lr=5e-5),
    )


def small() -> RunConfig:
    """One GPU: about 60 million parameters, longer text, the same task family. Not run on a GPU yet."""
    base = tiny()
    return replace(
        base,
        preset="small",
        device="cuda",
        vocab_size=4096,
        corpus=CorpusConfig(max_bytes=40_000_000),
        model=replace(
            base.model,
            hidden_size=512,
            num_hidden_layers=8,
            intermediate_size=1536,
            moe_intermediate_size=384,
            n_routed_experts=16,
            num_attention_heads=8,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
        ),
        cpt=replace(base.cpt, phase1_steps=400, phase1_rows=64, phase1_seq_len=512, phase2_seq_len=1024, lr=1e-3),
        mtp=replace(base.mtp, seq_len=512, rows=32),
        sft=replace(base.sft, num_steps=800, schedule_steps=1200, batch_size=64, lr=1e-3),
        engine=replace(base.engine, max_len=512),
    )


def published() -> RunConfig:
    """One GPU and a published model of about a billion parameters, named by `start`. Not run on a GPU yet.

    Choice: the limits leave room for tool schemas in the prompt and some reasoning in every turn; the learning rate is
    small because such a policy has much to lose. Pages hold 131,072 tokens for all windows together."""
    base = tiny()
    return replace(
        base,
        preset="published",
        device="cuda",
        episode=EpisodeLimits(
            max_turns=12,
            max_tokens_per_turn=1024,
            max_result_tokens=512,
            context_budget=8192,
            max_summaries=1,
            max_summary_tokens=512,
            run_timeout=1.0,
        ),
        engine=EngineConfig(num_slots=64, max_len=8192, dtype="bfloat16", device="cuda", page_size=256, num_pages=512),
        rl=replace(
            base.rl,
            num_steps=50,
            prompts_per_step=8,
            lr=1e-6,
            final_lr_frac=1.0,
            loss=replace(base.rl.loss, norm_length=1024.0),
            row_length=8192,
            rows_per_batch=1,
        ),
        eval=EvalConfig(
            sets=tuple(EvalSpec(name=name, num_tasks=32) for name in ("test", "ood", "humaneval")),
            during=EvalSpec(name="dev", num_tasks=16, num_samples=4),
            mismatch_tasks=8,
        ),
    )


NEEDS_START = ("published",)
"""Presets without a model of their own."""
PRESETS: Mapping[str, Callable[[], RunConfig]] = {
    "tiny-smoke": tiny_smoke,
    "tiny": tiny,
    "tiny-long": tiny_long,
    "small": small,
    "published": published,
}
