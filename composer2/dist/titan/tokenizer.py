"""torchtitan wants a tokenizer; our loaders bring token ids. This one refuses to be used.

Source: row D1. Choice: token ids are the truth, nothing is tokenised again in a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer


class NoTokenizer(BaseTokenizer):
    """Stands where a tokenizer has to stand."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError("batches arrive as token ids")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("batches arrive as token ids")

    def get_vocab_size(self) -> int:
        raise NotImplementedError("the model's config has the vocabulary")
