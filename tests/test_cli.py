"""The command: what is refused, with which words and exit code."""

import json

import pytest

from composer2 import pipeline
from composer2.cli import COMMANDS, TRAINING, main
from composer2.config import save_config
from composer2.pipeline import STAGES
from composer2.recipes import tiny_smoke
from composer2.types import PodError


def refused(capsys, *argv, code=2):
    """stderr of a command line that leaves with `code`."""
    with pytest.raises(SystemExit) as left:
        main(list(argv))
    assert left.value.code == code
    return capsys.readouterr().err


def test_unknown_command_names_the_nearest(capsys):
    text = refused(capsys, "trian", "tiny")
    assert text.startswith("error: command is 'trian', accepted are train, cpt")
    assert "nearest accepted: train" in text


def test_unknown_preset_names_the_nearest(capsys):
    text = refused(capsys, "train", "tiny-smok")
    assert text.startswith("error: preset is 'tiny-smok', accepted are tiny-smoke, tiny, tiny-long, small")
    assert "nearest accepted: tiny-smoke" in text


@pytest.mark.parametrize(
    ("flag", "near"), [("--rl.max-stalenes", "--rl.max-staleness"), ("--max-staleness", "--rl.max-staleness")]
)
def test_unknown_field_names_the_nearest(capsys, tmp_path, flag, near):
    text = refused(capsys, "train", "tiny-smoke", "--run-dir", str(tmp_path / "run"), flag, "0")
    assert text.startswith(f"error: {flag} is not a field of RunConfig")
    assert near in text.split("nearest accepted:")[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flag", "value"), [("--rl.num-steps", "many"), ("--engine.cache-on-update", "drop")])
def test_value_of_the_wrong_type_leaves_with_2(capsys, tmp_path, flag, value):
    text = refused(capsys, "train", "tiny-smoke", "--run-dir", str(tmp_path / "run"), flag, value)
    assert value in text
    assert not (tmp_path / "run").exists()


def test_value_out_of_range_names_field_value_and_what_is_accepted(capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        main(["train", "tiny-smoke", "--run-dir", str(tmp_path / "run"), "--rl.group-size", "0"])
    assert left.value.code != 0
    captured = capsys.readouterr()
    assert "group_size is 0, accepted is 1 or more" in " ".join((captured.err + captured.out).split())


def test_fields_are_listed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "tiny-smoke", "--fields"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--rl.max-staleness", "--cpt.phase1-steps", "--pods.backend"):
        assert flag in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([command, *(["run"] if command == "inspect" else []), "--help"])
    assert left.value.code == 0
    assert f"usage: composer2 {command}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in ("train", "generate", "solve", "report", "inspect"):
        assert command in text


def test_every_training_command_ends_at_a_stage():
    assert set(TRAINING.values()) <= set(STAGES)


def test_a_run_of_another_config_is_refused(capsys, tmp_path):
    save_config(tmp_path / "config.json", tiny_smoke())
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "data.json").write_text("{}", encoding="utf-8")
    text = refused(capsys, "cpt", "tiny-smoke", "--run-dir", str(tmp_path), "--cpt.phase1-steps", "25", "--quiet")
    assert "holds a run with another configuration (cpt.phase1_steps is 25, not 24), accepted is the same" in text
    assert json.loads((tmp_path / "config.json").read_text())["cpt"]["phase1_steps"] == 24


@pytest.mark.parametrize("text", ['{"model_type": "qwen3"}', "[]", "{", ""])
def test_a_run_never_writes_over_another_config_json(capsys, tmp_path, text):
    """A published model's directory as --run-dir must not lose its config."""
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    told = refused(capsys, "cpt", "tiny-smoke", "--run-dir", str(tmp_path), "--quiet")
    assert told.startswith(f"error: {tmp_path / 'config.json'} is no")
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_run_that_never_did_anything_takes_the_corrected_command(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "run_stages", lambda run, *, last: True)
    save_config(tmp_path / "config.json", tiny_smoke())
    assert main(["cpt", "tiny-smoke", "--run-dir", str(tmp_path), "--cpt.phase1-steps", "25", "--quiet"]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["cpt"]["phase1_steps"] == 25


def test_overrides_and_stages_reach_the_pipeline(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(pipeline, "run_stages", lambda run, *, last: seen.append((run, last)) or True)
    argv = ["sft", "tiny-smoke", "--run-dir", str(tmp_path), "--quiet", "--rl.max-staleness", "0", "--seed", "4"]
    assert main([*argv, "--unsafe-process-pods"]) == 0
    run, last = seen[0]
    assert last == "sft"
    assert (run.config.rl.max_staleness, run.config.seed, run.config.pods.allow_unsafe) == (0, 4, True)
    assert (tmp_path / "config.json").exists()


def test_an_interrupted_run_leaves_with_130(monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "run_stages", lambda run, *, last: False)
    assert main(["cpt", "tiny-smoke", "--run-dir", str(tmp_path), "--quiet"]) == 130


def test_pods_that_are_not_permitted_are_refused_before_training(capsys, tmp_path):
    text = refused(capsys, "train", "tiny-smoke", "--run-dir", str(tmp_path / "run"), "--pods.backend", "process")
    assert "unsafe" in text
    assert not (tmp_path / "run").exists()


def test_quiet_and_json_exclude_each_other(capsys, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    assert "--quiet and --json exclude each other" in refused(
        capsys, "inspect", "run", str(tmp_path), "--quiet", "--json"
    )


@pytest.mark.parametrize("argv", [["report"], ["inspect", "run"]])
def test_a_missing_run_is_named(capsys, tmp_path, argv):
    text = refused(capsys, *argv, str(tmp_path / "absent"), code=1)
    assert text.startswith(f"error: run directory is '{tmp_path / 'absent'}', accepted is a folder with")


@pytest.mark.parametrize("argv", [["generate", "--prompt", "x"], ["solve", "."]])
def test_use_of_a_missing_run_is_refused(capsys, tmp_path, argv):
    text = refused(capsys, *argv, "--model", str(tmp_path / "absent"), code=1)
    assert text.startswith("error: ")
    assert "absent" in text


def test_inspect_has_help(capsys):
    assert main(["inspect", "--help"]) == 0
    assert "usage: composer2 inspect run RUN_DIR [N] | model NAME|DIR" in capsys.readouterr().out


def test_inspect_takes_run(capsys, tmp_path):
    assert "inspect takes `run RUN_DIR`" in refused(capsys, "inspect", str(tmp_path))


def test_inspect_shows_a_run(capsys, tmp_path):
    (tmp_path / "summary.json").write_text('{"sft_pass_at_1": 0.25}')
    assert main(["inspect", "run", str(tmp_path), "--json"]) == 0
    assert "0.25" in capsys.readouterr().out
    assert "rollout is 3" in refused(capsys, "inspect", "run", str(tmp_path), "3", code=1)


def test_report_is_written_again(capsys, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    assert main(["report", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    assert (tmp_path / "report.html").is_file()


def test_a_pod_that_does_not_start_is_one_line(capsys, monkeypatch):
    def refuse(argv):
        raise PodError("no pods here")

    monkeypatch.setitem(COMMANDS, "solve", refuse)
    assert refused(capsys, "solve", ".", code=1) == "error: no pods here\n"
