"""Scripts as modules, and a start for them: the folder of a run at the scale of `tiny-smoke` with fresh weights."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from composer2.log import Console
from composer2.model.checkpoint.native import save_model
from composer2.pipeline import initial_model, run_stages
from composer2.recipes import tiny_smoke
from composer2.run import Run

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def load_script(monkeypatch):
    """load_script(name) -> module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"composer2_script_{name}", SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def smoke_start(tmp_path_factory) -> Path:
    """Tokenizer and a policy that was not trained; enough to sample from."""
    folder = tmp_path_factory.mktemp("scripts") / "start"
    with Console("quiet") as console:
        run = Run(folder, tiny_smoke(), console)
        assert run_stages(run, last="data")
        save_model(run.model_dir("sft"), initial_model(run))
    return folder
