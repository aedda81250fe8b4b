"""`composer2 … --executor ray` on a real local cluster: results of one machine, interrupts, what is left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from composer2.log import Console, read_metrics, without_time
from composer2.recipes import tiny_smoke

pytest.importorskip("ray", reason="ray is not installed: pip install ray -c constraints.txt")
from composer2.dist.ray.cluster import RayConfig
from composer2.dist.ray.executor import run_on_ray

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
FIELDS = {
    "seed": 5, "rl.max-staleness": 0, "rl.num-workers": 2, "rl.num-steps": 3, "rl.eval-every": 2, "rl.group-size": 3,
    "rl.prompts-per-step": 2, "eval.during.num-tasks": 2, "eval.sets.0.num-tasks": 3, "eval.sets.1.num-tasks": 1,
    "eval.sets.2.num-tasks": 1, "cpt.phase1-steps": 3, "cpt.warmup-steps": 1, "cpt.phase2-steps": 1, "mtp.num-steps": 1,
    "sft.num-steps": 2,
}  # fmt: skip
PRESET = ["tiny-smoke", *(word for name, value in FIELDS.items() for word in (f"--{name}", str(value)))]
SECONDS = 240.0
MARK = uuid.uuid4().hex
"""In the environment of every process of these runs."""


def start(command, folder, *options, log):
    """The command in a process group of its own, as a shell starts it."""
    line = [sys.executable, "-m", "composer2.cli", command, *PRESET, "--run-dir", str(folder), *options]
    with log.open("a") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COMPOSER2_TEST": MARK}
        return subprocess.Popen(
            line, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip


def run(command, folder, *options):
    log = folder.with_suffix(".log")
    assert start(command, folder, *options, log=log).wait(SECONDS) == 0, log.read_text()
    return log.read_text()


def lines(folder, *, without=("services",)):
    """Metrics but for the clock and what only Ray has to say."""
    records = without_time(read_metrics(folder / "metrics.jsonl"))
    return [record for record in records if record["stage"] not in without]


def left_behind():
    """Processes of this test's runs that are alive after a moment: pid -> command."""
    end = time.monotonic() + 30
    while (found := alive()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def alive():
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if MARK.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A run up to the fine-tuned policy, which others copy."""
    folder = tmp_path_factory.mktemp("prepared") / "run"
    run("sft", folder)
    return folder


@pytest.fixture(scope="module")
def local(prepared, tmp_path_factory):
    """The run on one machine, up to the end of RL."""
    folder = tmp_path_factory.mktemp("local") / "run"
    shutil.copytree(prepared, folder)
    run("rl", folder)
    return folder


def test_an_interrupted_run_over_actors_writes_the_metrics_of_one_machine(prepared, local, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    shutil.copytree(prepared, folder)
    process = start("rl", folder, "--executor", "ray", log=log)
    end = time.monotonic() + SECONDS
    while not any(record["stage"] == "rl" for record in lines(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(alive()) > 8  # Ray, the trainer, two samplers, two environments, two evaluation workers
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    assert "the same command continues" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not left_behind()
    done = len([record for record in lines(folder) if record["stage"] == "rl"])
    assert 1 <= done < 3
    run("rl", folder, "--executor", "ray")
    assert lines(folder) == lines(local)
    for name in ("model.safetensors", "config.json"):
        assert (folder / "models" / "rl" / name).read_bytes() == (local / "models" / "rl" / name).read_bytes()
    services = [record for record in read_metrics(folder / "metrics.jsonl") if record["stage"] == "services"]
    assert [record["step"] for record in services] == [1, 2, 3]
    assert [record["ray_samples"] for record in services] == [
        *range(6, 6 * done + 1, 6),
        *range(6, 6 * (3 - done) + 1, 6),
    ]
    last = services[-1]
    assert last["ray_stored_bytes"] > 0
    assert last["ray_spilled_bytes"] == last["ray_spilled_objects"] == last["ray_restarts"] == 0
    roles = ("environment", "evaluation", "sampler")
    places = {f"{role}-{index}": f"node 0 bundle {1 + index}" for role in roles for index in (0, 1)}
    assert last["ray_placements"] == {"trainer": "node 0 bundle 0", **places}
    result = json.loads((folder / "stages" / "rl.json").read_text())
    assert result["ray_placements"] == last["ray_placements"]
    assert not left_behind()


def test_without_ray_the_reason_is_told(tmp_path):
    code = (
        "import sys; sys.modules['ray'] = None; from composer2.cli import main; "
        f"main(['train', 'tiny-smoke', '--run-dir', {str(tmp_path / 'run')!r}, '--executor', 'ray'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ray executor needs ray, which cannot be imported: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_sampler_on_a_gpu_is_refused(tmp_path):
    config = tiny_smoke()
    config = replace(config, engine=replace(config.engine, device="cuda"))
    with pytest.raises(ValueError, match=r"^engine\.device is 'cuda', accepted over Ray is 'cpu'"):
        run_on_ray(tmp_path / "run", config, last="sft", console=Console("quiet"), ray_config=RayConfig())
    assert not (tmp_path / "run").exists()
