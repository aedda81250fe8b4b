"""The text of continued pretraining: sources in, training and held-out documents out.

In: folders of text and code, or JSONL files, each with a weight. Out: `Corpus`, two tuples of `Document` (train, held
out) in a fixed order, near-duplicates removed.

Source: report §3 ("a large code-dominated data mix"), row P1 (weighted sources, held-out split by file, MinHash).
Choice: the default source is the standard library of the running interpreter, real code that every machine has.
Choice: a document is held out when md5(relative path) / 2^128 < heldout_frac, so the split depends on nothing else: not
on the seed, not on the other files.
Choice: `max_bytes` takes files in order of a second md5, an even sample of the folder rather than its first letters.
Choice: near-duplicates are found with MinHash over word 5-grams (64 hashes in 16 bands) and confirmed by the exact
Jaccard index; the first document in path order stays, before the split, so no copy crosses it.

Shape letters: S distinct shingles of a document, H hash functions, N documents.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

NUM_HASHES = 64
ROWS_PER_BAND = 4
WORDS_PER_SHINGLE = 5
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "node_modules"}
)
TEXT_SUFFIXES = (".py", ".md", ".txt", ".rst", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts", ".java", ".toml")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of text: a folder, a JSONL file, or (empty path) the standard library."""

    path: str = ""
    """Folder or `.jsonl` file; empty means the standard library of the running interpreter."""
    weight: float = 1.0
    """Share of training rows drawn from this source, relative to the other weights."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """File names a folder source accepts."""
    text_field: str = "text"
    """Field of a JSONL record that holds the text."""
    path_field: str = "path"
    """Field of a JSONL record that names the document; `file#line` where a record has none."""

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"SourceConfig.weight is {self.weight}, accepted is a number above 0")
        if not self.suffixes or any(not suffix.startswith(".") for suffix in self.suffixes):
            raise ValueError(f"SourceConfig.suffixes is {self.suffixes}, accepted is a non-empty tuple like ('.py',)")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """What text continued pretraining reads."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """The mixture."""
    heldout_frac: float = 0.05
    """Expected share of documents held out for evaluation."""
    max_bytes: int = 4 << 20
    """Most bytes taken from each source; 0 takes everything."""
    max_document_bytes: int = 256 << 10
    """Longer files are left out: generated tables rather than written code."""
    min_document_bytes: int = 128
    """Shorter files are left out."""
    duplicate_threshold: float = 0.7
    """Jaccard index of word 5-grams from which two documents count as copies; 1 or more removes exact copies only."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("CorpusConfig.sources is empty, accepted is at least one SourceConfig")
        if not 0 <= self.heldout_frac < 1:
            raise ValueError(f"CorpusConfig.heldout_frac is {self.heldout_frac}, accepted is 0 <= x < 1")
        for name in ("max_bytes", "min_document_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"CorpusConfig.{name} is {getattr(self, name)}, accepted is 0 or more")
        if self.max_document_bytes <= self.min_document_bytes:
            raise ValueError(
                f"CorpusConfig.max_document_bytes is {self.max_document_bytes}, accepted is more than "
                f"min_document_bytes ({self.min_document_bytes})"
            )
        if not self.duplicate_threshold > 0:
            raise ValueError(f"CorpusConfig.duplicate_threshold is {self.duplicate_threshold}, accepted is above 0")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file or record."""

    path: str
    """Relative to its source; decides the split."""
    text: str
    source: int = 0
    """Index into `CorpusConfig.sources`."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in path order, split by file."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    num_duplicates: int = 0
    weights: tuple[float, ...] = field(default=(1.0,))
    """Weight of every source."""

    @property
    def num_train_bytes(self) -> int:
        return sum(len(document.text.encode()) for document in self.train)


def load_corpus(config: CorpusConfig) -> Corpus:
    """Read, deduplicate and split. Raises ValueError for a source that gives no document or a split side left empty."""
    documents: list[Document] = []
    for index, source in enumerate(config.sources):
        found = sorted(_read_source(source, index, config), key=lambda document: document.path)
        if not found:
            raise ValueError(_nothing_found(source, config))
        documents += found
    kept = [documents[i] for i in distinct_documents([d.text for d in documents], config.duplicate_threshold)]
    train = tuple(document for document in kept if not is_heldout(document.path, config.heldout_frac))
    heldout = tuple(document for document in kept if is_heldout(document.path, config.heldout_frac))
    for index, source in enumerate(config.sources):
        if not any(document.source == index for document in train):
            raise ValueError(
                f"source {source.path or 'standard library'!r} has no training document left after the split"
            )
    if config.heldout_frac > 0 and not heldout:
        raise ValueError(
            f"CorpusConfig.heldout_frac is {config.heldout_frac}, which holds out none of {len(kept)} documents; "
            "accepted is a larger fraction, or 0 for no held-out text"
        )
    return Corpus(
        train=train,
        heldout=heldout,
        num_duplicates=len(documents) - len(kept),
        weights=tuple(source.weight for source in config.sources),
    )


def is_heldout(path: str, heldout_frac: float) -> bool:
    """The split rule: a pure function of the relative path."""
    return int.from_bytes(hashlib.md5(path.encode()).digest(), "big") < heldout_frac * 2.0**128


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def standard_library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def _read_source(source: SourceConfig, index: int, config: CorpusConfig) -> Iterator[Document]:
    root = Path(source.path) if source.path else standard_library()
    if root.is_dir():
        suffixes = source.suffixes if source.path else (".py",)
        yield from _read_folder(root, suffixes, index, config)
    elif root.is_file() and root.suffix == ".jsonl":
        yield from _read_jsonl(root, source, index, config)
    else:
        raise ValueError(f"SourceConfig.path is {source.path!r}, accepted is an existing folder or a .jsonl file")


def _read_folder(root: Path, suffixes: Sequence[str], index: int, config: CorpusConfig) -> Iterator[Document]:
    paths = [
        path.relative_to(root)
        for path in root.rglob("*")
        if path.suffix in suffixes
        and not EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts)
        and path.is_file()
    ]
    taken = 0
    for path in sorted(paths, key=lambda path: hashlib.md5(f"order {path.as_posix()}".encode()).digest()):
        size = (root / path).stat().st_size
        if not config.min_document_bytes <= size <= config.max_document_bytes:
            continue
        if config.max_bytes and taken + size > config.max_bytes:
            continue
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text: there is nothing to learn from it
        taken += size
        yield Document(path=path.as_posix(), text=text, source=index)


def _read_jsonl(file: Path, source: SourceConfig, index: int, config: CorpusConfig) -> Iterator[Document]:
    taken = 0
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} line {number} is not JSON: {error}") from error
            text = record.get(source.text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ValueError(
                    f"{file} line {number} has no text in field {source.text_field!r}, accepted is an object whose "
                    "SourceConfig.text_field is a string"
                )
            size = len(text.encode())
            if not config.min_document_bytes <= size <= config.max_document_bytes:
                continue
            if config.max_bytes and taken + size > config.max_bytes:
                continue
            taken += size
            name = record.get(source.path_field)
            yield Document(path=name if isinstance(name, str) else f"{file.name}#{number}", text=text, source=index)


def _nothing_found(source: SourceConfig, config: CorpusConfig) -> str:
    where = source.path or str(standard_library())
    return (
        f"corpus folder {where!r} holds no usable document; accepted are UTF-8 files ending in "
        f"{', '.join(source.suffixes)} (or a .jsonl file of records), of {config.min_document_bytes} to "
        f"{config.max_document_bytes} bytes, outside folders named {', '.join(sorted(EXCLUDED_FOLDERS))}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Near-duplicates


def distinct_documents(texts: Sequence[str], threshold: float) -> list[int]:
    """Indices that stay: a text goes when an earlier kept one has a Jaccard index >= `threshold` with it."""
    word_ids: dict[str, int] = {}
    shingles = [shingle_hashes(text, word_ids) for text in texts]
    keys_NB = _band_keys(minhash_signatures(shingles))
    buckets: dict[tuple[int, int], list[int]] = {}
    seen_exactly: set[bytes] = set()
    kept: list[int] = []
    for index, text in enumerate(texts):
        digest = hashlib.md5(text.encode()).digest()
        bands = [(band, int(key)) for band, key in enumerate(keys_NB[index])]
        candidates = sorted({other for band in bands for other in buckets.get(band, ())})
        if digest in seen_exactly or any(jaccard(shingles[index], shingles[o]) >= threshold for o in candidates):
            continue
        seen_exactly.add(digest)
        kept.append(index)
        for band in bands:
            buckets.setdefault(band, []).append(index)
    return kept


def shingle_hashes(text: str, word_ids: dict[str, int] | None = None) -> np.ndarray:
    """Sorted distinct uint64 [S] hashes of the text's word 5-grams. `word_ids` is a cache shared between texts."""
    cache = {} if word_ids is None else word_ids
    words = re.findall(r"\w+", text)
    for word in words:
        if word not in cache:
            data = word.encode()
            cache[word] = zlib.crc32(data) << 32 | zlib.adler32(data)
    ids = np.fromiter((cache[word] for word in words), dtype=np.uint64, count=len(words))
    length = max(len(ids) - WORDS_PER_SHINGLE + 1, 1 if len(ids) else 0)
    hashes = np.zeros(length, dtype=np.uint64)
    for offset in range(min(WORDS_PER_SHINGLE, len(ids))):
        hashes = _mix(hashes + ids[offset : offset + length])
    return np.unique(hashes)


def minhash_signatures(shingles: Sequence[np.ndarray]) -> np.ndarray:
    """uint64 [N, H]: for every document the least value of each hash function over its shingles."""
    salts_H = _mix(np.arange(1, NUM_HASHES + 1, dtype=np.uint64))
    odd_H = _mix(salts_H) | np.uint64(1)
    signatures_NH = np.full((len(shingles), NUM_HASHES), np.iinfo(np.uint64).max, dtype=np.uint64)
    for row, hashes_S in enumerate(shingles):
        for start in range(0, len(hashes_S), 4096):
            values_HS = hashes_S[None, start : start + 4096] * odd_H[:, None] + salts_H[:, None]
            np.minimum(signatures_NH[row], values_HS.min(axis=1), out=signatures_NH[row])
    return signatures_NH


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """|A and B| / |A or B| of two sorted sets of hashes; two empty sets give 1."""
    if not len(left) and not len(right):
        return 1.0
    shared = len(np.intersect1d(left, right, assume_unique=True))
    return shared / (len(left) + len(right) - shared)


def _band_keys(signatures_NH: np.ndarray) -> np.ndarray:
    bands_NBR = signatures_NH.reshape(len(signatures_NH), -1, ROWS_PER_BAND)
    keys_NB = np.zeros(bands_NBR.shape[:2], dtype=np.uint64)
    for row in range(ROWS_PER_BAND):
        keys_NB = _mix(keys_NB + bands_NBR[:, :, row])
    return keys_NB


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: spreads every input bit over the whole word."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
