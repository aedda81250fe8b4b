"""A run that begins with a published model, from its evaluation to the report, and what becomes of it afterwards."""

import asyncio
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer2 import pipeline, use
from composer2.cli import main
from composer2.config import load_config
from composer2.inspect_run import read_rollouts
from composer2.log import Console, read_metrics
from composer2.model.checkpoint.native import load_model
from composer2.pipeline import adopt_start, begin_with_start
from composer2.recipes import RunConfig
from composer2.rl.system.worker import GroupRequest
from composer2.run import Run
from composer2.runner import EpisodeRunner
from composer2.start import check_start
from composer2.task_source import TaskSource
from composer2.templates import find_chat, open_template, read_chat
from composer2.types import Message, Role

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(chat, published_models, tmp_path_factory):
    return published_models.qwen3(tmp_path_factory.mktemp("qwen3"), chat)


@pytest.fixture(scope="module")
def train(published_models):
    """Calls a training command with the sizes of a test; returns its exit code."""

    def call(start, folder, command="train"):
        argv = [command, "tiny", "--start", str(start), "--run-dir", str(folder), "--quiet"]
        return main([*argv, *published_models.FLAGS])

    return call


def stamps(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(start, train, tmp_path_factory):
    """A finished run; the start directory is as it was."""
    folder, before = tmp_path_factory.mktemp("runs") / "run", stamps(start)
    assert train(start, folder) == 0
    assert stamps(start) == before
    return folder


def test_rl_runs_from_the_published_model_to_the_report(start, trained):
    summary = json.loads((trained / "summary.json").read_text())
    figures = "sft_pass_at_1 rl_pass_at_1 pass_gain ood_rl_pass_at_1 humaneval_rl_pass_at_1 staleness_mean rl_steps "
    figures += "mismatch_p99_replay_on mismatch_p99_replay_off mismatch_tokens summaries_used trained_twice"
    assert [name for name in figures.split() if not isinstance(summary.get(name), int | float)] == []
    assert summary["adopted_from"] == str(start)
    assert "mtp_acceptance" not in summary  # Qwen3 has no MTP module
    page = (trained / "report.html").read_text()
    assert f"start {start}" in page
    steps = [record for record in read_metrics(trained / "metrics.jsonl") if record["stage"] == "rl"]
    assert [record["step"] for record in steps] == [1, 2]
    assert steps[0]["mismatch_max"] < 1e-4
    assert steps[0]["grad_norm"] > 0
    assert {"test", "ood", "humaneval", "train"} <= {record["split"] for record in read_rollouts(trained)}
    assert (trained / "chat_template.jinja").read_bytes() == (start / "chat_template.jinja").read_bytes()
    assert read_chat(trained) == find_chat(start)


def test_the_trained_policy_is_another_one_and_tied(start, trained):
    first, last = load_model(trained / "models" / "sft"), load_model(trained / "models" / "rl")
    published_weights = load_file(start / "model.safetensors")
    assert torch.equal(first.embed_tokens.weight, published_weights["model.embed_tokens.weight"])
    assert last.lm_head.weight is last.embed_tokens.weight
    assert not torch.equal(first.embed_tokens.weight, last.embed_tokens.weight)
    assert all(parameter.dtype == torch.float32 for parameter in last.parameters())


def test_rollouts_of_the_run_are_conversations(trained, chat):
    """Segments as a worker of the run samples them, to which its specification travels pickled."""
    run = Run(trained, load_config(trained / "config.json", RunConfig), Console("quiet"))
    worker = EpisodeRunner(pickle.loads(pickle.dumps(run.spec("rl"))))
    run.close()
    task = TaskSource(run.config).at(0)
    found = []

    async def play():
        async with worker.session():
            request = GroupRequest(key=0, task=task, num_samples=2, seed=1)
            await worker.run_cohort([request], lambda key, group: found.append(group))

    asyncio.run(play())
    for rollout in found[0].rollouts:
        ids = rollout.segments[0].token_ids.tolist()
        prompt = worker.template.render_prompt(task)
        assert ids[: len(prompt)] == prompt
        assert chat.tokenizer().decode(prompt).startswith("<|im_start|>system\n# Tools")
        assert rollout.segments[0].sampled[len(prompt) :].any()
        assert not rollout.error


def test_a_finished_run_does_nothing_again_and_needs_no_start(start, trained, train, tmp_path):
    moved = tmp_path / "elsewhere"
    before = {path.name: path.stat().st_mtime_ns for path in (trained / "stages").iterdir() if path.stem != "report"}
    weights = (trained / "models" / "rl" / "model.safetensors").stat().st_mtime_ns
    shutil.move(start, moved)
    try:
        assert train(start, trained) == 0
    finally:
        shutil.move(moved, start)
    after = {path.name: path.stat().st_mtime_ns for path in (trained / "stages").iterdir() if path.stem != "report"}
    assert after == before
    assert (trained / "models" / "rl" / "model.safetensors").stat().st_mtime_ns == weights


def test_export_is_what_transformers_loads(trained, tmp_path, capsys):
    folder = tmp_path / "exported"
    assert main(["export", str(trained), str(folder), "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == f"model: {folder}"
    ids = torch.arange(40)[None] * 7
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        ours = load_model(trained / "models" / "rl")(ids).logits_BTV
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    question = [{"role": "user", "content": "What is f?"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        question, add_generation_prompt=True, return_dict=False
    )
    template, _ = open_template(folder / "tokenizer.json", find_chat(folder))
    assert template.render_messages([Message(role=Role.USER, content="What is f?")]) == expected
    assert find_chat(folder) == read_chat(trained)
    with pytest.raises(ValueError, match=r"exported, accepted is a new or an empty folder"):
        use.export(trained, folder)


def test_generate_chats_with_the_trained_policy(trained, start, tmp_path):
    """The run answers as its export does."""
    use.export(trained, tmp_path / "exported")
    question = {"max_tokens": 8, "temperature": 0.0, "seed": 0}
    answer = use.generate(trained, "What is f?", **question, chat="auto")
    assert answer == use.generate(tmp_path / "exported", "What is f?", **question, chat="auto")
    assert answer != use.generate(start, "What is f?", **question)
    with pytest.raises(ValueError, match=r"chat is 'kimi-k2', accepted with the run .* is auto or qwen3"):
        use.generate(trained, "x", **question, chat="kimi-k2")


def test_a_run_can_begin_with_a_run(trained, tmp_path, published_models):
    """The newest model and the format of the first run; its own settings of the format are not overridden."""
    config = published_models.config_of(trained)
    run = Run(tmp_path / "next", config, Console("quiet"))
    begin_with_start(run)
    run.close()
    model = (run.folder / "models" / "sft" / "model.safetensors").read_bytes()
    assert model == (trained / "models" / "rl" / "model.safetensors").read_bytes()
    assert run.spec("sft").chat == read_chat(trained)
    other = shutil.copytree(trained, tmp_path / "other")
    with pytest.raises(ValueError, match="accepted is the same start or a new folder"):
        adopt_start(run.folder, other, model="rl")
    with pytest.raises(ValueError, match=r"chat is 'qwen3', accepted with the run .* is 'auto': it has its own"):
        check_start(published_models.config_of(trained, chat="qwen3"))


def test_eval_of_a_start_trains_nothing(start, train, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(pipeline, "run_stages", lambda run, *, last: seen.append((run, last)) or True)
    monkeypatch.chdir(start.parent)
    for command, last in (("eval", "eval-sft"), ("rl", "rl"), ("train", "report")):
        folder = tmp_path / command
        assert train(start.name, folder, command) == 0
        run, found = seen.pop()
        assert found == last
        assert run.config.start == str(start)


def test_kimi_trains_with_router_replay(chat, published_models, train, tmp_path):
    folder = tmp_path / "run"
    assert train(published_models.kimi(tmp_path / "kimi", chat), folder, "rl") == 0
    assert read_chat(folder).format == "kimi-k2"
    steps = [record for record in read_metrics(folder / "metrics.jsonl") if record["stage"] == "rl"]
    assert len(steps) == 2
    assert all(record["mismatch_max"] < 1e-4 for record in steps)  # replayed experts are the sampler's
    assert len(load_model(folder / "models" / "rl").mtp) == 1
