"""How fast the engine is, each figure against an alternative in the same run: `scripts/bench_engine.py --out DIR`.

    python scripts/bench_engine.py --out DIR [--quick]

In: nothing. Out: `DIR/bench_engine.json`, flat figures; a ratio above 1 means that ours is faster.

    decode_tokens_per_s_vs_transformers     32 greedy continuations of prompts of mixed length, all at once: tokens/s of
                                            the engine / of `generate` (left padding, its own key-value cache)
    generate_tokens_per_s_vs_transformers   the same calls as a whole, prefill included
    greedy_identical                        1 when every token of both is the same
    prefix_cache_speedup                    8 samples of one long prompt: seconds without sharing it / with
    speculative_acceptance                  share of the MTP module's drafts that were taken
    speculative_speedup                     4 requests at once: seconds of plain decoding / with drafts
    train_tokens_per_cpu_s_vs_transformers  one optimizer step (forward, backward, AdamW) on rows of 512 tokens, the
                                            longest context of the preset; `_rows_256` has shorter rows

Decoding is timed on both sides from the moment the first token of all 32 is known until the last one: no prefill, the
same number of steps. One thread, one precision (float32), the same weights. The two sides of a ratio alternate, and a
figure is the ratio of their medians. Seconds are CPU seconds of the process, which for one thread are what an idle
machine would take; figures that end in `_wall` have the wall clock's, which other processes lengthen.

Source: rows I1 I2 I5 M7 M9. One model for all: the tiny latent-attention preset, first trained for some steps on a
made-up language (a token has one likely successor and, one time in five, any other), next-token and MTP loss, so that
greedy decoding has no ties and the MTP module something to guess; then saved in the published layout, which
transformers loads. An acceptance near the share of likely successors is a fact of this language, of no other text.
Choice: `generate` ends by length alone, and no end token is set, so that it runs no logits processor for one.
Choice: drafts are measured with few requests at once, where they are used: they cost arithmetic, and save steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DeepseekV3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from composer2.log import Console
from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.mtp import mtp_distillation_loss
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(max_position_embeddings=2048)
"""The preset, with room for a long prompt."""
USED = 128
"""Tokens the made-up language has."""
NOISE = 0.2
"""Share of tokens drawn from all of them."""
NUM_PROMPTS = 32


class Seconds(NamedTuple):
    """A span of time, on both clocks."""

    wall: float
    cpu: float

    def __sub__(self, earlier: Seconds) -> Seconds:
        return Seconds(self.wall - earlier.wall, self.cpu - earlier.cpu)


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def alternate(sides: Sequence[Callable[[], Sequence[Seconds]]], repeats: int) -> list[list[Seconds]]:
    """Medians of the spans each side returns, [side][span], over `repeats` calls in changing order, one more before."""
    calls: list[list[Sequence[Seconds]]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        order = range(len(sides)) if repeat % 2 else reversed(range(len(sides)))
        for side in order:
            spans = sides[side]()
            if repeat:
                calls[side].append(spans)
    return [[_median(span) for span in zip(*spans, strict=True)] for spans in calls]


def _median(spans: Sequence[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(clock) for clock in zip(*spans, strict=True)))


def timed(call: Callable[[], Any]) -> list[Seconds]:
    started = now()
    call()
    return [now() - started]


def ratio(name: str, ours: Seconds, other: Seconds) -> dict[str, float]:
    """How many times as long the other side takes."""
    return {name: other.cpu / ours.cpu, f"{name}_wall": other.wall / ours.wall}


# ---------------------------------------------------------------------------------------------------------------------
# The model


def language(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length]: token t is mostly followed by 5 t + 1 modulo USED."""
    text = rng.integers(0, USED, (rows, length))
    follows = rng.random((rows, length)) >= NOISE
    for place in range(1, length):
        text[:, place] = np.where(follows[:, place], (5 * text[:, place - 1] + 1) % USED, text[:, place])
    return text


def next_token_loss(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), token_ids_BT[:, 1:].flatten())


def trained_model(steps: int, console: Console) -> Transformer:
    """The model after `steps` steps of 1024 tokens, next-token and MTP losses."""
    model = Transformer(CONFIG)
    init_weights(model, 0)
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with console.stage("train the model", total=steps) as stage:
        for step in range(steps):
            token_ids_BT = torch.from_numpy(language(rng, 16, 64))
            out = model(token_ids_BT)
            loss = next_token_loss(out.logits_BTV, token_ids_BT)
            guesses = model.mtp_logits(out.hidden_BTD, token_ids_BT)
            optimizer.zero_grad()
            (loss + mtp_distillation_loss(out.logits_BTV, guesses)).backward()
            optimizer.step()
            stage.update(step + 1, loss=loss.item())
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def requests(prompts: list[list[int]], *, is_shared: bool = False, **params: Any) -> list[Request]:
    """One request a prompt, each of a session of its own; with `is_shared` they lend each other their prefixes."""
    return [
        Request(
            token_ids=tuple(prompt),
            session=f"s{index}",
            group="all" if is_shared else f"g{index}",
            seed=index,
            params=SamplingParams(**params),
        )
        for index, prompt in enumerate(prompts)
    ]


def run(engine: Engine, wanted: list[Request]) -> tuple[list[list[int]], list[Seconds]]:
    """The tokens of every request, and the spans of all steps and of all but the first; the cache is empty again."""
    started = now()
    for request in wanted:
        engine.submit(request)
    done: dict[str, list[int]] = {}
    marks = []
    while engine.has_work:
        done |= {finished.session: finished.generation.token_ids.tolist() for finished in engine.step()}
        marks.append(now())
    for request in wanted:
        engine.release(request.session)
    return [done[request.session] for request in wanted], [marks[-1] - started, marks[-1] - marks[0]]


class Marks(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token of a batch is known, and stops nothing."""

    def __init__(self) -> None:
        self.times: list[Seconds] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def bench_decode(model: Transformer, peer: Any, repeats: int, new_tokens: int) -> dict[str, float]:
    """Greedy continuations of prompts of 16 .. 256 tokens."""
    rng = np.random.default_rng(1)
    prompts = [language(rng, 1, int(length))[0].tolist() for length in rng.integers(16, 257, NUM_PROMPTS)]
    engine = Engine(model, num_slots=NUM_PROMPTS, max_len=256 + new_tokens)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    wanted = requests(prompts, temperature=0.0, max_tokens=new_tokens)
    tokens: dict[str, list[list[int]]] = {}

    def ours() -> list[Seconds]:
        tokens["ours"], spans = run(engine, wanted)
        return spans

    def theirs() -> list[Seconds]:
        started, marks = now(), Marks()
        with torch.inference_mode():
            out = peer.generate(
                input_ids=padded,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([marks]),
            )
        tokens["theirs"] = out[:, longest:].tolist()
        assert len(marks.times) == new_tokens
        return [marks.times[-1] - started, marks.times[-1] - marks.times[0]]

    (mine, mine_decode), (other, other_decode) = alternate((ours, theirs), repeats)
    decoded = NUM_PROMPTS * (new_tokens - 1)
    return {
        "decode_tokens_per_s": decoded / mine_decode.cpu,
        "transformers_decode_tokens_per_s": decoded / other_decode.cpu,
        **ratio("decode_tokens_per_s_vs_transformers", mine_decode, other_decode),
        **ratio("generate_tokens_per_s_vs_transformers", mine, other),
        "greedy_identical": float(tokens["ours"] == tokens["theirs"]),
        "greedy_tokens_compared": float(sum(map(len, tokens["ours"]))),
    }


def bench_prefix(model: Transformer, repeats: int, length: int) -> dict[str, float]:
    """Eight samples of 16 tokens of one prompt, in one group and each in its own."""
    prompt = language(np.random.default_rng(2), 1, length)[0].tolist()
    engine = Engine(model, num_slots=8, max_len=length + 16)
    shared, alone = (requests([prompt] * 8, is_shared=flag, max_tokens=16) for flag in (True, False))
    tokens: list[list[list[int]]] = [[], []]

    def side(index: int, wanted: list[Request]) -> list[Seconds]:
        tokens[index], spans = run(engine, wanted)
        return spans[:1]

    (mine,), (other,) = alternate((partial(side, 0, shared), partial(side, 1, alone)), repeats)
    return {
        "prefix_cache_ms": 1e3 * mine.cpu,
        "no_prefix_cache_ms": 1e3 * other.cpu,
        **ratio("prefix_cache_speedup", mine, other),
        "prefix_cache_same_tokens": float(tokens[0] == tokens[1]),
    }


def bench_speculative(model: Transformer, repeats: int, new_tokens: int) -> dict[str, float]:
    """Four prompts of 32 tokens, sampled at temperature 1."""
    prompts = language(np.random.default_rng(3), 4, 32).tolist()
    wanted = requests(prompts, max_tokens=new_tokens)
    drafting, plain = (Engine(model, num_slots=4, max_len=32 + new_tokens, speculative=flag) for flag in (True, False))

    def side(engine: Engine) -> list[Seconds]:
        return run(engine, wanted)[1][:1]

    (mine,), (other,) = alternate((partial(side, drafting), partial(side, plain)), repeats)
    stats = drafting.stats
    return {
        "speculative_ms": 1e3 * mine.cpu,
        "plain_ms": 1e3 * other.cpu,
        "speculative_acceptance": stats.accepted_tokens / stats.drafted_tokens,
        **ratio("speculative_speedup", mine, other),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Training


def bench_train(model: Transformer, peer: Any, repeats: int, rows: int, length: int) -> dict[str, float]:
    """One optimizer step on [rows, length] tokens; next-token loss alone, so no MTP on either side."""
    token_ids_BT = torch.from_numpy(language(np.random.default_rng(4), rows, length))
    model.train()
    peer.train()
    trunk = [parameter for name, parameter in model.named_parameters() if not name.startswith("mtp.")]
    losses = {"ours": 0.0, "theirs": 0.0}

    def step(name: str, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses[name] = loss.item()

    ours = partial(
        step,
        "ours",
        torch.optim.AdamW(trunk, lr=1e-5),
        lambda: next_token_loss(model(token_ids_BT).logits_BTV, token_ids_BT),
    )
    theirs = partial(
        step,
        "theirs",
        torch.optim.AdamW(peer.parameters(), lr=1e-5),
        lambda: peer(input_ids=token_ids_BT, labels=token_ids_BT, use_cache=False).loss,
    )
    (mine,), (other,) = alternate((partial(timed, ours), partial(timed, theirs)), repeats)
    return {
        "train_tokens_per_cpu_s": token_ids_BT.numel() / mine.cpu,
        "transformers_train_tokens_per_cpu_s": token_ids_BT.numel() / other.cpu,
        **ratio("train_tokens_per_cpu_s_vs_transformers", mine, other),
        "train_loss_difference": abs(losses["ours"] - losses["theirs"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, fewer tokens, a shorter training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    quick = options.quick
    repeats = 3 if quick else 9
    with Console() as console:
        model = trained_model(60 if quick else 150, console)
        with tempfile.TemporaryDirectory() as folder:
            save_huggingface(Path(folder) / "model", model)
            peer = DeepseekV3ForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32).eval()
        peer.generation_config.eos_token_id = None
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "decode": lambda: bench_decode(model, peer, repeats, 24 if quick else 64),
            "prefix": lambda: bench_prefix(model, repeats, 1024),
            "speculative": lambda: bench_speculative(model, repeats, 48 if quick else 128),
            "train": lambda: bench_train(model, peer, repeats, 4, 512),
            "rows_256": lambda: {
                f"{name}_rows_256": value for name, value in bench_train(model, peer, repeats, 8, 256).items()
            },
        }
        figures: dict[str, float] = {"parameters": float(sum(p.numel() for p in peer.parameters()))}
        with console.stage("measure", total=len(parts)) as stage:
            for index, (name, part) in enumerate(parts.items()):
                measured = part()
                figures |= measured
                stage.update(index + 1, part=name)
    (options.out / "bench_engine.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
