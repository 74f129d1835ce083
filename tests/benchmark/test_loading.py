"""benchmarks/loading.py: what it writes is a checkpoint, what it measures is there, and it leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.loading import INDEX, Checkpoint, Files, Peaks, Run, read_seconds, serve, write, written
from legato.modelfiles.files import ModelFiles

ROOT = Path(__file__).parents[2]
TINY = Checkpoint(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, vocab=128, files=3)
WORDS = ["--layers=2", "--hidden=64", "--inner=96", "--heads=4", "--kv-heads=2", "--vocab=128", "--files=3"]


def start(*words: str, temporary: Path) -> subprocess.Popen[str]:
    """The tool in a session of its own, where its children can be counted."""
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.loading", *WORDS, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip


def members(session: int) -> list[int]:
    found = []
    for pid in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
        try:
            if os.getsid(pid) == session:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def test_a_checkpoint_is_small_numbers_in_bfloat16_under_the_names_of_a_llama(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    ModelFiles.open(tmp_path).check_weights()
    tensors = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TINY.tensors
    head = tensors["lm_head.weight"]
    assert head.dtype is torch.bfloat16
    assert head.float().std().item() == pytest.approx(0.02, rel=0.05)


def test_files_of_a_large_model_have_about_the_same_size() -> None:
    large = Checkpoint(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, vocab=128_256, files=4)
    sizes: dict[str, int] = {}
    for name, file in large.weight_map.items():
        sizes[file] = sizes.get(file, 0) + 2 * math.prod(large.tensors[name])
    assert list(sizes) == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert sum(sizes.values()) == 2 * 8_030_261_248
    assert max(sizes.values()) < 1.1 * min(sizes.values())


def test_more_files_than_tensors_are_as_many_as_tensors(tmp_path: Path) -> None:
    many = Checkpoint(layers=1, hidden=8, inner=8, heads=1, kv_heads=1, vocab=8, files=10_000)
    write(many, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(many.tensors)
    ModelFiles.open(tmp_path).check_weights()


def test_a_kept_checkpoint_is_used_again(tmp_path: Path) -> None:
    def moments() -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in (tmp_path / "kept").iterdir()}

    with written(TINY, tmp_path / "kept"):
        before = moments()
    with written(TINY, tmp_path / "kept"):
        assert moments() == before
    assert INDEX in before


def test_a_checkpoint_that_is_not_kept_goes_away() -> None:
    with written(TINY, None) as folder:
        assert (folder / INDEX).exists()
    assert not folder.exists()


@pytest.mark.parametrize("content", ["another shape", "other files", "unfinished", "no JSON"])
def test_a_folder_with_anything_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    write(TINY, tmp_path)
    if content == "another shape":
        (tmp_path / "config.json").write_text(json.dumps(TINY.config | {"hidden_size": 32}))
    elif content == "other files":
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TINY.tensors, "model.safetensors")}))
    elif content == "unfinished":
        (tmp_path / INDEX).unlink()
    else:
        (tmp_path / "config.json").write_text("hello")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match=f"--keep {tmp_path}: holds something else"), written(TINY, tmp_path):
        pass
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_peak_of_memory_outlives_the_memory() -> None:
    peaks = Peaks(os.getpid())
    until(lambda: peaks.bytes["RssAnon"] > 0)
    before = peaks.bytes["RssAnon"]
    held = bytearray(b"x") * (128 << 20)
    until(lambda: peaks.bytes["RssAnon"] - before > 100 << 20)
    del held
    time.sleep(0.05)  # it is looked at again
    assert peaks.stop()["RssAnon"] - before > 100 << 20


def test_rates_are_bytes_of_files_over_seconds() -> None:
    files = Files(2, 6_000_000_000, 4_000_000_000)
    assert Run(1.5, 9.0, "cuda", "bfloat16", {}).rate(files) == 4.0
    assert Run(0.0, 9.0, "cuda", "bfloat16", {}).rate(files) is None


def test_reading_takes_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(40 << 20))
    assert 0.001 < read_seconds([tmp_path / "file"]) < 10


@pytest.mark.benchmarks
def test_the_figures_are_printed_and_written_with_their_circumstances(tmp_path: Path) -> None:
    words = ["--repeat=2", "--device=cpu", f"--out={tmp_path}/new/out.json"]
    tool = start(*words, temporary=tmp_path / "temporary")
    out, err = tool.communicate(timeout=120)
    assert tool.returncode == 0, err
    assert [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")][2:] == ["1", "2"]
    assert "3 files" in out and "to cpu in float32" in out and "from the page cache" in out
    figures = json.loads((tmp_path / "new" / "out.json").read_text())
    assert {"date", "command", "commit", "machine", "work"} <= set(figures)
    assert figures["files"]["count"] == 3
    assert figures["ceilings"]["read_gb_per_second"] > 0
    for run in figures["runs"]:
        assert 0 <= run["seconds"] < run["start_seconds"]
        assert run["memory"]["RssAnon"] > 10_000_000 and run["memory"]["RssFile"] > 10_000_000
        assert run["peak_of_largest_file"] == run["memory"]["VmHWM"] / figures["files"]["largest"]
    assert len(figures["runs"]) == 2
    assert members(tool.pid) == [] and list((tmp_path / "temporary").iterdir()) == []


def test_a_server_that_dies_has_the_last_word(tmp_path: Path) -> None:
    tool = start("--device=nowhere", temporary=tmp_path / "temporary")
    out, err = tool.communicate(timeout=60)
    assert (tool.returncode, out) == (1, "")
    assert "error: the server ended with code 2:" in err and "'nowhere' is not one of" in err
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    write(TINY, tmp_path)
    with pytest.raises(SystemExit, match=r"the server had not loaded after 0.1 s \(--timeout\)"):
        serve(tmp_path, "cpu", patience=0.1)


@pytest.mark.benchmarks
def test_an_interrupted_tool_leaves_neither_server_nor_checkpoint(tmp_path: Path) -> None:
    tool = start("--device=cpu", "--repeat=100", temporary=tmp_path / "temporary")
    deadline = time.monotonic() + 30
    while not any("legato.server.cli" in Path(f"/proc/{pid}/cmdline").read_text() for pid in members(tool.pid)):
        assert time.monotonic() < deadline and tool.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)
    assert list((tmp_path / "temporary").glob(f"*/{INDEX}"))
    tool.send_signal(signal.SIGTERM)
    tool.communicate(timeout=30)
    assert tool.returncode == 128 + signal.SIGTERM
    assert members(tool.pid) == [] and list((tmp_path / "temporary").iterdir()) == []
