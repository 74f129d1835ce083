"""The table of options and the command lines made of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import click
import pytest

from legato.common.errors import LegatoError
from legato.common.option import Options, groups, table
from legato.common.options import PROGRAMS, DownloadOptions, LauncherOptions, RouterOptions, ServerOptions
from legato.common.program import command, forward, run_program, variables

# Flag -> default of TGI's launcher; None where TGI decides later or has no default.
TGI_DEFAULTS: dict[str, Any] = {
    "revision": None,
    "validation-workers": 2,
    "sharded": None,
    "num-shard": None,
    "quantize": None,
    "speculate": None,
    "dtype": None,
    "kv-cache-dtype": None,
    "trust-remote-code": False,
    "max-concurrent-requests": 128,
    "max-best-of": 2,
    "max-stop-sequences": 4,
    "max-top-n-tokens": 5,
    "max-input-tokens": None,
    "max-total-tokens": None,
    "waiting-served-ratio": 0.3,
    "max-batch-prefill-tokens": None,
    "max-batch-total-tokens": None,
    "max-waiting-tokens": 20,
    "max-batch-size": None,
    "cuda-graphs": (),
    "hostname": "0.0.0.0",
    "port": 3000,
    "prometheus-port": 9000,
    "shard-uds-path": "/tmp/text-generation-server",
    "master-addr": "localhost",
    "master-port": 29500,
    "huggingface-hub-cache": None,
    "weights-cache-override": None,
    "disable-custom-kernels": False,
    "cuda-memory-fraction": 1.0,
    "rope-scaling": None,
    "rope-factor": None,
    "json-output": False,
    "otlp-endpoint": None,
    "otlp-service-name": "text-generation-inference.router",
    "cors-allow-origin": (),
    "api-key": (),  # one or several
    "watermark-gamma": None,
    "watermark-delta": None,
    "ngrok": False,
    "ngrok-authtoken": None,
    "ngrok-edge": None,
    "tokenizer-config-path": None,
    "disable-grammar-support": False,
    "env": False,
    "max-client-batch-size": 4,
    "lora-adapters": None,
    "usage-stats": "on",
    "payload-limit": 2_000_000,
    "enable-prefill-logprobs": False,
    "graceful-termination-timeout": 90,
    "max-image-fetch-size": 1 << 30,
}
LEGATO_DEFAULTS: dict[str, Any] = {
    "nnodes": 1,
    "node-rank": 0,
    "node-addr": None,
    "pipeline-parallel-size": 1,
    "cluster-key": None,
    "cluster-key-file": None,
    "cluster-certfile": None,
    "cluster-keyfile": None,
    "cluster-cafile": None,
    # TGI refuses the 129th request. A queue costs little, and a refused user costs a user.
    "max-concurrent-requests": 4096,
    "http-workers": None,
    "speculate-model": None,
    "ssl-certfile": None,
    "ssl-keyfile": None,
    "max-queued-tokens": 2_000_000,
    "share-prefix-cache": False,
    "queue-timeout": 0.0,
    "request-timeout": 0.0,
    "fake": False,
    "fake-script": None,
    "fake-step-ms": 0.0,
    "fake-token-ms": 0.0,
    "model-id": None,
    "block-size": 16,
    "prefix-caching": True,
    "prefix-cache-mb": None,
    "load-format": "auto",
    "device": "auto",
    "logger-level": "info",
    "schema-lenient": False,
    "api-key-file": None,
    "tool-call-parser": "auto",
    "reasoning-parser": "auto",
    "reasoning-budget": None,
    "response-store": None,
    "response-store-size": 32 << 20,
    "max-image-bytes": 1 << 24,
    "max-image-pixels": 1 << 24,
    "image-url-allow": (),
    "hang-timeout": 30.0,
    "load-timeout": 600.0,
    "lora-device-ranks": None,
    "lora-max-rank": None,
    "lora-target-modules": (),
    "lora-allow-runtime": False,
    "lora-allow": (),
    "max-restarts": 10,
    "task": "generate",
    "pooling": None,
    "fp8-copy-fraction": 0.1,
    "kv-offload-gb": 0.0,
    "route-key": None,
    "kv-events": False,
    "kv-events-endpoint": None,
    "max-client-batch-size": None,  # TGI's 4 for prompts, and another number for texts to embed
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers export HOSTNAME; none of it is meant for these tests."""
    for program in PROGRAMS.values():
        for name in variables(program):
            monkeypatch.delenv(name, raising=False)


def run(program: type[Options], *args: str) -> tuple[int, Any]:
    """Exit code of a command line, and the options it was read as."""
    seen: list[Any] = []
    code = run_program(command(program, seen.append, "program", "A program."), args)
    return code, seen[0] if seen else None


def parse(program: type[Options], *args: str) -> Any:
    code, options = run(program, *args)
    assert code == 0
    return options


def test_launcher_has_tgis_flags_with_tgis_defaults() -> None:
    assert {option.flag: option.default for option in table(LauncherOptions)} == TGI_DEFAULTS | LEGATO_DEFAULTS


def test_parsing_nothing_gives_the_defaults() -> None:
    assert parse(LauncherOptions) == LauncherOptions()


@pytest.mark.parametrize("program", [*PROGRAMS.values(), DownloadOptions])
def test_flags_and_variables_are_unique(program: type[Options]) -> None:
    options = table(program)
    for names in ([o.flag for o in options], [o.env for o in options if o.env], [o.short for o in options if o.short]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("program", [*PROGRAMS.values(), DownloadOptions])
def test_every_option_has_a_help_sentence(program: type[Options]) -> None:
    for option in table(program):
        assert option.long_help.endswith(".")


def test_groups_end_with_the_programs_own_options() -> None:
    assert list(groups(RouterOptions)) == [
        "Model",
        "Memory and batching",
        "Request limits and features",
        "HTTP",
        "Logs",
        "Supervision",
        "LoRA adapters at run time",
        "Shards",
    ]


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LauncherOptions().port = 80  # type: ignore[misc]


def test_a_flag_takes_precedence_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "80")
    assert parse(LauncherOptions).port == 80
    assert parse(LauncherOptions, "--port", "8080").port == 8080


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "")
    assert parse(LauncherOptions).port == 3000


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("0", False), ("false", False)])
def test_prefix_caching_reads_tgis_values(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("PREFIX_CACHING", value)
    assert parse(LauncherOptions).prefix_caching is expected


def test_a_flag_that_defaults_to_true_can_be_negated() -> None:
    assert parse(LauncherOptions, "--no-prefix-caching").prefix_caching is False


def test_lists_may_be_repeated_or_separated_by_commas() -> None:
    options = parse(LauncherOptions, "--cors-allow-origin=http://a,http://b", "--cors-allow-origin", "http://c")
    assert options.cors_allow_origin == ("http://a", "http://b", "http://c")


def test_a_list_in_a_variable_is_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORS_ALLOW_ORIGIN", "http://a,http://b")
    assert parse(LauncherOptions).cors_allow_origin == ("http://a", "http://b")


def test_log_level_has_tgis_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert parse(RouterOptions).logger_level == "debug"


def test_env_has_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV", "production")
    assert parse(LauncherOptions).env is False


def test_given_options_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_BEST_OF", "2")
    assert parse(LauncherOptions, "-p", "3000").given == {"max_best_of", "port"}


def test_the_deprecated_alias_of_max_input_tokens_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(LauncherOptions, "--max-input-length", "7").max_input_tokens == 7
    monkeypatch.setenv("MAX_INPUT_LENGTH", "8")
    assert parse(LauncherOptions).max_input_tokens == 8


def test_both_names_of_max_input_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(LauncherOptions, "--max-input-length=7", "--max-input-tokens=7")
    assert code == 1
    assert "--max-input-length is a deprecated alias of --max-input-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--port=http"],
        ["--port=70000"],
        ["--max-best-of=-1"],
        ["--waiting-served-ratio=nan"],
        ["--dtype=int3"],
        ["--cuda-graphs=1,two"],
        ["--no-such-flag"],
    ],
)
def test_an_invalid_command_line_exits_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(LauncherOptions, *args)
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err


LATER = {
    "--ngrok-authtoken": "secret",
    "--ngrok-edge": "edge",
}


@pytest.mark.parametrize("words", [*([flag, LATER[flag]] for flag in LATER), ["--ngrok"]])
def test_an_unavailable_feature_is_refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(LauncherOptions, *words)
    error = capsys.readouterr().err
    assert code == 1
    assert error.startswith(f"error: {words[0]}: ")
    assert error.endswith(" not available in this version of Legato\n")
    assert error.count("\n") == 1


def test_a_refused_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NGROK_EDGE", "edge")
    assert run(LauncherOptions)[0] == 1
    assert "--ngrok-edge (set by NGROK_EDGE)" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--num-shard=1", "--sharded=false", "--cuda-graphs=1,2", "--usage-stats=no-stack"])
def test_default_values_of_unavailable_features_are_accepted(words: str) -> None:
    assert parse(LauncherOptions, words).warnings == []


def test_options_without_effect_warn_only_when_given() -> None:
    assert LauncherOptions().warnings == []
    (warning,) = parse(LauncherOptions, "--max-waiting-tokens=10").warnings
    assert warning.startswith("--max-waiting-tokens has no effect: ")


def test_forward_passes_what_the_target_has_and_what_differs_from_its_defaults() -> None:
    options = LauncherOptions(
        model_id="some/model",
        port=80,
        dtype="float16",
        rope_factor=2.0,
        prefix_caching=False,
        json_output=True,
        cors_allow_origin=("http://a", "http://b"),
        max_input_tokens=7,
    )
    assert forward(options, RouterOptions) == [
        "--tokenizer-name=some/model",
        "--max-input-tokens=7",
        "--port=80",
        "--cors-allow-origin=http://a,http://b",
        "--json-output",
    ]
    assert forward(options, ServerOptions) == [
        "some/model",
        "--dtype=float16",
        "--rope-factor=2.0",
        "--no-prefix-caching",
        "--json-output",
        "--max-input-tokens=7",
    ]
    assert forward(options, DownloadOptions) == ["some/model", "--json-output"]


@pytest.mark.parametrize("program", [RouterOptions, ServerOptions, DownloadOptions])
def test_the_target_reads_forwarded_arguments_as_the_same_options(program: type[Options]) -> None:
    options = parse(
        LauncherOptions,
        "--model-id=some/model",
        "--revision=refs/pr/1",
        "--no-prefix-caching",
        "--rope-scaling=dynamic",
        "--cuda-graphs=0",
        "--watermark-delta=-1.5",
        "--cors-allow-origin=*",
        "--hostname=::1",
        "--logger-level=info,legato.router=debug",
        "--disable-grammar-support",
    )
    read = parse(program, *forward(options, program))
    for option in table(program):
        if hasattr(options, option.name):
            assert getattr(read, option.name) == getattr(options, option.name), option.flag


def test_an_option_without_effect_is_not_forwarded_so_that_one_program_warns() -> None:
    assert forward(LauncherOptions(max_waiting_tokens=7), RouterOptions) == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], None),
        (["--rope-factor=2"], ("linear", 2.0)),
        (["--rope-scaling=dynamic"], ("dynamic", 1.0)),
        (["--rope-scaling=dynamic", "--rope-factor=4"], ("dynamic", 4.0)),
    ],
)
def test_rope_options_complete_each_other(args: list[str], expected: tuple[str, float] | None) -> None:
    assert parse(ServerOptions, *args).rope == expected


def test_the_server_takes_its_rank_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = parse(ServerOptions, "some/model")
    assert (options.model_id, options.rank, options.world_size) == ("some/model", 1, 2)


def test_help_shows_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(LauncherOptions, "--help")[0] == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "-p, --port INTEGER Port to listen on. [env: PORT] [default: 3000]" in words
    assert "-h, --help" in words


@pytest.mark.parametrize(("error", "code"), [(LegatoError("no such folder"), 1), (KeyboardInterrupt(), 130)])
def test_an_error_ends_a_program_without_a_traceback(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_program(click.Command("program", callback=fail), []) == code
    assert capsys.readouterr().err.strip() == ("error: no such folder" if code == 1 else "")


def test_a_program_may_choose_its_exit_code() -> None:
    assert run_program(click.Command("program", callback=lambda: 3), []) == 3


def test_output_into_a_closed_pipe_ends_quietly() -> None:
    program = "import sys; from legato.cli import legato, run_program; sys.exit(run_program(legato, ['options']))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_traces_without_their_packages_are_refused_with_the_extra_that_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("legato.common.options.find_spec", lambda name: None)
    assert run(LauncherOptions, "--otlp-endpoint=http://localhost:4317")[0] == 1
    error = capsys.readouterr().err
    assert error == (
        "error: --otlp-endpoint needs the package opentelemetry: install it with pip install 'legato[otel]'\n"
    )
    assert run(LauncherOptions)[0] == 0
