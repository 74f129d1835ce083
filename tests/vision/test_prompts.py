"""Images in requests: placeholders in the prompt, limits, and errors."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from legato.http.app import create_app
from legato.ipc.messages import Submit
from legato.pb import generate_pb2 as pb
from legato.pb import unpack_token_ids
from legato.router.shards import _admission
from legato.scheduling.prefix_tree import PrefixTree
from legato.scheduling.state import Admission, GenerationRequest
from legato.vision.rules import PixelNormalization, QwenRules
from tests.chat.cases import make
from tests.http.asgi import LIMITS, SETTINGS, Answer, FakeBackend, post
from tests.http.asgi import tokenizer as plain_tokenizer
from tests.models.tiny_vision import QWEN_TEMPLATE, picture

pytest.importorskip("PIL", reason="pictures need Pillow, the extra `vision`")

CHAT = "/v1/chat/completions"


def tokenizer() -> Tokenizer:
    own = Tokenizer.from_str(plain_tokenizer().to_str())
    own.add_special_tokens([AddedToken(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")])
    return own


TOKENIZER = tokenizer()
IMAGE, BEGIN, END = (TOKENIZER.token_to_id(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end"))
RULES = QwenRules(IMAGE, PixelNormalization(), max_pixels=28 * 28 * 16)
WIDE, TALL = picture(112, 56, 1), picture(56, 84, 2)  # 8 tokens and 6


class Server:
    def __init__(self, *, sees: bool = True, **settings: Any) -> None:
        self.backend = FakeBackend(limits=replace(LIMITS, max_input_tokens=80, max_total_tokens=120))
        self.template = make(QWEN_TEMPLATE)
        self.app = create_app(
            self.backend, TOKENIZER, replace(SETTINGS, payload_limit=1 << 26, **settings),
            chat_template=self.template, image_rules=RULES if sees else None,
        )  # fmt: skip

    def ask(self, path: str, body: Any) -> Answer:
        return asyncio.run(post(self.app, path, body))

    def chat(self, *content: Any) -> Answer:
        return self.ask(CHAT, {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 4})

    @property
    def request(self) -> GenerationRequest:
        return self.backend.requests[-1]

    def sent(self) -> pb.Admission:
        """What a shard would receive."""
        return _admission(Admission(0, self.request, list(self.request.input_ids), 0, 0, []))


def uri(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def problem(answer: Answer) -> str:
    assert answer.status == 422, answer.body
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def test_image_tokens_replace_the_images_of_a_chat() -> None:
    server = Server()
    assert server.chat(text("see"), image(uri(WIDE)), text("and"), image(uri(TALL))).status == 200
    sent = server.sent()
    ids = unpack_token_ids(sent.input_ids).tolist()
    assert [ids.count(token_id) for token_id in (IMAGE, BEGIN, END)] == [14, 2, 2]
    assert [(span.start, span.num_tokens) for span in sent.images] == [
        (ids.index(IMAGE), 8),
        (len(ids) - ids[::-1].index(IMAGE) - 6, 6),
    ]
    assert [span.image.data for span in sent.images] == [WIDE, TALL]
    assert sent.images[0].image.mimetype == "image/png"


def test_markdown_in_a_native_prompt_is_an_image() -> None:
    server = Server()
    answer = server.ask("/generate", {"inputs": f"a ![]({uri(WIDE)}) b", "parameters": {"max_new_tokens": 2}})
    assert answer.status == 200
    ids = unpack_token_ids(server.sent().input_ids).tolist()
    first = ids.index(IMAGE)
    assert ids[first - 1 : first + 9] == [BEGIN, *[IMAGE] * 8, END]


def test_tokenizing_counts_the_tokens_of_images() -> None:
    """As many as a request with the same images is billed for."""
    server, content = Server(), [text("see"), image(uri(WIDE)), text("and"), image(uri(TALL))]
    server.chat(*content)
    answer = server.ask("/chat_tokenize", {"messages": [{"role": "user", "content": content}]}).json()
    ids = [token["id"] for token in answer["tokenize_response"]]
    assert ids == unpack_token_ids(server.sent().input_ids).tolist()
    assert answer["templated_text"].count("<|image_pad|>") == 2 and "base64" not in answer["templated_text"]
    inputs = f"a ![]({uri(WIDE)}) b"
    server.ask("/generate", {"inputs": inputs, "parameters": {"max_new_tokens": 2}})
    tokens = server.ask("/tokenize", {"inputs": inputs}).json()
    assert [token["id"] for token in tokens] == unpack_token_ids(server.sent().input_ids).tolist()
    places = {(token["start"], token["stop"]) for token in tokens if token["id"] == IMAGE}
    assert places == {(18, 31)}  # all in the place of the placeholder


def test_tokenizing_text_needs_no_image_for_a_placeholder() -> None:
    tokens = Server().ask("/tokenize", {"inputs": "<|image_pad|>"}).json()
    assert [token["id"] for token in tokens].count(IMAGE) == 1
    assert "image placeholders" in problem(Server().ask("/tokenize", {"inputs": f"<|image_pad|> ![]({uri(WIDE)})"}))


@pytest.mark.parametrize("mime", ["", "image/*", "image/x-png", "application/octet-stream", "IMAGE/PNG"])
def test_a_declared_type_that_is_no_supported_format_is_ignored(mime: str) -> None:
    assert Server().chat(image(uri(WIDE, mime))).status == 200


def test_a_text_model_refuses_images_and_takes_other_markdown_for_text() -> None:
    server = Server(sees=False)
    for url in ("data:image/png;base64,AAAA", "https://example.com/a.png"):
        assert "text only" in problem(server.ask("/generate", {"inputs": f"a ![]({url})"}))
    for inputs in ("![logo](https://example.com/a.png)", "![](figure.png)", "![]()"):
        assert server.ask("/generate", {"inputs": inputs}).status == 200
    assert not server.sent().images
    assert "text only" in problem(server.chat(image(uri(WIDE))))


def test_cache_keys_of_images_tell_them_apart() -> None:
    server = Server()
    for data in (WIDE, WIDE, picture(112, 56, 9)):
        server.chat(image(uri(data)), text("what?"))
    one, same, other = (request.input_ids for request in server.backend.requests)
    assert one == same and len(one) == len(other)
    assert sum(left != right for left, right in zip(one, other, strict=True)) == 8
    tree = PrefixTree(4)
    assert tree.match(tree.root(), array("q", one).tobytes(), 3)[1] == []  # cache keys are tokens like any other
    assert all(0 <= token_id < 1 << 63 for token_id in other)


def test_a_request_with_images_survives_the_link_between_processes() -> None:
    import msgspec

    server = Server()
    server.chat(image(uri(WIDE)))
    packed = msgspec.msgpack.encode([Submit(server.request)])
    assert msgspec.msgpack.decode(packed, type=list[Submit])[0].request == server.request


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1/a.png", "--image-url-allow"),
        ("https://169.254.169.254/latest", "--image-url-allow"),
        ("file:///etc/passwd", "neither a data: URI nor an http(s) URL"),
        ("ftp://a/b", "neither a data: URI"),
        ("", "neither a data: URI"),
        ("data:image/png,abc", "must be a data: URI of the form"),
        ("data:image/png;base64,####", "invalid base64 data"),
        ("data:image/png;base64,", "is not a PNG"),
        (uri(WIDE, "image/jpeg"), "its data: URI declares another type"),
        (uri(WIDE[: len(WIDE) // 2]), "is damaged or truncated"),
        (uri(picture(500, 2, 1)), "is not supported: the aspect ratio is greater than 200"),
    ],
)
def test_an_invalid_image_is_refused_and_its_field_named(url: str, said: str) -> None:
    server = Server()
    answer = problem(server.chat(text("x"), image(url)))
    assert "`messages[0].content[1].image_url.url`" in answer and said in answer
    assert said in problem(server.ask("/generate", {"inputs": f"![]({url})"}))
    assert not server.backend.requests


def test_limits_on_bytes_and_pixels_follow_the_flags() -> None:
    assert "bytes, more than the limit of 100" in problem(Server(max_image_bytes=100).chat(image(uri(WIDE))))
    assert "112 x 56 pixels, more than the limit of 1000" in problem(
        Server(max_image_pixels=1000).chat(image(uri(WIDE)))
    )


def test_images_with_too_many_tokens_are_refused() -> None:
    server = Server()
    answer = server.chat(*[image(uri(WIDE))] * 30)
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("inputs", ["a <|image_pad|> b", f"<|image_pad|> ![]({uri(WIDE)})"])
def test_the_placeholder_token_cannot_be_written_as_text(inputs: str) -> None:
    assert "image placeholders" in problem(Server().ask("/generate", {"inputs": inputs}))
    assert "image placeholders" in problem(Server().chat(text("<|image_pad|>"), image(uri(WIDE))))


def test_truncate_is_refused_with_images() -> None:
    server = Server()
    body = {"inputs": f"![]({uri(WIDE)})", "parameters": {"truncate": 5}}
    assert "truncate" in problem(server.ask("/generate", body))
    assert server.ask("/generate", {**body, "inputs": "text"}).status == 200


def test_details_of_a_prompt_with_images_are_empty() -> None:
    """As those of TGI are: TGI's client always asks for them."""
    parameters = {"decoder_input_details": True}
    answer = Server().ask("/generate", {"inputs": f"![]({uri(WIDE)})", "parameters": parameters})
    assert answer.status == 200 and answer.json()["details"]["prefill"] == []


@pytest.mark.parametrize("part", [{"type": "image", "image": "x"}, {"type": "input_image"}, {"type": "image_url"}])
def test_other_part_types_are_refused(part: dict[str, Any]) -> None:
    assert "image_url" in problem(Server().chat(part))


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.vision.prompts.has_decoder", lambda: False)
    assert "legato[vision]" in problem(Server().chat(image(uri(WIDE))))


def test_a_chat_without_images_is_unchanged() -> None:
    server = Server()
    assert json.loads(server.chat(text("hi")).body)["choices"]
    assert not server.request.images and IMAGE not in server.request.input_ids
