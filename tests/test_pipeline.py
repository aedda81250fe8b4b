"""Stages on their own: what they do when there is too little to report."""

import io
from types import SimpleNamespace

import pytest

from composer2.log import Console
from composer2.model import tokenizer
from composer2.model.pretrain.phases import EvalPoint
from composer2.pipeline import fitted_loss
from composer2.recipes import tiny
from composer2.run import Interrupted, Run


def evals(steps, per_step=100):
    return [EvalPoint(step=s, tokens=s * per_step, loss=6.0 - 0.1 * s) for s in steps]


def test_too_few_evaluations_leave_the_fit_out_and_say_so():
    stream = io.StringIO()
    run = SimpleNamespace(config=tiny(), console=Console("rich", stream=stream, error_stream=stream))
    for points in ([], evals([0]), evals([0, 1, 2])):
        assert fitted_loss(run, points) == {}
    assert stream.getvalue().count("it needs 10") == 3


def test_the_fit_uses_what_lies_after_the_warm_up():
    run = SimpleNamespace(config=tiny(), console=Console("quiet"))
    after = list(range(21, 33))
    figures = fitted_loss(run, evals([0, 5, *after]))
    assert figures["loss_fit_points"] == len(after)
    assert figures["loss_fit_after_tokens"] == 2099
    assert figures["loss_fit_r2"] == pytest.approx(1, abs=0.02)


def test_a_damaged_result_of_a_stage_is_named(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "sft.json").write_text("{")
    with pytest.raises(ValueError, match=r"sft\.json is damaged .* the stage runs again"):
        Run.result(SimpleNamespace(folder=tmp_path), "sft")


def test_a_stop_inside_a_guarded_call_is_still_a_stop(monkeypatch, tmp_path):
    """The signal handler raises wherever the program is, within the reading of a tokenizer file for one."""

    class Backend:
        @staticmethod
        def from_buffer(text):
            raise Interrupted

    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(tokenizer, "Backend", Backend)
    with pytest.raises(Interrupted):
        tokenizer.Tokenizer.load(tmp_path)
