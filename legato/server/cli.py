"""`text-generation-server`: serve a model on a unix socket, download its files beforehand, or quantize it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

import click

from legato.common.errors import ModelNotFound, OptionError, UnsupportedModel
from legato.common.gc import paused_gc
from legato.common.logging import setup
from legato.common.options import SAFETENSORS, DownloadOptions, ServerOptions
from legato.common.program import command, run_program, with_version
from legato.common.sockets import claim_socket
from legato.common.tgi_variables import variable_warnings
from legato.modelfiles.files import ModelFiles, has_pickles
from legato.modelfiles.locate import cache_of, locate, open_model
from legato.modelfiles.merged import MergedModel
from legato.server.driver_start import DriverStart
from legato.server.quantizing.options import QuantizeOptions

logger = logging.getLogger(__name__)

# Model types that make vectors of texts and nothing else.
ENCODERS_ONLY = {"bert", "modernbert", "roberta", "xlm-roberta"}
# How often a thread of OpenMP looks whether its work is there before it sleeps: some ten microseconds.
OPENMP_SPINS = "3000"


def serve(options: ServerOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-server")
    for warning in (*options.warnings, *variable_warnings(os.environ)):
        logger.warning(warning)
    if options.is_sharded and not {"rank", "world_size", "master_addr", "master_port"} <= options.given:
        raise OptionError("--sharded needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which a launcher sets")
    if options.rank >= options.world_size:
        raise OptionError(f"--rank ({options.rank}) must be less than --world-size ({options.world_size})")
    if not options.fake and (options.fake_step_ms or options.fake_token_ms or options.fake_script):
        raise OptionError("--fake-step-ms, --fake-token-ms and --fake-script are for a fake shard: add --fake")
    if options.fake and options.task == "embed":
        raise OptionError("--fake generates made-up tokens: it cannot be combined with --task embed")
    claim_socket(f"{options.uds_path}-{options.rank}", "--uds-path")
    files = open_model(options)
    files.config()
    if options.fake:
        from legato.server.fake.service import run as run_fake  # never brings in torch

        run_fake(files, options)
        return
    if options.task == "generate" and (kind := str(files.config().get("model_type"))) in ENCODERS_ONLY:
        raise UnsupportedModel(f"{files.path}: model_type '{kind}' does not generate text: use --task embed")
    if options.load_format == "auto":
        files.check_weights()
    let_openmp_sleep(os.environ)
    driver = None if options.device == "cpu" else DriverStart()
    with paused_gc():
        _leave_out_triton(options, driver)
        # Brings in torch, which takes seconds: wrong flags and files end before.
        if options.task == "embed":
            from legato.server.embedding.service import run
        else:
            from legato.server.service import run

    run(files, options)


def _leave_out_triton(options: ServerOptions, driver: DriverStart | None) -> None:
    """On a CPU none of its kernels ever runs, and its library takes 50 MB and a part of the start."""
    import torch

    if driver is not None:
        driver.wait()  # the shard may fork, which it does without other threads
    if options.device == "cpu" or not torch.cuda.is_available():
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # an import then fails as if it were missing


def let_openmp_sleep(environ: MutableMapping[str, str]) -> None:
    """Have OpenMP's threads, which torch computes with, wait for each other asleep after some ten microseconds: threads
    that spin take the core from those that they wait for, where another program has the other cores. OpenMP reads the
    variables when torch is imported. Unless they are set."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)


def download_weights(options: DownloadOptions) -> None:
    setup(options.logger_level, options.json_output, "text-generation-server")
    if options.extension != SAFETENSORS:
        raise OptionError(
            f"--extension {options.extension}: Legato serves {SAFETENSORS} files; without the option, download-weights"
            " converts PyTorch files to them"
        )
    path = _located(options)
    is_known = (path / "config.json").exists() or (path / "adapter_config.json").exists()
    if options.auto_convert and is_known and not any(path.glob("*.safetensors")):
        from legato.server.convert import convert, fetch_pickles  # brings in torch, for the few models that need it

        is_snapshot = options.weights_cache_override is None and path.parent.name == "snapshots"
        if is_snapshot and options.model_id and not has_pickles(path):
            fetch_pickles(options.model_id, path)
        convert(path)
    files = ModelFiles.open(path, cache_of(options))
    files.check_weights()
    if options.merge_lora and isinstance(files, MergedModel):
        from legato.server.merging import merge, target_of  # brings in torch

        files = ModelFiles.open(merge(files, target_of(str(options.model_id), files)))
    logger.info("Weights downloaded", extra={"fields": {"path": str(files.path)}})


def quantize(options: QuantizeOptions) -> None:
    from legato.server.quantizing.command import run  # brings in torch

    run(options)


def _located(options: DownloadOptions) -> Path:
    try:
        return locate(options)
    except ModelNotFound:
        if not options.auto_convert or options.model_id is None:
            raise
        from legato.server.convert import cached_snapshot

        cache = Path(options.huggingface_hub_cache) if options.huggingface_hub_cache else None
        snapshot = cached_snapshot(options.model_id, options.revision, cache)
        if snapshot is None:
            raise
        return snapshot


def main() -> None:
    group = with_version(click.Group("text-generation-server", help="The model server: one shard of one model."))
    group.add_command(command(ServerOptions, serve, "serve", "Serve a model on a unix socket."))
    group.add_command(
        command(DownloadOptions, download_weights, "download-weights", "Download a model's files and check them.")
    )
    group.add_command(
        command(QuantizeOptions, quantize, "quantize", "Quantize a model with GPTQ and write it to a folder.")
    )
    sys.exit(run_program(group))


if __name__ == "__main__":
    main()
