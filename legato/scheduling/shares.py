"""Fair shares of limited resources between API keys: request slots, and tokens of the queue."""

from __future__ import annotations

import math

from legato.scheduling.state import GenerationRequest

# Of everything that is free, how many times as much a tenant may hold.
FACTOR = 4
# Nobody has to be protected from this one: there are no API keys, so it is the only tenant.
EVERYBODY = ""


class Shares:
    """A pool that no tenant can use up (dynamic thresholds, Choudhury and Hahne 1998).

    A tenant may take more while it holds less than `FACTOR` times what is free. Alone it gets four fifths of the pool;
    of n tenants who take all they can get, each gets the same, and something is left for one who comes new.
    """

    def __init__(self, total: int | None) -> None:
        """None: there is no limit."""
        self.total: float = math.inf if total is None else total
        self.free: float = self.total
        self._held: dict[str, int] = {}

    def take(self, tenant: str, count: int) -> bool:
        """Whether there was enough. What is larger than the whole pool gets all of it."""
        held = self._held.get(tenant, 0)
        if count > self.free and self.free < self.total:
            return False
        if tenant != EVERYBODY and held >= FACTOR * self.free:
            return False
        self.free -= count
        self._held[tenant] = held + count
        return True

    def give_back(self, tenant: str, count: int) -> None:
        self.free += count
        left = self._held.pop(tenant, 0) - count
        if left:
            self._held[tenant] = left
        assert self.free <= self.total, "more was given back than taken"


class RequestShares:
    """What a request takes: a permit until it ends, and room in the queue for its prompt until it is admitted."""

    def __init__(self, max_requests: int | None, max_queued_tokens: int | None) -> None:
        self.permits = Shares(max_requests)
        self.queued_tokens = Shares(max_queued_tokens)
        self.queued_work = 0  # of all tenants

    def take(self, request: GenerationRequest) -> bool:
        if not self.permits.take(request.tenant, 1):
            return False
        if self.queued_tokens.take(request.tenant, len(request.input_ids)):
            self.queued_work += request.prefill_work
            return True
        self.permits.give_back(request.tenant, 1)
        return False

    def leave_queue(self, request: GenerationRequest) -> None:
        self.queued_tokens.give_back(request.tenant, len(request.input_ids))
        self.queued_work -= request.prefill_work

    def give_back(self, request: GenerationRequest, *, is_queued: bool) -> None:
        self.permits.give_back(request.tenant, 1)
        if is_queued:
            self.leave_queue(request)
