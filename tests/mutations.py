"""Do the tests see the faults they are for? `python tests/mutations.py` breaks one line at a time in a copy of the tree
and asserts that the named test then fails.

In: the table in `mutants.py`, or the part of it whose file or test contains the argument. Out: exit status 0 when every
mutant is caught, else 1 with the survivors on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch.distributed  # noqa: F401
from mutants import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent


def survives(mutation: Mutation, tree: Path) -> str:
    """Empty when the named test fails on the mutant as it should, else what is wrong."""
    path = tree / mutation.file
    text = path.read_text()
    if text.count(mutation.original) != 1:
        return f"the original line occurs {text.count(mutation.original)} times, accepted is once"
    path.write_text(text.replace(mutation.original, mutation.mutated))
    try:
        return "" if run(mutation.test, tree) == 1 else "the test does not fail"
    finally:
        path.write_text(text)


def run(test: str, tree: Path) -> int:
    """Exit status of pytest on one file of the copied tree, in a fork that has torch already: 0 passed, 1 failed."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os.chdir(tree)
            # The first entry of the path decides which composer2 is imported: the copy, not an installed one.
            sys.path.insert(0, str(tree))
            os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
            sys.dont_write_bytecode = True
            # The profile has no deadlines and no randomness: a slow machine must not make a mutant look caught.
            status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=ci", test]))
            if not sys.modules["composer2"].__path__[0].startswith(str(tree)):
                status = 70
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(part: str) -> int:
    """Copy the tree, see that the tests pass there, then try every mutation of the part (all when empty)."""
    mutations = [mutation for mutation in MUTATIONS if part in mutation.file or part in mutation.test]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        for name in ("composer2", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for test in sorted({mutation.test for mutation in mutations}):
            if run(test, tree) != 0:
                survivors.append(f"{test}: does not pass before any mutation")
        for mutation in mutations:
            problem = survives(mutation, tree)
            if problem:
                survivors.append(f"{mutation.file}: {mutation.mutated!r}: {mutation.test}: {problem}")
    sys.stderr.write("".join(f"{line}\n" for line in survivors))
    sys.stderr.write(f"{len(mutations)} mutations, {len(survivors)} problems\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
