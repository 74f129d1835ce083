"""GET /v1/models: the one model that is served."""

from __future__ import annotations

import time
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from legato.api.openai.responses import ModelList, ModelObject
from legato.http.routes.openai.errors import UnknownModel
from legato.ipc.settings import RouterSettings

JSON = "application/json"


class ModelRoutes:
    def __init__(self, settings: RouterSettings) -> None:
        self._model = ModelObject(id=settings.model_id, created=int(time.time()), owned_by=settings.model_id)

    async def models(self, request: Request) -> Response:
        return Response(msgspec.json.encode(ModelList(data=[self._model])), media_type=JSON)

    async def model(self, request: Request) -> Response:
        wanted: str = request.path_params["model"]
        # Some clients quote the slash in a model's name, and some servers leave it quoted.
        if self._model.id not in (wanted, unquote(wanted)):
            raise UnknownModel(wanted)
        return Response(msgspec.json.encode(self._model), media_type=JSON)
