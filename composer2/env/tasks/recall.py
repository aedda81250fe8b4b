"""Tasks that hide one early fact: a word is read in the first file, and written into the last one, windows later.

In: an explicit `random.Random` and a `RecallConfig`. Out: a `Task`; with a template and limits, the windows of an
episode that a script plays in the real harness, to imitate, or a drill of looking facts up.

    instruction   core.py blue                   the first file, and the name whose word is asked for
    first file    # red oak, # blue fox, …, #util.py    several facts, and the file to read next
    fillers       # seed ink, …, #main.py        words that nobody asks for; short or long
    last file     blue = None                    must become blue = 'fox'; the hidden test compares the word
    summary       main.py blue fox               where to go on, and a noted fact

Every file names the next one alone, and the turns suffice for reading each file once and editing the last: nothing is
left for a second look at the first file. What the context loses, only a summary can carry.

Source: report §4.1 (self-summaries up- and down-weighted by the outcome they led to); row R3.
Choice: the words are few, so that a tiny policy knows them all; a guess is right once in len(WORDS).
Choice: the script's first summary notes one of the facts of the first file, the right one as often as `right_frac`
says: imitation teaches the form of a summary and the use of a noted word, and leaves what to keep to reinforcement.
Choice: a part of the scripted episodes is short: the fact is looked up while it is still in view.
Choice: a policy from scratch learns to look a word up by its name from drills, windows with a dozen lookups each; an
episode has one or two.
Choice: no prompt shows a file. Every window begins with the prompt, so a fact in it would never be lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from composer2.env.harness import EpisodeLimits, run_episode
from composer2.env.tasks.expert import SftExample
from composer2.env.tasks.procedural import task_hash
from composer2.env.tools.lines import number_lines
from composer2.types import (
    Generation,
    Grade,
    Pod,
    PodLimits,
    Rollout,
    SamplingParams,
    Task,
    Template,
    TestCase,
    ToolCall,
    ToolResult,
)

FACT_NAMES = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")
FILLER_NAMES = ("seed", "size", "rate", "port", "page", "depth", "width", "limit")
FILE_NAMES = ("main", "core", "util", "base", "data", "text", "list", "node", "tree", "path", "time", "math")
WORDS = (
    *("oak", "elm", "fox", "owl", "bee", "ant", "cat", "dog", "cow", "hen", "pig", "rat", "sun", "sky", "sea", "ice"),
    *("ink", "pen", "cup", "jar", "box", "bag", "hat", "tie", "car", "bus", "van", "jet", "arm", "leg", "ear", "eye"),
)
"""What a fact can say."""


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Sizes of a task, and what the script plays."""

    num_facts: int = 4
    """Facts in the first file, one of which is asked for."""
    num_fillers: int = 2
    """Files between the first and the last one."""
    filler_lines: tuple[int, int] = (2, 5)
    """Lines of a short and of a long filler; each filler is either, with equal chance."""
    right_frac: float = 0.4
    """Share of the script's first summaries that note the fact asked for; the others note another fact of the file."""
    cut_frac: float = 0.15
    """Share of scripted episodes played in the harness that cuts."""
    short_frac: float = 0.25
    """Share of scripted episodes without fillers, which end before the context is full: the fact is still there."""
    prompt_weight: float = 0.05
    """Loss weight of tokens that a policy does not sample."""
    word_weight: float = 5.0
    """Loss weight of the noted and the written word, where it is one token; the script's other tokens weigh 1."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_facts <= len(FACT_NAMES):
            raise ValueError(f"RecallConfig.num_facts is {self.num_facts}, accepted is 2 to {len(FACT_NAMES)}")
        if not 0 <= self.num_fillers <= len(FILE_NAMES) - 2:
            raise ValueError(f"RecallConfig.num_fillers is {self.num_fillers}, accepted is 0 to {len(FILE_NAMES) - 2}")
        if not 1 <= min(self.filler_lines) <= max(self.filler_lines) <= len(FILLER_NAMES):
            raise ValueError(
                f"RecallConfig.filler_lines is {self.filler_lines}, accepted are 1 to {len(FILLER_NAMES)} lines"
            )
        for name in ("right_frac", "cut_frac", "short_frac", "prompt_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"RecallConfig.{name} is {getattr(self, name)}, accepted is 0 to 1")
        if not self.word_weight > 0:
            raise ValueError(f"RecallConfig.word_weight is {self.word_weight}, accepted is above 0")
        if self.cut_frac + self.short_frac > 1:
            raise ValueError(f"RecallConfig.short_frac is {self.short_frac}, accepted is 0 to {1 - self.cut_frac}")

    @property
    def num_turns(self) -> int:
        """Turns a task takes, and all that an episode should have: every file read once, the last one edited."""
        return self.num_fillers + 3


def recall_task(rng: random.Random, config: RecallConfig) -> Task:
    """A fresh task. `meta`: `paths` in reading order, `asked` name, its `value`, and all `facts`."""
    paths = [f"{name}.py" for name in rng.sample(FILE_NAMES, config.num_fillers + 2)]
    names = rng.sample(FACT_NAMES, config.num_facts)
    facts = dict(zip(names, rng.sample(WORDS, config.num_facts), strict=True))
    asked = rng.choice(names)
    bodies = [facts]
    for _ in range(config.num_fillers):
        fillers = rng.sample(FILLER_NAMES, rng.choice(config.filler_lines))
        bodies.append({name: rng.choice(WORDS) for name in fillers})
    following = [f"#{path}\n" for path in paths[1:]]
    texts = [
        "".join(f"# {n} {v}\n" for n, v in body.items()) + then for body, then in zip(bodies, following, strict=True)
    ]
    files = dict(sorted({**dict(zip(paths, texts, strict=False)), paths[-1]: f"{asked} = None\n"}.items()))
    instruction = f"{paths[0]} {asked}"
    return Task(
        task_id=task_hash(instruction, files, ()),
        instruction=instruction,
        files=files,
        tools=("read", "edit"),
        fail_to_pass=(TestCase(name="t0", module=paths[-1], call=asked, expected=repr(facts[asked])),),
        reference={**files, paths[-1]: f"{asked} = {facts[asked]!r}\n"},
        family="recall",
        meta={"paths": paths, "asked": asked, "value": facts[asked], "facts": facts},
    )


def edit_of(word: str) -> ToolCall:
    """The edit that writes a word into the last file."""
    return ToolCall(name="edit", arguments={"line": 1, "old": "None", "new": repr(word)})


def scripted_examples(
    rng: random.Random, template: Template, limits: EpisodeLimits, config: RecallConfig
) -> list[SftExample]:
    """The windows of one scripted episode, with the loss weights of `config`.

    Where the harness cuts instead of asking for summaries, the script guesses the word, since nobody could know it.
    """
    kind = rng.random()
    if kind < config.cut_frac:
        limits = replace(limits, on_full="truncate")
    elif kind < config.cut_frac + config.short_frac:
        config = replace(config, num_fillers=0)
        limits = replace(limits, max_turns=config.num_turns, max_summaries=0)
    rollout = scripted_rollout(recall_task(rng, config), template, limits, rng, config)
    words = [
        ids[0]
        for ids in (template.render_summary(form)[:-1] for word in WORDS for form in (word, f" {word}"))
        if len(ids) == 1
    ]
    examples = []
    for segment in rollout.segments:
        weights_T = np.where(np.isin(segment.token_ids, words), config.word_weight, 1.0)
        weights_T = np.where(segment.sampled, weights_T, config.prompt_weight)
        examples.append(SftExample(token_ids=segment.token_ids, weights=weights_T.astype(np.float32)))
    return examples


def scripted_rollout(
    task: Task, template: Template, limits: EpisodeLimits, rng: random.Random, config: RecallConfig
) -> Rollout:
    """One episode of the harness in which a script takes the place of the policy. Not graded."""
    return asyncio.run(
        run_episode(
            task,
            sampler=_Script(task, template, limits, rng, config),
            backend=_NoPods(),
            grader=_NoVerdict(),
            template=template,
            limits=limits,
            sampling=SamplingParams(),
            session="script",
            group="script",
            seed=0,
            sample_index=0,
        )
    )


def drill(rng: random.Random, template: Template, config: RecallConfig, num_lookups: int = 12) -> SftExample:
    """A first file as the harness shows it, then names and their words: first what is asked for, then at random.

    Loss weights are 1 for all words after the file and for the name asked for, else 0."""
    task = recall_task(rng, replace(config, num_facts=rng.randint(2, config.num_facts)))
    path, facts = task.meta["paths"][0], task.meta["facts"]
    ids = [
        *template.render_prompt(task),
        *template.render_calls([ToolCall(name="read", arguments={"path": path})]),
        *template.render_results([ToolResult(content=f"{path}\n{number_lines(task.files[path])}")]),
    ]
    weights = [0.0] * len(ids)
    for index, name in enumerate([task.meta["asked"], *rng.choices(list(facts), k=num_lookups - 1)]):
        for text, weight in ((f" {name}", float(index == 0)), (f" {facts[name]}", 1.0)):
            piece = template.render_summary(text)[:-1]
            ids += piece
            weights += [weight] * len(piece)
    return SftExample(token_ids=np.array(ids, dtype=np.int32), weights=np.array(weights, dtype=np.float32))


class _Script:
    """A `Sampler` that reads the files in order, notes a fact in its first summary and trusts it from then on."""

    def __init__(
        self, task: Task, template: Template, limits: EpisodeLimits, rng: random.Random, config: RecallConfig
    ) -> None:
        self.task, self.template, self.limits, self.rng, self.config = task, template, limits, rng, config
        self.request = template.render_summary_request()
        self.paths: list[str] = task.meta["paths"]
        self.num_turns = 0
        self.noted: str | None = None

    def _note(self) -> str:
        asked, facts = self.task.meta["asked"], self.task.meta["facts"]
        if self.noted is None:
            others = [name for name in facts if name != asked]
            self.noted = asked if self.rng.random() < self.config.right_frac else self.rng.choice(others)
        # Where to go on; once the last file is read, nowhere: what is left is the edit of the file shown last.
        return f"{''.join(self.paths[self.num_turns : self.num_turns + 1])} {self.noted} {facts[self.noted]}"

    def _turn(self) -> ToolCall:
        self.num_turns += 1
        if self.num_turns <= len(self.paths):
            return ToolCall(name="read", arguments={"path": self.paths[self.num_turns - 1]})
        if self.limits.on_full == "truncate":
            return edit_of(self.rng.choice(WORDS))
        return edit_of(self.task.meta["facts"][self.noted or self.task.meta["asked"]])

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, session: str, group: str, seed: int
    ) -> Generation:
        is_asked = list(token_ids[-len(self.request) :]) == self.request
        ids = self.template.render_summary(self._note()) if is_asked else self.template.render_calls([self._turn()])
        return Generation(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            policy_versions=np.zeros(len(ids), dtype=np.int32),
            routes=np.zeros((len(token_ids) + len(ids), 0, 0), dtype=np.int16),
            finish_reason="stop",
        )

    def release(self, session: str) -> None:
        """Nothing is held."""


class _NoPods:
    """A `PodBackend` for episodes in which nothing runs."""

    name = "none"

    async def create(self, files: object, limits: PodLimits | None = None) -> Pod:
        raise AssertionError("a scripted episode runs nothing")

    async def close(self) -> None:
        """Nothing is held."""


class _NoVerdict:
    """A `Grader` that looks at nothing."""

    async def grade(self, task: Task, final_files: object) -> Grade:
        return Grade(passed=False, passed_frac=0.0)
