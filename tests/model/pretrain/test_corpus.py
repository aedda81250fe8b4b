"""Sources, split and near-duplicates."""

import json
import random

import numpy as np
import pytest

from composer2.model.pretrain.corpus import (
    CorpusConfig,
    SourceConfig,
    distinct_documents,
    is_heldout,
    jaccard,
    load_corpus,
    minhash_signatures,
    shingle_hashes,
    standard_library,
)


def words(seed: int, count: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(5000)}" for _ in range(count)]


def write_folder(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return CorpusConfig(sources=(SourceConfig(path=str(root)),), heldout_frac=0.0)


def test_folder_takes_suffixes_in_path_order_and_skips_tests(tmp_path):
    files = {
        "b.py": " ".join(words(1)),
        "a/c.md": " ".join(words(2)),
        "test/d.py": " ".join(words(3)),
        "pkg/tests/e.py": " ".join(words(4)),
        "site-packages/f.py": " ".join(words(5)),
        "g.bin": " ".join(words(6)),
        "h.py": "x",
    }
    corpus = load_corpus(write_folder(tmp_path, files))
    assert [document.path for document in corpus.train] == ["a/c.md", "b.py"]
    assert corpus.train[1].text == files["b.py"]


def test_empty_folder_is_named_with_the_suffixes(tmp_path):
    config = CorpusConfig(sources=(SourceConfig(path=str(tmp_path), suffixes=(".py", ".rs")),))
    with pytest.raises(ValueError) as caught:
        load_corpus(config)
    assert str(tmp_path) in str(caught.value)
    assert ".py, .rs" in str(caught.value)


def test_missing_path_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="accepted is an existing folder"):
        load_corpus(CorpusConfig(sources=(SourceConfig(path=str(tmp_path / "none")),)))


def test_jsonl_source_and_its_broken_line(tmp_path):
    file = tmp_path / "data.jsonl"
    texts = [" ".join(words(seed)) for seed in range(3)]
    records = [{"text": texts[0], "path": "z"}, {"text": texts[1]}, {"text": texts[2], "path": "b"}]
    file.write_text("\n".join(json.dumps(record) for record in records))
    config = CorpusConfig(sources=(SourceConfig(path=str(file)),), heldout_frac=0.0)
    found = {document.path: document.text for document in load_corpus(config).train}
    assert found == {"z": texts[0], "data.jsonl#2": texts[1], "b": texts[2]}
    file.write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match="line 1 has no text"):
        load_corpus(config)
    file.write_text("{\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        load_corpus(config)


def test_max_bytes_bounds_each_source(tmp_path):
    files = {f"f{seed}.py": " ".join(words(seed)) for seed in range(20)}
    config = write_folder(tmp_path, files)
    limited = CorpusConfig(sources=config.sources, heldout_frac=0.0, max_bytes=10_000)
    corpus = load_corpus(limited)
    assert 0 < corpus.num_train_bytes <= 10_000
    assert len(load_corpus(config).train) == 20


def test_split_is_a_function_of_the_path_alone(tmp_path):
    # md5("b") = 92eb5ffe…: 0x92 / 256 = 0.5703 <= value < 0.5742
    assert not is_heldout("b", 0.57)
    assert is_heldout("b", 0.58)
    files = {f"f{seed}.py": " ".join(words(seed)) for seed in range(60)}
    config = CorpusConfig(sources=write_folder(tmp_path, files).sources, heldout_frac=0.3)
    before = {document.path for document in load_corpus(config).heldout}
    write_folder(tmp_path, {"new.py": " ".join(words(99))})
    after = {document.path for document in load_corpus(config).heldout}
    assert after - {"new.py"} == before
    assert 5 <= len(before) <= 32


def test_near_duplicates_go_and_the_first_stays():
    original = words(1)
    changed = list(original)
    changed[200] = "other"  # 5 of 396 shingles differ: Jaccard 391 / 401
    half = original[:200] + words(2, 200)
    texts = [" ".join(words(3)), " ".join(original), " ".join(changed), " ".join(half), " ".join(original)]
    assert distinct_documents(texts, 0.7) == [0, 1, 3]
    assert distinct_documents(texts, 1.1) == [0, 1, 2, 3]


def test_minhash_estimates_the_exact_jaccard_index():
    left, right = words(5, 3000), words(5, 3000)
    right[1500:] = words(6, 1500)
    shingles = [shingle_hashes(" ".join(left)), shingle_hashes(" ".join(right))]
    sets = [{tuple(side[i : i + 5]) for i in range(len(side) - 4)} for side in (left, right)]
    exact = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert jaccard(*shingles) == pytest.approx(exact, abs=1e-12)
    signatures = minhash_signatures(shingles)
    estimate = float(np.mean(signatures[0] == signatures[1]))
    assert estimate == pytest.approx(exact, abs=0.18)  # three standard deviations of 64 draws


def test_standard_library_loads_the_same_twice():
    config = CorpusConfig(max_bytes=400_000)
    first, second = load_corpus(config), load_corpus(config)
    assert first == second
    assert all(document.path.endswith(".py") for document in first.train)
    assert all("test" not in document.path.split("/")[:-1] for document in first.train)
    assert (standard_library() / first.train[0].path).read_text() == first.train[0].text
    assert not {d.path for d in first.train} & {d.path for d in first.heldout}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heldout_frac", 1.0),
        ("max_bytes", -1),
        ("sources", ()),
        ("duplicate_threshold", 0.0),
        ("max_document_bytes", 5),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"CorpusConfig.{field}"):
        CorpusConfig(**{field: value})
