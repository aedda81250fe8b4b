"""Hands out `tests/kernels/exact.py` as a fixture, since test modules cannot import each other."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def exact() -> ModuleType:
    """The module tests/kernels/exact.py: rational oracles, data and libraries to compare with."""
    spec = importlib.util.spec_from_file_location("composer2_kernels_exact", Path(__file__).parent / "exact.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
