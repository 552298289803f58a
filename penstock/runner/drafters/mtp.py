"""Method mtp: the multi-token-prediction (MTP) layer of the model's own checkpoint drafts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from penstock.layers.build import Build
from penstock.models.assembly import load_model
from penstock.models.base import Model
from penstock.models.config import read_int
from penstock.models.decoder import DecoderLM
from penstock.models.mtp import MtpHead
from penstock.protocol.errors import ConfigError, ModelError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.head import HeadDrafter

logger = logging.getLogger(__name__)


class MtpDrafter(HeadDrafter):
    """Several drafts come from one layer."""

    def load(self, setup: DraftSetup) -> None:
        target, source = setup.target, setup.source
        layout = target.mtp_layout
        if layout is None or not isinstance(target, DecoderLM):
            raise ConfigError(
                f"method mtp is not supported for {type(target).__name__}, only for DeepSeek V3, "
                "GLM-4.5, MiMo and Qwen3-Next: use draft_model, ngram or suffix"
            )
        declared = read_int(source.config, "num_nextn_predict_layers", layout.num_layers, low=0)
        if not declared:
            raise ConfigError(
                f"{source.name} has no MTP layer (num_nextn_predict_layers in config.json): use "
                "draft_model, ngram or suffix"
            )

        def create(build: Build, settings: Mapping[str, Any]) -> Model:
            return MtpHead(build, target, layout)

        own = dataclasses.replace(source, adapter=None)
        try:
            head, dtypes, _ = load_model(
                setup.config, own, setup.platform, setup.draft_mesh, setup.limits.max_model_len,
                create,
            )  # fmt: skip
        except ModelError as error:  # some checkpoints come without the layer that they declare
            raise ConfigError(
                f"the MTP layer of {source.name} cannot be loaded ({error}): use draft_model, "
                "ngram or suffix"
            ) from error
        assert isinstance(head, MtpHead)
        if declared > 1 or self.num_drafts > 1:
            logger.info(
                "Of %d MTP layer(s), the first makes all %d drafts, further ones from its output",
                declared, self.num_drafts,
            )  # fmt: skip
        self._head = head
        self.use(head, dtypes.kv, setup.max_rows, setup.limits.max_model_len)
