"""docs/models.md, written from the catalogue of architectures: `legato models > docs/models.md`."""

from __future__ import annotations

from legato.modelfiles.vocabularies.find import BYTE_LEVEL, SENTENCEPIECE
from legato.models.catalogue import CATALOGUE, VISION, CatalogueEntry

SHARDS = (1, 2, 4)

INTRODUCTION = """\
# Models

<!-- Written by `legato models > docs/models.md`. Edit legato/models/catalogue.py instead. -->

The architecture is `model_type` in a model's config.json. Those in this table run on Legato's own code. A tick means
that a test compares tokens and logits with transformers: for 1, 2 and 4 shards 48 greedy tokens for each of eight
prompts of different lengths in one batch, for GGUF a file that was converted from the same weights. Other numbers of
shards work as well. The checkpoints are examples; any with the same `model_type` runs.

Weights are safetensors. PyTorch's files (`*.bin`, else `*.pt`) are converted before a model is served, those of a local
folder too: once, beside them, and by `torch.load(weights_only=True)`, which runs no code. GGUF files and quantized
checkpoints: [docs/quantization.md](quantization.md). LoRA adapters: [docs/lora.md](lora.md). `--rope-scaling` is
refused for models without rotary embeddings.
"""

IMAGES = """\
## Images

Architectures with a tick in the last column take images in chats, in native prompts and in chunks of the unary
`Prefill` call. All others take text alone, and so do GGUF files. Videos are not read.

The tokens that Gemma 3, Idefics2, Idefics3, Llama 4 and SmolVLM have around an image or between its parts count as
tokens of the image.

Images of Llama 3.2 Vision and of Idefics are not in the text: layers of their own attend to them. They have slots in
the KV cache all the same (one for each patch of each tile, or 64 for an image), before the text and up to a multiple of
128, which count as tokens of the prompt. Decodes of these models run without CUDA graphs. Tokens that no image precedes
see none, as in Meta's code for Llama 3.2 Vision; in transformers they see all images.

The tokens of an image in Gemma 3 see each other, and so do all tokens of a prompt in PaliGemma: one step computes them.
PaliGemma's prompts are therefore limited by `--max-batch-prefill-tokens` and not kept in the prefix cache. A prompt of
PaliGemma is written as in its training: images, `<bos>`, text, the end of a line. Gemma 3's crops of very wide or tall
images (`do_pan_and_scan`) are not made.
"""

ENCODER_DECODERS = """\
## Encoder-decoder models

T5 and mT5 take 4,096 tokens of prompt and answer together, BART and Pegasus as many as config.json says for either of
them (`max_position_embeddings`). The answer begins with `decoder_start_token_id`; `forced_bos_token_id` is not applied,
as in TGI.
"""

EMBEDDINGS = """\
## Embeddings and classifiers

With `--task embed` ([docs/embeddings.md](embeddings.md)): BERT (`bert`), RoBERTa (`roberta`), XLM-RoBERTa
(`xlm-roberta`), ModernBERT (`modernbert`), and decoders that embed (`qwen3`, `qwen2`, `mistral`, `llama`), such as
Qwen3-Embedding; each with or without a head for sequence classification.
"""

TOKENIZERS = """\
## Tokenizers

A model without `tokenizer.json` has its tokenizer made from other files when it is loaded, by the class that
tokenizer_config.json names or that its `model_type` has:

| files | classes |
|---|---|
| `vocab.json` and `merges.txt` | BYTE_LEVEL |
| `tokenizer.model`, `spiece.model` (SentencePiece) | SENTENCEPIECE; without a class as SentencePiece does |
| `tokenizer.model`, `tiktoken.model`, `*.tiktoken` (tiktoken) | all; text is split as Llama 3 does |

`make test-tokenizers` compares the tokens of 10,000 strings each with transformers, or with SentencePiece where the two
differ (merges of published Mistral and Llama files, which transformers 5 orders by number instead of score). Classes
that are not in this table are refused by name.

A tokenizer that is Python code in the model's repository runs once, with `--trust-remote-code`, in a process of its
own: what it makes of the vocabulary is compared with a tokenizer of the library and stored in the cache. If no such
tokenizer gives the same tokens, it is refused.

Galactica's sequences (`[START_SMILES]`, `[START_I_SMILES]`, `[START_DNA]`, `[START_AMINO]`) are split into characters,
as in its training.
"""

LONG_CONTEXTS = """\
## Long contexts

Llama 4 attends in chunks of 8,192 tokens (`attention_chunk_size`) in most of its layers. Legato serves it up to that
length.

Phi-3 and other models with rope of the type `longrope` have two sets of factors, one for sequences within the original
context and one for longer ones. transformers chooses by the length of each sequence. A server cannot: cached keys are
shared by sequences, and a sequence that grows would need its keys rotated again. So all sequences use one set, chosen
by `--max-total-tokens`: the short factors if it is at most the original context, else the long ones. For short
sequences alone, set that limit: results are those of transformers then.
"""

STATES = """\
## States

Mamba has no attention: a token reads and changes a state of fixed size. A block of the cache, which holds the keys and
values of its tokens elsewhere, has the state after its last token here, and is 256 tokens long. So prefixes are shared
in steps of 256 tokens, and preemption, shards and `--kv-offload-gb` are as for all other models. There are no
drafts: `--speculate` is refused, and so is `--kv-cache-dtype`. Sequences may have up to 32,768 tokens.
"""

OTHERS = """\
## All others

Any other `model_type` runs through transformers if that is installed (`pip install 'legato[transformers]'`): everything
but attention is transformers' own code, keys and values are in Legato's cache. It is slower, without CUDA graphs, and
on one shard. EXAONE 4, GLM, Granite MoE, OLMoE, Persimmon and StableLM are tested like the architectures above.

Refused with the reason: models with state besides keys and values (state spaces, linear attention, convolutions), with
bidirectional attention, and with windows that attention does not know of. Of TGI's models this is none.

Code that comes with a model is fetched and run only with `--trust-remote-code`.
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
