"""Decides what follows the last layer of a pooling model: rows, dense layers, activation.

Everything here is float32, whatever type the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from penstock.config import EngineConfig
from penstock.layers.build import Build
from penstock.layers.linear import Linear, Part
from penstock.loading.sentence_transformers import (
    ActivationName,
    DenseFile,
    SentenceTransformer,
)
from penstock.loading.source import ModelSource
from penstock.loading.tasks import Task, label_tokens
from penstock.models.base import Model
from penstock.models.config import read_num_labels
from penstock.models.decoder import DecoderLM
from penstock.models.runtime import needs_whole_prompts
from penstock.models.vector_heads import NO_IDS, VectorHeads, load_vector_heads
from penstock.ops.blocks import BlockTensor, Weight, take_rows
from penstock.ops.gguf_blocks import dequantize
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.pooling import DualInputs, PoolingInfo, PoolingTask, PoolingType, VectorName
from penstock.text.scoring import QWEN3_RERANKER, QWEN3_VL_INSTRUCTION, QWEN3_VL_RERANKER
from penstock.text.tokenizer import load_tokenizer, read_json_if_there

Activation = Literal["softmax", "sigmoid", "identity"]
ACTIVATIONS: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


class ScoreHead(nn.Module):
    """Logits of labels from one vector: a matrix, or two with a ReLU between them (rewards)."""

    def __init__(
        self,
        build: Build,
        hidden_size: int,
        num_labels: int,
        pooling: PoolingType,
        is_deep: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        build = build.in_float32()
        self.num_labels, self.pooling = num_labels, pooling
        self.layers: list[Linear] = []  # registered under their names in checkpoints
        if is_deep:
            self.layers += [Linear(build, hidden_size, [Part("", hidden_size, 1)], bias=True)]
        self.layers += [Linear(build, hidden_size, [Part("", num_labels, 1)], bias or is_deep)]
        for layer in self.layers:
            layer.is_label_head = True

    def register(self, model: Model) -> None:
        """Add the layers to the model: as `score`, or under the names of nn.Sequential."""
        if len(self.layers) == 1:
            model.add_module("score", self.layers[0])
            return
        for index, layer in enumerate(self.layers):
            self.add_module(str(2 * index), layer)
        model.add_module("score", self)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        *first, last = self.layers
        for layer in first:
            pooled = layer(pooled).relu()
        return last(pooled)


class TokenHead(nn.Module):
    """The LM head's logits of a few tokens, as labels: for rerankers that answer yes or no.

    It replaces the LM head, and keeps these rows of it.
    """

    pooling: PoolingType = "LAST"

    def __init__(
        self,
        build: Build,
        model: DecoderLM,
        token_ids: Sequence[int],
        is_tied: bool,
        scores: bool = True,
    ) -> None:
        super().__init__()
        config = model.config
        # With two tokens, the probability of the second is the score: sigmoid(second - first).
        self.is_score = scores and len(token_ids) == 2
        self.num_labels = 1 if self.is_score else len(token_ids)
        self._token_ids = list(token_ids)
        self._shape = (config.vocab_size, config.hidden_size)
        embedding = model.model.embed_tokens
        self._embedding = [embedding] if is_tied and embedding is not None else []  # no submodule
        self.weight = build.in_float32().empty(len(token_ids), config.hidden_size)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        weight = self.weight[1:] - self.weight[:1] if self.is_score else self.weight
        return pooled @ weight.T

    def expected(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        return {} if self._embedding else {("weight", ""): self._shape}

    def load(self, parameter: str, part: str, tensor: Weight) -> None:
        for row, token_id in enumerate(self._token_ids):
            self.weight[row] = _dense(take_rows(tensor, token_id, token_id + 1))[0]

    def finish_loading(self) -> None:
        for embedding in self._embedding:
            ids = torch.tensor(self._token_ids, device=self.weight.device)
            self.weight.copy_(embedding(ids))


def _dense(tensor: Weight) -> torch.Tensor:
    return dequantize(tensor) if isinstance(tensor, BlockTensor) else tensor


def add_classifier(model: Model, build: Build, config: EngineConfig, source: ModelSource) -> None:
    """Give a classifying decoder its head, which loads with the other weights."""
    if model.classifier is not None:
        return
    raw = source.config
    names = [name for name in raw.get("architectures") or [] if isinstance(name, str)]
    tokens = label_tokens(config, source)
    if not isinstance(model, DecoderLM):
        raise ConfigError(
            f"convert=classify is not for {names}, which runs on transformers' implementation"
        )
    if tokens is not None:
        is_tied = bool(raw.get("tie_word_embeddings", False))
        returned = (config.pooling.pooler_config or {}).get("returned_token_ids")
        ids = returned or _token_ids(config, source, tokens)
        if max(ids) >= model.vocab_size:
            raise ConfigError(
                f"pooler_config: returned_token_ids must be below {model.vocab_size}, got "
                f"{max(ids)}"
            )
        rows = TokenHead(build, model, ids, is_tied, scores=returned is None)
        model.lm_head = rows  # type: ignore[assignment]
        model.classifier = rows
        return
    is_reward = any(name.endswith("RewardModel") for name in names)
    by_token = any(name.endswith("ForTokenClassification") for name in names)
    head = ScoreHead(
        build,
        model.hidden_size,
        read_num_labels(raw),
        "ALL" if is_reward or by_token else "LAST",
        is_deep=is_reward,
        bias=by_token,
    )
    head.register(model)
    model.classifier = head


def _label_names(raw: Mapping[str, Any], count: int) -> list[str]:
    by_id = raw.get("id2label")
    if not isinstance(by_id, dict) or len(by_id) != count:
        return []
    return [str(by_id.get(str(index), by_id.get(index))) for index in range(count)]


def _token_ids(config: EngineConfig, source: ModelSource, tokens: object) -> list[int]:
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(
            f"config.json: classifier_from_token must be a list of tokens, got {tokens!r:.80}"
        )
    tokenizer = load_tokenizer(source, config.model.tokenizer)
    found = [tokenizer.encode(token, add_special_tokens=False) for token in tokens]
    for token, ids in zip(tokens, found, strict=True):
        if len(ids) != 1:
            raise ConfigError(
                f"classifier_from_token must name single tokens, but {token!r} is {len(ids)} of "
                "them"
            )
    return [token_id for (token_id,) in found]


class Pooler:
    """Turns pooled states into what a request asked for."""

    def __init__(
        self,
        model: Model,
        info: PoolingInfo,
        activation: Activation,
        step_tag_id: int | None = None,
        dense: Sequence[nn.Module] = (),
        vector_heads: VectorHeads | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        self.info = info
        self.classifier = model.classifier
        self.hidden_size = model.hidden_size
        self.may_chunk = not needs_whole_prompts(model)
        self.activation = activation
        self.step_tag_id = step_tag_id  # of a process reward model: marks the tokens with rewards
        self.dense = dense
        self.truncate_dim = truncate_dim  # of embeddings, where a request does not say
        self._heads = vector_heads.layers if vector_heads else {}
        self.unweighted_ids = vector_heads.unweighted_ids if vector_heads else NO_IDS

    def __call__(
        self,
        pooled: torch.Tensor,  # [n, hidden_size] float32
        task: PoolingTask,
        dimensions: int | None,
        use_activation: bool | None,
    ) -> torch.Tensor:
        """[n, numbers] float32"""
        if task in ("classify", "token_classify"):
            assert self.classifier is not None
            logits = self.classifier(pooled)
            if use_activation is False or self.activation == "identity":
                return logits
            return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()
        if task == "embed":  # the dense layers were trained on pooled vectors
            for layer in self.dense:
                pooled = layer(pooled)
        if dimensions is not None:
            pooled = pooled[:, :dimensions]
        if use_activation is None:
            use_activation = self.info.normalizes
        if use_activation:
            pooled = nn.functional.normalize(pooled, dim=-1)
        # Of a length of 1 only where a request asks for it: sentence-transformers cuts last.
        is_cut = task == "embed" and dimensions is None and self.truncate_dim is not None
        return pooled[:, : self.truncate_dim] if is_cut else pooled

    def token_vectors(
        self,
        name: VectorName,
        rows: torch.Tensor,  # [n, hidden_size] float32
        use_activation: bool | None,
    ) -> torch.Tensor:
        """[n, 1] (sparse) or [n, numbers] (colbert) float32"""
        found: torch.Tensor = self._heads[name](rows)
        if name == "sparse":
            return found.relu()
        if use_activation is None:
            use_activation = self.info.normalizes
        return nn.functional.normalize(found, dim=-1) if use_activation else found


class Dense(nn.Module):
    """A dense layer after pooling, from sentence-transformers' files."""

    def __init__(self, file: DenseFile, in_features: int, device: torch.device) -> None:
        super().__init__()
        path = file.folder / "model.safetensors"
        if file.in_features != in_features:
            raise ModelError(
                f"{file.folder / 'config.json'}: in_features is {file.in_features}, but the vector "
                f"that comes in has {in_features} numbers"
            )
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        expected = {"linear.weight": [file.out_features, in_features]}
        if file.bias:
            expected["linear.bias"] = [file.out_features]
        found = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            raise ModelError(f"{path}: must contain {expected}, got {found}")
        self.weight = tensors["linear.weight"].float().to(device)
        self.bias = tensors["linear.bias"].float().to(device) if file.bias else None
        self.activate = ACTIVATIONS[file.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(nn.functional.linear(x, self.weight, self.bias))


def make_pooler(
    model: Model,
    task: Task,
    config: EngineConfig,
    source: ModelSource,
    files: SentenceTransformer | None,
) -> Pooler:
    """The pooler of a loaded model.

    The operator's settings come first, then files, then defaults.
    """
    given = config.pooling.pooler_config or {}
    raw = source.config
    tasks: list[PoolingTask]
    pooling_type: PoolingType
    if task == "classify":
        classifier = model.classifier
        if classifier is None:
            raise ConfigError(
                f"convert=classify needs a model with a classifier, and {source.name} has none"
            )
        by_step = "step_tag_id" in given  # whose results are those of single tokens
        pooling_type = "ALL" if by_step else given.get("pooling_type", classifier.pooling)
        tasks = ["token_classify"] if pooling_type == "ALL" else ["classify"]
        template = instruction = None
        if isinstance(classifier, TokenHead) and "returned_token_ids" not in given:
            template = QWEN3_RERANKER
            if any(str(name).startswith("Qwen3VL") for name in raw.get("architectures") or ()):
                template, instruction = QWEN3_VL_RERANKER, QWEN3_VL_INSTRUCTION
        info = PoolingInfo(
            tasks=tasks,
            pooling_type=pooling_type,
            num_labels=classifier.num_labels,
            labels=_label_names(raw, classifier.num_labels),
            reads_prefix_cache=pooling_type == "LAST",
            score_template=given.get("score_template", template),
            score_instruction=instruction,
        )
        activation = _activation(raw, classifier.num_labels)
        if given.get("use_activation") is False:
            activation = "identity"
        return Pooler(model, info, activation, given.get("step_tag_id"))
    if "step_tag_id" in given:
        raise ConfigError("pooler_config: step_tag_id is for models with labels, not embeddings")
    pooling_type = given.get("pooling_type", files.pooling if files else model.pooling)
    tasks = ["token_embed"] if pooling_type == "ALL" else ["embed", "token_embed"]
    sizes = given.get("dimensions", raw.get("matryoshka_dimensions")) or []
    size = model.hidden_size
    dense = []
    for file in files.dense if files else ():
        dense.append(Dense(file, size, next(model.parameters()).device))
        size = file.out_features
    truncate_dim = files.truncate_dim if files and "embed" in tasks else None
    if truncate_dim is not None and truncate_dim > size:
        raise ModelError(
            f"config_sentence_transformers.json: truncate_dim ({truncate_dim}) must not exceed the "
            f"{size} numbers of an embedding"
        )
    heads = None
    if "embed" in tasks and source.path.is_dir():
        heads = load_vector_heads(
            source, config, model.hidden_size, next(model.parameters()).device
        )
    pools_prompt = files is None or files.include_prompt or pooling_type != "MEAN"
    if not pools_prompt and "max_embed_len" in given:
        raise ConfigError(
            "pooler_config: max_embed_len is not supported by this model, whose prompts are not "
            "pooled (include_prompt=false)"
        )
    normalizes = given.get("use_activation", files.normalize if files else True)
    info = PoolingInfo(
        tasks=tasks,
        pooling_type=pooling_type,
        embedding_size=truncate_dim or size,
        vectors=["dense", *heads.layers] if heads else [],
        dimensions=[n for n in sizes if isinstance(n, int) and 0 < n <= size],
        any_dimension=not sizes and raw.get("is_matryoshka") is True,
        reads_prefix_cache=pooling_type == "LAST",
        lower_case=files is not None and files.lower_case,
        normalizes=normalizes,
        max_embed_len=given.get("max_embed_len", 0),
        pools_prompt=pools_prompt,
        prompts=dict(files.prompts) if files else {},
        default_prompt_name=files.default_prompt_name if files else None,
    )
    if model.dual is not None:
        info = _read_tokenizer_settings(info, model.dual, source)
    return Pooler(
        model, info, "identity", dense=dense, vector_heads=heads, truncate_dim=truncate_dim
    )


def _read_tokenizer_settings(
    info: PoolingInfo, dual: DualInputs, source: ModelSource
) -> PoolingInfo:
    """How texts of a dual encoder are written and padded, which only its tokenizer's files say."""
    settings = read_json_if_there(source.path / "tokenizer_config.json")
    lowers = settings.get("tokenizer_class") == "Siglip2Tokenizer"
    return msgspec.structs.replace(
        info,
        dual=msgspec.structs.replace(dual, pads_left=settings.get("padding_side") == "left"),
        lower_case=info.lower_case or lowers or settings.get("do_lower_case") is True,
    )


def _activation(raw: Mapping[str, Any], num_labels: int) -> Activation:
    """The activation of logits: from config.json, else by the number of labels."""
    trainer = raw.get("sentence_transformers")
    name = trainer.get("activation_fn") if isinstance(trainer, dict) else None
    name = name or raw.get("sbert_ce_default_activation_function")
    if isinstance(name, str):
        kind = name.rpartition(".")[2].lower()
        if kind in ("identity", "sigmoid", "softmax"):
            return kind  # type: ignore[return-value]
        raise ModelError(
            f"config.json: the activation {name!r:.80} of scores is not supported, only Identity, "
            "Sigmoid and Softmax"
        )
    if raw.get("problem_type") == "regression":
        return "identity"
    if raw.get("problem_type") == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
