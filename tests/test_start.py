"""A run that begins with a published model: what is refused, where it runs, one template, `solve`."""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from composer2 import runner, use
from composer2.cli import main
from composer2.env.pod import open_backend
from composer2.env.tools.registry import TOOLS, tool_specs
from composer2.log import Console
from composer2.model.checkpoint.native import load_model
from composer2.model.engine.engine import Engine
from composer2.pipeline import adopt_start
from composer2.recipes import published, tiny
from composer2.run import Run
from composer2.runner import EpisodeRunner, open_model
from composer2.start import check_start
from composer2.task_source import TaskSource
from composer2.templates import find_chat, open_template
from composer2.types import Message, Role, ToolCall


@pytest.fixture(scope="module")
def start(chat, published_models, tmp_path_factory):
    return published_models.qwen3(tmp_path_factory.mktemp("qwen3"), chat)


@pytest.fixture
def config_of(published_models):
    return published_models.config_of


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"episode": {"context_budget": 416}},
            r"^episode\.context_budget is 416, accepted with this model is \d+ or more: a task's prompt takes \d",
        ),
        ({"engine": {"max_len": 5000}}, r"^engine\.max_len is 5000, accepted with .* max_position_embeddings 4096"),
        (
            {"engine": {"max_len": 5000}} | {"episode": {"context_budget": 4500}},
            r"^episode\.context_budget is 4500, accepted with .* max_position_embeddings 4096",
        ),
        ({"engine": {"speculative": True}}, r"^engine\.speculative is True, accepted with .* has no MTP module"),
        ({"start": "/absent"}, r"^start is '/absent', accepted is a Hugging Face directory .* qwen3, .* or the folder"),
    ],
)
def test_a_config_that_does_not_fit_the_model_is_refused(start, changes, message, config_of):
    with pytest.raises(ValueError, match=message):
        check_start(config_of(start, **changes))


def test_the_least_context_named_is_the_least(start, config_of):
    with pytest.raises(ValueError, match=r"is 400") as refused:
        check_start(config_of(start, episode={"context_budget": 400}))
    least = int(str(refused.value).split("model is ")[1].split()[0])
    with pytest.raises(ValueError, match=f"is {least - 1}, accepted with this model is {least}"):
        check_start(config_of(start, episode={"context_budget": least - 1}))
    check_start(config_of(start, episode={"context_budget": least}))


def test_the_preset_fits_the_smallest_published_model(chat, published_models, tmp_path):
    """Qwen3-0.6B has 40,960 positions; the vocabulary here is smaller, so that a prompt takes more tokens."""
    start = published_models.qwen3(tmp_path, chat, max_position_embeddings=40_960)
    check_start(replace(published(), start=str(start)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), r"holds no tokenizer\.json, accepted is a directory"),
        (lambda folder: (folder / "chat_template.jinja").write_text("plain"), "fits none; accepted is one fit, or one"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "model_type deepseek_v3"),
    ],
)
def test_a_directory_that_lacks_something_is_refused(start, tmp_path, spoil, message, config_of):
    folder = tmp_path / "model"
    shutil.copytree(start, folder)
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_start(config_of(folder))


def test_without_a_template_the_marks_alone_decide(start, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(start, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"fits kimi-k2\.5, kimi-k2, .*; accepted is one fit"):
        find_chat(folder)
    assert find_chat(folder, "qwen3").format == "qwen3"


def test_a_tokenizer_larger_than_the_model_is_refused(chat, tmp_path, config_of, published_models):
    size = chat.tokenizer().vocab_size
    folder = published_models.qwen3(tmp_path, chat, vocab_size=size - 1)
    with pytest.raises(ValueError, match=rf"has {size} tokens, accepted is at most the model's vocab_size {size - 1}"):
        check_start(config_of(folder))


def test_marks_that_the_tokenizer_lacks_are_named(chat, tmp_path, config_of, published_models):
    folder = published_models.qwen3(tmp_path, chat)
    data = json.loads((folder / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        if token["content"] == "<think>":
            token["content"] = "<thought>"
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"chat is 'qwen3', accepted is a format whose marks .* it lacks <think>$"):
        check_start(config_of(folder, chat="qwen3"))


def test_fields_of_a_published_start_need_one():
    with pytest.raises(ValueError, match=r"RunConfig\.chat is 'llama', accepted is auto or one of kimi-k2, "):
        replace(tiny(), start="x", chat="llama")
    with pytest.raises(ValueError, match=r"RunConfig\.chat is 'qwen3', accepted without a published start is 'auto'"):
        replace(tiny(), chat="qwen3")
    with pytest.raises(ValueError, match=r"RunConfig\.thinks is False, accepted without a published start is True"):
        replace(tiny(), thinks=False)


def test_a_format_that_always_reasons_says_so(start, config_of):
    with pytest.raises(ValueError, match="thinks is False, accepted in format minimax-m2 is True"):
        check_start(config_of(start, chat="minimax-m2", thinks=False))


def test_the_command_refuses_before_it_writes(start, tmp_path, capsys):
    for flags, message in (
        (["tiny", "--start", str(start)], "episode.context_budget is 416, accepted with this model is"),
        (["published"], "start is '', accepted with the preset published is a directory, --start DIR"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["train", *flags, "--run-dir", str(tmp_path / "run"), "--quiet"])
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: {message}")
        assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        main(["plan", "published", "--gpus", "1"])  # a preset without a model has nothing to plan
    assert capsys.readouterr().err.startswith("error: preset is 'published', accepted are tiny-smoke, tiny, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none(start, tmp_path, config_of):
    for field, changes in (("RunConfig", {"device": "cuda"}), ("EngineConfig", {"engine": {"device": "cuda"}})):
        with pytest.raises(ValueError, match=rf"^{field}\.device is 'cuda', accepted on this machine is 'cpu'"):
            Run(tmp_path / "run", config_of(start, **changes), Console("quiet"))
        assert not (tmp_path / "run").exists()
    spec = use.solver(start, samples=1, allow_unsafe=True, device="cuda", thinks=True)
    with pytest.raises(ValueError, match="device is 'cuda', accepted on this machine is 'cpu'"):
        EpisodeRunner(spec)
    with pytest.raises(ValueError, match=r"EngineConfig\.device is 'tpu', accepted is one of cpu, cuda"):
        replace(spec.engine, device="tpu")


def test_the_sampler_is_loaded_where_the_config_says(start, monkeypatch):
    model, asked = open_model(start, "cpu"), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "load_huggingface", lambda folder, *, device: asked.append((folder, device)) or model)
    EpisodeRunner(use.solver(start, samples=1, allow_unsafe=True, device="cuda", thinks=True))
    assert asked == [(start, "cuda")]


def test_bfloat16_is_trained_in_float32_and_written_back(chat, published_models, tmp_path):
    """Without a step of training the weights come back bit for bit, in the dtype they had."""
    start = published_models.qwen3(tmp_path / "start", chat, dtype=torch.bfloat16)
    adopt_start(tmp_path / "run", start)
    adopted = load_model(tmp_path / "run" / "models" / "sft")
    assert {parameter.dtype for parameter in adopted.parameters()} == {torch.float32}
    use.export(tmp_path / "run", tmp_path / "exported")
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "exported"))
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"
    use.export(tmp_path / "run", tmp_path / "whole", "float32")
    assert {t.dtype for t in load_file(tmp_path / "whole" / "model.safetensors").values()} == {torch.float32}
    with pytest.raises(ValueError, match=r"^dtype is 'fp8', accepted is one of float32, bfloat16"):
        use.export(tmp_path / "run", tmp_path / "other", "fp8")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_from_the_trainer_land_in_place(chat, tmp_path, device, published_models):
    """float32 on the CPU in; the sampler keeps its device and its dtypes, a router its float32."""
    model = open_model(published_models.kimi(tmp_path, chat), "cpu")
    engine = Engine(model.to(device), num_slots=1, max_len=64, dtype=torch.bfloat16)
    kinds = {name: (tensor.dtype, tensor.device) for name, tensor in engine.model.state_dict().items()}
    fresh = {name: torch.full(tensor.shape, 1.01) for name, tensor in engine.model.state_dict().items()}
    engine.load_weights(fresh, 1)
    state = engine.model.state_dict()
    assert {name: (tensor.dtype, tensor.device) for name, tensor in state.items()} == kinds
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.float32}
    if device == "cpu":
        assert all(torch.equal(tensor, fresh[name].to(tensor.dtype)) for name, tensor in state.items())


# ---------------------------------------------------------------------------------------------------------------------
# One harness and one template


def test_a_task_opens_as_transformers_renders_it(start, chat, config_of):
    template, tokenizer = open_template(start / "tokenizer.json", find_chat(start))
    task = TaskSource(config_of(start)).at(0)
    prompt = template.render_prompt(task)
    shown = tokenizer.decode(prompt).split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    assert shown.startswith(task.instruction)
    assert prompt == chat.peer_ids("qwen3", [Message(role=Role.USER, content=shown)], tool_specs(task.tools))
    assert [name for name in TOOLS if f'"name": "{name}"' in tokenizer.decode(prompt)] == [
        name for name in TOOLS if name in task.tools
    ]


def test_every_tool_works_in_a_pod(start, fakes):
    template, tokenizer = open_template(start / "tokenizer.json", find_chat(start, thinks=False))
    tools = ("read", "search", "edit", "run", "todo", "finish")
    calls = [
        ToolCall(name="read", arguments={"path": "solution.py", "start": 2, "limit": 1}),
        ToolCall(name="search", arguments={"pattern": "return x"}),
        ToolCall(name="todo", arguments={"items": [{"text": "compare", "done": False}]}),
        ToolCall(name="run"),
        ToolCall(name="edit", arguments={"line": 4, "old": "0", "new": "-0"}),
        ToolCall(name="edit", arguments={"line": 2, "old": " >", "new": " >="}),
        ToolCall(name="run"),
        ToolCall(name="finish", arguments={"message": "done"}),
    ]
    script = [template.render_calls([call]) for call in calls]
    backend, _ = open_backend("auto", allow_unsafe=True)

    async def play():
        try:
            task = fakes.make_task(tools=tools)
            limits = {"context_budget": 9000, "max_tokens_per_turn": 400, "max_result_tokens": 400, "max_turns": 9}
            return await fakes.run_script(task, script, template=template, backend=backend, **limits)
        finally:
            await backend.close()

    rollout, sampler, _ = asyncio.run(play())
    answers = [message.tool_results[0].content for message in rollout.messages if message.tool_results]
    assert answers == [
        "solution.py\n2     if x > 3:\n",
        "solution.py:3         return x",
        "1 of 1 open",
        "fail 3",
        "ok",
        "ok",  # on top of the first edit: the files are not put back in between
        "pass",
        "ok",
    ]
    assert rollout.passed
    assert rollout.attempts == (False, True)
    assert rollout.final_files["solution.py"].count("-0") == 1
    assert rollout.events == {}
    context = tokenizer.decode(sampler.requests[-1][0])
    assert context.count("<tool_response>\n") == 7
    assert context.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# ---------------------------------------------------------------------------------------------------------------------
# Solve


@pytest.fixture
def broken(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "count.py").write_text("def big(values):\n    return sum(1 for value in values if value >= 3)\n")
    (folder / "test_count.py").write_text("from count import big\n\n\ndef test_edge():\n    assert big([3, 4]) == 1\n")
    return folder


def test_solve_works_with_a_published_directory(start, broken, monkeypatch, capsys):
    preset = published()
    limits = replace(preset.episode, max_tokens_per_turn=40, max_result_tokens=200, max_summary_tokens=40, max_turns=2)
    monkeypatch.setattr(use, "published", lambda: replace(preset, episode=limits))
    argv = ["solve", str(broken), "3 does not count", "--model", str(start), "--samples", "2", "--json"]
    assert main([*argv, "--no-thinks", "--unsafe-process-pods"]) in (0, 1)
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert record["instruction"] == "3 does not count"
    assert record["error"] == ""
    assert record["stats"]["num_turns"] >= 1


def test_solve_takes_windows_no_longer_than_the_models(start):
    spec = use.solver(start, samples=3, allow_unsafe=False, device="cpu", thinks=False)
    assert (spec.engine.max_len, spec.episode.context_budget, spec.engine.num_slots) == (4096, 4096, 3)
    assert spec.chat == replace(find_chat(start), thinks=False)
    assert spec.model_dir == start
    assert spec.episode.max_turns == published().episode.max_turns


def test_solve_says_when_no_turn_fits(chat, published_models, broken, tmp_path):
    start = published_models.qwen3(tmp_path, chat, max_position_embeddings=2560)
    with pytest.raises(ValueError, match=r"episode\.context_budget is 2560, accepted is more: no turn fits"):
        use.solve(broken, "3 does not count", start, samples=1, seed=0, allow_unsafe=True)


def test_every_end_token_of_the_model_ends_a_turn(start):
    """Not the format's own alone: what the directory's configs name too, in training as in use."""
    chat = find_chat(start)
    other = next(i for i in range(50) if i not in chat.eos_ids)
    own = open_template(start / "tokenizer.json", replace(chat, eos_ids=()))[0].stop_ids
    template = open_template(start / "tokenizer.json", replace(chat, eos_ids=(other,)))[0]
    assert template.stop_ids == (*own, other)
