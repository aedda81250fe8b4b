"""Configs to JSON and back, errors that name the place, overrides and presets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.config import apply_overrides, choose_preset, differences, from_json, load_config, save_config, to_json


class Shape(StrEnum):
    COSINE = "cosine"
    WSD = "wsd"


@dataclass(frozen=True, kw_only=True)
class Yarn:
    factor: float = 4.0
    """How many times longer."""


@dataclass(frozen=True, kw_only=True)
class RL:
    max_staleness: int = 2
    """Versions a token may lag."""
    learning_rate: float = 3e-4
    """Peak."""
    replay: bool = True
    """Router replay."""
    correction: Literal["none", "clip"] = "none"
    """Off-policy correction."""
    clip: tuple[float, float] = (0.8, 1.28)
    """Range."""
    weights: dict[str, float] = field(default_factory=dict)
    """Reward components."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"RL.max_staleness is {self.max_staleness}, accepted is an integer >= 0")


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    """Folder name."""
    seed: int = 0
    """Every random draw starts here."""
    shape: Shape = Shape.COSINE
    """Learning-rate shape."""
    splits: tuple[str, ...] = ("dev",)
    """Evaluated."""
    rl: RL = field(default_factory=RL)
    yarn: Yarn | None = None
    folder: Path | None = None
    """Corpus."""


runs = st.builds(
    Run,
    name=st.text(max_size=5),
    seed=st.integers(),
    shape=st.sampled_from(Shape),
    splits=st.lists(st.text(max_size=3), max_size=3).map(tuple),
    rl=st.builds(
        RL,
        max_staleness=st.integers(0, 9),
        learning_rate=st.floats(allow_nan=False, allow_infinity=False),
        replay=st.booleans(),
        correction=st.sampled_from(["none", "clip"]),
        clip=st.tuples(st.floats(0, 1), st.floats(1, 2)),
        weights=st.dictionaries(st.text(max_size=3), st.floats(-1, 1), max_size=2),
    ),
    yarn=st.none() | st.builds(Yarn, factor=st.floats(1, 64)),
    folder=st.none() | st.just(Path("a/b")),
)


@settings(max_examples=50, deadline=None)
@given(runs)
def test_json_round_trip_is_exact(run: Run):
    assert from_json(Run, json.loads(json.dumps(to_json(run)))) == run


def test_fields_left_out_keep_their_defaults():
    assert from_json(Run, {"name": "a", "rl": {"max_staleness": 0}}) == Run(name="a", rl=RL(max_staleness=0))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "a", "rl": {"max_stalness": 0}}, ["rl.max_stalness", "not a field of RL", "max_staleness"]),
        ({"name": "a", "sed": 1}, ["sed", "not a field of Run", "seed"]),
        ({"name": "a", "rl": {"learning_rate": "big"}}, ["rl.learning_rate is 'big' (str)", "accepted is float"]),
        ({"name": "a", "seed": 1.5}, ["seed is 1.5 (float)", "accepted is int"]),
        ({"name": "a", "seed": True}, ["seed is True (bool)", "accepted is int"]),
        ({"name": "a", "rl": {"replay": 1}}, ["rl.replay is 1 (int)", "accepted is bool"]),
        ({"name": "a", "rl": {"correction": "clp"}}, ["rl.correction is 'clp'", "'none', 'clip'", "nearest accepted"]),
        ({"name": "a", "shape": "cosin"}, ["shape is 'cosin'", "'cosine', 'wsd'"]),
        ({"name": "a", "rl": {"clip": [1.0]}}, ["rl.clip has 1 items", "exactly 2"]),
        ({"name": "a", "rl": {"weights": {"style": "x"}}}, ["rl.weights.style is 'x'", "float"]),
        ({"name": "a", "splits": ["dev", 3]}, ["splits[1] is 3 (int)", "accepted is str"]),
        ({"name": "a", "yarn": {"factr": 2}}, ["yarn.factr", "factor"]),
        ({"name": "a", "rl": 3}, ["rl is 3", "an object with the fields of RL"]),
        ({"name": "a", "rl": {"max_staleness": -1}}, ["RL.max_staleness is -1", ">= 0"]),
        ({}, ["name is missing", "accepted is str"]),
    ],
)  # fmt: skip
def test_bad_data_names_place_value_and_what_is_accepted(data: dict[str, Any], words: list[str]):
    with pytest.raises(ValueError) as caught:
        from_json(Run, data)
    for word in words:
        assert word in str(caught.value)


def test_file_round_trip_and_errors_that_name_the_file(tmp_path: Path):
    path = tmp_path / "config.json"
    save_config(path, Run(name="a", yarn=Yarn()))
    assert load_config(path, Run) == Run(name="a", yarn=Yarn())
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"name": "a", "sede": 1}')
    with pytest.raises(ValueError, match=r"config\.json: sede is not a field of Run; nearest accepted: seed"):
        load_config(path, Run)
    path.write_text('{"name":\n oops}')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_config(path, Run)


def test_overrides_reach_nested_fields_and_leave_the_rest():
    start = Run(name="a", rl=RL(learning_rate=1e-3), yarn=Yarn())
    args = ["--rl.max-staleness", "0", "--seed=3", "--rl.no-replay", "--splits", "dev", "test", "--yarn.factor", "2"]
    got = apply_overrides(start, args)
    want_rl = RL(learning_rate=1e-3, max_staleness=0, replay=False)
    assert got == Run(name="a", seed=3, splits=("dev", "test"), rl=want_rl, yarn=Yarn(factor=2.0))
    assert apply_overrides(start, []) == start


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rl.max-stalness", "0"], ["--rl.max-stalness", "--rl.max-staleness"]),
        (["--max-staleness", "0"], ["--max-staleness", "--rl.max-staleness"]),
        (["--rl.max-staleness", "-1"], ["max_staleness is -1", ">= 0"]),
        (["--rl.max-staleness", "few"], ["--rl.max-staleness", "few"]),
        (["--rl.correction", "x"], ["--rl.correction", "none"]),
    ],
)
def test_bad_overrides_exit_with_code_two_and_say_why(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        apply_overrides(Run(name="a"), args)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    text = " ".join((printed.err + printed.out).replace("│", " ").split())
    for word in words:
        assert word in text


def test_presets_by_name_with_nearest_names_offered(capsys: pytest.CaptureFixture[str]):
    presets = {"tiny": Run(name="tiny"), "tiny-smoke": Run(name="tiny-smoke"), "small": Run(name="small")}
    assert choose_preset("tiny", presets).name == "tiny"
    with pytest.raises(SystemExit) as caught:
        choose_preset("tiny-smok", presets)
    assert caught.value.code == 2
    assert "nearest accepted: tiny-smoke" in capsys.readouterr().err


def test_differences_name_place_and_both_values():
    known, wanted = RL(weights={"a": 1.0, "b": 2.0}), RL(max_staleness=1, clip=(0.8, 1.2), weights={"a": 1.0, "b": 3.0})
    assert differences(known, wanted) == [
        "max_staleness is 1, not 2",
        "clip.1 is 1.2, not 1.28",
        "weights.b is 3.0, not 2.0",
    ]
    assert differences(known, RL(weights={"a": 1.0})) == ["weights is {'a': 1.0}, not {'a': 1.0, 'b': 2.0}"]
    assert differences(known, known) == []
