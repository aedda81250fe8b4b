"""MTP modules and their losses against brute force over positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.layers import rope_tables
from composer2.model.mtp import mtp_acceptance, mtp_distillation_loss, mtp_label_loss
from composer2.model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    intermediate_size=16,
    moe_intermediate_size=8,
    kv_lora_rank=8,
    num_nextn_predict_layers=2,
)


def build():
    model = Transformer(CONFIG)
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model.double()


def test_module_equals_its_equation_position_by_position():
    """Two modules in a chain, every document alone, only the indices that know their next tokens."""
    model = build()
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    tokens = torch.randint(0, 20, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trunk = model(tokens, document_ids_BT=documents).hidden_BTD
        out = model.mtp_forward(trunk, tokens, document_ids_BT=documents)
        load = torch.zeros(2, 8, dtype=torch.int64)
        for start, end in ((0, 5), (5, 8)):
            hidden = trunk[:, start:end]
            for depth, module in enumerate(model.mtp):
                known = end - start - depth - 1
                hidden = hidden[:, :known]
                following = model.embed_tokens(tokens[:, start + depth + 1 : end])
                joined = module.eh_proj(torch.cat((module.enorm(following), module.hnorm(hidden)), dim=-1))
                rope = rope_tables(torch.arange(known)[None], CONFIG, torch.float64)
                hidden, selection = module.block(joined, rope, None)
                load[depth] += torch.bincount(selection.expert_ids_TK.flatten(), minlength=8)
                expected = model.lm_head(module.norm(hidden))
                torch.testing.assert_close(out.logits[depth][:, start : start + known], expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(out.tokens_per_expert_NE, load)
    again = model.mtp_logits(trunk, tokens, document_ids_BT=documents)
    assert all(torch.equal(a, b) for a, b in zip(again, out.logits, strict=True))


def by_hand(main, drafts, tokens, documents, mask):
    """(KL, cross entropy, acceptance per module) with loops over positions."""
    divergences, entropies, accepted = [], [], []
    for depth, logits in enumerate(drafts):
        kl, ce, overlap = [], [], []
        for row in range(documents.shape[0]):
            for i in range(documents.shape[1]):
                target = i + depth + 2
                if target >= documents.shape[1] or documents[row, i] < 0:
                    continue
                if documents[row, target] != documents[row, i] or not mask[row, target]:
                    continue
                p, q = main[row, target - 1].softmax(0), logits[row, i].softmax(0)
                kl.append(float((p * (p / q).log()).sum()))
                ce.append(-float(q[tokens[row, target]].log()))
                overlap.append(float(torch.minimum(p, q).sum()))
        count = max(len(kl), 1)
        divergences.append(sum(kl) / count)
        entropies.append(sum(ce) / count)
        accepted.append(sum(overlap) / count)
    return sum(divergences) / len(drafts), sum(entropies) / len(drafts), accepted


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.integers(-1, 2), min_size=8, max_size=8).map(sorted),
    masked=st.lists(st.booleans(), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_losses_equal_loops_over_positions(documents, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    documents = torch.tensor([documents, [0] * 8])
    mask = torch.tensor([masked, [True] * 8])
    main, *drafts = torch.randn(3, 2, 8, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (2, 8), generator=generator)
    where = {"document_ids_BT": documents, "loss_mask_BT": mask}
    kl, ce, accepted = by_hand(main, drafts, tokens, documents, mask)
    assert float(mtp_distillation_loss(main, drafts, **where)) == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert float(mtp_label_loss(drafts, tokens, **where)) == pytest.approx(ce, rel=1e-9, abs=1e-12)
    assert mtp_acceptance(main, drafts, **where).tolist() == pytest.approx(accepted, rel=1e-9, abs=1e-12)


def test_a_perfect_draft_is_always_accepted():
    main = torch.randn(1, 6, 7, generator=torch.Generator().manual_seed(0))
    draft = main.roll(-1, dims=1)
    assert mtp_acceptance(main, [draft]).tolist() == pytest.approx([1.0])
    assert float(mtp_distillation_loss(main, [draft])) == pytest.approx(0.0, abs=1e-6)


def test_nothing_to_predict_is_zero():
    main = torch.randn(1, 2, 7, requires_grad=True)
    loss = mtp_distillation_loss(main, [main * 2])
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(main.grad.abs().sum()) == 0


def gradients(model, **options):
    model.zero_grad(set_to_none=True)
    tokens = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    out = model(tokens)
    mtp_distillation_loss(out.logits_BTV, model.mtp_logits(out.hidden_BTD, tokens, **options)).backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and float(p.grad.abs().sum()) > 0}
    return {n for n in reached if n.startswith("mtp.")}, {n for n in reached if not n.startswith("mtp.")}


def test_detached_trunk_gets_no_gradient_from_the_loss():
    model = build()
    modules, others = gradients(model, detach_trunk=True)
    assert others == set()
    assert {"mtp.0.eh_proj.weight", "mtp.1.norm.weight", "mtp.0.block.mlp.gate.weight"} <= modules
    _, others = gradients(model)
    assert {"lm_head.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight"} <= others


def test_main_logits_are_a_fixed_teacher():
    main = torch.randn(1, 5, 7, requires_grad=True)
    draft = torch.randn(1, 5, 7, requires_grad=True)
    mtp_distillation_loss(main, [draft]).backward()
    assert main.grad is None
    assert float(draft.grad[:, :3].abs().sum()) > 0
    assert float(draft.grad[:, 3:].abs().sum()) == 0


def test_bias_of_the_modules_is_updated_from_their_own_load():
    model = build()
    load = torch.zeros(2, 8, dtype=torch.int64)
    load[1, 3] = 8
    trunk = torch.zeros(1, 8, dtype=torch.int64)
    model.update_router_bias(trunk, 0.1, mtp_tokens_per_expert_NE=load)
    assert model.mtp[0].block.mlp.gate.e_score_correction_bias.tolist() == pytest.approx([0.0] * 8)
    bias = model.mtp[1].block.mlp.gate.e_score_correction_bias.tolist()
    assert bias == pytest.approx([0.025] * 3 + [-0.175] + [0.025] * 4)
