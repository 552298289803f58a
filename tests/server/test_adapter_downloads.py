"""LoRA adapters that are fetched: from the hub, and from wheels."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_requests import LORA, error_of, load, names, say, unload
from hub_stand_in import hub_of
from server_process import SMALL, ServerProcess
from tiny_adapters import write_adapter, write_adapters


def build_wheel(adapter: Path, folder: Path, name: str) -> str:
    """Write a wheel with an adapter's files. Returns how it is named as a lora_path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(adapter.iterdir()):
            archive.write(file, f"{name}/{file.name}")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"pypi:{name}==1.0#sha256={digest}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def wheels(folder: Path) -> dict[str, str]:
    index = folder.parent / "wheels"
    return {
        "first": build_wheel(folder / "b", index, "first"),
        "second": build_wheel(folder / "c", index, "second"),
        "other": build_wheel(folder / "c", index, "other"),
    }


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, folder: Path, wheels: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """With one adapter of the hub and one of a wheel from the start."""
    cache = tmp_path_factory.mktemp("cache")
    broken = write_adapter(folder / "broken", 7, rank=17)
    repositories = {
        "org/a": folder / "a", "org/c": folder / "c", "org/broken": broken, "else/c": folder / "c"
    }  # fmt: skip
    with hub_of(repositories) as endpoint:
        env = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache / "hub"),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder.parent / "wheels"),
        }
        process = ServerProcess(
            *(str(tiny_model), *SMALL, *LORA, "--served-model-name", "tiny"),
            *("--download-dir", str(cache / "models"), "--admin-api-key", "admin-key"),
            *("--allowed-lora-paths", "hub:org/*", "pypi:first", "pypi:second", str(folder)),
            *("--lora-resolver", "hub:org/*"),
            *("--lora-modules", "of-hub=org/a", f"of-wheel={wheels['first']}"),
            env=env,
        )
        yield process
        process.close()


def test_fetched_adapters_say_what_the_same_files_in_a_folder_say(
    server: ServerProcess, folder: Path, wheels: dict[str, str]
) -> None:
    assert names(server) == ["tiny", "of-hub", "of-wheel"]
    assert load(server, "c-of-hub", "org/c").status_code == 200
    assert load(server, "c-of-wheel", wheels["second"]).status_code == 200
    for name in "abc":
        assert load(server, name, folder / name).status_code == 200
    said = {name: say(server, name) for name in ("tiny", *"abc")}
    assert len(set(said.values())) == 4
    fetched = {"of-hub": "a", "of-wheel": "b", "c-of-hub": "c", "c-of-wheel": "c"}
    assert {name: say(server, name) for name in fetched} == {
        name: said[own] for name, own in fetched.items()
    }
    roots = {card["id"]: card["root"] for card in server.get("/v1/models").json()["data"]}
    assert roots["of-hub"] == "org/a"
    assert roots["c-of-wheel"] == wheels["second"]
    for name in ("c-of-hub", "c-of-wheel", *"abc"):
        assert unload(server, name).status_code == 200


def test_a_hub_id_as_the_models_name_is_fetched_when_asked_for(
    server: ServerProcess, folder: Path
) -> None:
    assert load(server, "c", folder / "c").status_code == 200
    assert say(server, "org/c") == say(server, "c")
    assert "org/c" in names(server)
    for name in ("c", "org/c"):
        assert unload(server, name).status_code == 200
    body = {"model": "else/c", "prompt": "x"}  # the pattern is of another organization
    error_of(server.post("/v1/completions", body), 404)


def test_what_cannot_be_fetched_is_refused_and_harms_nobody(
    server: ServerProcess, wheels: dict[str, str]
) -> None:
    before = names(server)
    cases = {
        "org/missing": "could not be fetched",
        "org/broken": "rank 17",
        "else/c": "not allowed",
        wheels["other"]: "not allowed",
        wheels["second"][:-1] + ("0" if wheels["second"][-1] != "0" else "1"): "sha256",
        "pypi:second==9.0#sha256=" + "0" * 64: "pip could not download",
        "pypi:second": "pypi:package==version",
    }
    for path, why in cases.items():
        message, param = error_of(load(server, "x", path))
        assert param == "lora_path", path
        assert why in message, (path, message)
    message, param = error_of(
        server.post("/v1/completions", {"model": "org/broken", "prompt": "x"})
    )
    assert (param, "rank 17" in message) == ("model", True)
    assert names(server) == before
    say(server, "of-hub")
