"""Models that see, against transformers: tokens and logits of prompts with pictures, alone and among others."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from legato.layers.linear import Linear
from legato.layers.mlp import GatedMLP
from legato.layers.shard import Shard
from legato.modelfiles.files import ModelFiles
from legato.models.config import ModelConfig
from legato.models.qwen2_5_vl import pad_inner
from legato.models.registry import get_model
from legato.models.vision import CrossModel
from legato.pb import generate_pb2 as pb
from legato.quantization.dense import DenseWeight
from legato.scheduling.state import GenerationRequest, PromptSpan
from legato.server.vision.cross import CrossVisionEncoder
from legato.server.vision.images import VisionEncoder
from legato.server.vision.pixels import num_pixels, pixels_of
from legato.server.vision.preparing import MOST_STARTED, ImagePreparation, PreparedImage
from legato.vision.files import decode
from legato.vision.prompts import PromptImage
from legato.vision.rules import ImageRules, Size, image_rules
from tests.generation import admission_of, generation
from tests.models import tiny_cross as cross
from tests.models import tiny_gemma_vision as gemma
from tests.models import tiny_llama4 as llama4
from tests.models import tiny_vision as tiny
from tests.models.shards import ShardProcesses
from tests.server.local import DEVICE, LocalServer, load

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

NUM_TOKENS = 24
TOLERANCE = 5e-4
MAX_ROWS = 16

Oracle = Callable[[Path, list[int], list[bytes], int], tuple[list[int], torch.Tensor]]


@dataclass(frozen=True)
class Seeing:
    folder: Path
    rules: ImageRules
    oracle: Oracle

    def server(self, shard: Shard | None = None, **settings: Any) -> LocalServer:
        files = ModelFiles.open(self.folder)
        model: Any = get_model(files, ModelConfig.from_hf(files.config()), torch.float32, DEVICE, shard=shard)
        server = LocalServer(model, max_rows=MAX_ROWS, **settings)
        encoder = CrossVisionEncoder if isinstance(model, CrossModel) else VisionEncoder
        server.engine.vision_encoder = encoder(model, self.rules, MAX_ROWS, DEVICE)
        return server

    def request(self, number: int, *parts: int | bytes) -> GenerationRequest:
        """Token ids and pictures."""
        pictures = [part for part in parts if isinstance(part, bytes)]
        sizes = [Size(picture.height, picture.width) for picture in map(decode, pictures)]
        counts = [self.rules.num_tokens(size) for size in sizes]
        token_id = self.rules.token_id
        ids, starts = self.rules.placed([part if isinstance(part, int) else token_id for part in parts], counts)
        images = tuple(
            PromptImage(data, "image/png", PromptSpan(start, count, token_id))
            for data, start, count in zip(pictures, starts, counts, strict=True)
        )
        return generation(number, ids, NUM_TOKENS, ignore_eos=True, images=images)

    def expected(self, request: GenerationRequest) -> tuple[list[int], torch.Tensor]:
        ids = [self.rules.token_id if token_id >= 1 << 32 else token_id for token_id in request.input_ids]
        return self.oracle(self.folder, ids, [image.image.data for image in admission_of(request).images], NUM_TOKENS)


@dataclass(frozen=True)
class Family:
    make: Callable[[Path], Path]
    oracle: Oracle


FAMILIES = {
    "qwen2-vl": Family(tiny.tiny_qwen2_vl, tiny.qwen_oracle),
    "qwen2-5-vl": Family(tiny.tiny_qwen2_5_vl, tiny.qwen_oracle),
    "qwen3-vl": Family(tiny.tiny_qwen3_vl, tiny.qwen_oracle),
    "gemma3": Family(gemma.tiny_gemma3_images, gemma.gemma3_oracle),
    "llama4": Family(llama4.tiny_llama4, llama4.llama4_oracle),
    "mllama": Family(cross.tiny_mllama, cross.mllama_oracle),
    "paligemma": Family(gemma.tiny_paligemma, gemma.paligemma_oracle),
    "paligemma2": Family(gemma.tiny_paligemma2, gemma.paligemma_oracle),
    "idefics": Family(cross.tiny_idefics, cross.idefics_oracle),
    "idefics2": Family(tiny.tiny_idefics2, tiny.idefics2_oracle),
    "idefics3": Family(tiny.tiny_idefics3, tiny.idefics_oracle),
    "smolvlm": Family(tiny.tiny_smolvlm, tiny.idefics_oracle),
    "llava-next": Family(tiny.tiny_llava_next, tiny.llava_oracle),
}


def make(name: str, folder: Path) -> Seeing:
    rules = image_rules(ModelFiles.open(FAMILIES[name].make(folder)))
    assert rules is not None
    return Seeing(folder, rules, FAMILIES[name].oracle)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make("qwen2-vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make("llava-next", tmp_path_factory.mktemp("llava_next"))


@pytest.fixture(params=["qwen", "llava"])
def seeing(request: pytest.FixtureRequest) -> Seeing:
    found: Seeing = request.getfixturevalue(request.param)
    return found


def prompts(seeing: Seeing) -> list[GenerationRequest]:
    """One picture, two, none, and one at the very beginning."""
    wide, tall, small = tiny.picture(130, 90, 1), tiny.picture(60, 200, 2), tiny.picture(31, 31, 3)
    texts = [list(np.random.default_rng(seed).integers(64, 320, 12).tolist()) for seed in range(4)]
    return [
        seeing.request(0, 1, 20, tiny.BEGIN, wide, tiny.END, *texts[0]),
        seeing.request(1, 1, tiny.BEGIN, tall, tiny.END, *texts[1], tiny.BEGIN, small, tiny.END, 70),
        seeing.request(2, 1, *texts[2]),
        seeing.request(3, small, *texts[3]),
    ]


def logits_of(server: LocalServer, request: GenerationRequest) -> torch.Tensor:
    """[NUM_TOKENS, vocab], of a request that is alone."""
    seen: list[torch.Tensor] = []
    model: Any = server.engine.model
    compute = model.logits
    model.logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]
    server.run([request])
    return torch.cat(seen).cpu()


def answers(seeing: Seeing, shard: Shard | None = None) -> list[tuple[list[int], torch.Tensor]]:
    """To each prompt alone, from one shard's point of view; all shards of a model call this together."""
    found = []
    for request in prompts(seeing):
        server = seeing.server(shard)
        logits = logits_of(server, request)[:NUM_TOKENS]
        found.append((server.tokens(request.id), logits))
    return found


def marks(name: str, world_size: int) -> list[pytest.MarkDecorator]:
    """Towers are whole on every shard, and some families are others by another name, or simpler: for
    `make test-shards`."""
    is_variant = name in ("smolvlm", "paligemma", "idefics") or (
        world_size == 2 and name not in ("qwen2-vl", "llava-next")
    )
    return [pytest.mark.shards] if is_variant else []


@pytest.mark.parametrize(
    ("name", "world_size"),
    [pytest.param(name, size, id=f"{name}-{size}", marks=marks(name, size)) for name in FAMILIES for size in (1, 2)],
)
def test_tokens_and_logits_equal_transformers(
    name: str, world_size: int, tmp_path: Path, shards: ShardProcesses
) -> None:
    seeing = make(name, tmp_path)
    ours = answers(seeing) if world_size == 1 else shards.call(answers, seeing, world_size=world_size)[0]
    for request, (tokens, logits) in zip(prompts(seeing), ours, strict=True):
        expected, behind = seeing.expected(request)
        assert tokens == expected
        assert (logits - behind).abs().max() < TOLERANCE


def test_a_picture_matters(seeing: Seeing) -> None:
    one, other = (seeing.request(0, 1, tiny.picture(90, 90, seed), 70) for seed in (1, 2))
    assert one.input_ids[2] != other.input_ids[2]
    assert (logits_of(seeing.server(), one)[0] - logits_of(seeing.server(), other)[0]).abs().max() > 0.1


@pytest.mark.parametrize("step_tokens", [512, 17])
def test_a_mixed_batch_in_steps_of_any_size_says_what_each_says_alone(seeing: Seeing, step_tokens: int) -> None:
    requests = prompts(seeing)
    answers = seeing.server(step_tokens=step_tokens).run(requests)
    assert [answers[request.id] for request in requests] == [seeing.expected(request)[0] for request in requests]


def test_preemption_changes_nothing_and_nothing_is_looked_at_twice(seeing: Seeing) -> None:
    requests = prompts(seeing)
    longest = max(len(request.input_ids) for request in requests) + NUM_TOKENS
    roomy = seeing.server()
    tight = seeing.server(num_blocks=longest // 8 + 3, block_size=8, step_tokens=32, prefix_caching=False)
    assert tight.run(requests) == roomy.run(requests)
    assert tight.scheduler.stats.preemptions > 0
    assert tight.engine.vision_encoder is not None and tight.engine.vision_encoder.num_encoded == 3


def test_a_picture_in_the_prefix_cache_is_not_looked_at_and_another_one_is(seeing: Seeing) -> None:
    server = seeing.server(block_size=4)
    encoder = server.engine.vision_encoder
    assert encoder is not None
    text = list(range(100, 120))
    first = seeing.request(1, 1, tiny.picture(90, 90, 1), *text)
    server.run([first])
    encoder._cache._kept.clear()  # only what the cache knows counts
    again = seeing.request(2, 1, tiny.picture(90, 90, 1), *text, 200)
    other = seeing.request(3, 1, tiny.picture(90, 90, 2), *text, 200)
    server.run([again])
    assert encoder.num_encoded == 1 and server.outputs[2][0].num_cached > 20
    server.run([other])
    assert encoder.num_encoded == 2 and server.outputs[3][0].num_cached < 4
    assert server.tokens(2) == seeing.expected(again)[0]
    assert server.tokens(3) == seeing.expected(other)[0]


def test_images_of_a_step_are_prepared_in_threads(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    prepare = ImagePreparation._prepare

    def noting(self: ImagePreparation, data: bytes) -> PreparedImage:
        prepared.append(threading.current_thread().name)
        return prepare(self, data)

    monkeypatch.setattr(ImagePreparation, "_prepare", noting)
    server = seeing.server()
    server.run(prompts(seeing))  # four pictures, of which two are the same
    assert len(prepared) == 3 and all(name.startswith("images") for name in prepared)


def test_images_are_prepared_from_the_moment_that_their_step_arrives(seeing: Seeing) -> None:
    """Not when it is launched: the device would wait for Pillow."""
    server = seeing.server()
    encoder = server.engine.vision_encoder
    assert encoder is not None
    data = tiny.picture(90, 90, 1)
    image = pb.AdmittedImage(image=pb.Image(data=data, mimetype="image/png"), start=0, num_tokens=4)
    encoder.expect([pb.Admission(row=0, images=[image])])
    encoder.expect([pb.Admission(row=0, images=[image])])  # known already
    (started,) = encoder._preparation._started.values()
    taken = encoder._preparation.take(hashlib.sha256(data).digest(), data)
    assert taken is started.result() and not encoder._preparation._started


def test_an_image_that_a_step_before_has_encoded_is_not_kept_for_nobody(seeing: Seeing) -> None:
    """Two steps are in flight: it was not encoded yet when the second one arrived, and is when that is launched."""
    server = seeing.server()
    encoder, data = server.engine.vision_encoder, tiny.picture(90, 90, 1)
    assert encoder is not None
    server.run([seeing.request(1, 100, data)])
    encoder._preparation.start({hashlib.sha256(data).digest(): data})
    server.run([seeing.request(2, 200, data)])
    assert encoder.num_encoded == 1 and not encoder._preparation._started


def test_images_that_nobody_takes_are_forgotten(qwen: Seeing) -> None:
    preparation = ImagePreparation(qwen.rules)
    for number in range(MOST_STARTED + 5):
        preparation.start({str(number).encode(): tiny.picture(28, 28, 1)})
    assert len(preparation._started) == MOST_STARTED


def test_embeddings_are_given_up_once_the_prompt_is_computed(seeing: Seeing) -> None:
    server = seeing.server()
    server.run(prompts(seeing))
    assert server.engine.vision_encoder is not None
    assert all(not row.images for row in server.engine.vision_encoder._rows.values())


def test_pixels_are_those_of_the_processor(qwen: Seeing) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(qwen.folder)
    for width, height in ((1, 1), (28, 28), (130, 90), (60, 200), (500, 333), (1000, 20)):
        data = tiny.picture(width, height, 4)
        expected = processor(tiny.decoded([data]), return_tensors="np")["pixel_values"]
        ours = pixels_of(decode(data), qwen.rules)
        assert ours.shape == expected.shape and np.abs(ours - expected).max() < 1e-5


@pytest.mark.parametrize("width", [1, 27, 56, 99, 640, 1999, 4000])
@pytest.mark.parametrize("height", [1, 28, 57, 333, 1080])
def test_tokens_are_counted_as_the_processor_counts(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    from legato.vision.rules import PixelNormalization, QwenRules, UnsupportedImageShape

    rules = QwenRules(tiny.IMAGE, PixelNormalization())
    try:
        tall, wide = smart_resize(height, width, 28, rules.min_pixels, rules.max_pixels)
    except ValueError:
        with pytest.raises(UnsupportedImageShape):
            rules.num_tokens(Size(height, width))
    else:
        assert rules.num_tokens(Size(height, width)) == tall * wide // 28 // 28


def test_a_captured_decode_reads_how_far_each_row_has_moved(qwen: Seeing) -> None:
    """A graph knows nothing of pictures but the rows' numbers."""
    server = qwen.server()
    model: Any = server.engine.model
    for request in prompts(qwen):
        server.submit(request)
    server.step()
    images = server.engine.vision_encoder._rows  # type: ignore[union-attr]
    rows = torch.tensor(sorted(images), dtype=torch.int32, device=DEVICE)
    decode_step: Any = SimpleNamespace(images=None, positions=torch.full((4,), 100, device=DEVICE), rows=rows)
    expected = [100 + images[row].shift for row in sorted(images)]
    assert model.positions(decode_step).tolist() == expected
    assert min(expected) < 100 and 100 in expected


def test_zeros_between_the_products_of_a_tower_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(*size, generator=generator) for size in ((200, 32), (200,), (32, 100), (32,), (5, 32))]
    gate_up, down = Linear(DenseWeight(*matrices[:2])), Linear(DenseWeight(*matrices[2:4]))
    expected = GatedMLP(gate_up, down, "silu")(matrices[4])
    pad_inner(gate_up, down)
    assert (gate_up.weight.weight.shape, down.weight.weight.shape) == ((256, 32), (32, 128))  # type: ignore[attr-defined]
    torch.testing.assert_close(GatedMLP(gate_up, down, "silu")(matrices[4]), expected)


def test_warmup_encodes_the_largest_image_in_its_own_shape(qwen: Seeing) -> None:
    shapes: list[tuple[int, ...]] = []
    server = qwen.server()
    model: Any = server.engine.model
    encode = model.encode_image
    model.encode_image = lambda pixels, shape: shapes.append((*encode(pixels, shape).shape, shape.height)) or None
    assert server.engine.vision_encoder is not None
    with torch.inference_mode():
        server.engine.vision_encoder.encode_largest(50)
        server.engine.vision_encoder.encode_largest(5000)
    assert shapes == [(49, 96, 7), (64, 96, 8)]


def test_tiles_are_those_of_the_processor_and_as_many_tokens_as_it_counts(llava: Seeing) -> None:
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    processor = LlavaNextImageProcessorPil.from_pretrained(llava.folder)
    counter: Any = LlavaNextProcessor.__new__(LlavaNextProcessor)
    counter.image_processor, counter.patch_size, counter.num_additional_image_tokens = processor, 7, 0
    for width, height in ((1, 1), (28, 28), (130, 90), (60, 200), (57, 56), (300, 20), (29, 31)):
        data = tiny.picture(width, height, 4)
        expected = processor(tiny.decoded([data]), return_tensors="np")["pixel_values"][0]
        ours = pixels_of(decode(data), llava.rules)
        assert ours.shape == expected.shape == num_pixels(Size(height, width), llava.rules)
        assert np.abs(ours - expected).max() < 1e-5
        assert llava.rules.num_tokens(Size(height, width)) == counter._get_number_of_features(height, width, 28, 28)


def test_idefics_cuts_images_as_its_processors_do(tmp_path: Path) -> None:
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    families = (("idefics2", Idefics2ImageProcessorPil), ("idefics3", Idefics3ImageProcessorPil))
    for name, processors in families:
        seeing = make(name, tmp_path / name)
        file = seeing.folder / "preprocessor_config.json"
        if name == "idefics2":  # of any shape
            file.write_text(json.dumps(dict(size={"shortest_edge": 20, "longest_edge": 50}, do_image_splitting=True)))
            seeing = make_again(seeing)
        processor = processors.from_pretrained(seeing.folder)
        for width, height in ((2, 2), (28, 28), (130, 90), (60, 200), (57, 56), (300, 20), (29, 31)):
            data = tiny.picture(width, height, 4)
            expected = processor([tiny.decoded([data])], return_tensors="np")["pixel_values"][0]
            ours = pixels_of(decode(data), seeing.rules)
            assert ours.shape == expected.shape and np.abs(ours - expected).max() < 1e-5


def make_again(seeing: Seeing) -> Seeing:
    rules = image_rules(ModelFiles.open(seeing.folder))
    assert rules is not None
    return Seeing(seeing.folder, rules, seeing.oracle)


def test_a_mistral_may_be_the_language_model(tmp_path: Path) -> None:
    folder = tiny.tiny_llava_next(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"model_type": "mistral", "sliding_window": 8}
    (folder / "config.json").write_text(json.dumps(config))
    model: Any = load(folder)
    assert {layer.attention.attention.scoring.window for layer in model.layers} == {8}


def test_images_that_see_themselves_are_never_cut(tmp_path: Path) -> None:
    """Steps of 40 tokens have room for one image at a time, beside the decodes of the others. Blocks end within an
    image, so that the second time a part of it is in the prefix cache."""
    seeing = make("gemma3", tmp_path)
    requests = prompts(seeing)
    server = seeing.server(step_tokens=40, block_size=4)
    expected = [seeing.expected(request)[0] for request in requests]
    assert [server.run(requests)[request.id] for request in requests] == expected
    again = seeing.request(9, 1, 20, tiny.BEGIN, tiny.picture(130, 90, 1), 70, 71)
    assert server.run([again])[9] == seeing.expected(again)[0]
    assert server.outputs[9][0].num_cached == 20


def test_a_prompt_that_sees_itself_is_computed_at_once_and_again_after_preemption(tmp_path: Path) -> None:
    seeing = make("paligemma2", tmp_path)
    requests = prompts(seeing)
    longest = max(len(request.input_ids) for request in requests) + NUM_TOKENS
    tight = seeing.server(num_blocks=longest // 8 + 3, block_size=8, step_tokens=longest + MAX_ROWS)
    assert tight.run(requests) == {request.id: seeing.expected(request)[0] for request in requests}
    assert tight.scheduler.stats.preemptions > 0


def test_images_beside_the_text_are_shared_and_computed_in_pieces(tmp_path: Path) -> None:
    """In steps of 24 tokens some have images alone. The second time they come from the prefix cache."""
    seeing = make("mllama", tmp_path)
    requests = prompts(seeing)
    server = seeing.server(step_tokens=24)
    assert server.run(requests) == {request.id: seeing.expected(request)[0] for request in requests}
    wide = tiny.picture(130, 90, 1)
    again = seeing.request(9, 1, 20, tiny.BEGIN, wide, tiny.END, 70, 71)
    assert server.run([again])[9] == seeing.expected(again)[0]
    assert server.outputs[9][0].num_cached == 128
    beside = seeing.request(10, 1, wide, tiny.picture(31, 31, 3), 70, 71)
    assert server.run([beside])[10] == seeing.expected(beside)[0]
