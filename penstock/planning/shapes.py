"""The sizes of one rank: its model, built on the meta device, which takes no memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from penstock.config import EngineConfig, LoadConfig, LoRAConfig
from penstock.config.quantization import find_quantization_config
from penstock.distributed.mesh import Mesh, RankGroup
from penstock.layers.attention import Attention
from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.layers.experts import Experts
from penstock.layers.latent_attention import LatentAttention
from penstock.layers.linear import Linear
from penstock.layers.matrix import MatrixLayer
from penstock.layers.quantization import DeferredQuantization, DenseMethod
from penstock.layers.quantized.checkpoints import choose_quantization
from penstock.layers.quantized.dummy import dummy_weight
from penstock.layers.quantized.experts import QuantizedExperts
from penstock.layers.quantized.linear import QuantizedMethod
from penstock.layers.quantized.plan import StoredLayers, assign_methods
from penstock.layers.quantized.schemes import Scheme
from penstock.layers.rotary import Rotary
from penstock.loading.checkpoint import open_checkpoint
from penstock.loading.gguf.file import GGUFFile
from penstock.loading.load import own_name
from penstock.loading.source import ModelSource, find_tensor_files
from penstock.loading.tasks import choose_task
from penstock.models.base import Model
from penstock.models.registry import build_model
from penstock.models.runtime import Dtypes
from penstock.models.vision import VisionModel
from penstock.ops.registry import Ops
from penstock.protocol.kv import KVCacheSpec

T = TypeVar("T")

SAMPLE_ROWS = 128  # of a quantized matrix that is made to measure its bytes
_FLOATS = ("F64", "F32", "F16", "BF16")  # GGUF types that become the model's own


@dataclass(frozen=True)
class Partition:
    """Among how many ranks an engine divides what."""

    tp: int = 1  # ranks that share every layer
    pp: int = 1  # stages, each of `tp` ranks, that share the layers
    ep: int = 1  # ranks that have some of the experts, whole; 1: every rank has a slice of each

    @property
    def num_lanes(self) -> int:
        """Replicas that experts are spread over, and that therefore step together."""
        return max(self.ep // self.tp, 1)

    @property
    def is_eager(self) -> bool:
        """Whether steps are launched kernel by kernel, not as CUDA graphs."""
        return self.num_lanes > 1

    def mesh(self, stage: int) -> Mesh:
        """The first rank of a stage."""
        return Mesh(RankGroup(0, self.tp), RankGroup(stage, self.pp), RankGroup(0, self.ep))

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep))
        return " ".join(f"{name}={n}" for name, n in sizes if n > 1 or name == "tp")


@dataclass(frozen=True)
class Matrix:
    num_weights: int
    num_bytes: int
    width: int = 0  # outputs that are written and read again; 0 if the next layer adds them


@dataclass(frozen=True)
class ExpertsShape:
    """The routed experts of one layer."""

    num_experts: int
    num_own: int  # of which this rank has a slice, or all
    top_k: int
    num_weights: int  # of one expert, on this rank
    num_bytes: int
    width: int  # numbers that each selected expert writes for a token


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention. It reads the last `window` tokens, or all."""

    dim: int  # of queries and values together, over all heads
    window: int | None


@dataclass(frozen=True)
class RankShape:
    """What a rank holds, and what it computes with."""

    partition: Partition
    weight_bytes: int  # with the slots of adapters
    kv_specs: dict[str, KVCacheSpec]
    hidden_size: int
    num_layers: int
    element_size: int  # of activations
    vocab_rows: int  # of the LM head on this rank
    matrices: tuple[Matrix, ...]  # read in every step
    head: Matrix | None  # None: a model without logits
    experts: tuple[ExpertsShape, ...] = ()
    attention: tuple[AttentionShape, ...] = ()
    num_sums: int = 0  # over ranks, per step
    table_bytes: int = 0  # of the angles of all positions
    embeddings_bytes: int = 0  # of media, which are kept
    widest: int = 0  # elements of a token in the layer that needs the most
    gathers_tokens: bool = False  # for experts of other replicas: all ranks get all tokens

    @property
    def tp(self) -> int:
        return self.partition.tp

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token() for spec in self.kv_specs.values())

    @property
    def state_bytes(self) -> int:
        """Of one request, whatever its length."""
        return sum(
            spec.block_bytes(1) for spec in self.kv_specs.values() if not spec.bytes_per_token()
        )


@torch.inference_mode()
def shape_of(
    config: EngineConfig,
    source: ModelSource,
    dtypes: Dtypes,
    max_model_len: int,
    partition: Partition,
    stage: int = 0,
) -> RankShape:
    """The first rank of a stage. Raises ModelError or ConfigError if the model cannot be so."""
    quantization = choose_quantization(source.config, config.load.quantization, partition.tp)
    generates = choose_task(config, source) == "generate"
    build = Build(
        dtype=dtypes.compute,
        device=torch.device("meta"),
        max_model_len=max_model_len,
        ops=Ops("cpu"),
        mesh=partition.mesh(stage),
        linear_method=DeferredQuantization() if quantization is not None else DenseMethod(),
        generates=generates,
        takes_media=config.media.modalities,
        shards_towers=config.media.mm_encoder_tp_mode == "weights",
        num_redundant_experts=config.parallel.num_redundant_experts,
    )
    model = build_model(source.config, build, config.model.model_impl)
    if quantization is not None:
        stored = _stored_layers(source, model)
        assign_methods(model, quantization, DenseMethod(), stored)
        if stored is None and config.load.quantization is None:
            for layer in _of(model, VocabEmbedding):
                layer.use(DenseMethod())  # as nearly all checkpoints store it
    factor = 1.0
    if source.gguf is not None and quantization is None:
        factor = _gguf_factor(source.gguf, dtypes.compute.itemsize)
    shape = _measure(model, build, dtypes, factor, partition)
    if config.parallel.all2all_backend == "allgather_reducescatter":
        shape = replace(shape, gathers_tokens=True)
    if isinstance(model, VisionModel) and model.has_tower:
        kept = config.media.encoder_cache_tokens * model.media_width * dtypes.compute.itemsize
        shape = replace(shape, embeddings_bytes=kept)
    if config.lora.enable_lora:
        size = _slots_bytes(model, config.lora, dtypes.compute)
        shape = replace(shape, weight_bytes=shape.weight_bytes + size)
    return shape


def _stored_layers(source: ModelSource, model: Model) -> StoredLayers | None:
    """The names in the files of a quantized checkpoint, if they are there."""
    if find_quantization_config(source.config) is None or source.gguf is not None:
        return None
    if not any(source.path.glob("*.safetensors")):
        return None
    load = LoadConfig()
    files = tuple(find_tensor_files(source.path, load))
    names = open_checkpoint(replace(source, tensor_files=files), load).names()
    return StoredLayers((own_name(name, model.weights), name) for name in names)


def _measure(
    model: Model, build: Build, dtypes: Dtypes, factor: float, partition: Partition
) -> RankShape:
    """`factor`: bytes of a matrix over those in the model's type."""
    # What a vision tower computes is left out: few steps have images.
    apart = [own.experts for own in _of(model, Experts)]
    if isinstance(model, VisionModel) and model.has_tower:
        apart.append(getattr(model, model.tower_prefix))
    left_out = {id(part) for own in apart for part in own.modules()}
    layers = [own for own in _of(model, Linear) if id(own) not in left_out]
    matrices = tuple(
        _matrix(own, factor, 0 if own.split_input else own.out_features) for own in layers
    )
    vocab = list(_of(model, VocabEmbedding))
    has_head = bool(vocab) and build.generates and build.mesh.is_last_stage
    head = _matrix(vocab[-1], factor, 0) if has_head else None
    experts = tuple(_experts(own, factor) for own in _of(model, Experts))
    plain = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    scaled = {id(own.weight) for own in (*layers, *vocab) if isinstance(own.method, DenseMethod)}
    scaled |= {
        id(parameter)
        for own in _of(model, Experts)
        for parameter in own.experts.parameters()
        if parameter.dim() == 3
    }
    floats = sum(own.nbytes for own in model.parameters() if id(own) in scaled)
    quantized = sum(_quantized_bytes(module) for module in model.modules())
    attention = tuple(_attention(own for own in model.modules() if id(own) not in left_out))
    widths = [own.out_features + own.in_features for own in layers]
    widths += [own.top_k * (own.width + model.hidden_size) for own in experts]
    return RankShape(
        partition=partition,
        weight_bytes=int(plain - floats + factor * floats) + quantized,
        kv_specs=dict(model.kv_specs(dtypes.kv)) if build.generates else {},
        hidden_size=model.hidden_size,
        num_layers=max(len(attention), len(model.kv_specs(dtypes.kv)), 1),
        element_size=build.dtype.itemsize,
        vocab_rows=vocab[-1].rows if has_head else 0,
        matrices=matrices,
        head=head,
        experts=experts,
        attention=attention,
        num_sums=sum(own.split_input for own in layers) + len(experts) + 1,
        table_bytes=sum(own.table.nbytes for own in _of(model, Rotary)),
        widest=max(widths, default=0),
    )


def _of(model: nn.Module, kind: type[T]) -> Iterator[T]:
    return (module for module in model.modules() if isinstance(module, kind))


def _matrix(layer: MatrixLayer, factor: float, width: int) -> Matrix:
    num_weights = layer.in_features * layer.out_features
    if isinstance(layer.method, QuantizedMethod):
        return Matrix(num_weights, _quantized_bytes(layer), width)
    return Matrix(num_weights, int(num_weights * layer.build.dtype.itemsize * factor), width)


def _quantized_bytes(module: nn.Module) -> int:
    """Of a layer's or of experts' quantized matrices, which the meta device has no tensors for."""
    if isinstance(module, QuantizedExperts):
        hidden, size = module.config.hidden_size, module.size
        one = sum(
            rows * _bytes_per_row(module.scheme, columns, module.build.dtype)
            for rows, columns in ((2 * size, hidden), (hidden, size))
        )
        return int(one * len(module.config.own_experts))
    if isinstance(module, MatrixLayer) and isinstance(module.method, QuantizedMethod):
        per_row = _bytes_per_row(module.method.scheme, module.in_features, module.build.dtype)
        return int(module.out_features * per_row)
    return 0


@functools.cache
def _bytes_per_row(scheme: Scheme, columns: int, dtype: torch.dtype) -> float:
    """Scales included. A few random rows are made, as for dummy weights."""
    made = dummy_weight(scheme, SAMPLE_ROWS, columns, 1.0, dtype, torch.Generator())
    return sum(tensor.nbytes for tensor in made.tensors().values()) / SAMPLE_ROWS


def _experts(layer: Experts, factor: float) -> ExpertsShape:
    config, own = layer.config, layer.experts
    is_whole = config.held is not None
    size = config.intermediate_size // (1 if is_whole else layer.build.tp.size)
    num_own = len(config.own_experts)
    num_weights = 3 * size * config.hidden_size
    num_bytes = num_weights * layer.build.dtype.itemsize * factor
    if isinstance(own, QuantizedExperts):
        num_bytes = _quantized_bytes(own) / num_own
    return ExpertsShape(
        config.num_experts, num_own, config.routing.top_k, num_weights, int(num_bytes), 3 * size
    )


def _slots_bytes(model: Model, config: LoRAConfig, compute: torch.dtype) -> int:
    """Of a GPU's slots for adapters. Those of experts take memory only when they are used."""
    dtype = compute if config.lora_dtype == "auto" else getattr(torch, config.lora_dtype)
    rank, num_elements, num_vectors = config.max_lora_rank, 0, 0

    def add(inputs: int, outputs: int) -> None:
        nonlocal num_elements, num_vectors
        num_elements += rank * (inputs + outputs)
        num_vectors += 2 * outputs  # DoRA's

    for layer in _of(model, Linear):
        if layer.takes_adapters and not layer.is_label_head:
            add(len(layer.part_rows) * layer.in_features, layer.out_features)
    vocab = list(_of(model, VocabEmbedding))
    for at, own in enumerate(vocab):
        is_embedding = own.build.mesh.is_first_stage and at == 0
        is_head = own.build.generates and own.build.mesh.is_last_stage and own is vocab[-1]
        if is_embedding:
            add(own.vocab_size, own.hidden_size)
        if is_head:
            add(own.hidden_size, own.rows)
    return config.max_loras * (num_elements * dtype.itemsize + num_vectors * 4)


def _attention(modules: Iterable[nn.Module]) -> Iterator[AttentionShape]:
    for module in modules:
        if isinstance(module, Attention):
            yield AttentionShape(2 * module.num_heads * module.head_dim, module.window)
        elif isinstance(module, LatentAttention):
            own = module.config
            yield AttentionShape(module.num_heads * (2 * own.kv_rank + own.rope_dim), None)


def _gguf_factor(gguf: GGUFFile, element_size: int) -> float:
    """Bytes of the file's matrices over those in the model's type, which floats become."""
    num_bytes = num_weights = 0
    for tensor in gguf.tensors.values():
        if len(tensor.shape) < 2:
            continue
        count = math.prod(tensor.shape)
        num_weights += count
        num_bytes += count * element_size if tensor.type.name in _FLOATS else tensor.nbytes
    return num_bytes / (num_weights * element_size) if num_weights else 1.0
