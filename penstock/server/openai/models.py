"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request

from penstock.server.adapters.holds import AdapterVersion
from penstock.server.http.errors import describe_errors
from penstock.server.openai.protocol import ModelCard, ModelList
from penstock.server.service import Service
from penstock.text.scoring import served_tasks

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=describe_errors(401))
async def list_models(request: Request) -> ModelList:
    """List the names under which the model is served, and its LoRA adapters."""
    service: Service = request.app.state.service
    base = [_card(service, name) for name in service.model_names]
    adapters = service.adapters.versions if service.adapters is not None else []
    return ModelList(data=base + [_adapter_card(service, item) for item in adapters])


@router.get("/v1/models/{model_id:path}", responses=describe_errors(401, 404))
async def get_model(model_id: str, request: Request) -> ModelCard:
    """Describe a served model."""
    service: Service = request.app.state.service
    if (name := service.base_name(model_id)) is not None:
        return _card(service, name)
    version = service.adapters.find(model_id) if service.adapters is not None else None
    if version is None:
        raise service.no_model(model_id)
    return _adapter_card(service, version)


def _card(service: Service, name: str) -> ModelCard:
    pooling = service.frontend.pooling
    return ModelCard(
        id=name,
        created=service.created,
        owned_by="penstock",
        root=service.root,
        parent=None,
        max_model_len=service.frontend.max_model_len,
        tasks=["generate"] if pooling is None else served_tasks(pooling),
        takes_images=service.frontend.takes_images,
        labels=pooling.labels or None if pooling is not None else None,
    )


def _adapter_card(service: Service, version: AdapterVersion) -> ModelCard:
    card = _card(service, version.name)
    card.created, card.root, card.parent = version.created, version.root, version.parent
    return card
