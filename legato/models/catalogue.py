"""The supported architectures and the tests that compare each with transformers. docs/models.md is written from it.

Keyed by model_type like `ARCHITECTURES`; a test compares the two, another checks that every test named exists.
"""

from __future__ import annotations

from dataclasses import dataclass

TESTS = "tests/models"
SHARDS = f"{TESTS}/test_architectures.py::test_tokens_and_logits_equal_transformers"
GGUF = f"{TESTS}/test_gguf_families.py::test_a_gguf_file_is_the_model_it_was_made_from"
VISION = f"{TESTS}/test_vision.py::test_tokens_and_logits_equal_transformers"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    examples: tuple[str, ...]  # checkpoints on the Hub
    case: str  # of `test`
    shards: tuple[int, ...] = (1, 2)
    gguf: str = ""  # the test that reads one; empty: not read
    test: str = SHARDS

    def shard_test(self, world_size: int) -> str:
        return f"{self.test}[{self.case}-{world_size}]"


FOUR = (1, 2, 4)
CATALOGUE = {
    "baichuan": CatalogueEntry("Baichuan, Baichuan 2", ("baichuan-inc/Baichuan2-7B-Chat",), "baichuan"),
    "bart": CatalogueEntry("BART", ("facebook/bart-large-cnn",), "bart"),
    "bloom": CatalogueEntry("BLOOM", ("bigscience/bloom-560m", "bigscience/bloomz-7b1"), "bloom", FOUR),
    "codegen": CatalogueEntry("CodeGen", ("Salesforce/codegen-350M-mono",), "codegen"),
    "cohere": CatalogueEntry("Command R, Command R+", ("CohereLabs/c4ai-command-r-v01",), "cohere"),
    "cohere2": CatalogueEntry("Command R7B, Command A", ("CohereLabs/c4ai-command-r7b-12-2024",), "cohere2"),
    "dbrx": CatalogueEntry("DBRX", ("databricks/dbrx-instruct",), "dbrx"),
    "deepseek_v2": CatalogueEntry("DeepSeek V2", ("deepseek-ai/DeepSeek-V2-Lite-Chat",), "deepseek-v2"),
    "deepseek_v3": CatalogueEntry("DeepSeek V3, R1", ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
                                  "deepseek-v3"),
    "falcon": CatalogueEntry("Falcon", ("tiiuae/falcon-7b-instruct", "tiiuae/falcon-40b"), "falcon-40b", FOUR),
    "gemma": CatalogueEntry("Gemma", ("google/gemma-2b-it", "google/gemma-7b-it"), "gemma", gguf=f"{GGUF}[gemma]"),
    "gemma2": CatalogueEntry("Gemma 2", ("google/gemma-2-2b-it", "google/gemma-2-9b-it"), "gemma2",
                             gguf=f"{GGUF}[gemma2]"),
    "gemma3": CatalogueEntry("Gemma 3 with images", ("google/gemma-3-4b-it",), "gemma3", test=VISION),
    "gemma3_text": CatalogueEntry("Gemma 3", ("google/gemma-3-1b-it",), "gemma3", gguf=f"{GGUF}[gemma3]"),
    "gpt2": CatalogueEntry("GPT-2", ("openai-community/gpt2", "openai-community/gpt2-xl"), "gpt2"),
    "gpt_bigcode": CatalogueEntry("StarCoder, SantaCoder", ("bigcode/starcoder", "bigcode/gpt_bigcode-santacoder"),
                         "starcoder", FOUR),
    "gpt_neo": CatalogueEntry("GPT-Neo", ("EleutherAI/gpt-neo-1.3B",), "gpt-neo"),
    "gpt_neox": CatalogueEntry("GPT-NeoX, Pythia, Dolly", ("EleutherAI/pythia-1.4b", "EleutherAI/gpt-neox-20b"),
                      "gpt-neox", FOUR),
    "gpt_oss": CatalogueEntry("gpt-oss", ("openai/gpt-oss-20b", "openai/gpt-oss-120b"), "gpt-oss"),
    "gptj": CatalogueEntry("GPT-J", ("EleutherAI/gpt-j-6b",), "gptj"),
    "granite": CatalogueEntry("Granite", ("ibm-granite/granite-3.1-8b-instruct",), "granite",
                     gguf=f"{GGUF}[granite]"),
    "idefics": CatalogueEntry("Idefics", ("HuggingFaceM4/idefics-9b-instruct",), "idefics", test=VISION),
    "idefics2": CatalogueEntry("Idefics2", ("HuggingFaceM4/idefics2-8b",), "idefics2", test=VISION),
    "idefics3": CatalogueEntry("Idefics3", ("HuggingFaceM4/Idefics3-8B-Llama3",), "idefics3", test=VISION),
    "llama": CatalogueEntry("Llama 1 to 3, Code Llama, SmolLM2", ("meta-llama/Llama-3.1-8B-Instruct",
                   "HuggingFaceTB/SmolLM2-135M-Instruct"), "llama", FOUR,
                   f"{TESTS}/test_gguf_source.py::test_a_part_equals_that_part_of_the_whole"),
    "llama4": CatalogueEntry("Llama 4", ("meta-llama/Llama-4-Scout-17B-16E-Instruct",), "llama4", test=VISION),
    "llama4_text": CatalogueEntry("Llama 4, text only", ("meta-llama/Llama-4-Scout-17B-16E-Instruct",), "llama4-text"),
    "llava_next": CatalogueEntry("LLaVA-NeXT", ("llava-hf/llava-v1.6-mistral-7b-hf",), "llava-next", test=VISION),
    "mamba": CatalogueEntry("Mamba", ("state-spaces/mamba-2.8b-hf",), "mamba"),
    "mistral": CatalogueEntry("Mistral, Nemo", ("mistralai/Mistral-7B-Instruct-v0.3",), "mistral", FOUR),
    "mixtral": CatalogueEntry("Mixtral", ("mistralai/Mixtral-8x7B-Instruct-v0.1",), "mixtral", FOUR),
    "mllama": CatalogueEntry("Llama 3.2 Vision", ("meta-llama/Llama-3.2-11B-Vision-Instruct",), "mllama", test=VISION),
    "mpt": CatalogueEntry("MPT", ("mosaicml/mpt-7b-instruct",), "mpt"),
    "mt5": CatalogueEntry("mT5, mT0", ("google/mt5-base", "bigscience/mt0-base"), "mt5"),
    "olmo": CatalogueEntry("OLMo", ("allenai/OLMo-7B-hf",), "olmo"),
    "olmo2": CatalogueEntry("OLMo 2", ("allenai/OLMo-2-1124-7B-Instruct",), "olmo2", FOUR, f"{GGUF}[olmo2]"),
    "olmo3": CatalogueEntry("OLMo 3", ("allenai/Olmo-3-7B-Instruct",), "olmo3"),
    "opt": CatalogueEntry("OPT, Galactica", ("facebook/opt-125m", "facebook/galactica-1.3b"), "opt"),
    "paligemma": CatalogueEntry("PaliGemma, PaliGemma 2", ("google/paligemma-3b-mix-224",
                       "google/paligemma2-3b-mix-224"), "paligemma", test=VISION),
    "pegasus": CatalogueEntry("Pegasus", ("google/pegasus-xsum",), "pegasus"),
    "phi": CatalogueEntry("Phi 1, 1.5 and 2", ("microsoft/phi-2",), "phi"),
    "phi3": CatalogueEntry("Phi-3, Phi-4", ("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"), "phi3",
                  gguf=f"{GGUF}[phi3]"),
    "phimoe": CatalogueEntry("Phi-3.5-MoE", ("microsoft/Phi-3.5-MoE-instruct",), "phimoe"),
    "qwen2": CatalogueEntry("Qwen2, Qwen2.5", ("Qwen/Qwen2.5-7B-Instruct",), "qwen2", gguf=f"{GGUF}[qwen2]"),
    "qwen2_5_vl": CatalogueEntry("Qwen2.5-VL", ("Qwen/Qwen2.5-VL-7B-Instruct",), "qwen2-5-vl", test=VISION),
    "qwen2_moe": CatalogueEntry("Qwen2 MoE", ("Qwen/Qwen1.5-MoE-A2.7B-Chat",), "qwen2-moe"),
    "qwen2_vl": CatalogueEntry("Qwen2-VL", ("Qwen/Qwen2-VL-2B-Instruct",), "qwen2-vl", test=VISION),
    "qwen3": CatalogueEntry("Qwen3", ("Qwen/Qwen3-8B",), "qwen3", FOUR, f"{GGUF}[qwen3]"),
    "qwen3_5": CatalogueEntry("Qwen3.5, text only", ("Qwen/Qwen3.5-27B",), "qwen3-5-beside-vision"),
    "qwen3_5_moe": CatalogueEntry("Qwen3.5 MoE, text only", ("Qwen/Qwen3.5-35B-A3B",), "qwen3-5-moe-beside-vision"),
    "qwen3_5_moe_text": CatalogueEntry("Qwen3.5 MoE, language model alone", ("Qwen/Qwen3.5-35B-A3B",), "qwen3-5-moe"),
    "qwen3_5_text": CatalogueEntry("Qwen3.5, language model alone", ("Qwen/Qwen3.5-27B",), "qwen3-5"),
    "qwen3_moe": CatalogueEntry("Qwen3 MoE", ("Qwen/Qwen3-30B-A3B",), "qwen3-moe"),
    "qwen3_next": CatalogueEntry("Qwen3-Next", ("Qwen/Qwen3-Next-80B-A3B-Instruct",), "qwen3-next"),
    "qwen3_vl": CatalogueEntry("Qwen3-VL", ("Qwen/Qwen3-VL-8B-Instruct",), "qwen3-vl", test=VISION),
    "RefinedWeb": CatalogueEntry("Falcon 40B as first published", ("tiiuae/falcon-40b",), "falcon-40b", FOUR),
    "RefinedWebModel": CatalogueEntry("Falcon 7B as first published", ("tiiuae/falcon-7b",), "falcon-refined-web"),
    "smolvlm": CatalogueEntry("SmolVLM, SmolVLM2", ("HuggingFaceTB/SmolVLM-Instruct",), "smolvlm", test=VISION),
    "starcoder2": CatalogueEntry("StarCoder2", ("bigcode/starcoder2-3b",), "starcoder2", gguf=f"{GGUF}[starcoder2]"),
    "t5": CatalogueEntry("T5, Flan-T5", ("google-t5/t5-small", "google/flan-t5-large"), "t5", FOUR),
    "xglm": CatalogueEntry("XGLM", ("facebook/xglm-564M",), "xglm"),
}  # fmt: skip
