"""Fault 84, its pretraining side: after a kill and a resume some data are never trained, others twice."""

import numpy as np
import torch

from composer2.model.pretrain.data import PackedBatches, TokenisedCorpus, TokenStream
from composer2.model.pretrain.loop import LossOutput
from composer2.model.pretrain.optim import OptimConfig
from composer2.model.pretrain.phases import PhaseSpec, RunControl, run_phase


class Counter(torch.nn.Module):
    """A model that only remembers which tokens it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))
        self.register_buffer("times_trained", torch.zeros(240, dtype=torch.int64))


def remember(model, batch) -> LossOutput:
    model.times_trained += torch.bincount(batch.token_ids_BT[batch.document_ids_BT >= 0], minlength=240)
    return LossOutput(loss_sum=model.weight.sum())


def test_every_token_of_an_epoch_is_trained_once_over_kills_and_stops(tmp_path):
    stream = TokenStream(token_ids=np.arange(240, dtype=np.int32), document_starts=np.array([0, 11, 100]))
    corpus = TokenisedCorpus(train=(stream,), heldout=None, weights=(1.0,), pad_id=0)
    steps, calls = 10, 0  # 240 tokens = 10 steps of 3 rows of 8

    def attempt(kill_at: int | None, stop_at: int | None) -> torch.Tensor:
        model = Counter()

        def on_step(metrics):
            if metrics["step"] == kill_at:
                raise KeyboardInterrupt

        taken = []
        spec = PhaseSpec(
            optim=OptimConfig(schedule_steps=steps),
            batches=PackedBatches(corpus, seq_len=8, num_rows=3, seed=5),
            loss_fn=remember,
            parameters=model.named_parameters(),
            accumulation=2,
        )
        control = RunControl(
            folder=tmp_path,
            save_every=2,
            on_step=lambda metrics: (taken.append(metrics["step"]), on_step(metrics)),
            should_stop=lambda: taken[-1] == stop_at,
        )
        run_phase(model, spec, control)
        return model.times_trained

    for kill_at, stop_at in ((3, None), (None, 5), (8, None), (None, 9)):
        try:
            attempt(kill_at, stop_at)
        except KeyboardInterrupt:
            calls += 1
    assert calls == 2
    assert attempt(None, None).tolist() == [1] * 240
