import asyncio
from dataclasses import replace

import pytest

from composer2.env.tools.files import Workspace
from composer2.env.tools.registry import Toolbox
from composer2.types import TestCase, ToolCall


def play(fakes, calls, *, task=None, backend=None, **options):
    """Results of the calls, the toolbox, the final files and the backend."""
    backend = backend or fakes.MemoryBackend()

    async def go():
        workspace = Workspace(task or fakes.make_task(), backend)
        toolbox = Toolbox(workspace, **options)
        results = [await toolbox.call(ToolCall(name=name, arguments=arguments)) for name, arguments in calls]
        final = await workspace.final_files()
        await workspace.close()
        return [result.content for result in results], toolbox, final, backend

    return asyncio.run(go())


def edit(line, old, new, **more):
    return ("edit", {"line": line, "old": old, "new": new, **more})


RUN = ("run", {})


def test_read_shows_the_file_as_the_prompt_does(fakes):
    contents, toolbox, _, backend = play(
        fakes, [("read", {"path": "./solution.py"}), ("read", {"path": "solution.py", "start": 4, "limit": 9})]
    )
    assert contents == [
        "solution.py\n1 def f(x):\n2     if x > 3:\n3         return x\n4     return 0\n",
        "solution.py\n4     return 0\n",
    ]
    assert backend.num_created == 0
    assert not toolbox.events


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/etc/passwd", "error: path is '/etc/passwd', accepted is a path inside the repository"),
        ("a/../../x", "error: path is 'a/../../x', accepted is a path inside the repository"),
        ("", "error: path is '', accepted is a path inside the repository"),
        ("a\0b", "error: path is 'a\\x00b', accepted is a path inside the repository"),
        ("\ud800", "error: path is '\\ud800', accepted is a path inside the repository"),
        ("nope.py", "error: no file 'nope.py'; files are solution.py"),
    ],
)
def test_paths_that_do_not_exist_or_lead_out(fakes, path, message):
    for calls in ([], [RUN]):  # before and after a pod exists
        contents, toolbox, _, _ = play(fakes, [*calls, ("read", {"path": path})])
        assert contents[-1] == message
        assert toolbox.events["no_file"] == 1


def test_start_behind_the_end_says_what_is_accepted(fakes):
    contents, _, _, _ = play(fakes, [("read", {"path": "solution.py", "start": 5})])
    assert contents == ["error: start is 5, accepted is 1 to 4"]


def test_search_finds_plain_text(fakes):
    task = fakes.make_task(files={"b.py": "x\n", "a.py": "y\nx = (\n"}, recent_files=())
    contents, _, _, _ = play(fakes, [("search", {"pattern": "x"}), ("search", {"pattern": "("})], task=task)
    assert contents == ["a.py:2 x = (\nb.py:1 x", "a.py:2 x = ("]
    contents, toolbox, _, _ = play(fakes, [("search", {"pattern": "(a+)+$"}), ("search", {"pattern": ""})], task=task)
    assert contents == ["no match", "error: pattern is empty, accepted is some text"]
    assert toolbox.events["bad_arguments"] == 1


def test_search_output_is_bounded(fakes):
    task = fakes.make_task(files={"a.py": "x" * 10_000 + "\n" + "x\n" * 1000}, recent_files=())
    contents, _, _, _ = play(fakes, [("search", {"pattern": "x"})], task=task)
    assert len(contents[0].splitlines()) == 51
    assert len(contents[0]) < 1000


def test_edit_then_run_reports_and_remembers(fakes):
    contents, toolbox, final, backend = play(fakes, [RUN, edit(2, " >", " >="), RUN])
    assert contents == ["fail 3", "ok", "pass"]
    assert toolbox.attempts == [False, True]
    assert final == {"solution.py": fakes.SOURCE.replace("x > 3", "x >= 3")}
    assert backend.num_created == backend.num_destroyed == 1


def test_edits_pile_up_unless_restarted(fakes):
    both, _, final, _ = play(fakes, [edit(2, "3", "9"), edit(4, "0", "1")])
    assert both == ["ok", "ok"]
    assert final["solution.py"] == fakes.SOURCE.replace("3", "9").replace("0", "1")
    _, _, final, _ = play(fakes, [edit(2, "3", "9"), edit(4, "0", "1", restart=True)])
    assert final["solution.py"] == fakes.SOURCE.replace("0", "1")


@pytest.mark.parametrize("runs", [[], [RUN]])
def test_refused_edit_with_restart_leaves_the_first_state(fakes, runs):
    contents, toolbox, final, _ = play(fakes, [edit(2, "3", "9"), *runs, edit(1, "qq", "r", restart=True)])
    assert contents[-1] == "error: 'qq' is not in solution.py"
    assert toolbox.events["invalid_edit"] == 1
    assert final == {}


@pytest.mark.parametrize("runs", [[], [RUN]])
def test_restart_brings_back_other_files_too(fakes, runs):
    task = fakes.make_task(files={"a.py": "a = 1\n", "solution.py": fakes.SOURCE}, recent_files=("solution.py",))
    calls = [
        *runs,
        edit(1, "1", "2", path="a.py"),
        *runs,
        edit(2, "3", "9", restart=True),
        edit(4, "0", "1", restart=True),
    ]
    _, _, final, _ = play(fakes, calls, task=task)
    assert final == {"solution.py": fakes.SOURCE.replace("0", "1")}
    _, _, final, _ = play(
        fakes, [*runs, edit(1, "1", "2", path="a.py", restart=True), edit(2, "3", "9", restart=True)], task=task
    )
    assert final == {"solution.py": fakes.SOURCE.replace("3", "9")}


def test_restart_after_code_left_files_takes_a_fresh_pod(fakes):
    task = fakes.make_task(files={"solution.py": "POD_FILES['evil.py'] = b''\n" + fakes.SOURCE})
    contents, _, final, backend = play(fakes, [RUN, edit(3, " >", " >=", restart=True), RUN], task=task)
    assert contents[-1] == "pass"
    assert backend.num_created == backend.num_destroyed == 2
    assert set(final) == {"solution.py"}  # what code left behind is not the policy's work


def test_edit_without_path_means_the_file_shown_last(fakes):
    task = fakes.make_task(files={"a.py": "x = 1\n", "b.py": "x = 1\n"}, recent_files=("b.py",))
    _, _, final, _ = play(fakes, [edit(1, "1", "2")], task=task)
    assert set(final) == {"b.py"}
    _, _, final, _ = play(fakes, [("read", {"path": "a.py"}), edit(1, "1", "2")], task=task)
    assert set(final) == {"a.py"}


@pytest.mark.parametrize("runs", [[], [RUN]])
def test_edits_keep_every_other_byte(fakes, runs):
    text = "\tx = 1\r\n\r\n\ty = 2 \x0c\r\nz = 'é'"
    task = fakes.make_task(files={"solution.py": text})
    backend = fakes.MemoryBackend()
    contents, _, final, _ = play(fakes, [*runs, edit(3, " 2", " 3"), RUN], task=task, backend=backend)
    assert "ok" in contents
    assert final == {"solution.py": text.replace(" 2", " 3")}
    assert backend.pods[-1].files["solution.py"] == text.replace(" 2", " 3").encode()


def test_bytes_that_are_not_text_survive_an_edit(fakes):
    task = fakes.make_task(files={"solution.py": "POD_FILES['solution.py'] = b'x = 1 # \\xff\\n'\n"})
    backend = fakes.MemoryBackend()
    contents, _, final, _ = play(fakes, [RUN, edit(1, "1", "2")], task=task, backend=backend)
    assert contents[-1] == "ok"
    assert backend.pods[0].files["solution.py"] == b"x = 2 # \xff\n"
    assert final == {"solution.py": "x = 2 # �\n"}


def test_new_that_is_no_text_is_an_error(fakes):
    contents, toolbox, _, _ = play(fakes, [edit(2, "3", "\ud800")])
    assert contents == ["error: new is not valid text"]
    assert toolbox.events["invalid_edit"] == 1


def test_unknown_tool_names_the_known_ones(fakes):
    contents, toolbox, _, _ = play(fakes, [("shell", {"cmd": "ls"})], task=fakes.make_task(tools=("run", "finish")))
    assert contents == ["error: no tool 'shell'; tools are run, finish"]
    contents, toolbox, _, _ = play(fakes, [("read", {"path": "a"})], task=fakes.make_task(tools=("run", "finish")))
    assert toolbox.events["unknown_tool"] == 1


def test_strictness_is_decided_per_tool(fakes):
    call = edit("2", " >", " >=", why="because")
    contents, toolbox, _, _ = play(fakes, [call])
    assert contents[0].startswith("error: line is '2', accepted is an integer of at least 1; 'why' is no argument")
    assert toolbox.events["bad_arguments"] == 1
    contents, toolbox, _, _ = play(fakes, [call, ("run", {"why": 1})], lenient=("edit",))
    assert contents == ["ok", "error: 'why' is no argument, accepted are none"]
    assert toolbox.events["forgiven_arguments"] == 1


def test_finish(fakes):
    _, toolbox, _, backend = play(fakes, [("finish", {"message": 3})])
    assert not toolbox.is_finished
    _, toolbox, _, backend = play(fakes, [("finish", {"message": "done"})])
    assert toolbox.is_finished
    assert backend.num_created == 0


def test_run_counts_timeouts_and_caps_its_digit(fakes):
    task = fakes.make_task(files={"solution.py": "while True:\n    pass\n"})
    contents, toolbox, _, _ = play(fakes, [RUN], task=task)
    assert contents == ["fail 0"]
    assert toolbox.events["test_timeout"] == 1
    tests = tuple(
        TestCase(name=f"p{i}", module="solution.py", call=f"f({i + 4})", expected=str(i + 4)) for i in range(12)
    )
    contents, _, _, _ = play(fakes, [RUN], task=fakes.make_task(pass_to_pass=tests))
    assert contents == ["fail 9"]
    contents, toolbox, _, _ = play(fakes, [RUN], task=fakes.make_task(pass_to_pass=(), fail_to_pass=()))
    assert contents == ["error: there are no tests"]


def test_tests_of_several_modules(fakes):
    task = fakes.make_task(
        files={"a.py": "v = 1\n", "solution.py": fakes.SOURCE},
        pass_to_pass=(TestCase(name="a", module="a.py", call="v", expected="1"),),
    )
    contents, _, _, backend = play(fakes, [RUN], task=task)
    assert contents == ["fail 1"]
    assert backend.num_runs == 2


def test_the_todo_list_is_kept_by_the_model_and_counted(fakes):
    task = replace(fakes.make_task(), tools=("todo", "finish"))
    items = [{"text": "read", "done": True}, {"text": "fix", "done": False}]
    contents, toolbox, _, backend = play(
        fakes, [("todo", {"items": items}), ("todo", {"items": [{"text": "fix"}]}), ("todo", {"items": []})], task=task
    )
    assert contents[0] == "1 of 2 open"
    assert "done" in contents[1]
    assert contents[2] == "0 of 0 open"
    assert toolbox.events == {"bad_arguments": 1}
    assert backend.num_created == 0
