"""torchtitan's own Trainer with our model at 1, 2 and 4 ranks, its checkpoints, and its own model with our weights."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer2.dist.context_parallel import rank_policy_loss, shard_batch
from composer2.model.checkpoint.huggingface import load_huggingface
from composer2.rl.pack import fill, to_tensors
from composer2.rl.train import trained_logprobs

HERE = Path(__file__).parent
if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed (extra `dist`)", allow_module_level=True)

spec = importlib.util.spec_from_file_location("composer2_dist_parity", HERE / "parity.py")
assert spec is not None
assert spec.loader is not None
parity = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = parity
spec.loader.exec_module(parity)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
LAYOUTS = ["one", "cp2_ep2", "dp2_ep2_ac", "dp2_cp2_ep4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs of titan_job.py."""
    made = tmp_path_factory.mktemp("titan")
    done = subprocess.run(
        [sys.executable, str(HERE / "titan_job.py"), str(made)], capture_output=True, text=True, check=False
    )
    (made / "log.txt").write_text(done.stderr)
    return made


@pytest.fixture(scope="module")
def result(folder):
    def read(name):
        path = folder / f"{name}.pt"
        assert path.exists(), (folder / "log.txt").read_text()[-6000:]
        return torch.load(path, weights_only=False)

    return read


@pytest.fixture(scope="module")
def expected():
    """Two steps of Adam on one device, by composer2's own trainer parts; the batch is the same in both."""
    model, batch = parity.build_model(torch.float32), parity.build_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3)
    steps = []
    for _ in range(2):
        optimizer.zero_grad()
        logprobs, _, _ = trained_logprobs(model, batch, parity.RL)
        loss, _ = parity.policy_loss(logprobs, batch, parity.RL.loss, parity.DENOMINATOR)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients.values()))
        steps.append((float(loss.detach()), float(norm), gradients))
        optimizer.step()
    return steps


def error(found, right):
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_norm_and_every_gradient_equal_one_device(result, expected, layout):
    found = result(layout)
    for logged, (loss, norm, _) in zip(found["log"], expected, strict=True):
        assert logged["loss"] == pytest.approx(loss, rel=1e-5)
        assert logged["norm"] == pytest.approx(norm, rel=1e-5)
    right = expected[0][2]
    assert found["gradients"].keys() == right.keys()
    errors = {name: error(found["gradients"][name], gradient) for name, gradient in right.items()}
    assert max(errors.values()) <= 1e-5, max(errors, key=errors.get)


def test_without_replay_it_is_another_step(result, expected):
    found = result("replay_off")
    assert max(error(found["gradients"][name], g) for name, g in expected[0][2].items()) > 0.1


def test_a_checkpoint_of_two_ranks_goes_on_at_four_and_at_one(result):
    """Model, optimizer, schedule and data: losses and norms of steps 3 and 4 as without the break."""
    whole = result("save")["log"]
    assert [step["step"] for step in whole] == [1, 2, 3, 4]
    for name in ("resume_4", "resume_1"):
        resumed = result(name)["log"]
        assert [step["step"] for step in resumed] == [3, 4]
        for found, right in zip(resumed, whole[2:], strict=True):
            assert found["loss"] == pytest.approx(right["loss"], rel=1e-5)
            assert found["norm"] == pytest.approx(right["norm"], rel=1e-5)


def test_a_checkpoint_becomes_safetensors_that_score_as_the_run_did(result, folder):
    """The model exported after step 4 has the loss of a fifth step with the same samples."""
    from composer2.dist.titan.compat import prepare

    prepare()
    from composer2.dist.titan.data import load_step

    model = load_huggingface(folder / "exported")
    assert len(model.state_dict()) == len(parity.build_model(torch.float32).state_dict())
    samples, denominator = load_step(folder / "samples", 0)
    losses = []
    for trained in (parity.build_model(torch.float32), model):
        batch = to_tensors(fill([[sample] for sample in samples]))
        logprobs, _, _ = trained_logprobs(trained, batch, parity.RL)
        losses.append(float(parity.policy_loss(logprobs, batch, parity.RL.loss, denominator)[0].detach()))
    assert losses[0] == pytest.approx(result("save")["log"][0]["loss"], rel=1e-5)
    assert losses[1] < result("save")["log"][3]["loss"] < losses[0]


def test_a_run_starts_from_a_published_model(result, expected):
    assert result("seeded")["log"][0]["loss"] == pytest.approx(expected[0][0], rel=1e-5)


def test_a_fresh_model_is_the_same_for_every_layout(result):
    one, four = result("init_1")["sums"], result("init_4")["sums"]
    assert one.keys() == four.keys()
    assert all(float(one[name]) == pytest.approx(float(four[name]), rel=1e-12) for name in one)
    assert float(one["lm_head.weight"]) / (61 * 32) == pytest.approx(0.02**2, rel=0.1)


def test_torchtitans_own_model_with_our_weights_says_the_same(result):
    found = result("theirs")
    assert found["missing"] == found["unexpected"] == []
    assert found["logits"] < 1e-5
    assert len(found["gradients"]) > 40
    assert max(found["gradients"].values()) < 1e-5


def test_continued_pretraining_equals_one_rank_and_moves_the_bias(result):
    one, four = result("corpus_1"), result("corpus_4")
    for found, right in zip(four["log"], one["log"], strict=True):
        assert found["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(right["norm"], rel=1e-4)
    assert one["log"][0]["loss"] > 4  # nats a token, of log(300) = 5.7 and what the random weights add
    for ours, theirs in zip(four["biases"], one["biases"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        assert float(ours.abs().max()) > 0.1
        assert float(ours.mean()) == pytest.approx(0, abs=1e-5)


def test_quantised_experts_and_wire_train(result, expected):
    """NVFP4 experts, MXFP8 wire, BF16 weights: a finite step near no other, whose loss falls."""
    first, second = result("formats")["log"]
    assert second["loss"] < first["loss"]
    assert all(torch.isfinite(g).all() for g in result("formats")["gradients"].values())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("tp", "Degrees.tp is 2 with ep 2, accepted is 1"),
        ("backend", "parallelism.spmd_backend is 'spmd_types', accepted is 'partial_dtensor'"),
        ("compile", "compile.enable is True, accepted is False"),
        ("graphs", "training.disable_cuda_graphs is False, accepted is True"),
        ("data", "dataloader.dataset_path is None"),
        ("length", "row_length is 97, accepted is a multiple of 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(result, case, message):
    assert message in result("refusals")[case]


@pytest.mark.slow
def test_the_documented_command(folder, result):
    """torchrun on two ranks, a debug recipe, degrees overridden on the command line."""
    result("one")
    overrides = {
        "dataloader.dataset_path": folder / "debug",
        "dump_folder": folder / "debug_out",
        "dataloader.wait_seconds": 0,
        "parallelism.context_parallel_degree": 2,
        "parallelism.expert_parallel_degree": 2,
    }
    arguments = [part for name, value in overrides.items() for part in (f"--{name}", str(value))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m",
        "composer2.dist.titan", "--config", "debug_rl", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Training completed" in done.stderr + done.stdout


def test_a_step_file_gives_back_its_samples(tmp_path):
    from composer2.dist.titan.compat import prepare

    prepare()
    from composer2.dist.titan.data import load_step, save_step

    row = parity.build_batch()
    where = row.document_ids[0] == 1
    sample = parity.Sample(**{name: getattr(row, name)[0][where].numpy() for name in parity.PER_TOKEN}, temperature=0.7)
    other = parity.Sample(**{name: getattr(row, name)[0][:5].numpy() for name in parity.PER_TOKEN}, temperature=0.7)
    save_step(tmp_path, 3, [sample, other], 12.5)
    back, denominator = load_step(tmp_path, 3)
    assert denominator == 12.5
    assert [s.temperature for s in back] == [0.7, 0.7]
    for found, right in zip(back, (sample, other), strict=True):
        for name in parity.PER_TOKEN:
            assert (getattr(found, name) == getattr(right, name)).all(), name
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003.npz"]
    with pytest.raises(ValueError, match="takes the values"):
        save_step(tmp_path, 4, [], 1.0)


def test_rows_of_any_length_are_padded_and_cut():
    """What the trainer does with a micro-batch: 48 tokens over 5 context ranks need 50."""
    from composer2.dist.context_parallel import pad_rows

    batch = parity.build_batch()
    padded = pad_rows(batch, 10)
    assert padded.token_ids.shape == (4, 50)
    assert (padded.document_ids[:, 48:] == -1).all()
    assert (padded.routes[:, 48:] == -1).all()
    assert not padded.loss_mask[:, 48:].any()
    assert pad_rows(batch, 8) is batch
    logprobs, _, _ = trained_logprobs(parity.build_model(torch.float32), batch, parity.RL)
    whole, _ = parity.policy_loss(logprobs, batch, parity.RL.loss, 3.0)
    parts = []
    for rank in range(5):
        shard = shard_batch(padded, 5, rank)
        following = torch.cat((logprobs[:, 1:], torch.zeros(4, 3)), dim=1)
        here = following[:, shard.key_view.query_index_T][shard.loss_mask]
        parts.append(rank_policy_loss(here, shard, parity.RL.loss, 3.0))
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
