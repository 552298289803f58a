"""Method mtp: the multi-token-prediction (MTP) layers of the model's own checkpoint draft."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from penstock.config.speculative import MOST_TOKENS
from penstock.layers.build import Build
from penstock.models.assembly import load_model
from penstock.models.base import Model
from penstock.models.config import read_int
from penstock.models.decoder import DecoderLM
from penstock.models.mtp import MtpHead
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter

KEY = "num_nextn_predict_layers"

logger = logging.getLogger(__name__)


def num_layers(config: Mapping[str, Any]) -> int:
    """The number of MTP layers of a config.json, at least 1."""
    return min(read_int(config, KEY, 1, low=0) or 1, MOST_TOKENS)


class MtpDrafter(HeadDrafter):
    def load(self, setup: DraftSetup) -> None:
        target, source = setup.target, setup.source
        layout = target.mtp_layout
        if layout is None or not isinstance(target, DecoderLM):
            raise ConfigError(
                f"method mtp is not supported for {type(target).__name__}, only for DeepSeek V3, "
                "GLM-4.5, MiMo and Qwen3-Next: use draft_model, ngram or suffix"
            )
        declared = read_int(source.config, KEY, layout.num_layers, low=0)
        if not declared:
            raise ConfigError(
                f"{source.name} has no MTP layer ({KEY} in config.json): use draft_model, ngram or "
                "suffix"
            )
        used = min(declared, self.num_drafts)

        def create(build: Build, settings: Mapping[str, Any]) -> Model:
            return MtpHead(build, target, layout, used)

        own = dataclasses.replace(source, adapter=None)
        try:
            head, dtypes, _ = load_model(
                setup.config, own, setup.platform, setup.draft_mesh, setup.limits.max_model_len,
                create,
            )  # fmt: skip
        except ModelError as error:  # some checkpoints come without the layers that they declare
            fewer = "lower num_speculative_tokens if it has fewer of them, or " * (used > 1)
            raise ConfigError(
                f"{used} MTP layers of {source.name} cannot be loaded ({error}), and config.json "
                f"has {KEY} {declared}: {fewer}use draft_model, ngram or suffix"
            ) from error
        assert isinstance(head, MtpHead)
        if declared > 1 or self.num_drafts > 1:
            logger.info("%d of %d MTP layers make %d drafts", used, declared, self.num_drafts)
        self._heads = head.layers
        self.use(head, dtypes.kv, setup.max_rows, setup.limits.max_model_len)
