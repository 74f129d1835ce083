"""The settings of the HTTP workers. The defaults are TGI's."""

from __future__ import annotations

from dataclasses import dataclass, field

import legato
from legato.scheduling.state import DEFAULT_PRIORITY


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Of a server that embeds or classifies texts."""

    # Dimensions of an embedding, or labels of a classifier.
    size: int
    pooling: str
    dtype: str = "float32"
    # Whether embeddings have the length one unless a request says otherwise.
    normalized: bool = True
    # Texts that may be put before a text, by name, and the one that is by default.
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    # Names of a classifier's outputs; None: the model embeds.
    labels: tuple[str, ...] | None = None
    # Texts of one request.
    max_client_batch_size: int = 2048


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    # Requests that run or wait; one more is answered with 429.
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    # Processes that speak HTTP.
    http_workers: int = 1
    # Threads that tokenize.
    validation_workers: int = 2
    # Whether requests may have grammars, and whether schemas that ask for too much are taken for what can be enforced.
    grammar_support: bool = True
    schema_lenient: bool = False
    # How the model writes calls of tools: a name in `tools/dialects.py`, or "auto" to go by its chat template.
    tool_call_parser: str = "auto"
    # How it marks its reasoning: a name in `chat/reasoning/formats.py`, "none", or "auto" to go by its chat template.
    reasoning_parser: str = "auto"
    # The most tokens of reasoning where a request does not say; None: no limit.
    reasoning_budget: int | None = None
    # The SQLite file that the workers keep responses in, and its bytes; None: in the worker's own memory; 0: nowhere.
    response_store: str | None = None
    response_store_size: int = 32 << 20
    # Images of prompts: the most bytes, the most bytes that are fetched, the most pixels, and the hosts to fetch from.
    max_image_bytes: int = 1 << 24
    max_image_fetch_size: int = 1 << 30
    max_image_pixels: int = 1 << 24
    image_url_allow: tuple[str, ...] = ()
    # Bytes of a request body.
    payload_limit: int = 2_000_000
    # Files of the certificate and its key; None: connections are not encrypted.
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    # Origins that browsers may call from; empty allows any.
    cors_allow_origin: tuple[str, ...] = ()
    # Keys for the routes that are not open; without any, no key is needed. Never shown.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    # What a balancer shows to be told which tokens its clients have got, and to go on after them; None: nobody is.
    route_key: str | None = field(default=None, repr=False)
    # The best priority that the holder of a key may ask for, by tenant, where it is not the default.
    best_priorities: dict[str, int] = field(default_factory=dict)
    # Whether requests may name LoRA adapters, whether these may change at run time, and for which tenants.
    takes_adapters: bool = False
    changes_adapters: bool = False
    adapter_tenants: frozenset[str] = frozenset()
    # None: the server generates text.
    embedding: EmbeddingSettings | None = None
    # Where Vertex AI asks for predictions and health, besides the usual paths.
    vertex_predict_route: str | None = None
    vertex_health_route: str | None = None
    # What x-compute-type says.
    compute_type: str = "cpu"
    version: str = legato.__version__
    sha: str | None = None
    docker_label: str | None = None
    # Seconds of silence after which a stream sends a comment, so that proxies keep the connection.
    keep_alive: float = 15.0

    def best_priority(self, tenant: str) -> int:
        """Without keys everybody may have any. With keys nobody overtakes others unless the operator says so."""
        return self.best_priorities.get(tenant, DEFAULT_PRIORITY) if self.api_keys else 0

    @property
    def base_names(self) -> tuple[str, str]:
        """What `model` is called on the routes of OpenAI's API if it is not an adapter. The second is TGI's."""
        return self.model_id, "tgi"

    @property
    def default_return_full_text(self) -> bool:
        """Default of `POST /`: local models have no tag and count as text generation."""
        return self.model_pipeline_tag in (None, "text-generation")
