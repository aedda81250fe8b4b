"""Choice of backend: by device alone, never in silence."""

import logging

import pytest
import torch

from composer2.kernels import backend
from composer2.kernels.backend import BackendUnavailable, choose, refusal, which
from composer2.kernels.mxfp8 import quantize_mxfp8
from composer2.kernels.nvfp4 import quantize_nvfp4


def test_auto_is_a_rule_by_device():
    assert which() == "reference"
    assert which("cuda:1") == "triton"
    with pytest.raises(BackendUnavailable, match="'meta'"):
        which("meta")
    assert choose("op", "auto", "cpu") == "reference"
    assert choose("op", "reference", "meta") == "reference"


def test_names_and_reasons_are_given():
    with pytest.raises(
        ValueError, match=r"op: backend is 'torchao', accepted is one of \('auto', 'reference', 'triton'"
    ):
        choose("op", "torchao", "cpu")
    assert "no such implementation" in refusal("cutlass", "cpu")
    assert refusal("reference", "cpu") == ""


def test_a_missing_package_raises_and_nothing_is_used_instead(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    x = torch.ones(2, 32)
    for quantize, name in (
        (quantize_nvfp4, "triton"),
        (quantize_nvfp4, "torchao"),
        (quantize_nvfp4, "transformer_engine"),
        (quantize_mxfp8, "torchao"),
        (quantize_mxfp8, "triton"),
    ):
        with pytest.raises(BackendUnavailable, match=f"backend '{name}' cannot run: {name} is not installed"):
            quantize(x, backend=name)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backend, "is_triton_interpreted", lambda: False)
    assert "interpreter is off" in refusal("triton", "cpu")
    assert refusal("triton", "cuda") == ""
    monkeypatch.setattr(backend, "is_triton_interpreted", lambda: True)
    assert refusal("triton", "cpu") == ""
    assert "meta" in refusal("triton", "meta")


def test_the_choice_is_logged_once(caplog):
    backend.log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger="composer2.kernels.backend"):
        for _ in range(3):
            choose("an operation", "auto", "cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "an operation on cpu: backend reference (asked for auto)"
    ]
