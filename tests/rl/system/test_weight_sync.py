"""Weights through a folder: equal bit for bit, never half a file, only the newest kept."""

import threading

import pytest
import torch
from safetensors import SafetensorError

from composer2.rl.system import weight_sync
from composer2.rl.system.weight_sync import FolderSink, read_weights


def state(value=0.0):
    generator = torch.Generator().manual_seed(int(value))
    return {
        "a": torch.randn(5, 3, generator=generator) + value,
        "half": torch.randn(7, generator=generator).bfloat16(),
        "counts": torch.arange(4),
    }


def test_round_trip_is_exact_to_the_bit(tmp_path):
    given = state(1.0)
    given["a"][0, 0] = -0.0
    given["a"][0, 1] = 1e-42  # a denormal
    found = read_weights(FolderSink(tmp_path).publish(3, given))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].contiguous().view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist()


def test_views_and_parameters_are_written(tmp_path):
    matrix = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    found = read_weights(FolderSink(tmp_path).publish(0, {"transposed": matrix.T}))
    assert found["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensors_that_share_memory_arrive_whole(tmp_path):
    """A tied head, and views of one buffer: the samplers ask for every name."""
    table, buffer = torch.arange(12.0).reshape(4, 3), torch.arange(10.0)
    given = {"embed": table, "head": table, "low": buffer[:5], "high": buffer[5:]}
    found = read_weights(FolderSink(tmp_path).publish(0, given))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in given.items()}


def test_only_the_newest_versions_stay(tmp_path):
    sink = FolderSink(tmp_path / "new" / "folder", keep=2)
    for version in (0, 9, 10, 100):
        sink.publish(version, state())
    assert sorted(path.name for path in sink.folder.iterdir()) == [sink.path(10).name, sink.path(100).name]
    with pytest.raises(FileNotFoundError):
        read_weights(sink.path(9))


def test_a_version_can_be_published_again(tmp_path):
    sink = FolderSink(tmp_path)
    sink.publish(4, state(1.0))
    sink.publish(4, state(2.0))
    assert torch.equal(read_weights(sink.path(4))["a"], state(2.0)["a"])


def test_keep_is_checked(tmp_path):
    with pytest.raises(ValueError, match="keep is 0, accepted is 1 or more"):
        FolderSink(tmp_path, keep=0)


def test_a_failed_write_leaves_the_old_version_whole(tmp_path, monkeypatch):
    sink = FolderSink(tmp_path)
    sink.publish(1, state(1.0))

    def half(tensors, path):
        with open(path, "wb") as file:
            file.write(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_sync, "save_file", half)
    with pytest.raises(OSError, match="No space"):
        sink.publish(1, state(2.0))
    assert torch.equal(read_weights(sink.path(1))["a"], state(1.0)["a"])
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [sink.path(1).name]


def test_a_reader_sees_whole_files_while_the_writer_writes(tmp_path):
    sink = FolderSink(tmp_path)
    sink.publish(0, {"x": torch.zeros(50_000), "y": torch.zeros(3)})
    seen, stop = [], threading.Event()

    def write():
        for number in range(1, 40):
            sink.publish(0, {"x": torch.full((50_000,), float(number)), "y": torch.full((3,), float(number))})
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        found = read_weights(sink.path(0))
        seen.append(set(found["x"].unique().tolist()) | set(found["y"].tolist()))
    writer.join()
    assert seen
    assert all(len(values) == 1 for values in seen)


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(weight_sync, "save_file", full)
    with pytest.raises(OSError, match=r"could not write .*weights-00000003.*No space left"):
        FolderSink(tmp_path).publish(3, {"a": torch.zeros(2)})
    assert list(tmp_path.iterdir()) == []
