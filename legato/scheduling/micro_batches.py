"""Which of the running requests a step of a pipeline decodes, so that several steps can be computed at once.

A pipeline of S stages computes S steps at a time, one in each stage. A row's next token needs its last one, which comes
out of the last stage; so rows in flight in one step should not be in the next. Every step takes 1/S of the decoding
rows, those first that no step has taken for the longest time:

    stage 0    A1  B1  A2  B2  A3        A and B are the two halves of the rows
    stage 1        A1  B1  A2  B2        A2 begins with the tokens that A1 has given

Prompt chunks depend on no token that is still to come: they are in every step, as the budget has room for them.
"""

from __future__ import annotations

from legato.scheduling.entry import Entry

# Steps that the tokens of a row may be ahead of the last one known: one is computed, one waits at the first stage.
MAX_AHEAD = 2


def micro_batch(running: list[Entry], num_stages: int, step_id: int) -> list[Entry]:
    """Those of `running` that step `step_id` may compute, in the same order; without stages all of them."""
    if num_stages == 1:
        return list(running)
    decoding = [entry for entry in running if entry.num_to_compute == 1]
    ready = [entry for entry in decoding if entry.num_pending < MAX_AHEAD]
    most = -(-len(decoding) // num_stages)
    if len(ready) > most:
        ready = sorted(ready, key=lambda entry: entry.last_step)[:most]
    for entry in ready:
        entry.last_step = step_id
    taken = {entry.id for entry in ready}
    return [entry for entry in running if entry.num_to_compute != 1 or entry.id in taken]
