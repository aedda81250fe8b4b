"""torchtitan's Trainer with the few steps that differ: rows are cut over context ranks, routes replayed, the loss ours.

    start_step -> micro-batches of the step (equal on all ranks) -> cut by chunks -> log-probs -> loss -> backward
    then, torchtitan's: joint clipping, optimizer, schedule, checkpoint, metrics
    then, in pretraining: the routers' selection bias moves by the load of all ranks

Source: report §6.1; rows D1 D2 D3 M5 M6. Choice: the bias is frozen when its rate is 0, as in RL (rl/train.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.trainer import Trainer

from composer2.dist.context_parallel import pad_rows, rank_logprobs, shard_batch
from composer2.dist.expert_parallel import reduce_load
from composer2.dist.titan.data import StepLoader, batch_of
from composer2.dist.titan.model import TitanTransformer
from composer2.model.router_replay import ReplayConfig


class ComposerTrainer(Trainer):
    """See the top of the file."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        replay: bool = True
        """Use the experts that the sampler recorded (row M6)."""
        replay_tau: float = 0.5
        """Plausibility threshold of the replay, 0 <= tau < 1; 0 replays everything."""
        bias_rate: float = 0.0
        """Step of the routers' selection bias after every optimizer step; 0 freezes it."""

    config: Config
    dataloader: StepLoader  # type: ignore[assignment]

    def __init__(self, config: Config) -> None:
        if not config.training.disable_cuda_graphs:
            raise ValueError("training.disable_cuda_graphs is False, accepted is True: micro-batches differ in shape")
        super().__init__(config)
        self.replay = ReplayConfig(tau=config.replay_tau) if config.replay else None
        self.load_LE: torch.Tensor | None = None

    @property
    def model(self) -> TitanTransformer:
        """The model, spread over the ranks."""
        model = self.model_parts[0]
        assert isinstance(model, TitanTransformer)
        return model

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        self.gradient_accumulation_steps = max(self.dataloader.start_step(), 1)  # at the end, ask once and be told
        self.load_LE = None
        super().train_step(data_iterator)
        if self.config.bias_rate > 0 and self.load_LE is not None:
            self.model.update_router_bias(reduce_load(self.load_LE), self.config.bias_rate)

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """As torchtitan's, over the loader anew for every step."""
        while True:
            yield from super().batch_generator(data_iterable)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """What of the rows lies on this rank."""
        cp = self.parallel_dims.cp
        rank = self.parallel_dims.get_mesh("cp").get_local_rank() if cp > 1 else 0
        batch = shard_batch(pad_rows(batch_of(input_dict), 2 * cp), cp, rank)
        self.ntokens_seen += batch.token_ids.numel()
        return batch.token_ids, batch.targets, {"batch": batch, "denominator": input_dict["denominator"]}

    def _forward_backward_body(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        batch = extra_kwargs["batch"]
        with self.train_context():
            logprobs_N, routing = rank_logprobs(self.model, batch, self.replay)
            denominator = extra_kwargs["denominator"]
            loss, _ = self.loss_fn(logprobs_N, batch, global_valid_tokens, denominator=denominator)
            loss.backward()
        load_LE = routing.tokens_per_expert_LE
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE
        return loss
