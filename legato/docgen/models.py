"""docs/models.md, written from the catalogue of architectures: `legato models > docs/models.md`."""

from __future__ import annotations

from legato.models.catalogue import CATALOGUE, VISION, CatalogueEntry

SHARDS = (1, 2, 4)

INTRODUCTION = """\
# Models

<!-- Written by `legato models > docs/models.md`. Edit legato/models/catalogue.py instead. -->

The architecture is `model_type` in a model's config.json. Those in this table run on Legato's own code. A tick means
that a test compares tokens and logits with transformers: for 1, 2 and 4 shards 48 greedy tokens for each of eight
prompts of different lengths in one batch, for GGUF a file that was converted from the same weights. Other numbers of
shards work as well. The checkpoints are examples; any with the same `model_type` runs.

Weights are safetensors; `text-generation-server download-weights` converts PyTorch's pickles. GGUF files are
dequantised when they are loaded. Quantized checkpoints: [docs/quantization.md](quantization.md). LoRA
adapters: [docs/lora.md](lora.md).
"""

IMAGES = """\
## Images

LLaVA-NeXT and Qwen2-VL take images in chats, in native prompts and in chunks of the unary `Prefill` call. All other
architectures take text alone.
"""

LONG_CONTEXTS = """\
## Long contexts

Phi-3 and other models with rope of the type `longrope` have two sets of factors, one for sequences within the original
context and one for longer ones. transformers chooses by the length of each sequence. A server cannot: cached keys are
shared by sequences, and a sequence that grows would need its keys rotated again. So all sequences use one set, chosen
by `--max-total-tokens`: the short factors if it is at most the original context, else the long ones. For short
sequences alone, set that limit: results are those of transformers then.
"""

OTHERS = """\
## All others

Any other `model_type` runs through transformers if that is installed (`pip install 'legato[transformers]'`): everything
but attention is transformers' own code, keys and values are in Legato's cache. It is slower, without CUDA graphs, and
on one shard. Cohere, Cohere 2, OLMoE, Persimmon, Phi-2 and StableLM are tested like the architectures above.

Refused with the reason: models with state besides keys and values (state spaces, linear attention, convolutions), with
bidirectional attention or attention sinks, and with windows that attention does not know of.

Code that comes with a model is fetched and run only with `--trust-remote-code`.
"""


def reference_page() -> str:
    """The whole page, in Markdown."""
    columns = ("architecture", "model_type", "for example", *(f"{n} shard{'s' * (n > 1)}" for n in SHARDS))
    columns = (*columns, "GGUF", "images")
    header = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    rows = [_row(model_type, CATALOGUE[model_type]) for model_type in sorted(CATALOGUE, key=str.lower)]
    return "\n".join([INTRODUCTION, "## Architectures\n", header, *rows, "", IMAGES, LONG_CONTEXTS, OTHERS])


def _row(model_type: str, entry: CatalogueEntry) -> str:
    ticks = [*(number in entry.shards for number in SHARDS), bool(entry.gguf), entry.test == VISION]
    examples = ", ".join(f"`{example}`" for example in entry.examples)
    cells = [entry.name, f"`{model_type}`", examples, *("✓" if tick else "" for tick in ticks)]
    return "| " + " | ".join(cells) + " |"
