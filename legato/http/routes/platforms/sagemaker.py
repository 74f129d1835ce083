"""POST /invocations, the one route that SageMaker calls: the native request, a chat or a completion, by its fields."""

from __future__ import annotations

from legato.http.exchange import Exchange
from legato.http.routes.native import GenerateRoutes
from legato.http.routes.openai.chat import ChatRoutes
from legato.http.routes.openai.completions import CompletionRoutes
from legato.http.routes.platforms.exchanges import Handler, Reread, handler_for, read_raw
from legato.ipc.settings import RouterSettings


class SageMakerRoutes:
    def __init__(
        self, settings: RouterSettings, generate: GenerateRoutes, chat: ChatRoutes, completions: CompletionRoutes
    ) -> None:
        self._payload_limit = settings.payload_limit
        self._handlers: dict[str, Handler] = {
            "inputs": generate.compat,
            "messages": chat.chat_completions,
            "prompt": completions.completions,
        }

    async def invocations(self, exchange: Exchange) -> None:
        body = await read_raw(exchange, self._payload_limit)
        await handler_for(body, self._handlers)(Reread(exchange, body))
