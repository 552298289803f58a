"""Rolls another version of the model through the replicas of a running server."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from dataclasses import dataclass

from penstock.config import EngineConfig
from penstock.media.frontend import MediaFrontend
from penstock.protocol.errors import InputError
from penstock.server.run import system_fingerprint
from penstock.server.service import Service
from penstock.text.frontend import Frontend
from penstock.text.gguf_processor import media_setup


async def roll_to(service: Service, model: str, timeout_s: float) -> None:
    """Serve the model at `model` in place of the present one. Its names stay.

    Requests are prepared once for both versions, so both must have the same tokenizer. Raises
    `InputError` for another one, and the engine's error if the model cannot be loaded. Then
    everything is as before.
    """
    now = service.client.config
    asked = dataclasses.replace(now, model=dataclasses.replace(now.model, model=model))
    version = await asyncio.to_thread(find_version, asked, service.frontend)
    shown, service.fingerprint = service.fingerprint, None  # two versions are served meanwhile
    try:
        await service.client.operations.rolling_restart(timeout_s, version.config)
    except BaseException:
        service.fingerprint = shown
        raise
    version.show(service)


@dataclass(frozen=True)
class ModelVersion:
    """A version of the model that is served."""

    config: EngineConfig
    frontend: Frontend
    fingerprint: str

    def show(self, service: Service) -> None:
        """It is the only one."""
        service.frontend, service.fingerprint = self.frontend, self.fingerprint
        service.root = self.config.model.model


def find_version(asked: EngineConfig, present: Frontend) -> ModelVersion:
    """Find a version with the same tokenizer as the present one. Raises `InputError`."""
    from penstock.loading.speculators import find_model

    config, source = find_model(asked)
    frontend = Frontend(
        config.model,
        source,
        present.max_model_len,
        chat=config.chat,
        seeds=random.SystemRandom(),
    )
    if (frontend.tokenizer is None) != (present.tokenizer is None) or (
        frontend.tokenizer is not None
        and present.tokenizer is not None
        and frontend.tokenizer.to_json() != present.tokenizer.to_json()
    ):
        raise InputError(
            "model has another tokenizer than the one that is served: start another server for it",
            "model",
        )
    frontend.pool, frontend.pooling = present.pool, present.pooling
    if present.media is not None:
        frontend.media = MediaFrontend(
            config.media, source, lambda: media_setup(source), present.media.width
        )
        frontend.media.on_lookup = present.media.on_lookup
    return ModelVersion(config, frontend, system_fingerprint(config, source.fingerprint))
