"""Code that comes with a model from the Hub: fetched and run with --trust-remote-code, else left where it is."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from legato.common.errors import UnsupportedModel
from tests.integration.processes import run
from tests.models.test_fallback import fallback, write_own_code

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """One repository, `org/name`, with the files of a folder; remembers which of them were fetched."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fetched: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        files = {file.relative_to(self.server.folder).as_posix(): file for file in self.server.folder.rglob("*.*")}
        name = self.path.partition(f"/resolve/{COMMIT}/")[2]
        if "/tree/" in self.path:
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": name} for name, file in files.items()
            ]
            body = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in files]  # the tree of older clients
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif name in files:
            body = files[name].read_bytes()
            if with_body:
                self.server.fetched.add(name)
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(write_own_code(tmp_path / "repository", monkeypatch))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def download(hub: Hub, tmp_path: Path, *flags: str) -> Path:
    """As a person does it; the model's folder in the Hub's cache."""
    words = ["download-weights", "org/name", f"--huggingface-hub-cache={tmp_path / 'cache'}", *flags]
    done = run("text-generation-server", *words, HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}")
    assert done.code == 0, done.stderr
    return tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT


def test_code_is_not_even_fetched_without_trust(hub: Hub, tmp_path: Path) -> None:
    snapshot = download(hub, tmp_path)
    assert "model.safetensors" in hub.fetched and not any(name.endswith(".py") for name in hub.fetched)
    with pytest.raises(UnsupportedModel, match="--trust-remote-code runs it"):
        fallback(snapshot)


@pytest.mark.parametrize("is_cached", [False, True])
def test_with_trust_it_comes_along_and_runs_even_where_the_rest_is_cached(
    hub: Hub, tmp_path: Path, is_cached: bool
) -> None:
    if is_cached:
        download(hub, tmp_path)
    snapshot = download(hub, tmp_path, "--trust-remote-code")
    assert "own.py" in hub.fetched
    assert fallback(snapshot, trust_remote_code=True).config.model_type == "brand_new"


# ---- tokenizers ------------------------------------------------------------------------------------------------------

# A class as Baichuan and Qwen have theirs: slow, around a vocabulary of its own format, with an end it adds itself.
OWN_TOKENIZER = """
import sentencepiece
from pathlib import Path
from transformers import PreTrainedTokenizer
class NewTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    def __init__(self, vocab_file, **settings):
        Path(RAN).touch()
        self.vocab_file = vocab_file
        self.sp = sentencepiece.SentencePieceProcessor(model_file=str(vocab_file))
        super().__init__(**settings)
    vocab_size = property(lambda self: self.sp.get_piece_size())
    def get_vocab(self):
        return {self.sp.id_to_piece(i): i for i in range(self.vocab_size)}
    def _tokenize(self, text):
        return EXTRA + self.sp.encode(text, out_type=str)
    def _convert_token_to_id(self, token):
        return self.sp.piece_to_id(token)
    def _convert_id_to_token(self, index):
        return self.sp.id_to_piece(index)
    def convert_tokens_to_string(self, tokens):
        return self.sp.decode(tokens)
"""


def write_own_tokenizer(folder: Path, ran: Path, extra: str = "[]") -> Path:
    from tests.modelfiles.vocabulary_files import write_config, write_pieces

    config = {"auto_map": {"AutoTokenizer": ["tokenization_new.NewTokenizer", None]}, "tokenizer_class": "NewTokenizer"}
    write_config(folder, "llama", config)
    write_pieces(folder / "tokenizer.model", "bpe", byte_fallback=True, normalization_rule_name="identity",
                 remove_extra_whitespaces=False, vocab_size=600)  # fmt: skip
    code = OWN_TOKENIZER.replace("RAN", repr(str(ran))).replace("EXTRA", extra)
    (folder / "tokenization_new.py").write_text(code)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "cache"


@pytest.mark.tokenizers
def test_a_tokenizers_code_runs_once_and_only_for_who_asked_for_it(tmp_path: Path, cache: Path) -> None:
    import sentencepiece

    from legato.common.options import DownloadOptions
    from legato.modelfiles.files import ModelFiles
    from legato.modelfiles.locate import locate

    ran = tmp_path / "ran"
    folder = write_own_tokenizer(tmp_path / "model", ran)
    locate(DownloadOptions(model_id=str(folder)))
    with pytest.raises(UnsupportedModel, match=r"the tokenizer is Python code .* --trust-remote-code runs it"):
        ModelFiles.open(folder).tokenizer()
    assert not ran.exists()
    locate(DownloadOptions(model_id=str(folder), trust_remote_code=True))
    assert ran.exists()
    ran.unlink()
    locate(DownloadOptions(model_id=str(folder), trust_remote_code=True))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = "The quick brown fox, 日本語 🚀  end"
    assert ModelFiles.open(folder).tokenizer().encode(text).ids == theirs.encode(text)
    assert not ran.exists()


class Code:
    """What transformers makes of such a class: it gives these tokens before every text."""

    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, folder: Path, *extra: int) -> None:
        import sentencepiece

        self.vocab_file = str(folder / "tokenizer.model")
        self.extra = extra
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=self.vocab_file)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*self.extra, *self.pieces.encode(text)]}


@pytest.mark.parametrize(("extra", "is_served"), [((), True), ((1,), False), ((5, 6), False)])
def test_a_tokenizer_that_does_more_than_its_file_is_refused(
    extra: tuple[int, ...], is_served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from legato.models import remote_tokenizer

    folder, target = write_own_tokenizer(tmp_path / "model", tmp_path / "ran"), tmp_path / "tokenizer.json"
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: Code(folder, *extra))
    if is_served:
        remote_tokenizer.write(folder, target)
    else:
        with pytest.raises(remote_tokenizer.Refused, match=r"'.*' is \[.*\] in its code and \[.*\] in what was made"):
            remote_tokenizer.write(folder, target)
    assert target.exists() == is_served
