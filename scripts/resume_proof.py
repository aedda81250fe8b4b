"""Interrupts `tiny-smoke` at random moments and proves that the resumed runs equal the uninterrupted one, bit for bit.

    python scripts/resume_proof.py --out DIR [--quick]

In: nothing. Out: `DIR/resume_proof.json`, flat figures; exit code 0 only if every resumed run is equal and left no
process behind. Compared are the metric lines without their times, the summary, the final weights and the kept rollouts.
Five runs are stopped by Ctrl-C (SIGINT to the whole group, as a terminal sends it) and five by kill -9 of the trainer,
whose workers and pods must then end by themselves; `--quick` takes one of each.

Source: rows P2 R1 X2.
Choice: moments are uniform over the duration of the uninterrupted run; a run that was over before its moment is taken
again with an earlier one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from composer2.inspect_run import read_rollouts
from composer2.log import read_metrics, without_time

ARGUMENTS = ("train", "tiny-smoke", "--seed", "3", "--rl.max-staleness", "0", "--quiet")
PATIENCE = 300.0
"""Seconds a whole run may take."""
GRACE = 15.0
"""Seconds the processes of a stopped run have to be gone."""


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """The command in a session of its own, which Ctrl-C goes to as a whole."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "composer2.cli", *ARGUMENTS, "--run-dir", str(folder)],
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def processes() -> dict[tuple[int, str], int]:
    """(process id, start time) -> parent of all processes but those that are dead and not waited for."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != "Z":
            found[int(path.parent.name), fields[19]] = int(fields[1])
    return found


def family(root: int) -> set[tuple[int, str]]:
    """A process and its descendants, workers and pods."""
    parents = processes()
    ids, size = {root}, 0
    while len(ids) > size:
        size = len(ids)
        ids |= {number for (number, _), parent in parents.items() if parent in ids}
    return {key for key in parents if key[0] in ids}


def seconds_until_gone(members: set[tuple[int, str]]) -> float | None:
    """How long the processes lived on; None when some are left after GRACE."""
    started = time.monotonic()
    while time.monotonic() - started < GRACE:
        if not members & processes().keys():
            return time.monotonic() - started
        time.sleep(0.05)
    return None


def fingerprint(folder: Path) -> dict[str, Any]:
    """What must be equal."""
    weights = sorted((folder / "models" / "rl").glob("*.safetensors"))
    return {
        "metrics": without_time(read_metrics(folder / "metrics.jsonl")),
        "summary": json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        "weights": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in weights},
        "rollouts": read_rollouts(folder),
    }


def run_whole(folder: Path) -> float:
    """Run or resume to the end; returns the seconds it took."""
    started = time.monotonic()
    process = start(folder, folder.with_suffix(".log"))
    if process.wait(PATIENCE) != 0:
        raise RuntimeError(f"{folder} ended with {process.returncode}, see {folder.with_suffix('.log')}")
    return time.monotonic() - started


def interrupt(folder: Path, moment: float, kind: str) -> dict[str, Any] | None:
    """Start, stop after `moment` seconds; None when the run was over before."""
    process = start(folder, folder.with_suffix(".log"))
    try:
        process.wait(moment)
        return None
    except subprocess.TimeoutExpired:
        pass
    members = family(process.pid)
    stopped = time.monotonic()
    if kind == "int":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGKILL)
    process.wait(60.0)
    seconds = time.monotonic() - stopped
    gone = seconds_until_gone(members)
    return {"exit_code": process.returncode, "processes": len(members), "stop_s": seconds, "gone_s": gone}


def prove(folder: Path, moment: float, kind: str, expected: dict[str, Any]) -> dict[str, Any]:
    """One interruption and one resume; what came of it."""
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        outcome = interrupt(folder, moment, kind)
        if outcome is not None:
            break
        moment *= 0.8
    stages = [path.stem for path in sorted((folder / "stages").glob("*.json"), key=lambda path: path.stat().st_mtime)]
    run_whole(folder)
    found = fingerprint(folder)
    unequal = [name for name in expected if expected[name] != found[name]]
    return outcome | {"kind": kind, "moment_s": moment, "after": stages[-1:], "unequal": unequal}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    whole = options.out / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    duration = run_whole(whole)
    expected = fingerprint(whole)
    rng = random.Random(options.seed)
    outcomes = []
    for number in range(1 if options.quick else 5):
        for kind in ("int", "kill"):
            moment = rng.uniform(0.0, duration)
            outcomes.append(prove(options.out / f"{kind}-{number}", moment, kind, expected))
            print(json.dumps(outcomes[-1]), flush=True)
    gone = [outcome["gone_s"] for outcome in outcomes]
    figures = {
        "num_interrupts": len(outcomes),
        "num_equal": sum(not outcome["unequal"] for outcome in outcomes),
        "num_left_processes": sum(seconds is None for seconds in gone),
        "interrupts_int": sum(outcome["kind"] == "int" for outcome in outcomes),
        "interrupts_kill": sum(outcome["kind"] == "kill" for outcome in outcomes),
        "max_stop_s": max(outcome["stop_s"] for outcome in outcomes if outcome["kind"] == "int"),
        "max_gone_s": max((seconds for seconds in gone if seconds is not None), default=0.0),
        "uninterrupted_s": duration,
        "num_metric_lines": len(expected["metrics"]),
    }
    (options.out / "resume_proof.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(json.dumps(figures))
    return 0 if figures["num_equal"] == len(outcomes) and not figures["num_left_processes"] else 1


if __name__ == "__main__":
    sys.exit(main())
