"""Vision-language models on several ranks and stages give one rank's tokens."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from stages import local_stages, stages_of
from tiny_vision import InProcessMedia, make_vision_checkpoint, picture
from vision_variants import VARIANTS, Variant

from penstock import LLM, SamplingParams
from penstock.config import EngineConfig
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.executor import multi_process
from penstock.executor.lanes import LaneExecutor
from penstock.executor.media_content import with_content
from penstock.executor.nodes import free_port
from penstock.layers.linear import Linear
from penstock.loading.source import resolve_source
from penstock.models.assembly import load_model
from penstock.models.vision import VisionModel
from penstock.platforms.platform import detect_platform
from penstock.protocol.errors import ConfigError
from penstock.protocol.media import DropMedia, EncodeMedia, MediaItem, MediaJob
from penstock.protocol.step import StepPlan
from penstock.runner.media import MediaStore
from penstock.runner.media_encoder import MediaEncoder, divide

__all__ = ["local_stages"]

SLOW = pytest.mark.slow
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 100, "cpu_threads": 1,
    "log_level": "error", "max_num_batched_tokens": 512,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = ((100, 60), (40, 90), (64, 64))
CPU = torch.device("cpu")


def prompts(variant: Variant) -> list[Any]:
    """Each of the images, two among text, and none."""
    image = variant.image
    given: list[Any] = [
        {"prompt": f"<|user|>{image}Say", "multi_modal_data": {"image": picture(*size)}}
        for size in SIZES
    ]
    two = [picture(100, 60), picture(50, 50, 3)]
    given.append({"prompt": f"{image} and {image} here", "multi_modal_data": {"image": two}})
    return [*given, "<|user|>No image at all"]


def tokens(folder: Path, name: str, **options: Any) -> list[list[int]]:
    """Of prompts in one batch."""
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        return tokens_of(llm, folder, name)


def tokens_of(llm: LLM, folder: Path, name: str) -> list[list[int]]:
    assert llm.frontend.media is not None
    llm.frontend.media.pool = InProcessMedia(folder)
    outputs = llm.generate(prompts(VARIANTS[name]), GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class ThreadGroup(RankGroup):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        super().__init__(rank, size)
        object.__setattr__(self, "shared", shared)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        shared: dict[str, Any] = self.shared  # type: ignore[attr-defined]
        shared[f"{self.rank}"] = x.clone()
        shared["barrier"].wait(60)
        found = [shared[f"{rank}"] for rank in range(self.size)]
        shared["barrier"].wait(60)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._exchange(x), torch.zeros_like(x)))

    def broadcast(self, x: torch.Tensor, rank: int) -> None:
        x.copy_(self._exchange(x)[rank])


def thread_ranks(size: int) -> list[ThreadGroup]:
    shared = {"barrier": threading.Barrier(size)}
    return [ThreadGroup(rank, size, shared) for rank in range(size)]


def load(folder: Path, mesh: Mesh, mode: str) -> Any:
    config = EngineConfig.from_options(
        {"model": str(folder), **OPTIONS, "mm_encoder_tp_mode": mode}
    )
    source = resolve_source(config.model, config.load)
    model, *_ = load_model(config, source, detect_platform(config.device), mesh, 512)
    assert isinstance(model, VisionModel)
    return model


def jobs_of(folder: Path, name: str) -> list[MediaJob]:
    """What a step encodes for the prompts."""
    found: list[MediaJob] = []
    seen: set[bytes] = set()

    class Watched(MediaStore):
        def run(self, jobs: Any) -> None:
            for job in jobs:
                if isinstance(job, EncodeMedia) and job.item.hash not in seen:
                    seen.add(job.item.hash)
                    found.append(with_content(plan_of(job)).jobs[0])
            super().run(jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.runner.media.MediaStore", Watched)
        tokens(folder, name)
    return found


def plan_of(*jobs: MediaJob) -> StepPlan:
    return StepPlan(step_id=0, scheduled=[], jobs=list(jobs))


def encoded(folder: Path, jobs: list[Any], ranks: list[Any], mode: str) -> list[list[torch.Tensor]]:
    """The embeddings that each rank has."""

    def run(rank: RankGroup) -> list[torch.Tensor]:
        model = load(folder, Mesh(tp=rank), mode)
        if mode == "weights" and rank.size > 1:
            layers = [layer for layer in model.tower.modules() if isinstance(layer, Linear)]
            has_norms = model.config.raw["vision_config"].get("use_qk_norm")  # over all heads
            assert any(layer.build.tp.size > 1 for layer in layers) != bool(has_norms)
        with torch.inference_mode():
            return MediaEncoder(model, CPU, torch.float32, capture_graphs=False).encode(jobs)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


QUICK = ("qwen3_vl", "internvl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in VARIANTS]
)
def test_ranks_have_one_ranks_embeddings_in_both_modes(name: str, tmp_path: Path) -> None:
    """By data to the bit."""
    folder = make_vision_checkpoint(tmp_path, name)
    jobs = jobs_of(folder, name)
    assert len(jobs) == 4 or name == "gemma3"
    (expected,) = encoded(folder, jobs, [RankGroup()], "data")
    for rank in encoded(folder, jobs, thread_ranks(2), "data"):
        assert all(map(torch.equal, rank, expected))
    for rank in encoded(folder, jobs, thread_ranks(2), "weights"):
        torch.testing.assert_close(rank, expected, rtol=1e-4, atol=1e-4)


def test_items_are_divided_by_their_rows() -> None:
    assert divide([], 2) == [[], []]
    assert divide([5], 2) == [[0], []]
    assert divide([2, 9, 3, 4], 2) == [[1], [0, 2, 3]]


def test_a_tower_whose_heads_do_not_divide_is_whole_on_every_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_vision_checkpoint(tmp_path, "llava")
    with caplog.at_level("WARNING"):
        model = load(folder, Mesh(tp=RankGroup(0, 4)), "weights")
    assert "its 2 heads do not divide among 4 ranks: mm_encoder_tp_mode is data" in caplog.text
    assert model.item_ranks.size == 4


@pytest.mark.parametrize("mode", ["data", pytest.param("weights", marks=SLOW)])
def test_two_ranks_give_one_ranks_tokens(mode: str, tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "qwen2_5_vl")
    expected = tokens(folder, "qwen2_5_vl")
    found = tokens(folder, "qwen2_5_vl", tensor_parallel_size=2, mm_encoder_tp_mode=mode)
    assert found == expected


@pytest.mark.slow
def test_a_rank_on_another_machine_gets_the_content_of_media(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot open the files, here because it gets other paths."""
    folder, port = make_vision_checkpoint(tmp_path, "qwen3_vl"), free_port("127.0.0.1")
    expected = tokens(folder, "qwen3_vl")

    def elsewhere(plan: StepPlan) -> StepPlan:
        jobs = []
        for job in with_content(plan).jobs:
            if isinstance(job, EncodeMedia):
                item = msgspec.structs.replace(job.item, path="/nowhere")
                job = msgspec.structs.replace(job, item=item)
            jobs.append(job)
        return msgspec.structs.replace(plan, jobs=jobs)

    monkeypatch.setattr(multi_process, "with_content", elsewhere)
    options = {**OPTIONS, "tensor_parallel_size": 2, "nnodes": 2, "master_port": port}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "penstock", "serve", str(folder), *flags, "--node-rank=1"]
    with subprocess.Popen(command) as node:
        try:
            assert tokens(folder, "qwen3_vl", **options) == expected
        finally:
            node.terminate()


def test_only_ranks_on_other_machines_that_encode_get_the_content(tmp_path: Path) -> None:
    path = tmp_path / "item"
    path.write_bytes(b"pixels")
    item = MediaItem(
        modality="image", hash=b"a", offset=0, length=1, runs=[(0, 1)], path=str(path), tensors=[]
    )
    executor = object.__new__(LaneExecutor)
    executor._num_tp, executor._hosts = 2, ["", "far", "", "far"]
    executor._collects_early = False
    sent: list[tuple[list[int], Any]] = []

    def send(method: str, args: tuple[Any, ...], ranks: Any) -> None:
        sent.append(([*ranks], [getattr(job, "content", None) for job in args[0].jobs]))

    executor._send = send  # type: ignore[assignment]
    executor.launch(plan_of(EncodeMedia(item)))
    executor.launch(plan_of(DropMedia(b"a")))
    assert sent == [([1], [b"pixels"]), ([0, 2, 3], [None]), ([0, 1, 2, 3], [None])]
    sent.clear()
    executor.launch_on(range(2, 4), plan_of(EncodeMedia(item)))  # of a replica that shares experts
    assert sent == [([3], [b"pixels"]), ([2], [None])]


@pytest.mark.usefixtures("local_stages")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("qwen3_vl", "gemma3") else SLOW) for name in VARIANTS],
)
def test_stages_give_one_ranks_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tower is on the first stage. All stages know positions and spans."""
    if "deepstack_visual_indexes" in VARIANTS[name].vision:  # the first layers take features
        text = {**VARIANTS[name].text, "num_hidden_layers": 4}
        monkeypatch.setitem(VARIANTS, name, VARIANTS[name]._replace(text=text))
    folder = make_vision_checkpoint(tmp_path, name)
    expected = tokens(folder, name)
    with LLM(str(folder), **OPTIONS, pipeline_parallel_size=2) as llm:
        assert tokens_of(llm, folder, name) == expected
        found: list[Any] = [stage.model for stage in stages_of(llm)]
        assert [model.has_tower for model in found] == [True, False]


@pytest.mark.usefixtures("local_stages")
def test_layers_that_take_features_of_images_must_be_on_the_first_stage(tmp_path: Path) -> None:
    folder = make_vision_checkpoint(tmp_path, "qwen3_vl")  # of two layers, both take some
    options = {**OPTIONS, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be at most 1, got 2"):
        LLM(str(folder), **options)
    with LLM(str(folder), **options, language_model_only=True) as llm:
        assert llm.generate("No image", GREEDY, use_tqdm=False)
