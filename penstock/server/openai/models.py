"""GET /v1/models."""

from __future__ import annotations

from fastapi import APIRouter, Request

from penstock.server.http.errors import describe_errors
from penstock.server.openai.protocol import ModelCard, ModelList
from penstock.server.service import Service
from penstock.text.scoring import served_tasks

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", responses=describe_errors(401))
async def list_models(request: Request) -> ModelList:
    """List the names under which the model is served."""
    service: Service = request.app.state.service
    return ModelList(data=[_card(service, name) for name in service.model_names])


@router.get("/v1/models/{model_id:path}", responses=describe_errors(401, 404))
async def get_model(model_id: str, request: Request) -> ModelCard:
    """Describe a served model."""
    service: Service = request.app.state.service
    return _card(service, service.check_model(model_id))


def _card(service: Service, name: str) -> ModelCard:
    pooling = service.frontend.pooling
    return ModelCard(
        id=name,
        created=service.created,
        owned_by="penstock",
        root=service.config.model.model,
        parent=None,
        max_model_len=service.frontend.max_model_len,
        tasks=["generate"] if pooling is None else served_tasks(pooling),
        labels=pooling.labels or None if pooling is not None else None,
    )
