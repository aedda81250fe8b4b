"""Runs one function on several real gloo ranks: `python launch.py WORLD SCRIPT FUNCTION FOLDER`.

FUNCTION of the file SCRIPT is called as function(folder) on every rank. Ranks are forked after the imports, so that
eight of them start as fast as one. Exit status 0 only if every rank ended well."""

import importlib.util
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import composer2.dist.fsdp
import composer2.rl.train  # noqa: F401

SECONDS = 500
"""Far above what a job takes (10 to 30 s alone): a machine under load is not a hang."""


def rank_main(rank: int, world: int, script: str, function: str, folder: Path) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("composer2_dist_job", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    spec.loader.exec_module(module)
    getattr(module, function)(folder)
    dist.barrier()
    dist.destroy_process_group()


def main(world: int, script: str, function: str, folder: Path) -> int:
    ranks = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rank_main(rank, world, script, function, folder)
                status = 0
            finally:  # whatever went wrong: a forked rank must not return into the launcher
                if status:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
        ranks.append(child)
    deadline, failed = time.monotonic() + SECONDS, False
    while ranks and not failed and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
            continue
        ranks.remove(child)
        failed = status != 0
    for child in ranks:
        os.kill(child, signal.SIGKILL)
    return int(failed or bool(ranks))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])))
