"""The registry of adapters: rules for sources, loading beside others, waiting for the last request, new shards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from legato.common.errors import OptionError
from legato.pb import generate_pb2 as pb
from legato.router import adapters as module
from legato.router.adapters import AdapterRefused, AdapterRegistry, AdapterRules
from legato.router.shards import AdapterFailed, GrpcShards
from legato.scheduling.limits import SchedulerLimits
from legato.scheduling.scheduler import Scheduler
from legato.scheduling.state import GenerationRequest, Output


class FakeShards(GrpcShards):
    """What shards have, without sockets."""

    def __init__(self, *names: str) -> None:
        super().__init__([])
        self.loaded = {name: f"/start/{name}" for name in names}
        self.refused: set[str] = set()

    async def load_adapter(self, name: str, path: str) -> pb.AdapterInfo:
        await asyncio.sleep(0)
        if name in self.refused:
            raise AdapterFailed(f"{path} is broken")
        self.loaded[name] = path
        return pb.AdapterInfo(adapter_id=name, path=path, num_pages=1)

    async def unload_adapter(self, name: str) -> None:
        del self.loaded[name]

    async def info(self) -> pb.InfoResponse:
        return pb.InfoResponse(adapters=self.infos)

    @property
    def infos(self) -> list[pb.AdapterInfo]:
        return [pb.AdapterInfo(adapter_id=name, path=path, num_pages=1) for name, path in self.loaded.items()]


class FakeSteps:
    def __init__(self, shards: FakeShards) -> None:
        self.scheduler = Scheduler(SchedulerLimits(64, 4, 8, 64, num_adapter_pages=8))
        self.shards = shards
        self.placing: set[str] = set()
        self.ended: dict[int, Output] = {}

    def end(self, request_id: int, output: Output) -> None:
        self.scheduler.cancel(request_id)
        self.ended[request_id] = output


class World:
    def __init__(self, root: Path, *start: str) -> None:
        self.shards = FakeShards(*start)
        self.steps = FakeSteps(self.shards)
        rules = AdapterRules((str(root), "acme/*"))
        self.registry = AdapterRegistry(cast(Any, self.steps), self.shards.infos, rules, ("base", "tgi"))
        self.told: list[list[str]] = []
        self.registry.on_change = lambda: self.told.append([info.name for info in self.registry.adapters])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of an adapter, as far as the router looks."""
    folder = tmp_path / "root" / "french"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    header = json.dumps({}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_only_what_is_allowed_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for each in (inside / "deep", outside):
        each.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    rules = AdapterRules((str(inside), "acme/*", "other/one"))
    for good in (str(inside / "deep"), f"{inside}/./deep", "acme/french", "other/one"):
        rules.check(good)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "local").mkdir(parents=True)
    wrong = [str(outside), str(inside / "link"), f"{inside}/../out", "other/two", "../out", "acme/../out", "acme/local"]
    for bad in [*wrong, str(tmp_path / "inside-not"), ""]:
        with pytest.raises(AdapterRefused) as caught:
            rules.check(bad)
        assert caught.value.status == 403
    with pytest.raises(OptionError, match="needs --lora-allow"):
        AdapterRules(())


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 5))  # type: ignore[arg-type]


def test_what_is_loaded_has_a_new_number_each_time(folder: Path) -> None:
    async def test() -> None:
        world = World(folder.parent, "start")
        first = await world.registry.load("french", str(folder))
        assert world.told == [["start", "french"]] and world.shards.loaded["french"] == str(folder)
        assert first.number in world.steps.scheduler.adapters.known
        await world.registry.unload("french")
        assert world.told[-1] == ["start"] and "french" not in world.shards.loaded
        assert (await world.registry.load("french", str(folder))).number != first.number

    run(test)


@pytest.mark.parametrize(
    ("name", "source", "status"),
    [
        ("start", None, 409),
        ("base", None, 422),
        ("tgi", None, 422),
        ("", None, 422),
        ("x", "/etc", 403),
        ("y", "", 403),
    ],
)
def test_what_cannot_be_loaded_is_refused(folder: Path, name: str, source: str | None, status: int) -> None:
    async def test() -> None:
        world = World(folder.parent, "start")
        with pytest.raises(AdapterRefused) as caught:
            await world.registry.load(name, str(folder) if source is None else source)
        assert caught.value.status == status and not world.told

    run(test)


def test_what_a_shard_cannot_read_is_not_there(folder: Path) -> None:
    async def test() -> None:
        world = World(folder.parent)
        world.shards.refused.add("french")
        with pytest.raises(AdapterRefused, match="is broken"):
            await world.registry.load("french", str(folder))
        with pytest.raises(AdapterRefused, match="is missing"):
            await world.registry.load("empty", str(folder.parent))
        with pytest.raises(AdapterRefused, match="no adapter 'french' is loaded") as caught:
            await world.registry.unload("french")
        assert caught.value.status == 404 and not world.registry.adapters

    run(test)


def test_an_adapter_goes_with_its_last_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0)

    async def test() -> None:
        world = World(folder.parent, "start")
        number = world.registry.adapters[0].number
        world.steps.scheduler.submit(GenerationRequest(1, [5, 6], 4, adapter=number))
        unloading = asyncio.create_task(world.registry.unload("start"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert world.told == [[]], "new requests are refused at once"
        assert "start" in world.shards.loaded and not unloading.done()
        with pytest.raises(AdapterRefused, match="being loaded or unloaded"):
            await world.registry.load("start", str(folder))
        world.steps.placing = {"start"}
        world.steps.scheduler.cancel(1)
        await asyncio.sleep(0)
        assert not unloading.done(), "a step in flight still brings it to the device"
        world.steps.placing = set()
        await unloading
        assert "start" not in world.shards.loaded

    run(test)


def test_new_shards_get_what_was_loaded_and_lose_what_was_unloaded(folder: Path) -> None:
    async def test() -> None:
        world = World(folder.parent, "start", "other")
        await world.registry.load("french", str(folder))
        await world.registry.unload("other")
        fresh = FakeShards("start", "other")
        await world.registry.restore(fresh)
        assert fresh.loaded == {"start": "/start/start", "french": str(folder)}

    run(test)


def test_an_adapter_that_new_shards_cannot_read_ends_its_requests_and_no_others(folder: Path) -> None:
    async def test() -> None:
        world = World(folder.parent, "start")
        info = await world.registry.load("french", str(folder))
        for request_id, adapter in ((1, info.number), (2, 0)):
            world.steps.scheduler.submit(GenerationRequest(request_id, [5, 6], 4, adapter=adapter))
        fresh = FakeShards("start")
        fresh.refused.add("french")
        await world.registry.restore(fresh)
        assert list(world.steps.ended) == [1] and "is lost" in str(world.steps.ended[1].error)
        assert world.told[-1] == ["start"]

    run(test)


def test_without_permission_nothing_changes() -> None:
    async def test() -> None:
        registry = AdapterRegistry(cast(Any, FakeSteps(FakeShards())), (), None)
        for change in (registry.load("a", "/b"), registry.unload("a")):
            with pytest.raises(AdapterRefused, match="--lora-allow-runtime") as caught:
                await change
            assert caught.value.status == 403

    run(test)


def test_an_adapter_of_the_start_cannot_be_called_like_the_model() -> None:
    with pytest.raises(OptionError, match="the name of the base model"):
        AdapterRegistry(cast(Any, FakeSteps(FakeShards())), FakeShards("base").infos, None, ("base", "tgi"))
