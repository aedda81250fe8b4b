"""Fixtures shared by folders. Test modules cannot import each other, so fakes are handed out as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    """`tests/env/fakes.py`: a byte tokenizer, a scripted sampler, pods in memory, a small task."""
    name = "composer2_env_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "env" / "fakes.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
