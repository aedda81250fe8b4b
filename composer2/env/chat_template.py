"""Episodes in the chat format of a published model: the harness talks to Qwen3, Kimi K2 or MiniMax-M2 in their words.

In and out as in `template.py`: tasks, calls and results to token ids, sampled ids back to calls.

    prompt    system with tools, user: instruction { path \\n numbered lines }, opening of the assistant's turn
    results   (the end token the model sampled) tool results, opening of the next turn
    summary   an empty turn, user: the request, opening; the next window quotes the sampled summary as a turn of its own

Source: report §2 and §6.2, row E6: one harness and one template for training, evaluation and use; row R3.
Choice: history is what was sampled, reasoning included, never a new rendering of it. Within one task, which has one
user message, the published templates keep the reasoning too.
Choice: text between two marks is encoded in one go, as a tokenizer would encode the whole conversation, and never
yields a mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from composer2.env.chat_formats import ChatFormat
from composer2.env.chat_parse import ChatParser
from composer2.env.chat_render import Fixed, open_turn, render_conversation, render_results, render_turn
from composer2.env.template import PromptCache
from composer2.env.tools.lines import number_lines
from composer2.env.tools.registry import TOOLS, ToolSpec, tool_specs
from composer2.types import Message, ParsedTurn, Role, Task, TokenizerLike, ToolCall, ToolResult

SUMMARY_REQUEST = "The context is full. Summarise what was tried and what is left to do."
CONTINUE = "Continue from your summary."


class ChatTemplate:
    """A published format as the harness's template; implements `types.Template`."""

    def __init__(
        self,
        form: ChatFormat,
        tokenizer: TokenizerLike,
        *,
        system: str = "",
        thinks: bool = True,
        tools: Sequence[ToolSpec] = tuple(TOOLS.values()),
        eos_ids: Sequence[int] = (),
        num_cached_prompts: int = 64,
    ) -> None:
        """`tokenizer` must know every mark of the format by its text; `tools` give the types of tagged values.

        `system`: text of the system message, empty for the family's default. `thinks`: let the model reason.
        `eos_ids`: tokens that end a turn besides the format's own."""
        self.form, self.tokenizer = form, tokenizer
        self._parser = ChatParser(form, tokenizer, tools, eos_ids=eos_ids)
        self._mark_pattern = re.compile("|".join(map(re.escape, sorted(form.marks, key=len, reverse=True))))
        self._system, self._thinks = system, thinks
        opening = "".join(open_turn(form, thinks=thinks))
        self._starts_thinking = form.think is not None and opening.endswith(form.think.open)
        self._prompts = PromptCache(num_cached_prompts)
        self.stop_ids: tuple[int, ...] = self._parser.end_ids

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Token ids of rendered pieces: marks of `Fixed` ones become their tokens, everything else is text."""
        ids: list[int] = []
        run = ""
        for piece in pieces:
            if not isinstance(piece, Fixed):
                run += piece
                continue
            position = 0
            for mark in self._mark_pattern.finditer(piece):
                run += piece[position : mark.start()]
                ids += self.tokenizer.encode(run) if run else []
                ids.append(self._parser.mark_ids[mark[0]])
                run, position = "", mark.end()
            run += piece[position:]
        return ids + (self.tokenizer.encode(run) if run else [])

    def render_messages(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A conversation, ready for the model to speak."""
        return self.encode(render_conversation(self.form, messages, tools, thinks=self._thinks))

    # -- types.Template

    def render_prompt(self, task: Task, *, summary: Sequence[int] | None = None) -> list[int]:
        """System message with the task's tools, the task, and the sampled ids of a summary if there is one."""
        ids = list(self._prompts.get(task, self._opening))
        if summary is not None:
            ids += map(int, summary)
            ids += () if ids[-1] in self.stop_ids else self.stop_ids[:1]
            ids += self.encode([Fixed(self.form.after_end), *self._user(CONTINUE)])
        return ids

    def _opening(self, task: Task) -> list[int]:
        files = [f"{path}\n{number_lines(task.files[path])}" for path in task.recent_files]
        messages = [Message(role=Role.USER, content="\n\n".join((task.instruction, *files)))]
        if self._system:
            messages.insert(0, Message(role=Role.SYSTEM, content=self._system))
        return self.render_messages(messages, tool_specs(task.tools))

    def _user(self, text: str) -> list[str]:
        """A user message and the opening of the answer."""
        end = Fixed(self.form.end + self.form.after_end)
        return [Fixed(self.form.user), text, end, *open_turn(self.form, thinks=self._thinks)]

    def _spoken(self, pieces: Sequence[str]) -> list[int]:
        """A turn as the model would sample it: reasoning the prompt opened is closed first, an end token follows."""
        close = self.form.think.close if self.form.think is not None and self._starts_thinking else ""
        return self.encode([Fixed(close), *pieces, Fixed(self.form.end)])

    def render_calls(self, calls: Sequence[ToolCall], *, text: str = "") -> list[int]:
        """Tokens of a turn; ValueError for calls that would not be read back as they are given."""
        ids = self._spoken(render_turn(self.form, text, calls))
        read = [(call.name, dict(call.arguments)) for call in self.parse_turn(ids).calls if isinstance(call, ToolCall)]
        for index, call in enumerate(calls):
            if read[index : index + 1] != [(call.name, dict(call.arguments))]:
                raise ValueError(
                    f"call {index} is {call.name} with {dict(call.arguments)}, accepted in format {self.form.name} is "
                    "one that reads back the same: values of the types in the tool's schema, no tags of the format"
                )
        return ids

    def render_results(self, results: Sequence[ToolResult]) -> list[int]:
        """What follows a turn's end token: the results, and the opening of the next turn."""
        pieces = [Fixed(self.form.after_end), *render_results(self.form, results)]
        return self.encode([*pieces, *open_turn(self.form, thinks=self._thinks)])

    def render_summary_request(self) -> list[int]:
        """The turn that was opened is closed empty; then a user message asks."""
        close = Fixed(self.form.after_end)
        return self._spoken([]) + self.encode([close, *self._user(SUMMARY_REQUEST)])

    def render_summary(self, text: str) -> list[int]:
        """A summary as the model would sample it."""
        return self._spoken([text])

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Read one generation; see `chat_parse.py`. Never raises."""
        return self._parser.parse(token_ids, starts_thinking=self._starts_thinking)
