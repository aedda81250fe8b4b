"""Fixtures shared by folders. Test modules cannot import each other, so fakes are handed out as a module."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RANKS = Path(__file__).parent / "dist"


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


@pytest.fixture(scope="session")
def published_models() -> ModuleType:
    """`tests/env/published.py`: small models as Hugging Face directories, and configs of runs that begin with them."""
    return load("published")


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Any]:
    """Call with (file of tests/dist, function of it, ranks): what rank 0 wrote to `result.json`, once a session."""
    results: dict[tuple[str, str, int], Any] = {}

    def run(script: str, function: str, world: int) -> Any:
        key = (script, function, world)
        if key not in results:
            folder = tmp_path_factory.mktemp(f"{function}_{world}")
            command = [sys.executable, str(RANKS / "launch.py"), str(world), str(RANKS / script), function, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # it ends itself in time
            results[key] = (
                json.loads((folder / "result.json").read_text())
                if done.returncode == 0
                else RuntimeError(f"{function} on {world} ranks: status {done.returncode}\n{done.stderr[-4000:]}")
            )
        if isinstance(results[key], Exception):
            raise results[key]
        return results[key]

    return run
