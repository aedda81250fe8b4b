"""Hands out `tests/rl/builders.py` as a fixture, since test modules cannot import each other."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The module tests/rl/builders.py."""
    spec = importlib.util.spec_from_file_location(
        "composer2_rl_builders", Path(__file__).parents[1] / "rl" / "builders.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
