"""POST /invocations, the one route that SageMaker calls: the native request, a chat or a completion, by its fields."""

from __future__ import annotations

from legato.ipc.settings import RouterSettings
from legato.router.exchange import Exchange
from legato.router.generate import GenerateRoutes
from legato.router.openai.chat import ChatRoutes
from legato.router.openai.completions import CompletionRoutes
from legato.router.platforms.exchanges import Handler, Reread, handler_for, read_raw


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
