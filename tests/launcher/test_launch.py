"""The launcher as a process, with scripts in place of shards and router."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from legato import __version__
from legato.launcher.processes import SAME_SIGNAL_SECONDS
from legato.modelfiles.cache import MANIFEST, Manifest
from tests.launcher.conftest import Launched

Launch = Callable[..., Launched]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_router_before_the_shard_and_exits_0(launch: Launch, number: signal.Signals) -> None:
    launched = launch(FAKE_ROUTER="slow")
    launched.until_logged("Listening on")
    launched.send(number)
    assert launched.wait() == (0, "")
    stops = [line for line in launched.journal if "stop" in line]
    assert stops == ["router asked to stop", "router stopped", "shard-0 asked to stop", "shard-0 stopped"]


def test_start_up_is_logged_step_by_step(launch: Launch) -> None:
    launched = launch()
    launched.until_logged("Listening on")
    messages = ["Starting shards and router", "Shard ready in", "Connected", f"http://127.0.0.1:{launched.port}"]
    positions = [launched.log.index(message) for message in messages]
    assert positions == sorted(positions)


def test_one_line_names_the_model_and_the_addresses_that_a_browser_can_open(launch: Launch) -> None:
    launched = launch("--hostname=0.0.0.0", model=".")
    launched.until_logged("Listening on")
    url = f"http://127.0.0.1:{launched.port}"
    (line,) = [line for line in launched.log.splitlines() if "http://" in line]
    assert f"INFO launcher: Listening on {url}, ready in " in line
    assert line.endswith(f"model=. docs={url}/docs")


def test_the_port_of_vertex_is_the_one_that_is_checked_and_asked(launch: Launch, free_port: int) -> None:
    """Otherwise the server would never count as ready, and the first failure would end it."""
    launched = launch("--port=1", AIP_HTTP_PORT=str(free_port))
    launched.until_logged(f"Listening on http://127.0.0.1:{free_port}")
    os.kill(launched.pid_of("shard-0"), signal.SIGKILL)
    launched.until_logged("Ready again")


def test_lines_of_children_keep_their_level_and_fields(launch: Launch) -> None:
    launched = launch()
    launched.until_logged("plain words")
    assert "2026-01-31T12:00:00.000000Z  WARN shard-0: loaded rank=0" in launched.log
    assert "INFO shard-0: plain words" in launched.log


def test_with_json_output_every_line_is_an_object(launch: Launch) -> None:
    launched = launch("--json-output")
    launched.until_logged("Listening on")
    entries = [json.loads(line) for line in launched.log.splitlines()]
    assert {(entry["program"], entry["level"], entry["message"]) for entry in entries} >= {
        ("shard-0", "WARN", "loaded"),
        ("shard-0", "INFO", "plain words"),
        ("launcher", "INFO", "Connected"),
    }


def test_a_local_model_is_not_downloaded(launch: Launch, tmp_path: Path) -> None:
    launched = launch(model=str(tmp_path))
    launched.until_logged("Listening on")
    assert not any(line.startswith("download") for line in launched.journal)


def test_another_model_is_downloaded_before_anything_starts(launch: Launch) -> None:
    launched = launch("--revision=main", model="some/model")
    launched.until_logged("Listening on")
    assert launched.journal[0] == "download some/model --revision=main --json-output"
    assert "INFO download: downloading" in launched.log


def test_a_package_that_is_in_the_cache_is_not_looked_for(launch: Launch, tmp_path: Path) -> None:
    model = tmp_path / "pypi" / "demo" / "1.0"
    model.mkdir(parents=True)
    manifest = Manifest("demo", "1.0", "model.gguf", {}, {})
    (model / "model.gguf").touch()
    (model / MANIFEST).write_text(json.dumps(asdict(manifest)))
    launched = launch(model="pypi:demo", LEGATO_CACHE=str(tmp_path))
    launched.until_logged("Listening on")
    assert not any(line.startswith("download") for line in launched.journal)


def test_a_failed_download_passes_its_line_and_code_through(launch: Launch) -> None:
    launched = launch(model="some/model", FAKE_DOWNLOAD="fail")
    assert launched.wait() == (1, "error: no such model\n")
    assert len(launched.journal) == 1


def test_a_signal_during_the_download_ends_it(launch: Launch) -> None:
    launched = launch(model="some/model", FAKE_DOWNLOAD="slow")
    launched.until_logged("downloading")
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")


def test_a_crashed_shard_is_reported_with_its_stderr(launch: Launch) -> None:
    code, stderr = launch(FAKE_SHARD="crash").wait()
    assert code == 1
    assert stderr.splitlines() == [
        "Traceback (most recent call last):",
        "  in load",
        "ValueError: bad weights",
        "error: shard-0 exited with code 3: ValueError: bad weights",
    ]


def test_without_restarts_a_killed_shard_stops_everything_and_the_signal_is_reported(launch: Launch) -> None:
    launched = launch("--max-restarts=0", FAKE_SHARD="die")
    code, stderr = launched.wait()
    assert code == 1
    assert stderr.startswith("error: shard-0 was killed by SIGKILL")
    assert "router stopped" in launched.journal


def test_without_restarts_a_router_that_exits_unexpectedly_is_an_error(launch: Launch) -> None:
    launched = launch("--max-restarts=0", FAKE_ROUTER="exit")
    assert launched.wait() == (1, "error: router exited with code 0\n")
    assert "shard-0 stopped" in launched.journal


def test_shards_that_die_are_restarted_together_and_the_router_is_not(launch: Launch) -> None:
    launched = launch("--num-shard=2")
    launched.until_logged("Listening on")
    dead, other, router = (launched.pid_of(name) for name in ("shard-1", "shard-0", "router"))
    os.kill(dead, signal.SIGKILL)
    launched.until_logged("Ready again")
    assert not alive(other)
    assert alive(router)
    starts = [line.rpartition(" ")[0] for line in launched.journal if "started" in line]
    assert sorted(starts) == ["router started", *2 * ["shard-0 started"], *2 * ["shard-1 started"]]
    assert "ERROR launcher: shard-1 was killed by SIGKILL, perhaps because memory ran out: restarting the shards" in (
        launched.log
    )
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")


def test_a_router_that_dies_is_restarted_and_the_shards_are_not(launch: Launch) -> None:
    launched = launch()
    launched.until_logged("Listening on")
    shard, router = launched.pid_of("shard-0"), launched.pid_of("router")
    os.kill(router, signal.SIGKILL)
    launched.until_logged("Ready again")
    assert alive(shard)
    assert sum("router started" in line for line in launched.journal) == 2


def test_a_router_that_hangs_before_its_first_heartbeat_is_started_again(launch: Launch) -> None:
    launched = launch("--load-timeout=2", FAKE_ROUTER="hang at its start")
    hung = "no heartbeat within 2 s of its start (--load-timeout)"
    launched.until_logged(f"router was hung and killed: {hung}: restarting the router in 1 s")
    launched.until_logged("Listening on")
    assert sum("router started" in line for line in launched.journal) == 2


def test_a_router_whose_heart_stops_is_replaced(launch: Launch) -> None:
    launched = launch("--hang-timeout=1")
    launched.until_logged("ERROR launcher: router is hung: no heartbeat for 1 s (--hang-timeout)")
    launched.until_logged("router was hung and killed: no heartbeat for 1 s (--hang-timeout): restarting the router")
    launched.until(lambda: sum("router started" in line for line in launched.journal) == 2)


def test_a_shard_that_hangs_while_it_loads_is_started_again(launch: Launch) -> None:
    launched = launch("--load-timeout=4", FAKE_SHARD="hang while it loads")
    hung = "no progress in loading for 4 s (--load-timeout)"
    launched.until_logged(f"ERROR launcher: shard-0 is hung: {hung}")
    launched.until_logged(f"shard-0 was hung and killed: {hung}: restarting the shards in 1 s")
    launched.until_logged("Listening on")
    assert sum("shard-0 started" in line for line in launched.journal) == 2
    assert sum("router started" in line for line in launched.journal) == 1


def test_a_shard_that_always_hangs_while_it_loads_ends_the_server_in_words(launch: Launch) -> None:
    code, stderr = launch("--load-timeout=4", "--max-restarts=0", FAKE_SHARD="hang while it loads").wait()
    assert (code, stderr) == (
        1,
        "error: shard-0 was hung and killed: no progress in loading for 4 s (--load-timeout)\n",
    )


def test_a_shard_that_loads_slowly_or_has_loaded_is_not_hung(launch: Launch) -> None:
    launched = launch("--load-timeout=2", FAKE_SHARD="load slowly")
    launched.until_logged("Listening on")
    time.sleep(3)
    assert "is hung" not in launched.log


def test_one_restart_too_many_ends_everything_with_an_error(launch: Launch) -> None:
    launched = launch("--max-restarts=2", FAKE_SHARD="die")
    code, stderr = launched.wait()
    assert code == 1
    assert stderr.startswith("error: shard-0 was killed by SIGKILL")
    assert sum("shard-0 started" in line for line in launched.journal) == 3
    assert "not restarted, because --max-restarts is 2 within 600 s" in launched.log
    assert "router stopped" in launched.journal


def test_a_signal_while_shards_restart_ends_everything(launch: Launch) -> None:
    launched = launch(FAKE_SHARD="die once")
    launched.until_logged("shard-0 exited with code 1: no memory: restarting the shards in 1 s")
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")


def test_a_stubborn_router_is_killed_after_the_grace(launch: Launch) -> None:
    launched = launch("-g1", FAKE_ROUTER="stubborn")
    launched.until_logged("Listening on")
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")
    assert "WARN launcher: router did not stop within 4 s: killing it" in launched.log
    assert launched.journal[-1] == "shard-0 stopped"


def test_requests_get_the_whole_grace_before_the_router_must_exit(launch: Launch) -> None:
    launched = launch("-g1", FAKE_ROUTER="finishes after 1.5 s")
    launched.until_logged("Listening on")
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")
    assert "router stopped" in launched.journal
    assert "killing it" not in launched.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_kills_at_once(launch: Launch, number: signal.Signals, code: int) -> None:
    launched = launch(FAKE_ROUTER="stubborn")
    launched.until_logged("Listening on")
    launched.send(number)
    launched.until_journal("router asked to stop")
    if number == signal.SIGTERM:  # two at once are one
        time.sleep(SAME_SIGNAL_SECONDS + 0.1)
    launched.send(number)
    assert launched.wait() == (code, "")


def test_a_signal_that_comes_twice_at_once_is_one(launch: Launch) -> None:
    launched = launch(FAKE_ROUTER="slow")
    launched.until_logged("Listening on")
    launched.send(signal.SIGTERM)
    launched.until_logged("Received SIGTERM")
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")
    assert "router stopped" in launched.journal


def test_nohup_is_respected(launch: Launch) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched = launch()
    finally:
        signal.signal(signal.SIGHUP, previous)
    launched.until_logged("Listening on")
    launched.send(signal.SIGHUP)
    launched.send(signal.SIGTERM)
    assert launched.wait() == (0, "")
    assert "Received SIGTERM" in launched.log
    assert "Received SIGHUP" not in launched.log


def test_a_killed_launcher_leaves_no_orphans(launch: Launch) -> None:
    launched = launch()
    launched.until_logged("Listening on")
    pids = [launched.pid_of("shard-0"), launched.pid_of("router")]
    launched.send(signal.SIGKILL)
    launched.wait()
    launched.until(lambda: not any(map(alive, pids)))


def test_sockets_are_gone_at_the_end(launch: Launch) -> None:
    launched = launch()
    launched.until_logged("Listening on")
    assert Path(f"{launched.socket_path}-0").is_socket()
    launched.send(signal.SIGTERM)
    launched.wait()
    assert not list(launched.socket_path.parent.glob("shard*"))


def test_a_stale_socket_is_replaced(launch: Launch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "shard-0"))
    launch().until_logged("Listening on")


def test_a_second_launcher_on_the_same_sockets_is_refused_while_the_first_starts(launch: Launch) -> None:
    first = launch()
    first.until_logged("Starting")
    second = launch("--port=1234")
    code, stderr = second.wait()
    assert code == 1
    assert "--shard-uds-path" in stderr
    first.until(lambda: Path(f"{first.socket_path}-0").exists())


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch, free_port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        launched = launch()
        code, stderr = launched.wait()
    assert code == 1
    assert (
        stderr == f"error: port {free_port} is in use by another process: stop it or choose another port with --port\n"
    )
    assert launched.journal == []


@pytest.mark.parametrize("flags, variables", [(["--max-waiting-tokens=7"], {}), ([], {"MAX_WAITING_TOKENS": "7"})])
def test_options_without_effect_are_logged(launch: Launch, flags: list[str], variables: dict[str, str]) -> None:
    launched = launch(*flags, **variables)
    launched.until_logged("Starting")
    assert "WARN launcher: --max-waiting-tokens has no effect: " in launched.log
    assert "--waiting-served-ratio" not in launched.log


def test_every_visible_device_gets_a_shard(launch: Launch) -> None:
    launched = launch(CUDA_VISIBLE_DEVICES="0,1")
    launched.until_logged("Starting")
    assert "num_shard=2" in launched.log


def test_environment_is_logged_and_the_server_starts(launch: Launch) -> None:
    """TGI's Docker tests start every container with `--env`."""
    launched = launch("--env")
    launched.until_logged("Listening on")
    first = launched.log.splitlines()[0]
    assert f"Environment legato={__version__}" in first
    assert f"python={platform.python_version()}" in first


def test_a_variable_of_tgi_that_does_nothing_is_reported_once(launch: Launch) -> None:
    launched = launch(ATTENTION="flashinfer")
    launched.until_logged("Listening on")
    assert launched.log.count("ATTENTION has no effect") == 1
