"""tools/studies/cifar reads CIFAR in both formats, and runs nothing that a pickle names."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

COUNT = 3


def pixels(count: int = COUNT) -> Tensor:
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8)


def text(of: str) -> bytes:
    return b"U" + bytes([len(of)]) + of.encode()


def python_2_pickle(images: Tensor, labels: list[int], shape: tuple[int, int]) -> bytes:
    """As Python 2 and numpy wrote CIFAR: protocol 2, with strings of bytes."""
    data = images.numpy().tobytes() if images.numel() else b""
    kind = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|")
    kind += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b")
    size = b"J" + struct.pack("<i", shape[0]) + b"J" + struct.pack("<i", shape[1]) + b"\x86"
    raw = b"T" + struct.pack("<i", len(data)) + data
    array = empty + b"\x87R(K\x01" + size + kind + b"\x89" + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    held = text("data") + array + text("fine_labels") + numbers
    return b"\x80\x02}(" + held + b"u."


def write(folder: Path, train: bytes, test: bytes, suffix: str = "") -> None:
    folder.mkdir(parents=True)
    (folder / f"train{suffix}").write_bytes(train)
    (folder / f"test{suffix}").write_bytes(test)


def test_pickles_of_python_2_are_read(part, tmp_path: Path) -> None:
    train, test = pixels(), pixels(2)
    files = [
        python_2_pickle(train, [5, 99, 0], (3, 3072)),
        python_2_pickle(test, [1, 2], (2, 3072)),
    ]
    write(tmp_path / "cifar-100-python", *files)
    found = part("images").read_folder(tmp_path, 100)
    assert torch.equal(found.train.pixels, train)
    assert torch.equal(found.test.pixels, test)
    assert found.train.labels.tolist() == [5, 99, 0]
    assert found.train.labels.dtype == torch.int64


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_of_todays_numpy_are_read(part, tmp_path: Path, protocol: int) -> None:
    pytest.importorskip("numpy")
    train = pixels()
    held = {b"data": train.view(COUNT, -1).numpy(), b"fine_labels": [3, 1, 2]}
    data = pickle.dumps(held, protocol)
    write(tmp_path / "here", data, data)
    assert torch.equal(part("images").read_folder(tmp_path / "here", 100).test.pixels, train)


def test_binary_files_are_read_by_their_fine_labels(part, tmp_path: Path) -> None:
    train = pixels()
    rows = [bytes([9, 40 + i]) + train[i].numpy().tobytes() for i in range(COUNT)]
    write(tmp_path / "cifar-100-binary", b"".join(rows), rows[1], ".bin")
    found = part("images").read_folder(tmp_path, 100)
    assert torch.equal(found.train.pixels, train)
    assert found.train.labels.tolist() == [40, 41, 42]
    assert found.test.labels.tolist() == [41]


class Harmful:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_nothing_that_a_pickle_names_is_run(part, tmp_path: Path) -> None:
    bad = pickle.dumps({"data": Harmful(tmp_path / "ran")}, 2)
    write(tmp_path / "cifar-100-python", bad, bad)
    with pytest.raises(ValueError, match="not a file of CIFAR: it names"):
        part("images").read_folder(tmp_path, 100)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (python_2_pickle(torch.zeros(0), [1, 2], (2, 3072)), "2 labels, and images of"),
        (python_2_pickle(pixels(1), [100], (1, 3072)), "not below 100"),
        (b"\x80\x02]K\x01a.", "it holds a list"),
        (b"not a pickle", "not a file of CIFAR"),
        (b"", "not a file of CIFAR"),
    ],
)
def test_other_files_are_refused_with_their_name(part, tmp_path: Path, train, said: str) -> None:
    write(tmp_path / "cifar-100-python", train, train)
    with pytest.raises(ValueError, match=said) as caught:
        part("images").read_folder(tmp_path, 100)
    assert "cifar-100-python/train" in str(caught.value)


def test_a_folder_without_the_files_is_refused(part, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files of cifar-10-batches-py or cifar-10-batches-bin"):
        part("images").read_folder(tmp_path, 10)
    write(tmp_path / "cifar-100-binary", b"\x00" * 10, b"", ".bin")
    with pytest.raises(ValueError, match="not a multiple of 3074"):
        part("images").read_folder(tmp_path, 100)


def named_right(data) -> float:
    train, test = data.train.pixels.float().flatten(1), data.test.pixels.float().flatten(1)
    means = torch.stack([train[data.train.labels == label].mean(0) for label in range(4)])
    named = torch.cdist(test, means).argmin(1)
    return float((named == data.test.labels).float().mean())


def test_made_images_are_the_same_each_time_and_can_be_told_apart(part) -> None:
    made = part("images").made
    first, again, empty = made(4, 200, 40), made(4, 200, 40), made(4, 200, 40, (0.0, 0.0))
    assert torch.equal(first.train.pixels, again.train.pixels)
    assert not torch.equal(first.train.pixels[:40], first.test.pixels)
    # By the nearest mean of a class: no network is needed to learn them.
    assert named_right(first) > 0.9
    assert named_right(empty) < 0.6  # without contrast by luck alone
