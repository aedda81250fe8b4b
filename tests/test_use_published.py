"""`composer2 generate` and `inspect model` on a Hugging Face directory."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer2.cli import main
from composer2.env.chat_formats import QWEN3
from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.checkpoint.native import save_model
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.runner import require_device
from composer2.use import generate


def directory(place: Path, marks=(), **changes) -> tuple[Path, Transformer]:
    """A tiny Qwen3 MoE model with a tokenizer of bytes and the added tokens `marks`."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=mark.startswith("<|"), normalized=False) for mark in marks])
    tokenizer.save(str(place / "tokenizer.json"))
    fields = {
        "vocab_size": 256 + len(marks),
        "n_shared_experts": 0,
        "num_nextn_predict_layers": 0,
        "scoring_func": "softmax",
    }
    model = Transformer(ModelConfig(**fields, attention="grouped", num_key_value_heads=2, qk_norm="head", **changes))
    init_weights(model, 0)
    save_huggingface(place / "m", model, eos_ids=[3], tokenizer=place / "tokenizer.json")
    return place / "m", model


def test_generate_continues_with_the_most_likely_token(tmp_path):
    folder, model = directory(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("def f(x):").ids
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits_BTV[0, -1].argmax()))
    expected = tokenizer.decode(ids[prompt:])
    assert 3 not in ids[prompt:]
    assert generate(folder, "def f(x):", max_tokens=6, temperature=0, seed=0) == expected


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    folder, _ = directory(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        generate(folder, "x", max_tokens=1, temperature=0, seed=0)


def test_inspect_model(tmp_path, capsys):
    folder, model = directory(tmp_path)
    assert main(["inspect", "model", str(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert record["family"] == "qwen3_moe"
    assert record["kv_values_per_token_per_layer"] == 2 * 2 * 32


TEMPLATES = Path(__file__).parent / "env" / "chat_templates"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_puts_the_prompt_into_the_models_format(tmp_path, capsys, place):
    """The same greedy tokens as the model gives after `transformers`' rendering of the directory's template."""
    folder, model = directory(tmp_path, marks=QWEN3.marks)
    published = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    data = published if place.endswith("jinja") else json.dumps({"chat_template": published})
    (folder / place).write_text(data, encoding="utf-8")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    peer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=published)
    question = [{"role": "user", "content": "What is f?"}]
    ids = peer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    stops = {3, backend.token_to_id("<|im_end|>")}
    sampled = []
    with torch.no_grad():
        while len(sampled) < 8 and not (sampled and sampled[-1] in stops):
            sampled.append(int(model(torch.tensor([ids + sampled])).logits_BTV[0, -1].argmax()))
    command = ["generate", "--model", str(folder), "--prompt", "What is f?", "--temperature", "0", "--max-tokens", "8"]
    assert main([*command, "--chat", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out.splitlines()[-1])["completion"]
    assert completion == backend.decode(sampled, skip_special_tokens=True)
    assert generate(folder, "What is f?", max_tokens=8, temperature=0, seed=0, chat="qwen3") == completion
    assert generate(folder, "What is f?", max_tokens=8, temperature=0, seed=0) != completion


def test_chat_formats_that_do_not_fit_are_refused(tmp_path):
    folder, _ = directory(tmp_path, marks=QWEN3.marks)
    for chat, message in (
        ("auto", "fits qwen3, qwen3-coder; accepted is one fit"),
        ("llama", "chat is 'llama', accepted is auto or one of kimi-k2, "),
        ("minimax-m2", r"chat is 'minimax-m2', accepted is a format whose marks .* it lacks \]~!b\["),
    ):
        with pytest.raises(ValueError, match=message):
            generate(folder, "x", max_tokens=1, temperature=0, seed=0, chat=chat)


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong is told in one line


def line(capsys, *argv) -> str:
    """The one line of a command that leaves with 1."""
    with pytest.raises(SystemExit) as left:
        main([str(part) for part in argv])
    assert left.value.code == 1
    (text,) = capsys.readouterr().err.splitlines()
    return text


def test_a_prompt_that_no_model_takes(tmp_path):
    folder, model = directory(tmp_path)
    longest = model.config.max_position_embeddings
    sampling = {"max_tokens": 3, "temperature": 0, "seed": 0}
    with pytest.raises(ValueError, match=r"^prompt is '', accepted is a text that .*tokenizer\.json makes a token of"):
        generate(folder, "", **sampling)
    with pytest.raises(
        ValueError, match=f"^prompt has {longest + 1} tokens, accepted is at most the model's {longest}$"
    ):
        generate(folder, "a" * (longest + 1), **sampling)
    assert generate(folder, "a\ud800b", **sampling) == generate(folder, "a?b", **sampling)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version'])
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    folder, _ = directory(tmp_path)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"m/tokenizer\.json is damaged .* accepted is a published tokenizer\.json"):
        generate(folder, "x", max_tokens=1, temperature=0, seed=0)


def test_a_chat_template_that_is_no_text_is_named(tmp_path):
    folder, _ = directory(tmp_path, marks=QWEN3.marks)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is damaged .* accepted is UTF-8"):
        generate(folder, "x", max_tokens=1, temperature=0, seed=0, chat="auto")


@pytest.mark.parametrize("use", ["generate", "chat", "solve"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            None,
            "model is '{folder}', accepted is the folder of a run, or a Hugging Face directory with a config.json of",
        ),
        ("{", "{folder}/config.json is no JSON: "),
        ('{"model_type": "llama"}', "{folder}/config.json: model_type is 'llama', accepted is one of deepseek_v3, "),
    ],
)
def test_a_folder_that_holds_no_known_model(capsys, tmp_path, use, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    rest = {"generate": ["--prompt", "x"], "chat": ["--prompt", "x", "--chat"], "solve": [tmp_path]}[use]
    text = line(capsys, "solve" if use == "solve" else "generate", *rest, "--model", tmp_path)
    assert text.startswith("error: " + message.replace("{folder}", str(tmp_path)))


def test_weights_that_are_no_numbers_are_one_line(capsys, tmp_path):
    folder, model = directory(tmp_path, marks=QWEN3.marks, max_position_embeddings=8192)
    model.norm.weight.data.fill_(float("nan"))
    shutil.rmtree(folder)
    save_huggingface(folder, model, eos_ids=[3], tokenizer=tmp_path / "tokenizer.json")
    text = line(capsys, "generate", "--model", folder, "--prompt", "x")
    assert text == "error: logits are not finite, nothing can be sampled from them"
    shutil.copyfile(TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    for name, source in (("calc.py", "def one():\n    return 2\n"), ("test_calc.py", "assert one() == 1\n")):
        (tmp_path / name).write_text(f"from calc import one\n\n{source}" if "test" in name else source)
    command = ["solve", tmp_path, "one is wrong", "--model", folder, "--samples", "2", "--unsafe-process-pods"]
    assert line(capsys, *command) == text


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", "cuda:", "cpu:x", ""])
def test_a_device_of_another_kind_is_refused(device):
    with pytest.raises(ValueError, match=f"^device is '{device}', accepted is cpu, cuda or cuda:N$"):
        require_device("device", device)


def test_inspect_model_of_a_run_and_of_an_unknown_model(capsys, tmp_path):
    _, model = directory(tmp_path)
    save_model(tmp_path / "run" / "models" / "sft", model)
    assert main(["inspect", "model", str(tmp_path / "run"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["total"] == sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert "published ones are deepseek_v3, " in line(capsys, "inspect", "model", tmp_path)


@pytest.mark.parametrize("command", [["report"], ["inspect", "run"]])
def test_a_model_is_no_run(capsys, tmp_path, command):
    folder, _ = directory(tmp_path)
    before = sorted(folder.iterdir())
    assert "which holds a model, accepted is the folder of a run" in line(capsys, *command, folder)
    assert sorted(folder.iterdir()) == before
