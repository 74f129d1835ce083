"""What a shard says while it starts, word for word: the launcher draws these lines instead of showing them."""

from __future__ import annotations

LOADING = "Loading weights"  # with a field `percent`
WARMING = "Warming up"
WARM = "Warm-up done"
