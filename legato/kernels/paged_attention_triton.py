"""Paged attention on a GPU: the decodes of a step, which come first, and its prompt chunks, a kernel for each."""

from __future__ import annotations

import torch
from torch import Tensor

from legato.kernels.chunk_attention import chunk_attention
from legato.kernels.decode_attention import decode_attention
from legato.kernels.paged_kv import PagedKV, Scoring


def paged_attention_triton(
    q: Tensor,  # [T, num_heads, head_dim]
    kv: PagedKV,  # of n sequences
    cu_seqlens_q: Tensor,  # [n + 1] int32
    num_decodes: int,  # leading sequences with one query each
    scoring: Scoring,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decodes > 0:
        decode_attention(q[:num_decodes], kv.sequences(0, num_decodes), scoring, out=out[:num_decodes])
    if num_decodes < kv.num_sequences:
        chunks = kv.sequences(num_decodes, kv.num_sequences)
        chunk_attention(q[num_decodes:], chunks, cu_seqlens_q[num_decodes:], scoring, out=out[num_decodes:])
    return out
