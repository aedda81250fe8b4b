"""The vocabulary of the project: what a task, a rollout and a training batch are, and the Protocols that join packages.

In: nothing. Out: frozen dataclasses and Protocols, free of torch, so that `env` can be used without a model and
`rl` without an environment.

Source: report §4.1 (rollouts, groups, chains), §6.2 (router replay, policy versions); rows R1 R3 A2 A3 E1 E5 E6 I1 M6.
Choice: one flat token record per context window (`Segment`), with masks and per-token fields beside it, because
generated text must never be tokenised again for training. One vocabulary file, though longer than the others: whoever
reads it knows every name that two packages share.

Shape letters: T tokens of a segment, N sampled tokens of a generation, B packed rows, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Conversation


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call the model made: a tool name and JSON-typed arguments, before any schema check."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""
    """Id the model gave the call, in formats that have one; its result carries the same."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a tool answered. `event` names a countable event such as `unknown_tool` or `bad_arguments`, or is None."""

    content: str
    is_error: bool = False
    event: str | None = None
    call_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of an episode, for reading: token ids, not this text, are the truth for training."""

    role: Role
    content: str = ""
    reasoning: str = ""
    """What an assistant thought before `content`, where the format tells it apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


class TaskCategory(StrEnum):
    """The problem categories of report Fig. 3 (row T1)."""

    ITERATE_ON_FEATURE = "iterate_on_feature"
    DEBUGGING = "debugging"
    NEW_FEATURE = "new_feature"
    REFACTOR = "refactor"
    UNDERSTAND_CODEBASE = "understand_codebase"
    DOCUMENTATION = "documentation"
    TESTING = "testing"
    CODE_REVIEW = "code_review"
    OPTIMIZE = "optimize"
    DEVOPS = "devops"
    MIGRATION = "migration"
    DELETION = "deletion"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class TestCase:
    """One hidden test: a call evaluated inside a pod, its outcome compared with `expected` outside of it.

    `expected` is the text of a `CallOutcome` value: the `repr` of a plain Python value when `raises` is empty.
    """

    __test__ = False  # pytest must not collect this class

    name: str
    module: str
    """Path of the module file the call runs in, relative to the repository, e.g. `solution.py`."""
    call: str
    """A Python expression over the module's names, e.g. `f([1, 2], 3)`."""
    expected: str = ""
    raises: str = ""
    """Name of the exception type the call must raise, or empty."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A repository snapshot, an instruction, and hidden verification (rows E6 V1)."""

    task_id: str
    """Identical prompts have identical ids: single-epoch training is enforced on this field."""
    instruction: str
    files: Mapping[str, str]
    """Repository: relative path -> text."""
    recent_files: tuple[str, ...] = ()
    """Paths whose text the prompt shows, as the report's harness shows recent files."""
    tools: tuple[str, ...] = ("read", "search", "edit", "run", "finish")
    fail_to_pass: tuple[TestCase, ...] = ()
    pass_to_pass: tuple[TestCase, ...] = ()
    reference: Mapping[str, str] = field(default_factory=dict)
    """Path -> text of the files as the reference solution leaves them. Never shown to the model."""
    context_budget: int | None = None
    """Tokens one context window may fill in this task; None: what the harness allows, which is never exceeded."""
    family: str = ""
    """Composition key that train/test splits are made by."""
    category: TaskCategory = TaskCategory.DEBUGGING
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Free notes for analysis, e.g. `bug_kind`; nothing that trains may read it."""


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next tokens are drawn. Log-probs are those of softmax(logits / temperature), the full distribution."""

    temperature: float = 1.0
    """0 is greedy: argmax, log-probs then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a generation; the stop token is part of the output and is trained."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Stop strings as token ids: a generation ends when its last sampled tokens are one of them, which stays in it."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a sampler returns for one request. Arrays are numpy, on the host."""

    token_ids: np.ndarray
    """int32 [N], the sampled tokens, stop token included."""
    logprobs: np.ndarray
    """float32 [N], natural log, at the sampling temperature."""
    policy_versions: np.ndarray
    """int32 [N], the weight version that produced each token (row A3)."""
    routes: np.ndarray
    """int16 [prompt + N, L, K]: experts chosen for every token of the whole context, prefill included; the last sampled
    token was never fed to the model, so its row is -1."""
    finish_reason: str
    """`stop`, `length` (max_tokens or context full) or `cancelled`."""
    truncated_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    """float32 [N], under the distribution that top-k and top-p leave (temperature 0: a point, 0); empty when the
    sampler does not tell."""


class Sampler(Protocol):
    """Draws tokens from the policy. A `session` is one rollout, window after window: its KV cache outlives a call, and
    what the next context has in common with the last one stays in it."""

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, session: str, group: str, seed: int
    ) -> Generation:
        """Continue `token_ids` (the whole context). Same seed -> same tokens, whatever else is in the batch."""
        ...

    def release(self, session: str) -> None:
        """Forget a session and free its cache; an unknown session is ignored."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# Rollouts


class SpanKind(StrEnum):
    """What a stretch of a segment's tokens is."""

    PROMPT = "prompt"
    ACTION = "action"
    SUMMARY = "summary"
    RESULT = "result"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, stop) of a segment."""

    kind: SpanKind
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One context window of a chain, in the order the model saw it (row R3). Index t describes token t itself."""

    token_ids: np.ndarray
    """int32 [T]."""
    sampled: np.ndarray
    """bool [T]: True where the policy sampled the token. Exactly these tokens are trained, summaries included."""
    logprobs: np.ndarray
    """float32 [T]: behaviour log-prob of sampled tokens, 0 elsewhere."""
    policy_versions: np.ndarray
    """int32 [T]: version that sampled the token, -1 elsewhere."""
    routes: np.ndarray
    """int16 [T, L, K]: experts the sampler chose; -1 where it recorded none (the last token of a segment)."""
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("sampled", "logprobs", "policy_versions", "routes"):
            rows = len(getattr(self, name))
            if rows != length:
                raise ValueError(f"Segment.{name} has {rows} rows, accepted is exactly one per token: {length}")


class RolloutStatus(StrEnum):
    """How an episode ended. Only INFRASTRUCTURE is excluded from training and baselines (faults 7 and 9)."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, kw_only=True)
class RolloutStats:
    """Counts that the length penalty (R5), the curriculum (R6) and the report read."""

    num_turns: int = 0
    num_tool_calls: int = 0
    num_summaries: int = 0
    thinking_tokens: int = 0
    tool_call_tokens: int = 0
    tool_output_tokens: int = 0
    final_message_tokens: int = 0
    sampled_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One episode: a chain of segments with one outcome. A failure of the machinery travels here as data."""

    task_id: str
    sample_index: int
    segments: tuple[Segment, ...]
    status: RolloutStatus
    passed: bool = False
    """True when every F2P and P2P test passed in a fresh pod."""
    passed_frac: float = 0.0
    stats: RolloutStats = field(default_factory=RolloutStats)
    events: Mapping[str, int] = field(default_factory=dict)
    """Countable events: `bad_arguments`, `unknown_tool`, `invalid_edit`, `malformed_summary`, `test_timeout` …"""
    attempts: tuple[bool, ...] = ()
    """For each `run` call in order: did all visible tests pass at that moment."""
    seconds: float = field(default=0.0, compare=False)
    """Wall-clock time of the episode, its verification included."""
    reward: float = 0.0
    reward_components: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    final_files: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one prompt (row R1): fixed size, one baseline."""

    task: Task
    rollouts: tuple[Rollout, ...]
    policy_version_start: int = 0
    """Trainer version when the group was admitted; staleness is the version trained minus the version of each token."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A segment ready to train: per-token advantages decided, nothing left to branch on."""

    token_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T]: tokens that carry loss."""
    advantages: np.ndarray
    """float32 [T], 0 where `loss_mask` is False."""
    behaviour_logprobs: np.ndarray
    """float32 [T]."""
    policy_versions: np.ndarray
    """int32 [T], -1 where not sampled."""
    routes: np.ndarray
    """int16 [T, L, K], -1 where none."""
    temperature: float = 1.0
    group: int = 0
    """Prompt of the step it belongs to: only samples of one prompt may be merged into a prefix tree."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows of one micro-batch. Index t describes token t; its predictor is t - 1 of the same document."""

    token_ids: np.ndarray
    """int32 [B, T]."""
    position_ids: np.ndarray
    """int32 [B, T], restarting at 0 in every document."""
    document_ids: np.ndarray
    """int32 [B, T], distinct within a row; -1 marks padding."""
    loss_mask: np.ndarray
    """bool [B, T]."""
    advantages: np.ndarray
    """float32 [B, T]."""
    behaviour_logprobs: np.ndarray
    """float32 [B, T]."""
    policy_versions: np.ndarray
    """int32 [B, T]."""
    routes: np.ndarray
    """int16 [B, T, L, K]."""
    temperature: float = 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Environments


@dataclass(frozen=True, kw_only=True)
class PodLimits:
    """What one pod may use (row E7)."""

    memory_bytes: int = 512 << 20
    num_processes: int = 64
    disk_bytes: int = 64 << 20
    output_bytes: int = 256 << 10
    """Per stream of one exec; more is cut and flagged."""
    wall_seconds: float = 600.0
    """Life of the pod; the backend destroys it afterwards."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """Outcome of one command in a pod."""

    exit_code: int
    """128 + signal for a killed process, as shells report it."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


class CallStatus(StrEnum):
    """How one test call ended."""

    RETURNED = "returned"
    RAISED = "raised"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process died, the module did not import, or the result is not a plain value."""


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """Outcome of one expression evaluated in a pod."""

    status: CallStatus
    value: str = ""
    """`repr` of a plain value, or the exception's type name."""
    line: int = field(default=0, compare=False)
    """Line of the module on which the outermost function called returned or raised; 0 where there was none. The code
    under test can forge it, so it is shown to the model and decides nothing."""


@runtime_checkable
class Pod(Protocol):
    """One isolated development environment running untrusted code (row E1). The repository lies in `/repo`."""

    pod_id: str

    async def exec(
        self, argv: Sequence[str], *, timeout: float = 30.0, stdin: bytes = b"", cwd: str = "/repo"
    ) -> ExecResult:
        """Run a command; at `timeout` seconds the whole process tree is killed, daemonised children included."""
        ...

    async def read(self, path: str) -> bytes:
        """Bytes of a file; FileNotFoundError, IsADirectoryError as usual. Links resolve inside the pod."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Replace a file, making parent folders."""
        ...

    async def list_files(self, path: str = ".") -> list[str]:
        """Relative paths of all files below `path`, sorted."""
        ...

    async def run_calls(self, module: str, calls: Sequence[str], *, timeout: float = 2.0) -> list[CallOutcome]:
        """Import `module` (a path) in one fresh forked process and evaluate each call there. The process is then thrown
        away. `timeout`: CPU seconds for each call; wall time is bounded by a multiple of it."""
        ...

    async def destroy(self) -> None:
        """Kill everything and free it. Idempotent, never raises for a pod that is gone."""
        ...


class PodBackend(Protocol):
    """Makes pods."""

    name: str

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> Pod:
        """A fresh pod whose `/repo` holds `files`. Raises PodError when the machine cannot make one."""
        ...

    async def close(self) -> None:
        """Destroy every pod of this backend."""
        ...


class PodError(RuntimeError):
    """The machinery failed (not the code in the pod): the rollout becomes INFRASTRUCTURE and is not trained."""


class PodRefused(PodError):
    """This machine does not permit what a pod needs; trying again will not help."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Verdict of a grader on final files."""

    passed: bool
    passed_frac: float
    """Passed tests / all tests."""
    fail_to_pass: Mapping[str, bool] = field(default_factory=dict)
    pass_to_pass: Mapping[str, bool] = field(default_factory=dict)


class Grader(Protocol):
    """Decides whether final files solve a task, in an environment the policy never touched."""

    async def grade(self, task: Task, final_files: Mapping[str, str]) -> Grade: ...


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and template seams


class TokenizerLike(Protocol):
    """What the environment needs of a tokenizer. `encode` never yields special ids, whatever the text holds."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def special_id(self, name: str) -> int: ...

    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """What one generation says: text before the calls, the calls, and precise errors for what could not be read."""

    text: str = ""
    reasoning: str = ""
    """What the model thought, where the format tells it apart from the text."""
    calls: tuple[ToolCall | ToolResult, ...] = ()
    """In order; a ToolResult stands for a call too broken to become a ToolCall, and holds the error for the model."""
    ended: bool = True
    """False when the end-of-turn token is missing (cut by length)."""
    num_text_tokens: int = 0
    """Tokens outside the calls, reasoning included, the stop token not counted."""


class Template(Protocol):
    """How an episode is written in tokens. One object serves training, evaluation and use (row E6)."""

    stop_ids: tuple[int, ...]

    def render_prompt(self, task: Task, *, summary: Sequence[int] | None = None) -> list[int]:
        """Opening tokens of a segment, ready for the model to act; `summary` holds the sampled summary tokens."""
        ...

    def render_calls(self, calls: Sequence[ToolCall], *, text: str = "") -> list[int]:
        """Tokens of a turn that makes `calls`, stop token included (for scripted experts)."""
        ...

    def render_results(self, results: Sequence[ToolResult]) -> list[int]:
        """Tokens of the tool results, ready for the model to act again."""
        ...

    def render_summary_request(self) -> list[int]:
        """Tokens that ask the model to summarise."""
        ...

    def render_summary(self, text: str) -> list[int]:
        """Tokens of a summary as the model would sample it, stop token included (for scripted experts)."""
        ...

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn: ...


# ---------------------------------------------------------------------------------------------------------------------
# Training seams


class Admission(Protocol):
    """Scheduling policy: how far rollouts may run ahead of the trainer (row A2)."""

    def may_start(self, *, groups_started: int, policy_version: int) -> bool: ...


class WeightSink(Protocol):
    """Takes a new policy version to the samplers (rows A3 A5); blocks training no longer than a copy of the weights."""

    def publish(self, version: int, state: Mapping[str, Any]) -> None: ...
