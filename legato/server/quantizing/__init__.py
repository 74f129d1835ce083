"""`text-generation-server quantize`: GPTQ, layer by layer."""
