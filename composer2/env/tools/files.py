"""The working copy of one episode, and the tools that read, search and change it.

In: a task and a pod backend. Out: answers for the model, and at the end the files that differ from the task's.

Source: report §6.2 (each environment starts with a shared tool library called by RPC); row E5.
Choice: the pod is made when something must run in it. Until then the copy is the task's files plus the edits so far,
held here, so an episode without a tool call costs no pod.
Choice: `search` looks for plain text. A regular expression from a model could keep the host busy for ever.
Choice: no tool makes files, so the result of an episode is what became of the task's own files. What code under test
leaves beside them is not the policy's work and is not graded.
"""

from __future__ import annotations

from collections.abc import Mapping
from posixpath import normpath
from typing import Any

from composer2.env.tools.lines import EditError, apply_edit, number_lines, split_lines
from composer2.types import Pod, PodBackend, PodLimits, Task, ToolResult

MAX_FILE_BYTES = 1 << 20
MAX_READ_LINES = 200
MAX_HITS = 50
MAX_LINE_CHARS = 200
NO_SOURCE = ("__pycache__/", ".git/")


def ok(content: str) -> ToolResult:
    """An answer that is no error."""
    return ToolResult(content=content)


def error(message: str, event: str) -> ToolResult:
    """An answer that says what is wrong; `event` is counted."""
    return ToolResult(content=f"error: {message}", is_error=True, event=event)


class Workspace:
    """Files of one episode. `PodError` from the backend passes through; a file problem is an OSError as usual."""

    def __init__(self, task: Task, backend: PodBackend, *, limits: PodLimits | None = None) -> None:
        """Nothing is made yet."""
        self.task = task
        self._backend, self._limits = backend, limits
        self._pod: Pod | None = None
        self._changed: dict[str, str] = {}
        self._has_run = False
        self.shown_path: str | None = (task.recent_files or tuple(task.files))[-1] if task.files else None
        """The file the model saw last: what an edit without a path means."""

    async def pod(self) -> Pod:
        """The pod to run code in. From the first call on, the files in it are the truth."""
        if self._pod is None:
            self._pod = await self._backend.create({**self.task.files, **self._changed}, self._limits)
        self._has_run = True
        return self._pod

    def known_files(self) -> dict[str, str] | None:
        """All files, while no code has run on them; afterwards None: only the pod knows."""
        return {**self.task.files, **self._changed} if self._pod is None else None

    async def paths(self) -> list[str]:
        """Paths of the repository's files, sorted. OSError when code that ran left too many of them."""
        if self._pod is None:
            return sorted({*self.task.files, *self._changed})
        return [p for p in await self._pod.list_files() if not any(part in f"{p}/" for part in NO_SOURCE)]

    async def read(self, path: str) -> str:
        """Text of a file; bytes that are not UTF-8 become lone surrogates, which `write` turns back."""
        if self._pod is not None:
            data = await self._pod.read(path)
            if len(data) > MAX_FILE_BYTES:
                raise OSError(f"{path} has {len(data)} bytes, accepted are {MAX_FILE_BYTES}")
            return data.decode("utf-8", errors="surrogateescape")
        text = self._changed.get(path, self.task.files.get(path))
        if text is None:
            raise FileNotFoundError(path)
        return text

    async def write(self, path: str, text: str) -> None:
        """Replace a file."""
        if self._pod is not None:
            await self._pod.write(path, text.encode("utf-8", errors="surrogateescape"))
        self._changed[path] = text

    async def restart(self, replaced: Mapping[str, str]) -> None:
        """Put every file back as it was at the start, with `replaced` on top.

        Where the code that ran left files of its own, or files that cannot be written, a fresh pod takes over.
        """
        if self._pod is not None:
            try:
                if self._has_run and set(await self.paths()) - set(self.task.files):
                    await self.close()
                else:
                    await self._rewrite(self._pod, replaced)
            except ConnectionError:
                raise
            except OSError:
                await self.close()
        self._has_run = False
        self._changed = dict(replaced)

    async def _rewrite(self, pod: Pod, replaced: Mapping[str, str]) -> None:
        for path, first in self.task.files.items():
            if self._has_run or path in self._changed or path in replaced:
                await pod.write(path, replaced.get(path, first).encode("utf-8", errors="surrogateescape"))

    async def final_files(self) -> dict[str, str]:
        """Path -> text of the task's files that differ from their first state; a deleted one is empty."""
        final: dict[str, str] = {}
        for path, first in self.task.files.items():
            try:
                text = await self.read(path)
            except ConnectionError:
                raise
            except OSError:
                text = ""
            if text != first:
                final[path] = text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
        return final

    async def close(self) -> None:
        """Destroy the pod, if there is one."""
        pod, self._pod = self._pod, None
        if pod is not None:
            await pod.destroy()


def _inside(path: str) -> str | None:
    """Normal form of a path inside the repository, None for one that leads out of it."""
    if not path or not path.isprintable() or path.startswith("/"):
        return None
    normal = normpath(path)
    return None if normal == "." or normal == ".." or normal.startswith("../") else normal


async def _load(workspace: Workspace, path: str, event: str) -> tuple[str, str] | ToolResult:
    normal = _inside(path)
    if normal is None:
        return error(f"path is {path[:MAX_LINE_CHARS]!r}, accepted is a path inside the repository", event)
    try:
        return normal, await workspace.read(normal)
    except ConnectionError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        known = sorted(workspace.task.files)
        rest = " …" if len(known) > 20 else ""
        return error(f"no file {path[:MAX_LINE_CHARS]!r}; files are {', '.join(known[:20])}{rest}", event)
    except OSError as problem:
        return error(f"{path[:MAX_LINE_CHARS]!r} cannot be read: {problem}"[:MAX_LINE_CHARS], event)


async def read_tool(workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
    """`read`: a file's path and numbered lines, as the prompt shows files."""
    loaded = await _load(workspace, arguments["path"], "no_file")
    if isinstance(loaded, ToolResult):
        return loaded
    path, text = loaded
    text = text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")
    num_lines, start = len(split_lines(text)), arguments.get("start", 1)
    if start > max(num_lines, 1):
        return error(f"start is {start}, accepted is 1 to {max(num_lines, 1)}", "bad_arguments")
    workspace.shown_path = path
    limit = min(arguments.get("limit", MAX_READ_LINES), MAX_READ_LINES)
    return ok(f"{path}\n{number_lines(text, start=start, limit=limit)}")


async def search_tool(workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
    """`search`: `path:line text` of every line that holds the pattern as plain text."""
    pattern, hits = arguments["pattern"], []
    if not pattern:
        return error("pattern is empty, accepted is some text", "bad_arguments")
    try:
        paths = await workspace.paths()
    except ConnectionError:
        raise
    except OSError as problem:
        return error(f"search failed: {problem}"[:MAX_LINE_CHARS], "search_failed")
    for path in paths:
        try:
            text = await workspace.read(path)
        except ConnectionError:
            raise
        except OSError:
            continue  # a file too large to read, or gone since it was listed, holds no line to show
        if pattern in text:
            lines = enumerate(split_lines(text), start=1)
            hits += [f"{path}:{n} {line[:MAX_LINE_CHARS]}" for n, line in lines if pattern in line]
        if len(hits) >= MAX_HITS:
            break
    shown = "\n".join(hits[:MAX_HITS]) + ("\n…" if len(hits) > MAX_HITS else "")
    return ok(shown.encode("utf-8", errors="replace").decode() if hits else "no match")


async def edit_tool(workspace: Workspace, arguments: Mapping[str, Any]) -> ToolResult:
    """`edit`: one token-aligned replacement, near a line. With `restart` on the task's first files.

    A refused edit changes nothing, except that a `restart` has happened.
    """
    path = arguments.get("path", workspace.shown_path)
    if path is None:
        return error("no file was shown yet; name a path", "invalid_edit")
    if arguments.get("restart", False):
        normal = _inside(path)
        first = None if normal is None else workspace.task.files.get(normal)
        if normal is not None and first is not None:
            edited = _edited(normal, first, arguments)
            await workspace.restart({} if isinstance(edited, ToolResult) else {normal: edited})
            return edited if isinstance(edited, ToolResult) else ok("ok")
        await workspace.restart({})
    loaded = await _load(workspace, path, "invalid_edit")
    if isinstance(loaded, ToolResult):
        return loaded
    edited = _edited(*loaded, arguments)
    if isinstance(edited, ToolResult):
        return edited
    try:
        await workspace.write(loaded[0], edited)
    except ConnectionError:
        raise
    except OSError as problem:
        return error(f"{loaded[0]} cannot be written: {problem}"[:MAX_LINE_CHARS], "invalid_edit")
    return ok("ok")


def _edited(path: str, text: str, arguments: Mapping[str, Any]) -> str | ToolResult:
    old, new = arguments["old"], arguments["new"]
    try:
        new.encode("utf-8")
        return apply_edit(text, line=arguments["line"], old=old, new=new, path=path)
    except UnicodeEncodeError:
        return error("new is not valid text", "invalid_edit")
    except EditError as problem:
        return error(str(problem), "invalid_edit")
