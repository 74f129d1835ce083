"""A shard as a process: load, then serve."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from legato.common.gc import freeze_gc
from legato.common.options import ServerOptions
from legato.modelfiles.files import ModelFiles
from legato.server.allocator import keep_freed_memory
from legato.server.listening import serve, socket_paths, socket_urls
from legato.server.loading import load
from legato.server.model import Model
from legato.server.service import TextGenerationService


def run(files: ModelFiles, options: ServerOptions) -> None:
    keep_freed_memory()
    engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
    model = engine.submit(lambda: Model(load(files, options), options)).result()
    service = TextGenerationService(model, socket_urls(options), engine, when_warm=freeze_gc)
    asyncio.run(serve(service, socket_paths(options)[options.rank]))
