"""`run_ranks(script, function, world)`: run a function of a file of this folder on gloo ranks, once a session."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Any]:
    """Call with (file name, function name, number of ranks); returns what rank 0 wrote to `result.json`."""
    results: dict[tuple[str, str, int], Any] = {}

    def run(script: str, function: str, world: int) -> Any:
        key = (script, function, world)
        if key not in results:
            folder = tmp_path_factory.mktemp(f"{function}_{world}")
            command = [sys.executable, str(HERE / "launch.py"), str(world), str(HERE / script), function, str(folder)]
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
