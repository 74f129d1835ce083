"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: LoRA adapters at run time, with vLLM's requests.

Only with --lora-allow-runtime, and only for API keys that may; on a server without keys only from its own machine.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from legato.api.errors import RequestError
from legato.api.openai.requests import LoadAdapterRequest, UnloadAdapterRequest
from legato.http.exchange import Exchange
from legato.http.routes.openai.errors import unsupported
from legato.http.scheduler import AdapterChangeFailed, SchedulerClient
from legato.ipc.settings import RouterSettings

JSON = "application/json"

_load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
_unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


_TYPES = {403: "unauthorized", 404: "not_found", 503: "healthcheck"}


class AdapterForbidden(RequestError):
    status, error_type = 403, "unauthorized"


class AdapterError(RequestError):
    """What the router says; the status differs."""

    status, error_type = 422, "validation"

    def __init__(self, failed: AdapterChangeFailed) -> None:
        super().__init__(str(failed))
        # Others have the same every time.
        self.status = failed.status  # type: ignore[misc]
        self.error_type = _TYPES.get(failed.status, "validation")  # type: ignore[misc]


class AdapterChange(Struct, kw_only=True):
    """What was done."""

    status: str = "success"
    message: str


class AdapterRoutes:
    def __init__(self, settings: RouterSettings, scheduler: SchedulerClient) -> None:
        self._settings = settings
        self._scheduler = scheduler

    async def load_adapter(self, exchange: Exchange) -> None:
        """Answers when requests may name it."""
        self._check(exchange)
        request = await exchange.json(_load_decoder, self._settings.payload_limit)
        if request.load_inplace:
            raise unsupported("load_inplace")
        await self._change(request.lora_name, request.lora_path, request.revision)
        await self._respond(exchange, f"LoRA adapter {request.lora_name!r} is loaded")

    async def unload_adapter(self, exchange: Exchange) -> None:
        """New requests are refused at once; answers when the last that uses it has ended."""
        self._check(exchange)
        request = await exchange.json(_unload_decoder, self._settings.payload_limit)
        await self._change(request.lora_name, None)
        await self._respond(exchange, f"LoRA adapter {request.lora_name!r} is unloaded")

    def _check(self, exchange: Exchange) -> None:
        settings = self._settings
        if not settings.changes_adapters:
            raise AdapterForbidden("LoRA adapters cannot be changed at run time: start the server with"
                                   " --lora-allow-runtime")  # fmt: skip
        if settings.api_keys and exchange.tenant not in settings.adapter_tenants:
            raise AdapterForbidden("This API key may not change LoRA adapters")
        if not settings.api_keys and not exchange.is_local:
            raise AdapterForbidden(
                "A server without API keys accepts changes of LoRA adapters only from its own machine"
            )

    async def _change(self, name: str, source: str | None, revision: str | None = None) -> None:
        try:
            await self._scheduler.change_adapter(name, source, revision)
        except AdapterChangeFailed as failed:
            raise AdapterError(failed) from None

    async def _respond(self, exchange: Exchange, message: str) -> None:
        await exchange.respond(msgspec.json.encode(AdapterChange(message=message)), {"content-type": JSON})
