"""Hands out `builders.py` and `policy.py` of tests/rl as fixtures, since test modules cannot import each other."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "rl" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"composer2_rl_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The module tests/rl/builders.py."""
    return load("builders")


@pytest.fixture(scope="session")
def policy() -> ModuleType:
    """The module tests/rl/policy.py."""
    return load("policy")
