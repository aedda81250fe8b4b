"""Hands out `chat.py` as a fixture, since test modules cannot import each other."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def chat() -> ModuleType:
    """`tests/env/chat.py`: a tokenizer with every format's marks, and the published templates in `transformers`."""
    name = "composer2_env_chat"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "chat.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
