"""What a shard can hold: from the limits that Warmup asks for and a number of bytes to blocks. Arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from legato.pb import generate_pb2 as pb
from legato.server.interceptor import RequestRefused

# Defaults for clients that call Warmup without limits.
DEFAULT_ROWS = 512
DEFAULT_STEP_TOKENS = 512
RESERVED_BLOCKS = 1  # block 0 takes the writes of padded rows
GIB = 2**30
# Of a host's free memory, what a shard takes: the rest is left to other processes.
HOST_SHARE = 0.5
# Of a GPU's memory, left to fragmentation and to what libraries allocate behind torch's back.
RESERVE_SHARE, LEAST_RESERVE = 0.01, 256 * 2**20
# What the driver keeps of a captured graph for each layer, besides the tensors that it writes: some ten kernels.
LAYER_GRAPH_BYTES = 256 * 2**10


def reserve(total: int) -> int:
    """Bytes of a GPU with `total` bytes that are left free."""
    return max(LEAST_RESERVE, int(RESERVE_SHARE * total))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits, as warm-up found."""

    num_blocks: int
    max_rows: int
    max_input_tokens: int
    max_total_tokens: int
    max_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class RequestedLimits:
    """The limits of a Warmup request, for a model of `max_positions`. 0 leaves a limit to the shard."""

    request: pb.WarmupRequest
    max_positions: int
    block_size: int
    bytes_per_token: int

    def __post_init__(self) -> None:
        if self.longest < 2:
            raise RequestRefused(f"max_total_tokens is {self.longest}: a prompt and its output have at least 2 tokens")

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer together, if memory allows."""
        return min(self.request.max_total_tokens or self.max_positions, self.max_positions)

    @property
    def max_rows(self) -> int:
        return self.request.max_rows or DEFAULT_ROWS

    @property
    def step_tokens(self) -> int:
        return max(self.request.max_prefill_tokens or DEFAULT_STEP_TOKENS, self.max_rows)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fit(self, budget: int) -> Capacity:
        """What fits into `budget` bytes. Memory is rounded down to whole blocks, requested tokens up."""
        in_memory = max(0, budget) // (self.bytes_per_token * self.block_size)
        usable = min(in_memory, self.max_rows * self.num_blocks(self.longest))
        if self.request.max_batch_total_tokens:
            usable = min(usable, self.num_blocks(self.request.max_batch_total_tokens))
        if usable < 1 or (self.request.max_total_tokens and usable < self.num_blocks(self.longest)):
            raise RequestRefused(self._problem(usable, in_memory, budget))
        total = min(self.longest, usable * self.block_size)
        return Capacity(
            num_blocks=usable + RESERVED_BLOCKS,
            max_rows=self.max_rows,
            max_input_tokens=min(self.request.max_input_tokens or total - 1, total - 1),
            max_total_tokens=total,
            max_prefill_tokens=self.request.max_prefill_tokens,
        )

    def _problem(self, usable: int, in_memory: int, budget: int) -> str:
        """The numbers, and the option to change."""
        wanted = self.longest if self.request.max_total_tokens else self.block_size
        room = f"Not enough memory to handle `max_total_tokens={wanted}`: the KV cache has room for"
        if usable < in_memory:
            return (
                f"{room} {usable * self.block_size} tokens by --max-batch-total-tokens."
                " Lower --max-total-tokens or raise --max-batch-total-tokens"
            )
        return (
            f"{room} {in_memory * self.block_size} tokens. They would take {gib(wanted * self.bytes_per_token)}, and"
            f" beside weights, a step of {self.step_tokens} tokens in {self.max_rows} rows and reserves there are"
            f" {gib(max(0, budget))}. Lower --max-total-tokens, --max-batch-prefill-tokens or"
            " --max-concurrent-requests, raise --cuda-memory-fraction, or take --kv-cache-dtype fp8_e4m3fn"
        )
