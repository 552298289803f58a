from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_builder import write_gguf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.config import LoadConfig, ModelConfig
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.gguf.file import GGML_TYPES, read_gguf
from penstock.loading.source import resolve_source
from penstock.protocol.errors import ModelError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, type_name="Q4_K")
    return path


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


ARRAY_OF_ONE_ARRAY = struct.pack("<IQ", 9, 1)


def test_metadata_and_tensors_are_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        type_name="Q5_1",
        metadata={
            "a.bool": True,
            "a.string": "Ärger ✓",
            "a.floats": [0.5, -1.0],
            "a.bools": [True, False],
            "a.ints": [-1, 2**30],
        },
    )
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    known = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == {key: field.contents() for key, field in known.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for reference in theirs.tensors:
        tensor = ours.tensors[reference.name]
        assert tensor.type.name == reference.tensor_type.name
        assert tensor.shape == tuple(reversed(reference.shape.tolist()))
        data = reference.data.view(np.uint8).reshape(-1)
        assert np.array_equal(ours.view(reference.name), data)


def test_every_type_has_the_size_that_the_gguf_package_gives_it() -> None:
    for type_id, ggml_type in GGML_TYPES.items():
        quant = gguf.GGMLQuantizationType(type_id)
        assert ggml_type == (quant.name, *gguf.GGML_QUANT_SIZES[quant])


def test_numbers_of_every_type_and_nested_arrays_are_read(tmp_path: Path) -> None:
    entries = [
        string(f"n{code}") + struct.pack("<I", type_id) + struct.pack("<" + code, 5)
        for type_id, code in enumerate("BbHhIif")
    ]
    entries += [
        string(f"n{code}") + struct.pack("<I", type_id) + struct.pack("<" + code, 5)
        for type_id, code in ((10, "Q"), (11, "q"), (12, "d"))
    ]
    inner = struct.pack("<IQhh", 3, 2, -1, 2)
    entries.append(string("nested") + struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    path = tmp_path / "numbers.gguf"
    path.write_bytes(header(num_entries=len(entries), version=2) + b"".join(entries))
    metadata = read_gguf(path).metadata
    assert metadata.pop("nested") == [[-1, 2], [-1, 2]]
    assert metadata == {f"n{code}": 5 for code in "BbHhIifQqd"}


def tensor_info(
    name: str = "t", dims: tuple[int, ...] = (32,), type_id: int = 0, offset: int = 0
) -> bytes:
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
    return string(name) + packed


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "ends .* inside the version"),
        (header(version=1), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_tensors=2**63), "tensor count is"),
        (header(num_entries=2**40), "metadata count is"),
        (header(num_entries=1), "ends .* inside the length of a metadata key"),
        (header(num_entries=1) + struct.pack("<Q", 2**60), "claims to be"),
        (header(num_entries=1) + struct.pack("<Q", 1000), "ends .* inside a metadata key"),
        (header(num_entries=1) + struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
        (header(num_entries=1) + string("k") + struct.pack("<I", 99), "unknown value type 99"),
        (header(num_entries=1) + string("k") + struct.pack("<IIQ", 9, 0, 2**62), "length of 'k'"),
        (header(num_entries=1) + string("k") + struct.pack("<IIQ", 9, 0, 2**20), "inside"),
        (header(num_entries=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**20), "an item of 'k'"),
        (header(num_entries=1) + string("k") + struct.pack("<IIQQ", 9, 8, 1, 9), "an item of 'k'"),
        (
            header(num_entries=1) + string("k") + struct.pack("<I", 9) + ARRAY_OF_ONE_ARRAY * 9,
            "nests arrays",
        ),
        (header(num_entries=2) + (string("k") + struct.pack("<IB", 0, 1)) * 2, "occurs twice"),
        (
            header(num_entries=1) + string("general.alignment") + struct.pack("<II", 4, 0),
            "general.alignment",
        ),
        (header(num_tensors=1) + tensor_info(dims=()), "0 dimensions"),
        (header(num_tensors=1) + tensor_info(dims=(1,) * 5), "5 dimensions"),
        (header(num_tensors=1) + tensor_info(dims=(0,)), "is empty"),
        (
            header(num_tensors=1) + tensor_info(type_id=31),
            "of the type Q4_0_4_4, which is not read",
        ),
        (header(num_tensors=1) + tensor_info(type_id=99), "of the type number 99"),
        (header(num_tensors=1) + tensor_info(dims=(33,), type_id=8), "do not divide"),
        (header(num_tensors=1) + tensor_info(offset=3), "not a multiple"),
        (header(num_tensors=1) + tensor_info(), "the file has only"),
        (header(num_tensors=1) + tensor_info(dims=(2**63, 2**63)), "the file has only"),
        (header(num_tensors=2) + tensor_info() * 2 + bytes(300), "occurs twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_file_is_refused_by_name_and_reason(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint) as raised:
        read_gguf(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_and_a_folder_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf(tmp_path)


def test_a_view_of_a_file_that_shrank_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    file = read_gguf(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="did the file change"):
        file.view("output_norm.weight")


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    before = path.read_bytes()
    read_gguf(path).view("output_norm.weight")[:] = 7
    assert path.read_bytes() == before


def load_everything(path: Path) -> None:
    source = resolve_source(ModelConfig(model=str(path)), LoadConfig())
    checkpoint = open_checkpoint(source, LoadConfig())
    assert [name for name, _ in checkpoint.tensors()] == checkpoint.names()


def header_size(path: Path) -> int:
    return min(tensor.offset for tensor in read_gguf(path).tensors.values())


@settings(max_examples=300)
@given(data=st.data())
def test_any_corruption_of_the_header_loads_or_is_a_model_error(
    tmp_path: Path, tiny: Path, data: st.DataObject
) -> None:
    content = bytearray(tiny.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_size(tiny) - 1))
        patch = data.draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)])
        )
        content[at : at + len(patch)] = patch
    path = tmp_path / "corrupt.gguf"
    path.write_bytes(content)
    with suppress(ModelError):
        load_everything(path)


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
@example(share=0.0)
@example(share=0.9999)
def test_a_truncated_file_is_always_a_model_error(tmp_path: Path, tiny: Path, share: float) -> None:
    content = tiny.read_bytes()
    path = tmp_path / "truncated.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"truncated\.gguf"):
        load_everything(path)


def test_the_default_model_is_read_as_the_gguf_package_reads_it(default_gguf: Path) -> None:
    file = read_gguf(default_gguf)
    assert default_gguf.stat().st_size == 98_362_432
    assert len(file.tensors) == 272
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    assert file.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert {tensor.type.name for tensor in file.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
