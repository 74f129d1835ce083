"""Generates docs/models.md from the catalogue of architectures: `legato models > docs/models.md`."""

from __future__ import annotations

from legato.modelfiles.vocabularies.find import BYTE_LEVEL, SENTENCEPIECE
from legato.models.catalogue import CATALOGUE, VISION, CatalogueEntry

SHARDS = (1, 2, 4)

INTRODUCTION = """\
# Models

<!-- Written by `legato models > docs/models.md`. Edit legato/models/catalogue.py instead. -->

The architecture is `model_type` in a model's config.json. Legato has its own code for the architectures in this table.
A tick means that a test compares tokens and logits with transformers: for 1, 2 and 4 shards, 48 greedy tokens for each
of eight prompts of different lengths in one batch; for GGUF, a file converted from the same weights. Other numbers of
shards work as well. The checkpoints are examples; any checkpoint with the same `model_type` runs.

Weights are safetensors. PyTorch files (`*.bin`, else `*.pt`) are converted once before a model is served, with
`torch.load(weights_only=True)`, which runs no code; for a local folder, the result is written into that folder. See
[docs/quantization.md](quantization.md) for GGUF files and quantized checkpoints, [docs/lora.md](lora.md) for LoRA
adapters. `--rope-scaling` is refused for models without rotary embeddings.
"""

IMAGES = """\
## Images

Architectures with a tick in the last column accept images in chats, in native prompts and in chunks of the unary
`Prefill` call. All others, and all GGUF files, accept only text. Videos are not supported.

For Gemma 3, Idefics2, Idefics3, Llama 4 and SmolVLM, the tokens around an image and between its parts count as image
tokens.

Images of Llama 3.2 Vision and Idefics are not part of the text; separate cross-attention layers attend to them. They
still have slots in the KV cache (one per patch of each tile, or 64 per image), before the text and padded to a multiple
of 128, which count as prompt tokens. These models decode without CUDA graphs. Tokens before the first image attend to
no image, as in Meta's code for Llama 3.2 Vision; in transformers they attend to all images.

The tokens of an image in Gemma 3, and all tokens of a prompt in PaliGemma, attend to each other and are computed in one
step. PaliGemma's prompts are therefore limited by `--max-batch-prefill-tokens` and not kept in the prefix cache. A
PaliGemma prompt has the format of its training: images, `<bos>`, text, newline. Gemma 3's crops of very wide or tall
images (`do_pan_and_scan`) are not supported.
"""

ENCODER_DECODERS = """\
## Encoder-decoder models

T5 and mT5 accept up to 4,096 tokens of prompt and output together, BART and Pegasus up to `max_position_embeddings` of
config.json for each of the two. The output begins with `decoder_start_token_id`; `forced_bos_token_id` is not applied,
as in TGI.
"""

EMBEDDINGS = """\
## Embeddings and classifiers

`--task embed` ([docs/embeddings.md](embeddings.md)) supports BERT (`bert`), RoBERTa (`roberta`), XLM-RoBERTa
(`xlm-roberta`), ModernBERT (`modernbert`), and decoder-based embedding models (`qwen3`, `qwen2`, `mistral`, `llama`)
such as Qwen3-Embedding, each with or without a sequence classification head.
"""

TOKENIZERS = """\
## Tokenizers

If a model has no `tokenizer.json`, its tokenizer is built from other files on load, for the class named in
tokenizer_config.json or the default class of its `model_type`:

| files | classes |
|---|---|
| `vocab.json` and `merges.txt` | BYTE_LEVEL |
| `tokenizer.model`, `spiece.model` (SentencePiece) | SENTENCEPIECE; without a class, SentencePiece's own behaviour |
| `tokenizer.model`, `tiktoken.model`, `*.tiktoken` (tiktoken) | all; text is split as in Llama 3 |

`make test-tokenizers` compares the tokens of 10,000 strings per tokenizer with transformers, or with SentencePiece
where the two differ (merges of published Mistral and Llama files, which transformers 5 orders by number instead of
score). Classes that are not in this table are refused by name.

A tokenizer that is Python code in the model's repository runs once, with `--trust-remote-code`, in a separate process:
its tokens for the vocabulary are compared with those of a built-in tokenizer, which is then stored in the cache. If no
built-in tokenizer gives the same tokens, the model is refused.

Galactica's sequences (`[START_SMILES]`, `[START_I_SMILES]`, `[START_DNA]`, `[START_AMINO]`) are split into characters,
as in its training.
"""

LONG_CONTEXTS = """\
## Long contexts

Llama 4 attends in chunks of 8,192 tokens (`attention_chunk_size`) in most of its layers. Legato serves it up to that
length.

Phi-3 and other models with RoPE of type `longrope` have two sets of factors, one for sequences within the original
context and one for longer ones. transformers chooses by the length of each sequence. A server cannot: sequences share
cached keys, and a growing sequence would need its keys rotated again. So all sequences use one set, chosen by
`--max-total-tokens`: the short factors if it is at most the original context, otherwise the long ones. If you need only
short sequences, set `--max-total-tokens` accordingly; the results then equal those of transformers.
"""

STATES = """\
## Mamba, Qwen3-Next and Qwen3.5

Mamba has no attention: each token reads and updates a state of fixed size. Instead of keys and values, a cache block
holds the state after its last token, and is 256 tokens long. So prefixes are shared in units of 256 tokens; preemption,
shards and `--kv-offload-gb` work as for all other models. There are no drafts;
`--speculate` and `--kv-cache-dtype` are refused.
Sequences may have up to 32,768 tokens.

Most layers of Qwen3-Next and Qwen3.5 keep a state (gated delta nets), the others have attention. A cache block holds
the keys and values of 1,024 tokens and the state after its last token, in float32; prefixes are shared in units of
1,024 tokens. `--kv-cache-dtype` applies to the keys and values. There are no drafts: `--speculate` is refused, and the
layers for predicting several tokens (`mtp`) are not read. Of Qwen3.5, only the language model is served: requests with
images are refused.
"""

OTHERS = """\
## Other architectures

Any other `model_type` runs through transformers if it is installed (`pip install 'legato[transformers]'`): everything
except attention is transformers' code; keys and values are in Legato's KV cache. Such models are slower, run without
CUDA graphs, and on one shard only. EXAONE 4, GLM, Granite MoE, OLMoE, Persimmon and StableLM are tested like the
architectures above.

Models with state other than keys and values (state spaces, linear attention, convolutions), with bidirectional
attention, or with unsupported attention windows are refused with the reason. None of TGI's models is among them.

Code in a model repository is downloaded and run only with `--trust-remote-code`.
"""


def reference_page() -> str:
    """The whole page, in Markdown."""
    columns = ("architecture", "model_type", "for example", *(f"{n} shard{'s' * (n > 1)}" for n in SHARDS))
    columns = (*columns, "GGUF", "images")
    header = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    rows = [_row(model_type, CATALOGUE[model_type]) for model_type in sorted(CATALOGUE, key=str.lower)]
    return "\n".join(
        [
            INTRODUCTION,
            "## Architectures\n",
            header,
            *rows,
            "",
            IMAGES,
            ENCODER_DECODERS,
            EMBEDDINGS,
            _tokenizers(),
            LONG_CONTEXTS,
            STATES,
            OTHERS,
        ]
    )


def _tokenizers() -> str:
    tables: dict[str, list[str]] = {"BYTE_LEVEL": sorted(BYTE_LEVEL), "SENTENCEPIECE": sorted(SENTENCEPIECE)}
    page = TOKENIZERS
    for word, classes in tables.items():
        page = page.replace(word, ", ".join(f"`{name}`" for name in classes))
    return page


def _row(model_type: str, entry: CatalogueEntry) -> str:
    ticks = [*(number in entry.shards for number in SHARDS), bool(entry.gguf), entry.test == VISION]
    examples = ", ".join(f"`{example}`" for example in entry.examples)
    cells = [entry.name, f"`{model_type}`", examples, *("✓" if tick else "" for tick in ticks)]
    return "| " + " | ".join(cells) + " |"
