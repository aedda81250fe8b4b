"""Damaged headers and indexes: the error names the file, whatever is wrong inside."""

import json
import struct

import pytest
import torch

from composer2.model.checkpoint.shards import INDEX_FILE, SINGLE_FILE, read_entries, read_header, write_shards


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"data_offsets": ["a", "b"]}, "has a damaged header"),
        ({"data_offsets": [0, 1, 2]}, "has a damaged header"),
        ({"data_offsets": [0, 4]}, r"tensor w has 4 bytes, accepted is 24 for F32 \[2, 3\]"),
        ({"shape": "ab"}, "has a damaged header"),
        ({"dtype": ["F32"]}, r"tensor w has dtype \['F32'\], accepted is F64"),
    ],
)
def test_a_damaged_header_names_its_file(tmp_path, item, message):
    header = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | item}
    text = json.dumps(header).encode()
    path = tmp_path / SINGLE_FILE
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    with pytest.raises(ValueError, match=f"{path} {message}"):
        read_header(path)


@pytest.mark.parametrize("file", [5, None, "other.safetensors"])
def test_an_index_names_files_of_its_folder(tmp_path, file):
    write_shards(tmp_path, [("a", torch.zeros(4)), ("b", torch.zeros(4))], max_shard_bytes=16)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["b"] = file
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{INDEX_FILE} puts tensor b into {file}, which is no file"):
        read_entries(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path, [("a", torch.zeros(4)), ("b", torch.zeros(4))], max_shard_bytes=16)
    second = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]["b"]
    (tmp_path / "again").mkdir()
    write_shards(tmp_path / "again", [("a", torch.ones(4)), ("b", torch.zeros(4))], max_shard_bytes=64)
    (tmp_path / "again" / SINGLE_FILE).replace(tmp_path / second)
    with pytest.raises(ValueError, match=f"{second} holds tensor a, which {INDEX_FILE} does not put there"):
        read_entries(tmp_path)
