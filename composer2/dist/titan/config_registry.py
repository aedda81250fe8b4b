"""Runs by name for torchtitan: `--module composer2.dist.titan --config NAME`. Every field can be overridden after it.

    debug_rl, debug_cpt     a small model on CPUs or any GPU
    rl, cpt                 the report's degrees, expert parallel 8 with context parallel 8 (RL) or 2 (pretraining):
                            one box of eight GPUs, or N boxes with data parallelism over what is left

Source: report §6.1; rows D1 P1 R1. Choice: `rl` and `cpt` take a model of a size that trains on one 8-GPU box; the
report's own base model is given to the same functions by whoever has the machines: `rl_run(kimi_k2_5(), …)`.
Choice: torchtitan's `partial_dtensor` backend, the one that keeps the dense weights on data times context ranks.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from composer2.dist.meshes import Degrees, pretraining_degrees, rl_degrees
from composer2.dist.titan.data import CorpusLoader, SampleLoader
from composer2.dist.titan.loss import PolicyLoss
from composer2.dist.titan.model import model_spec
from composer2.dist.titan.tokenizer import NoTokenizer
from composer2.dist.titan.trainer import ComposerTrainer
from composer2.model.config import ModelConfig, YarnConfig
from composer2.rl.loss import LossConfig

SMALL = ModelConfig(
    vocab_size=65536,
    hidden_size=2048,
    num_hidden_layers=24,
    intermediate_size=8192,
    moe_intermediate_size=1024,
    n_routed_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    routed_scaling_factor=2.446,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=131072,
    rope_scaling=YarnConfig(factor=32, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
)
"""A mixture of 64 experts with latent attention; 10.2 billion parameters, of which a token uses 1.8: one 8-GPU box."""
RL_FORMATS = {"expert_recipe": "nvfp4", "dispatch_wire": "mxfp8"}
"""NVFP4 forward with a scale a token, MXFP8 backward; MXFP8 on the wire."""
CPT_FORMATS = {"expert_recipe": "mxfp8", "dispatch_wire": "mxfp8"}


def parallelism(degrees: Degrees) -> ParallelismConfig:
    """torchtitan's names of the degrees; the data ranks are what is left."""
    return ParallelismConfig(
        data_parallel_shard_degree=-1,
        context_parallel_degree=degrees.cp,
        expert_parallel_degree=degrees.ep,
        tensor_parallel_degree=degrees.tp,
        spmd_backend="partial_dtensor",
    )


def rl_run(sizes: ModelConfig, degrees: Degrees, *, name: str, row_length: int) -> ComposerTrainer.Config:
    """RL on the samples that `dataloader.dataset_path` gets step by step: Dr. GRPO, replayed routes, Adam."""
    return ComposerTrainer.Config(
        model_spec=model_spec(name, sizes),
        dataloader=SampleLoader.Config(wait_seconds=3600.0),
        loss=PolicyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=1e-6, weight_decay=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(local_batch_size=1, seq_len=row_length, steps=1000, disable_cuda_graphs=True),
        parallelism=parallelism(degrees),
        checkpoint=CheckpointManager.Config(enable=True, interval=10, last_save_model_only=False),
        activation_checkpoint=FullAC.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
    )


def cpt_run(sizes: ModelConfig, degrees: Degrees, *, name: str, row_length: int) -> ComposerTrainer.Config:
    """Continued pretraining on a corpus: next-token loss, no replay, the selection bias follows the load."""
    config = rl_run(sizes, degrees, name=name, row_length=row_length)
    config.dataloader = CorpusLoader.Config(sizes=sizes)
    config.loss = PolicyLoss.Config(policy=LossConfig(correction="none", normaliser="tokens"))
    config.optimizer = default_adamw(lr=3e-4)
    config.replay, config.bias_rate = False, 1e-3
    return config


def rl() -> ComposerTrainer.Config:
    """EP 8, CP 8; rows of 131072 tokens."""
    return rl_run(replace(SMALL, **RL_FORMATS), rl_degrees(8), name="rl", row_length=131072)  # type: ignore[arg-type]


def cpt() -> ComposerTrainer.Config:
    """EP 8, CP 2; rows of 32768 tokens."""
    sizes = replace(SMALL, **CPT_FORMATS)  # type: ignore[arg-type]
    return cpt_run(sizes, pretraining_degrees(8), name="cpt", row_length=32768)


def debug_rl() -> ComposerTrainer.Config:
    """A small model, float32, one rank unless told otherwise; 2 steps."""
    return _debug(rl_run(DEBUG, Degrees(), name="debug_rl", row_length=64))


def debug_cpt() -> ComposerTrainer.Config:
    """The same on a corpus."""
    return _debug(cpt_run(DEBUG, Degrees(), name="debug_cpt", row_length=64))


DEBUG = ModelConfig(num_nextn_predict_layers=0)


def _debug(config: ComposerTrainer.Config) -> ComposerTrainer.Config:
    config.training.steps, config.training.mixed_precision_param = 2, "float32"
    config.checkpoint.enable = False
    config.optimizer.implementation = "for-loop"
    config.activation_checkpoint = None  # type: ignore[assignment]
    return config
