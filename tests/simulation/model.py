"""A model without weights. A token is a hash of the seed and of the whole context, as it is read from the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

VOCAB = 64
EOS = frozenset({3})
# What stands in the KV cache for tokens that a failed step should have computed.
GARBAGE = 0x0BAD_C0DE
START = 17
_FACTOR = 1_000_003
_MASK = (1 << 61) - 1

Sampled = tuple[int, float]


def extend(state: int, token: int) -> int:
    """`state` stands for a context, and the result for one that is longer by `token`."""
    return (state * _FACTOR + token + 1) & _MASK


def sample(seed: int, position: int, states: Sequence[int]) -> Sampled:
    """A token and its logprob. `states` has one number for each block of the context. Hashes of integers are the same
    in every process. Half of the seeds repeat themselves: of theirs, only the logprob depends on the context."""
    value = hash((seed, position, *states))
    chosen = value if seed % 2 else hash((seed, position % (2 + seed % 5)))
    return (chosen >> 9) % VOCAB, -((value >> 20) % 1000) / 1000


def prompt_logprob(state: int) -> float:
    return -float(state % 97)


def top_tokens(sampled: Sampled, count: int) -> list[Sampled]:
    token, logprob = sampled
    return [((token + step) % VOCAB, logprob - step) for step in range(count)]


class ExpectedText:
    """What a request must get whatever happens: a function of its prompt, its seed and nothing else."""

    def __init__(self, prompt: Sequence[int], seed: int, block_size: int) -> None:
        self._seed = seed
        self._block_size = block_size
        self._len = 0
        self._state = START
        self._states: list[int] = []  # at the end of each block
        self.prompt_logprobs: list[float | None] = [None]
        for token in prompt:
            self._push(token)
            self.prompt_logprobs.append(prompt_logprob(self._state))
        self.prompt_logprobs.pop()  # of the first generated token

    def next(self) -> Sampled:
        sampled = sample(self._seed, self._len, self._states)
        self._push(sampled[0])
        return sampled

    def _push(self, token: int) -> None:
        self._state = state = extend(self._state, token)
        if self._len % self._block_size:
            self._states[-1] = state
        else:
            self._states.append(state)
        self._len += 1
