"""Chat formats of published models, as data: a name goes in, the literal strings of its conversations come out.

    kimi-k2, kimi-k2.5     <|im_user|>user<|im_middle|>…<|im_end|>      calls between tokens, named functions.NAME:INDEX
    qwen3                  <|im_start|>user\\n…<|im_end|>\\n               calls as JSON between <tool_call> tokens
    qwen3-coder            the same frame                               calls as <function=…><parameter=…> text
    minimax-m2             ]~b]user\\n…[e~[\\n                             calls as <invoke …><parameter …> text

chat_render.py writes conversations with them, chat_parse.py reads what a model sampled.

Source: the templates and tool-calling guides published with the models; rows E6 M9.
Choice: a format is strings and a few switches, so that a reader can hold it against the published template line by line
and a new family is a value, not code. The strings in `marks` must be single tokens of the tokenizer: a turn is cut at
token ids, and text that only looks like a mark is text.
Choice: images and video, the `name` of a message, MiniMax's date and place and Kimi's tool declaration in TypeScript
(its template falls back to the JSON used here) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ThinkFormat:
    """How reasoning is written, and which earlier turns keep it."""

    open: str
    close: str
    kept_since: Literal["user", "answer"]
    """Turns after the last user message, or after the last assistant message without calls, keep their reasoning."""
    when_empty: Literal["never", "last", "always"]
    """Which of those turns show the two marks although nothing was reasoned: none, the last message, all."""
    dropped: str = ""
    """What other turns show instead."""
    trims: bool = False
    """Line breaks around the reasoning, and before the text after it, are dropped."""


@dataclass(frozen=True, kw_only=True)
class JsonCalls:
    """A call is one JSON object with `name` and `arguments` between two marks."""

    open: str
    close: str
    join: str = "\n"
    lead: str = ""
    """Before the first call of a turn without text."""
    lead_after_text: str = "\n"
    trims_text: bool = False


@dataclass(frozen=True, kw_only=True)
class IdCalls:
    """A section of calls; each is an id, which names the function, and a JSON object of arguments."""

    open: str
    close: str
    call_open: str
    call_middle: str
    call_close: str
    lead: str = ""
    lead_after_text: str = ""
    trims_text: bool = False


@dataclass(frozen=True, kw_only=True)
class XmlCalls:
    """Functions and parameters as tags in plain text, inside a block between two marks."""

    open: str
    close: str
    function_open: tuple[str, str]
    """Around the function's name."""
    function_close: str
    parameter_open: tuple[str, str]
    """Around the parameter's name."""
    parameter_close: str
    one_block_each: bool
    """Every call has a block of its own; otherwise one block holds all calls of a turn."""
    json_scalars: bool
    """Numbers, booleans and null are written as JSON; otherwise as Python writes them."""
    lead: str = ""
    lead_after_text: str = ""
    join: str = ""
    trims_text: bool = False


CallFormat = JsonCalls | IdCalls | XmlCalls


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """Everything literal in a family's conversations."""

    name: str
    signature: str
    """A text that only this family's published template holds; tells families of one vocabulary apart."""
    start: str = ""
    """Before the first message."""
    system: str
    """Opening of a system message; the next three of the others."""
    user: str
    assistant: str
    tool: str
    end: str
    """The token that ends a message, and a generation."""
    after_end: str = ""
    default_system: str | None = None
    """System text of a conversation without one; None: it gets no system message."""
    default_system_with_tools: str | None = None
    """The same when there are tools; None: the message holds the tools alone."""
    tools_first: tuple[str, str] | None = None
    """Around the tools when they have a message of their own before the system message."""
    tools_open: str = ""
    """Else: before the tools, within the system message."""
    tools_close: str = ""
    system_join: str = "\n\n"
    """Between system text and tools."""
    tool_style: Literal["json-list", "json-lines", "json-tags", "xml"]
    """The tools as one list, a line each, a <tool> each without its wrapper, or as tags."""
    json_separators: tuple[str, str] = (", ", ": ")
    """Of the tools' JSON."""
    result_open: str
    """Before each tool result; `{id}` stands for the id of its call."""
    result_close: str
    results_share_message: bool
    """Consecutive results are one message; otherwise each has its own."""
    think: ThinkFormat | None = None
    prefill: str = ""
    """What the prompt writes of the assistant's turn when the model is to think."""
    prefill_plain: str | None = ""
    """The same when it is not to; None when the family always thinks."""
    calls: CallFormat
    marks: tuple[str, ...] = field(default=())
    """Every string above that is one token."""


KIMI_K2 = ChatFormat(
    name="kimi-k2",
    signature="<|tool_calls_section_begin|>",
    system="<|im_system|>system<|im_middle|>",
    user="<|im_user|>user<|im_middle|>",
    assistant="<|im_assistant|>assistant<|im_middle|>",
    tool="<|im_system|>tool<|im_middle|>",
    end="<|im_end|>",
    default_system="You are Kimi, an AI assistant created by Moonshot AI.",
    default_system_with_tools="You are Kimi, an AI assistant created by Moonshot AI.",
    tools_first=("<|im_system|>tool_declare<|im_middle|>", "<|im_end|>"),
    tool_style="json-list",
    json_separators=(",", ":"),
    result_open="## Return of {id}\n",
    result_close="",
    results_share_message=False,
    calls=IdCalls(
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        call_middle="<|tool_call_argument_begin|>",
        call_close="<|tool_call_end|>",
    ),
    marks=(
        *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
)
"""Kimi K2 Instruct."""

KIMI_K2_5 = replace(
    KIMI_K2,
    name="kimi-k2.5",
    signature="<think></think>",
    think=ThinkFormat(
        open="<think>", close="</think>", kept_since="answer", when_empty="always", dropped="<think></think>"
    ),
    prefill="<think>",
    prefill_plain="<think></think>",
    marks=(*KIMI_K2.marks, "<think>", "</think>"),
)
"""Kimi K2.5, text only."""

_CHATML_MARKS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

QWEN3 = ChatFormat(
    name="qwen3",
    signature="<args-json-object>",
    system="<|im_start|>system\n",
    user="<|im_start|>user\n",
    assistant="<|im_start|>assistant\n",
    tool="<|im_start|>user",
    end="<|im_end|>",
    after_end="\n",
    tools_open=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    ),
    tools_close=(
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    tool_style="json-lines",
    result_open="\n<tool_response>\n",
    result_close="\n</tool_response>",
    results_share_message=True,
    think=ThinkFormat(open="<think>\n", close="\n</think>\n\n", kept_since="user", when_empty="last", trims=True),
    prefill_plain="<think>\n\n</think>\n\n",
    calls=JsonCalls(open="<tool_call>\n", close="\n</tool_call>"),
    marks=(*_CHATML_MARKS, "<think>", "</think>"),
)
"""Qwen3, dense and mixture of experts: calls in the Hermes form."""

QWEN3_CODER = replace(
    QWEN3,
    name="qwen3-coder",
    signature="<function=example_function_name>",
    default_system_with_tools=(
        "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."
    ),
    tools_open="# Tools\n\nYou have access to the following functions:\n\n<tools>",
    tools_close=(
        "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
        "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested "
        "within <tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n"
        "- You may provide optional reasoning for your function call in natural language BEFORE the function call, "
        "but NOT after\n- If there is no function call available, answer the question like normal with your current "
        "knowledge and do not tell the user about function calls\n</IMPORTANT>"
    ),
    tool="<|im_start|>user\n",
    tool_style="xml",
    result_open="<tool_response>\n",
    result_close="\n</tool_response>\n",
    think=None,
    prefill_plain="",
    calls=XmlCalls(
        open="<tool_call>\n",
        close="</tool_call>",
        function_open=("<function=", ">\n"),
        function_close="</function>\n",
        parameter_open=("<parameter=", ">\n"),
        parameter_close="\n</parameter>\n",
        one_block_each=True,
        json_scalars=False,
        lead_after_text="\n\n",
        join="\n",
        trims_text=True,
    ),
    marks=_CHATML_MARKS,
)
"""Qwen3-Coder: the frame of Qwen3 without reasoning, calls as tags; its line break comes after a result, not before."""

MINIMAX_M2 = ChatFormat(
    name="minimax-m2",
    signature="<minimax:tool_call>",
    start="]~!b[",
    system="]~b]system\n",
    user="]~b]user\n",
    assistant="]~b]ai\n",
    tool="]~b]tool",
    end="[e~[",
    after_end="\n",
    default_system="You are a helpful assistant.",
    default_system_with_tools="You are a helpful assistant.",
    tools_open=(
        "# Tools\nYou may call one or more tools to assist with the user query.\n"
        "Here are the tools available in JSONSchema format:\n\n<tools>\n"
    ),
    tools_close=(
        "</tools>\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
        '<minimax:tool_call>\n<invoke name="tool-name-1">\n<parameter name="param-key-1">param-value-1</parameter>\n'
        '<parameter name="param-key-2">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>'
    ),
    tool_style="json-tags",
    result_open="\n<response>",
    result_close="</response>",
    results_share_message=True,
    think=ThinkFormat(open="<think>\n", close="\n</think>\n\n", kept_since="user", when_empty="never"),
    prefill="<think>\n",
    prefill_plain=None,
    calls=XmlCalls(
        open="<minimax:tool_call>\n",
        close="</minimax:tool_call>",
        function_open=('<invoke name="', '">\n'),
        function_close="</invoke>\n",
        parameter_open=('<parameter name="', '">'),
        parameter_close="</parameter>\n",
        one_block_each=False,
        json_scalars=True,
        lead="\n",
        lead_after_text="\n",
    ),
    marks=(
        *("]~!b[", "]~b]", "[e~[", "<think>", "</think>"),
        *("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
)
"""MiniMax-M2: it always thinks, and its reasoning stays in the history between tool calls."""

CHAT_FORMATS = {f.name: f for f in (KIMI_K2, KIMI_K2_5, QWEN3, QWEN3_CODER, MINIMAX_M2)}
"""Name -> format, for `composer2 generate --chat NAME`."""


def find_format(vocabulary: set[str], published: str) -> ChatFormat:
    """The format of a model, by its tokenizer's added tokens and the text of its published template (empty: none).

    ValueError when no format fits, or several do and nothing tells them apart."""
    fitting = [f for f in CHAT_FORMATS.values() if set(f.marks) <= vocabulary]
    # Longest list of marks first: the plain variant of a family lacks the marks of the other.
    fitting.sort(key=lambda f: -len(f.marks))
    if published:
        fitting = [f for f in fitting if f.signature in published][:1]
    if len(fitting) != 1:
        found = f"fits {', '.join(f.name for f in fitting)}" if fitting else "fits none"
        raise ValueError(
            f"the tokenizer and chat template of the model: {found}; accepted is one fit, or one of "
            f"{', '.join(CHAT_FORMATS)} by name"
        )
    return fitting[0]
