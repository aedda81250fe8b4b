"""Fixtures shared by folders. Test modules cannot import each other, so fakes are handed out as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    """The module `tests/env/<name>.py`, imported once."""
    full = f"composer2_env_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / "env" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """`tests/env/fakes.py`: a byte tokenizer, a scripted sampler, pods in memory, a small task."""
    return load("fakes")


@pytest.fixture(scope="session")
def chat() -> ModuleType:
    """`tests/env/chat.py`: a tokenizer with the marks of all chat formats, and their templates in `transformers`."""
    return load("chat")
