"""Readers of checkpoint layouts: from a checkpoint's tensors to the schemes of `legato.quantization`."""
