"""GET /v1/models: the model that is served, and its LoRA adapters."""

from __future__ import annotations

import time
from typing import Literal
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from legato.api.errors import UnknownModel
from legato.api.openai.responses import ModelList, ModelObject
from legato.http.scheduler import SchedulerClient
from legato.ipc.settings import RouterSettings

JSON = "application/json"


class ModelRoutes:
    def __init__(self, settings: RouterSettings, scheduler: SchedulerClient) -> None:
        task: Literal["embed"] | UnsetType = UNSET if settings.embedding is None else "embed"
        name = settings.model_id
        self._base = ModelObject(id=name, created=int(time.time()), owned_by=name, task=task)
        self._scheduler = scheduler

    def _models(self) -> list[ModelObject]:
        base = self._base
        adapters = [
            ModelObject(id=name, created=base.created, owned_by=base.owned_by, root=adapter.path, parent=base.id)
            for name, adapter in self._scheduler.adapters.items()
        ]
        return [base, *adapters]

    async def models(self, request: Request) -> Response:
        return Response(msgspec.json.encode(ModelList(data=self._models())), media_type=JSON)

    async def model(self, request: Request) -> Response:
        wanted: str = request.path_params["model"]
        # Some clients quote the slash in a model's name, and some servers leave it quoted.
        found = next((model for model in self._models() if model.id in (wanted, unquote(wanted))), None)
        if found is None:
            raise UnknownModel(wanted)
        return Response(msgspec.json.encode(found), media_type=JSON)
