"""Fuzzed .bin/.idx pairs and index caches: they are read exactly as their fields specify, or rejected by name."""

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.files import file_crc32
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.training.errors import exit_on_user_error
from tests.fuzz.judging import Verdict, judged
from tests.fuzz.values import Choices, mutate_json

# NumPy types by the format's dtype codes.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_ODD_COUNTS = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1, (2**64 - 34) // 12]
_VOCABULARY = 100
_FIXED = struct.Struct("<9sQBQQ")


@dataclass
class Pair:
    """The fields of an .idx file as written, whether valid or not, and the contents of the .bin file."""

    code: int
    lengths: list[int]
    pointers: list[int]
    borders: list[int]
    modes: list[int]
    content: bytes
    multimodal: bool
    mmap: bool
    magic: bytes = b"MMIDIDX\0\0"
    version: int = 1
    counts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def idx(self) -> bytes:
        """Returns the contents of the .idx file."""
        parts = [np.array(self.lengths, "<i4"), np.array(self.pointers, "<i8"), np.array(self.borders, "<i8")]
        parts += [np.array(self.modes, "i1")]
        return _FIXED.pack(self.magic, self.version, self.code, *self.counts) + b"".join(p.tobytes() for p in parts)


def draw_pair(choices: Choices) -> Pair:
    """Draws a valid pair. Sequences may be empty, overlap or lie in any order; documents may have several sequences."""
    code = choices.one([8, 8, 4, *_TYPES])
    lengths = [
        choices.one([0, 1, 2, choices.integer(0, 20)]) for _ in range(choices.one([0, 1, 2, choices.integer(3, 12)]))
    ]
    size = np.dtype(_TYPES[code]).itemsize
    pointers = [sum(lengths[:number]) * size for number in range(len(lengths))]
    content = np.array([choices.below(_VOCABULARY) for _ in range(sum(lengths))], _TYPES[code]).tobytes()
    if choices.chance(0.2) and lengths:
        content = choices.bytes(choices.integer(0, 9)) + content
        free = [len(content) - length * size for length in lengths]
        pointers = [choices.integer(0, most) for most in free]
    borders = sorted(choices.integer(0, len(lengths)) for _ in range(choices.integer(0, 3)))
    borders = [0, *borders, len(lengths)] if choices.chance(0.5) else list(range(len(lengths) + 1))
    multimodal = choices.chance(0.2)
    modes = [choices.integer(-3, 3) for _ in lengths] if multimodal else []
    pair = Pair(code, lengths, pointers, borders, modes, content, multimodal, mmap=choices.chance(0.5))
    pair.counts = [len(lengths), len(borders)]
    return pair


def mutate_pair(choices: Choices, pair: Pair) -> None:
    """Damages at most one field of a pair."""
    name = choices.one(["lengths", "pointers", "borders", "counts", "code", "version", "magic", "content", "modes", ""])
    values = getattr(pair, name) if name in ("lengths", "pointers", "borders", "modes") else None
    pair.notes.append(name)
    if values:
        place = choices.below(len(values))
        limit = {"lengths": 31, "modes": 7}.get(name, 63)
        odd = [0, -1, 1 << (limit - 1), (1 << limit) - 1, -(1 << limit), choices.integer(-5, 60)]
        odd.insert(5, min(len(pair.content), (1 << limit) - 1))
        match choices.one(["set", "set", "shift", "drop", "double", "sort"]):
            case "set":
                values[place] = choices.one(odd)
            case "shift":
                values[place] = max(-(1 << limit), min((1 << limit) - 1, values[place] + choices.one([-1, 1, 2])))
            case "drop":
                del values[place]
            case "double":
                values.insert(place, values[place])
            case _:
                values.reverse()
        if choices.chance(0.7):
            pair.counts = [len(pair.lengths), len(pair.borders)]
    elif name == "counts":
        pair.counts[choices.below(2)] = choices.one(
            [*_ODD_COUNTS, pair.counts[0] + 1, pair.counts[1] - (pair.counts[1] > 0)]
        )
    elif name == "code":
        pair.code = choices.one([0, 9, 255, *_TYPES])
    elif name == "version":
        pair.version = choices.one([0, 2, 2**63, 2**64 - 1, 256])
    elif name == "magic":
        pair.magic = choices.one([b"\0" * 9, b"MMIDIDX\0\1", choices.bytes(9)])
    elif name == "content":
        cut = choices.integer(0, len(pair.content))
        pair.content = choices.one([pair.content[:cut], pair.content + choices.bytes(3), b""])


class IndexFuzzer:
    """Draws damaged pairs, and reads all their sequences and training samples."""

    def __init__(self, _shared: Path) -> None: ...

    def draw(self, choices: Choices, folder: Path) -> Pair:
        pair = draw_pair(choices)
        for _ in range(choices.one([0, 1, 1, 1, 2, 3])):
            mutate_pair(choices, pair)
        idx = pair.idx()
        if choices.chance(0.15):
            cut = choices.integer(0, len(idx))
            idx = choices.one(
                [idx[:cut], idx + choices.bytes(choices.integer(1, 9)), idx[:cut] + idx[cut + 1 :], idx[cut:]]
            )
            pair.notes.append("cut")
        if choices.chance(0.1) and idx:
            place = choices.below(len(idx))
            idx = idx[:place] + bytes([idx[place] ^ 1 << choices.below(8)]) + idx[place + 1 :]
            pair.notes.append(f"bit {place}")
        (folder / "a.idx").write_bytes(idx)
        (folder / "a.bin").write_bytes(pair.content)
        return pair

    def check(self, case: Pair, folder: Path) -> Verdict:
        idx, content = (folder / "a.idx").read_bytes(), (folder / "a.bin").read_bytes()
        expected = sequences_of(idx, content, multimodal=case.multimodal)
        verdict = judged(lambda: _check_read(folder, case, expected=expected), folder)
        assert (verdict is Verdict.RIGHT) == (expected is not None), (
            f"{verdict}, but the independent reader found {expected}"
        )
        # A valid pair may still be rejected as training data for other reasons.
        judged(lambda: _check_samples(folder, expected=expected), folder)
        return verdict


def sequences_of(idx: bytes, content: bytes, *, multimodal: bool) -> list[np.ndarray] | None:
    """Returns the sequences of a pair as read by an independent reader; None if the pair is invalid."""
    if len(idx) < _FIXED.size:
        return None
    magic, version, code, num_sequences, num_borders = _FIXED.unpack_from(idx)
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in _TYPES:
        return None
    if len(idx) != _FIXED.size + num_sequences * (12 + multimodal) + num_borders * 8:
        return None
    fields = struct.unpack_from(f"<{num_sequences}i{num_sequences}q{num_borders}q", idx, _FIXED.size)
    borders = fields[2 * num_sequences :]
    if borders and (borders[0] != 0 or borders[-1] != num_sequences or list(borders) != sorted(borders)):
        return None
    kind = np.dtype(_TYPES[code])
    sequences = []
    for length, pointer in zip(fields[:num_sequences], fields[num_sequences : 2 * num_sequences]):
        if length < 0 or pointer < 0 or pointer + length * kind.itemsize > len(content):
            return None
        sequences.append(np.frombuffer(content[pointer : pointer + length * kind.itemsize], kind))
    return sequences


def _check_read(folder: Path, pair: Pair, *, expected: list[np.ndarray] | None) -> None:
    with exit_on_user_error():
        dataset = IndexedDataset(str(folder / "a"), multimodal=pair.multimodal, mmap=pair.mmap)
    assert expected is not None, "a damaged pair was opened"
    assert len(dataset) == len(expected)
    read = [item[0] if pair.multimodal else item for item in map(dataset.get, range(len(dataset)))]
    assert all(one.tobytes() == other.tobytes() and one.dtype == other.dtype for one, other in zip(read, expected))


def _config(folder: Path) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        sequence_length=4,
        blend=([str(folder / "a")], None),
        split="1,0,0",
        tokenizer=NullTokenizer(_VOCABULARY),
        path_to_cache=str(folder / "cache"),
        create_attention_mask=False,
    )


def _samples(folder: Path) -> list[list[int]]:
    """Returns all samples of the pair in `folder`, using its index cache. Raises the same errors as training."""
    config = _config(folder)
    corpus = GPTDataset.build_low_level_dataset(str(folder / "a"), config)
    documents = np.arange(len(corpus.sequence_lengths), dtype=np.int32)
    dataset = GPTDataset(corpus, str(folder / "a"), documents, 30, Split.train, config)
    return [dataset.sample_tokens(number).tolist() for number in range(len(dataset))]


def _check_samples(folder: Path, *, expected: list[np.ndarray] | None) -> None:
    with exit_on_user_error():
        samples = _samples(folder)
    assert expected is not None and len(samples) >= 30
    # A sample is a part of the documents in some order, so all of its tokens occur in the documents.
    assert {token for sample in samples for token in sample} <= {int(t) for one in expected for t in one}
    assert all(len(sample) == 5 for sample in samples)


@dataclass(frozen=True)
class DamagedCache:
    """A description of the damage to an index cache. expected: the samples of an undamaged cache."""

    notes: list[str]
    expected: list[list[int]] = field(repr=False)


class IndexCacheFuzzer:
    """Damages the cached indices of a valid corpus. Damaged indices must be rebuilt, so the samples do not change."""

    def __init__(self, _shared: Path) -> None: ...

    def draw(self, choices: Choices, folder: Path) -> DamagedCache:
        lengths = [choices.integer(0, 9) for _ in range(8)] + [9]
        content = np.array([choices.below(_VOCABULARY) for _ in range(sum(lengths))], "<u2")
        pointers = [2 * sum(lengths[:number]) for number in range(9)]
        pair = Pair(8, lengths, pointers, list(range(10)), [], content.tobytes(), False, True, counts=[9, 10])
        (folder / "a.idx").write_bytes(pair.idx())
        (folder / "a.bin").write_bytes(pair.content)
        expected = _samples(folder)
        files = sorted((folder / "cache").iterdir())
        manifest = next(file for file in files if file.name.endswith("manifest.json"))
        damaged = choices.some(files, choices.integer(1, 2))
        # The manifest is damaged last, since damaging the other files may update their checksums in it.
        notes = [_damage(choices, file, manifest=manifest) for file in sorted(damaged, key=manifest.__eq__)]
        return DamagedCache(notes, expected)

    def check(self, case: DamagedCache, folder: Path) -> Verdict:
        assert _samples(folder) == case.expected
        return Verdict.RIGHT


def _damage(choices: Choices, file: Path, *, manifest: Path) -> str:
    content = file.read_bytes()
    if file == manifest and choices.chance(0.6):
        value = json.loads(content)
        note = mutate_json(choices, value)
        file.write_text(json.dumps(value))
        return f"{file.name}: {note}"
    if file != manifest and choices.chance(0.5):
        array: Any = np.load(file)
        changed = _changed(choices, array)
        np.save(file, changed, allow_pickle=True)
        _vouch(file, manifest)
        return f"{file.name}: {changed.dtype}{changed.shape}, with its checksum"
    cut = choices.below(len(content))
    flipped = bytes([content[cut] ^ 1 << choices.below(8)])
    broken = [content[:cut], content + b"x", b"", b"\x93NUMPY" + content, b"PK\3\4" + content]
    if choices.chance(0.5):
        file.write_bytes(choices.one([*broken, content[:cut] + flipped + content[cut + 1 :]]))
    else:
        file.write_bytes(choices.one(broken))
        if file != manifest:
            _vouch(file, manifest)
    return f"{file.name}: bytes at {cut}"


def _changed(choices: Choices, array: np.ndarray) -> np.ndarray:
    odd = array.copy()
    # Only impossible values, since plausible ones with a valid checksum cannot be detected.
    odd.flat[choices.below(array.size)] = choices.one([2**31 - 1, 10**6])
    return choices.one(
        [odd, array[:-1], array[:0], array.astype(np.float64), array[None], np.stack([array, array])]
        + [array.astype(object), np.array(3), array.astype("S4"), -1 - array.astype("i8")]
    )


def _vouch(file: Path, manifest: Path) -> None:
    """Updates the size and checksum of the file in the manifest."""
    value = json.loads(manifest.read_bytes())
    name = file.stem.rpartition("-")[2]
    value["arrays"][name] = {"bytes": file.stat().st_size, "crc32": file_crc32(file)}
    manifest.write_text(json.dumps(value))
