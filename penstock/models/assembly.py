"""Assembles a model that is ready to run: builds, quantizes and loads it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.config import EngineConfig
from penstock.config.speculative import READS_EMBEDDING
from penstock.distributed.mesh import Mesh
from penstock.layers.build import Build
from penstock.layers.expert_share import names_elsewhere
from penstock.layers.gguf import GgufMethod
from penstock.layers.quantization import DeferredQuantization
from penstock.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.loading.load import fill_dummy, is_elsewhere, load_weights, own_name
from penstock.loading.source import ModelSource
from penstock.loading.tasks import choose_task
from penstock.models.backend import ModelBackend, choose_backend
from penstock.models.base import Model
from penstock.models.registry import build_model
from penstock.models.runtime import Dtypes, resolve_dtypes
from penstock.ops.registry import Ops
from penstock.platforms.platform import GIB, Platform, is_out_of_memory
from penstock.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_model(
    config: EngineConfig,
    source: ModelSource,
    platform: Platform,
    mesh: Mesh,
    max_model_len: int,
    create: Callable[[Build, Mapping[str, Any]], Model] | None = None,
) -> tuple[Model, Dtypes, Ops]:
    """This rank's shard of the model, the types it computes in, and its ops.

    `create` makes what is no model of its own, instead of the registry.
    """
    started = time.perf_counter()
    task = choose_task(config, source)
    dtypes = resolve_dtypes(config, source.config, platform)
    backend = choose_backend(config, platform, dtypes.compute, source.gguf, source.config)
    dtypes = dataclasses.replace(dtypes, compute=backend.dtype)
    if config.cache.kv_cache_dtype == "auto" and backend.kv_dtype is not None:
        dtypes = dataclasses.replace(dtypes, kv=backend.kv_dtype)
    drafts = config.speculative.settings
    build = Build(
        dtype=dtypes.compute,
        device=platform.device,
        max_model_len=max_model_len,
        ops=backend.ops,
        mesh=mesh,
        linear_method=DeferredQuantization() if backend.quantization else backend.linear_method,
        tower_method=backend.tower_method,
        embeds_drafts=drafts is not None and drafts.method in READS_EMBEDDING,
        generates=task == "generate",
        takes_media=config.media.modalities,
        shards_towers=config.media.mm_encoder_tp_mode == "weights",
        num_redundant_experts=config.parallel.num_redundant_experts,
        gathers_tokens=config.parallel.all2all_backend == "allgather_reducescatter",
    )
    merger = None
    settings = source.config
    if source.adapter is not None:
        from penstock.models.merging import make_merger  # few engines need it

        merger, _ = make_merger(source, source.adapter, source.adapter_digest, build, config)
        if merger.unties:
            settings = {**settings, "tie_word_embeddings": False}
        if merger.changes_experts and isinstance(build.linear_method, GgufMethod):
            # Merged experts are floats. All experts of a layer are stored alike.
            build = dataclasses.replace(build, linear_method=GgufMethod(expert_blocks=False))
    try:
        if create is not None:
            model = create(build, settings).eval()
        else:
            model = build_model(settings, build, config.model.model_impl)
        if task == "classify" and mesh.is_last_stage:
            from penstock.models.pooler import add_classifier  # language models need none of it

            add_classifier(model, build, config, source)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"there is not enough memory for the weights of {source.name}: choose a smaller "
            f"or a quantized model ({str(error).partition(chr(10))[0]:.200})"
        ) from error
    checkpoint = None
    if config.load.load_format != "dummy":
        checkpoint = open_checkpoint(source, config.load, backend.native_types)
    _quantize(model, backend, checkpoint)
    if checkpoint is None:
        fill_dummy(model, config.model.seed)
    else:
        reads_all = merger is not None  # it may untie a head
        others = (*model.weights.elsewhere, *names_elsewhere(model))
        naming = dataclasses.replace(model.weights, elsewhere=others)

        def is_wanted(name: str) -> bool:
            return reads_all or not is_elsewhere(name, naming)

        tensors = model.convert(checkpoint.tensors(is_wanted))
        load_weights(
            model,
            naming,
            tensors if merger is None else merger.merge(tensors),
            total=len(checkpoint.names()),
            show_progress=mesh.world.rank == 0,
            ignored=backend.quantization.ignored if backend.quantization else (),
        )
    backend.finish(model)
    model.check()
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    logger.info(
        "Loaded %s: %.2f GiB of weights in %.2f s",
        source.name, size / GIB, time.perf_counter() - started,
    )  # fmt: skip
    return model, dtypes, backend.ops


def _quantize(model: Model, backend: ModelBackend, checkpoint: Checkpoint | None) -> None:
    """Tell the layers of a quantized model how they are stored."""
    if backend.quantization is None:
        return
    from penstock.layers.quantized.plan import StoredLayers, assign_methods

    stored = None
    if checkpoint is not None:
        stored = StoredLayers((own_name(name, model.weights), name) for name in checkpoint.names())
    assign_methods(model, backend.quantization, backend.linear_method, stored, backend.take_over)
