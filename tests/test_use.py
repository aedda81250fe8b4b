"""A folder as a task, without running any of its code."""

import os

import pytest

from composer2.env.tasks.record import plain_tests
from composer2.types import Rollout, RolloutStatus
from composer2.use import MAX_FILE_BYTES, apply_changes, changed_files, folder_task, newest_model, solve

MODULE = """def largest(items):
    return min(items)


def twice(x):
    return [x, x]
"""
TESTS = """from numbers_kit import largest, twice


def test_largest():
    assert largest([1, 3, 2]) == 3
    assert largest((1,)) == 1, "one item"


def test_twice():
    assert twice("a") == ["a", "a"]
    assert twice(1)
    assert len(twice(1)) == 2
    assert twice(1) == twice(1)
    assert twice(1) != []
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "numbers_kit.py").write_text(MODULE)
    (tmp_path / "test_numbers_kit.py").write_text(TESTS)
    (tmp_path / "README.md").write_text("no code")
    return tmp_path


def test_a_folder_becomes_a_task(folder):
    task = folder_task(folder, "largest is wrong")
    assert task.instruction == "largest is wrong"
    assert dict(task.files) == {"numbers_kit.py": MODULE}
    assert task.recent_files == ("numbers_kit.py",)
    assert [(test.module, test.call, test.expected) for test in task.fail_to_pass] == [
        ("numbers_kit.py", "largest([1, 3, 2])", "3"),
        ("numbers_kit.py", "largest((1,))", "1"),
        ("numbers_kit.py", "twice('a')", "['a', 'a']"),
    ]
    assert task.fail_to_pass[0].name == "test_numbers_kit.py:5"
    assert task.pass_to_pass == ()


def test_modules_in_subfolders_keep_their_path(folder):
    (folder / "kit").mkdir()
    (folder / "kit" / "more.py").write_text("def one():\n    return 1\n")
    (folder / "kit" / "test_more.py").write_text("def test_one():\n    assert one() == 1\n")
    task = folder_task(folder, "")
    assert sorted(task.files) == ["kit/more.py", "numbers_kit.py"]
    assert "kit/more.py" in {test.module for test in task.fail_to_pass}


@pytest.mark.parametrize("missing", ["numbers_kit.py", "test_numbers_kit.py"])
def test_a_folder_without_modules_or_tests_is_refused(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=r"readable tests, accepted is at least one module and one test file"):
        folder_task(folder, "")


def test_what_is_no_folder_is_refused(folder):
    for path in (folder / "absent", folder / "numbers_kit.py"):
        with pytest.raises(ValueError, match="is no folder, accepted is a folder with Python modules"):
            folder_task(path, "")


def test_files_that_are_too_large_are_left_out(folder):
    (folder / "large.py").write_text("#" * (MAX_FILE_BYTES + 1))
    assert "large.py" not in folder_task(folder, "").files


@pytest.mark.parametrize("data", [b"def broken(:\n", b"name = '\xff'\n", b"x = 1\x00\n"])
def test_a_file_that_is_no_python_is_refused_by_name(folder, data):
    (folder / "odd.py").write_bytes(data)
    with pytest.raises(ValueError, match=r"odd\.py"):
        folder_task(folder, "")


def test_plain_tests_execute_nothing(tmp_path):
    mark = tmp_path / "mark"
    evil = f"open({str(mark)!r}, 'w')\n"
    module = evil + "def f(x):\n    raise SystemExit\n"
    test = evil + f"assert f(open({str(mark)!r}, 'w')) == 1\nassert f(1) == __import__('os').getcwd()\n"
    found = plain_tests({"test_m.py": test}, {"m.py": module})
    assert not mark.exists()
    assert [case.expected for case in found] == ["1"]


def test_a_chained_comparison_is_no_plain_test():
    assert plain_tests({"test_m.py": "assert f(1) == 1 == 1\n"}, {"m.py": "def f(x): return x\n"}) == []


def test_sets_and_wide_values_are_written_as_a_pod_writes_them():
    found = plain_tests({"test_m.py": "assert f(1) == {'b': (1, 2.5), 'a': None}\n"}, {"m.py": "def f(x): ...\n"})
    assert found[0].expected == "{'b': (1, 2.5), 'a': None}"


def test_newest_model_is_the_last_stage_that_finished(tmp_path):
    with pytest.raises(ValueError, match="holds no finished model, accepted is the directory of a run"):
        newest_model(tmp_path)
    for name in ("cpt", "sft", "rl"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
        assert newest_model(tmp_path).name == name


def test_changed_files(folder):
    task = folder_task(folder, "")
    fixed = MODULE.replace("min", "max")
    rollout = Rollout(
        task_id="t",
        sample_index=0,
        segments=(),
        status=RolloutStatus.FINISHED,
        final_files={"numbers_kit.py": fixed, "new.py": ""},
    )
    assert changed_files(task, rollout) == {"numbers_kit.py": fixed, "new.py": ""}
    same = Rollout(task_id="t", sample_index=0, segments=(), status=RolloutStatus.FINISHED, final_files=task.files)
    assert changed_files(task, same) == {}


def test_what_is_no_file_of_the_folder_is_left_out(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "other.py"
    outside.write_text("x = 1\n")
    (folder / "link.py").symlink_to(outside)
    (folder / "broken.py").symlink_to(folder / "absent.py")
    (folder / "inner.py").symlink_to(folder / "numbers_kit.py")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "old.py").write_text("print 'no Python 3'\n")
    assert sorted(folder_task(folder, "").files) == ["inner.py", "numbers_kit.py"]


def test_at_least_one_sample(folder):
    with pytest.raises(ValueError, match="samples is 0, accepted is 1 or more"):
        solve(folder, "", folder, samples=0, seed=0, allow_unsafe=False)


def test_applied_changes_keep_line_ends_and_permissions(tmp_path):
    script = tmp_path / "run.py"
    script.write_bytes(b"a = 1\r\nb = 2\r\n")
    script.chmod(0o755)
    (tmp_path / "plain.py").write_text("a = 1\n")
    apply_changes(tmp_path, {"run.py": "a = 1\nb = 3\n", "plain.py": "a = 2\n", "new.py": "c = 1\n"})
    assert script.read_bytes() == b"a = 1\r\nb = 3\r\n"
    assert script.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "plain.py").read_bytes() == b"a = 2\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.py", "plain.py", "run.py"]
