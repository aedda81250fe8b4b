"""The map of the README leads to files and tests that exist, and every row id resolves in docs/rows.md (row X7)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"\b([MKPRAIEVDTX]\d{1,2})\b")

FIRST_LOOP = set(
    "M1 M2 M4 M5 M6 M7 P1 P2 P3 P4 P5 R1 R2 R3 R4 R5 R7 A2 A3 I1 E1 E5 E6 V2 X1 X2 X3 X4 X5 X7".split()  # noqa: SIM905
)
"""Rows that the loop in small implements in first form."""

ALL_ROWS = {"M": 10, "K": 9, "P": 7, "R": 12, "A": 9, "I": 6, "E": 8, "V": 6, "D": 6, "T": 9, "X": 7}


def section(title: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def map_rows() -> list[list[str]]:
    """Cells of the map: report section, row, what, file, test."""
    lines = [line for line in section("The map").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


MAP = map_rows()


def test_every_row_of_the_first_loop_is_in_the_map():
    assert FIRST_LOOP - {cells[1] for cells in MAP} == set()


@pytest.mark.parametrize("cells", MAP, ids=lambda cells: f"{cells[1]}-{cells[3].strip('`')}")
def test_file_and_test_of_a_map_row_exist(cells: list[str]):
    assert len(cells) == 5
    for cell in cells[3:]:
        assert re.fullmatch(r"`[^`]+`", cell)
        assert (ROOT / cell.strip("`")).is_file(), f"{cell} is named for {cells[1]} and does not exist"


@pytest.mark.parametrize("cells", MAP, ids=lambda cells: f"{cells[1]}-{cells[3].strip('`')}")
def test_the_file_of_a_map_row_names_the_row(cells: list[str]):
    path = ROOT / cells[3].strip("`")
    if path.suffix != ".py":
        return
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert cells[1] in ROW.findall(docstring), f"the docstring of {path.name} does not name row {cells[1]}"


def documented_rows() -> set[str]:
    text = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| ([A-Z]\d{1,2}) \|", text, flags=re.MULTILINE))


def test_rows_page_has_every_row_once():
    wanted = {f"{letter}{number}" for letter, count in ALL_ROWS.items() for number in range(1, count + 1)}
    assert documented_rows() == wanted
    text = (ROOT / "docs" / "rows.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| [A-Z]\d{1,2} \|", text, flags=re.MULTILINE)) == len(wanted)


def row_words(docstring: str) -> set[str]:
    """Row ids of a docstring, those after the word row or rows: `A1` in a formula is no row."""
    found: set[str] = set()
    for match in re.finditer(r"\brows?\b((?:[\s,:;]|and\b|to\b|–|-|[A-Z]\d{1,2}\b)+)", docstring):
        found |= set(ROW.findall(match.group(1)))
    return found


def test_every_row_id_in_a_docstring_resolves():
    documented, unknown = documented_rows(), {}
    seen: set[str] = set()
    for path in sorted((ROOT / "composer2").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                rows = row_words(ast.get_docstring(node) or "")
                seen |= rows
                if rows - documented:
                    unknown[str(path.relative_to(ROOT))] = sorted(rows - documented)
    assert unknown == {}
    assert FIRST_LOOP - seen <= {"X7"}


def test_readme_sections_come_in_their_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == [
        "Two commands",
        "The loop",
        "The map",
        "Read it in this order",
        "Recipes",
        "Bring a model",
        "Swap a part",
        "Take a part elsewhere",
        "Scale out",
        "Deviations and gaps",
        "Develop",
        "Citations, licence",
    ]


def test_every_path_the_readme_names_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:composer2|tests|scripts|docs)/[\w./-]+)`", text))
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
