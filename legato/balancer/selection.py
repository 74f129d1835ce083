"""Selects the replica for a request by the configured policy (`choosing.py`, `prefixes.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from itertools import count
from typing import Literal

from legato.balancer.calls import ClientCall
from legato.balancer.choosing import cheapest
from legato.balancer.prefixes import TOKENS_PER_CHUNK, PrefixIndex
from legato.balancer.replicas import Replica, ReplicaSet

Policy = Literal["prefix", "least-load", "round-robin"]
# Stored responses whose replica is remembered.
MAX_RESPONSES = 1 << 16


class Selection:
    def __init__(self, replicas: ReplicaSet, policy: Policy) -> None:
        self._replicas = replicas
        self._policy = policy
        self.index = PrefixIndex()
        self._turns = count()
        self._responses: dict[str, Replica] = {}
        # Estimates, for the metrics: prompt tokens of requests, and how many of them were expected in a cache.
        self.num_prompt_tokens = 0
        self.num_matched_tokens = 0

    def choose(self, call: ClientCall, tried: Container[Replica]) -> Replica | None:
        """Of those that are available and not `tried`; of those with the same model, if the client has got tokens."""
        now = asyncio.get_running_loop().time()
        call.num_new_tokens = call.num_tokens
        owner = self._owner(call)
        if owner is not None:  # others would say that there is no such response
            return owner if owner.is_up and owner not in tried else None
        candidates = [replica for replica in self._replicas.available(now) if replica not in tried]
        if call.marks:
            candidates = [replica for replica in candidates if replica.model == call.model]
        if not candidates:
            return None
        turn = next(self._turns) % len(candidates)
        if self._policy == "round-robin":
            return candidates[turn]
        cached = [0] * len(candidates)
        if self._policy == "prefix" and call.chain:
            depths = self.index.match(call.chain)
            cached = [depths.get(replica.number, 0) * TOKENS_PER_CHUNK for replica in candidates]
        best = cheapest([replica.load for replica in candidates], call.num_tokens, cached, turn)
        chosen = candidates[best]
        if call.chain:
            call.num_new_tokens = max(0, call.num_tokens - cached[best])
            self.num_prompt_tokens += call.num_tokens
            self.num_matched_tokens += call.num_tokens - call.num_new_tokens
            self.index.add(chosen.number, call.chain)
        return chosen

    def _owner(self, call: ClientCall) -> Replica | None:
        """The replica that stored the response which is asked for or followed; None if it is not known, or left."""
        response_id = call.prompt.previous_response_id or call.path.removeprefix("/v1/responses/").partition("/")[0]
        owner = self._responses.get(response_id)
        return owner if owner in self._replicas else None

    def remember(self, response_id: str, replica: Replica) -> None:
        if len(self._responses) >= MAX_RESPONSES:
            del self._responses[next(iter(self._responses))]
        self._responses[response_id] = replica
