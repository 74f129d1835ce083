"""One HTTP worker, a process of its own: `python -m legato.http.worker LINK LISTENER`, two file descriptors.

It speaks HTTP, tokenizes, and turns tokens into text. What to compute is decided at the other end of the link; when
that end is gone there is nothing left to do here.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from pathlib import Path

from starlette.types import ASGIApp
from tokenizers import Tokenizer

from legato.chat.template import ChatTemplate
from legato.common.errors import LegatoError
from legato.common.garbage import freeze_gc
from legato.common.logging import setup
from legato.http.app import create_app
from legato.http.inference import Shared
from legato.http.remote_backend import RemoteBackend
from legato.http.server import HttpServer
from legato.ipc import messages as say
from legato.ipc.link import Link, decoder_for
from legato.modelfiles.files import ModelFiles
from legato.telemetry.metrics import Metrics
from legato.vision.rules import ImageRules, image_rules


class Worker:
    """The two messages that bring it up, then whatever clients and scheduler want from each other."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._link = Link(decoder_for(say.ToWorker), self._on_message, self._on_lost)
        self._setup: asyncio.Future[say.Setup] = asyncio.get_running_loop().create_future()
        self._serve: asyncio.Future[say.Serve] = asyncio.get_running_loop().create_future()
        self._backend: RemoteBackend | None = None
        self._metrics: Metrics | None = None
        self._server: HttpServer | None = None

    async def run(self, connection: socket.socket) -> None:
        await self._link.open(connection)
        try:
            tokenizer, chat_template, rules = await self._load(await self._setup)
            self._link.send(say.Loaded())
            serve = await self._serve
            app = self._app(serve, tokenizer, chat_template, rules)
            server = self._server = HttpServer(app, serve.grace, serve.settings.payload_limit)
            freeze_gc()
            self._link.send(say.Serving())
            await server.serve(sockets=[self._listener])
        except LegatoError as error:
            self._link.send(say.Failed(str(error)))
        self._link.close()

    async def _load(self, wanted: say.Setup) -> tuple[Tokenizer, ChatTemplate | None, ImageRules | None]:
        setup(wanted.logger_level, wanted.json_output, "text-generation-router")
        files = ModelFiles.open(Path(wanted.model))
        override = Path(wanted.tokenizer_config_path) if wanted.tokenizer_config_path else None
        tokenizer = await asyncio.to_thread(files.tokenizer)
        template = await asyncio.to_thread(ChatTemplate.load, files, override, wanted.payload_limit)
        return tokenizer, template, image_rules(files)

    def _app(
        self, serve: say.Serve, tokenizer: Tokenizer, chat_template: ChatTemplate | None, rules: ImageRules | None
    ) -> ASGIApp:
        backend = self._backend = RemoteBackend(serve.limits, self._link.send)
        metrics = self._metrics = Metrics(serve.limits)
        shared = Shared(backend, itertools.count(serve.first_id), backend.scrape)
        return create_app(backend, tokenizer, serve.settings, metrics, chat_template, shared, rules)

    def _on_message(self, message: say.ToWorker) -> None:
        match message:
            case say.Tokens():
                assert self._backend is not None
                self._backend.on_tokens(message)
            case say.Admitted():
                assert self._backend is not None
                self._backend.on_admitted(message)
            case say.Answer():
                assert self._backend is not None
                self._backend.on_answer(message)
            case say.AskFigures():
                self._link.send(say.Report({} if self._metrics is None else self._metrics.figures()))
            case say.Setup():
                self._setup.set_result(message)
            case say.Serve():
                self._serve.set_result(message)
            case say.Drain() if self._server is not None:
                self._server.should_exit = True
            case say.Drain():  # it replaces one that died, and nobody has come yet
                self._link.close()

    def _on_lost(self) -> None:
        """Whether we closed the link or the scheduler is gone: nobody can be served any more. What is left to do at an
        ordinary end (joining threads that tokenize) nobody needs either."""
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    # Ctrl-C and a service's stop reach every process. The scheduler's process hears them and tells us what to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    import uvloop

    connection, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:])

    async def run() -> None:
        await Worker(listener).run(connection)

    uvloop.run(run())


if __name__ == "__main__":
    main()
