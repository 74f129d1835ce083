"""Python's search for garbage, in a process that others wait for.

A stream is about 150 objects that live for as long as it runs, and a full search looks at every object there is: a
tenth of a second with 2,000 streams, in which nobody is served. As it comes, Python searches the youngest 700 objects,
every eleventh time also those that have survived one search, and all of them once a quarter is new to it. The tokens
of one step for 2,000 streams are thousands of objects that survive until they are written, so every few steps would
look like growth. A shard has little that comes and goes, but torch alone is 190,000 objects: 50 to 90 ms, in which no
step is launched.
"""

from __future__ import annotations

import gc

# Objects, and searches among the younger ones before the older ones are searched, too: 25,000 objects are a few
# milliseconds. What a connection leaves behind, a circle of about a hundred objects, is found as before, a bit later.
THRESHOLDS = (5_000, 4, 10)
PYTHONS_OWN = gc.get_threshold()


def freeze_gc() -> None:
    """Call this once everything is loaded: that is here to stay, and is not searched again until `unfreeze_gc`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def unfreeze_gc() -> None:
    """Call this before much of that goes: what only refers to itself is then found again."""
    gc.unfreeze()
    gc.set_threshold(*PYTHONS_OWN)
