"""MTP losses by hand, and against the unweighted forms of the model."""

import math

import numpy as np
import pytest
import torch

from composer2.model.mtp import mtp_acceptance, mtp_distillation_loss
from composer2.model.pretrain.data import pack_examples
from composer2.model.pretrain.loop import TensorBatch, to_tensors
from composer2.model.pretrain.mtp import distillation_sum, draft_weights, measure_mtp_acceptance


def log(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[[math.log(p) for p in row] for row in rows]])


def test_distillation_by_hand():
    # one row of four tokens; the draft at position t is held against the main head at t + 1, for token t + 2
    batch = TensorBatch(
        token_ids_BT=torch.zeros(1, 4, dtype=torch.int64),
        position_ids_BT=torch.arange(4)[None],
        document_ids_BT=torch.zeros(1, 4, dtype=torch.int64),
        weights_BT=torch.tensor([[0.0, 9.0, 2.0, 0.5]]),
    )
    main = log((0.9, 0.1), (0.5, 0.5), (0.25, 0.75), (0.6, 0.4)).requires_grad_()
    draft = log((0.25, 0.75), (0.5, 0.5), (0.2, 0.8), (0.3, 0.7)).requires_grad_()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # KL(main at 1 || draft at 0)
    second = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    total = distillation_sum(main, [draft], batch)
    assert float(total.detach()) == pytest.approx(2.0 * first + 0.5 * second, rel=1e-5)
    total.backward()
    assert main.grad is None
    # d KL / d logits = q - p, times the weight
    expected = torch.tensor([[[-0.5, 0.5], [0.125, -0.125], [0.0, 0.0], [0.0, 0.0]]])
    torch.testing.assert_close(draft.grad, expected)


def test_weights_follow_the_predicted_token_inside_its_document():
    batch = TensorBatch(
        token_ids_BT=torch.zeros(1, 8, dtype=torch.int64),
        position_ids_BT=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]),
        document_ids_BT=torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]]),
        weights_BT=torch.tensor([[0, 1, 2, 3, 0, 5, 6, 0.0]]),
    )
    assert draft_weights(batch, 1).tolist() == [[2, 3, 0, 0, 6, 0]]
    assert draft_weights(batch, 2).tolist() == [[3, 0, 0, 0, 0]]


def test_equals_the_unweighted_forms_of_the_model(make_model, tiny_config):
    config = type(tiny_config)(**{**vars(tiny_config), "num_nextn_predict_layers": 2})
    model = make_model(config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    rng = np.random.default_rng(0)
    lengths = (9, 5, 7, 12)
    rows = pack_examples([(rng.integers(48, size=n), np.ones(n)) for n in lengths], row_len=16, pad_id=0)
    batch = to_tensors(rows, torch.device("cpu"))
    places = {"position_ids_BT": batch.position_ids_BT, "document_ids_BT": batch.document_ids_BT}
    with torch.no_grad():
        output = model(batch.token_ids_BT, **places)
        drafts = model.mtp_logits(output.hidden_BTD, batch.token_ids_BT, **places)
        for module in range(2):  # the model's loss is a mean for each module, ours a sum over the same predictions
            modules = range(module + 1)
            means = [float(_mean_of(drafts, output.logits_BTV, batch, index)) for index in modules]
            sums = [means[index] * sum(max(0, n - index - 2) for n in lengths) for index in modules]
            mine = float(distillation_sum(output.logits_BTV, drafts[: module + 1], batch))
            assert mine == pytest.approx(sum(sums) / len(sums), rel=1e-4)
        expected = mtp_acceptance(output.logits_BTV, drafts, document_ids_BT=batch.document_ids_BT)
    found = measure_mtp_acceptance(model, rows, rows_per_batch=1)
    assert found == pytest.approx(expected.tolist(), rel=1e-5)


def _mean_of(drafts, main_logits, batch, module) -> torch.Tensor:
    """The model's loss of one module: its mean over two lists that differ in that module alone."""
    documents = batch.document_ids_BT
    whole = mtp_distillation_loss(main_logits, drafts[: module + 1], document_ids_BT=documents) * (module + 1)
    return whole - mtp_distillation_loss(main_logits, drafts[:module], document_ids_BT=documents) * module
