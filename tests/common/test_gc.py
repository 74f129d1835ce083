"""Frozen objects are not collected; unfrozen ones are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from legato.common.gc import DEFAULT_THRESHOLDS, THRESHOLDS, freeze_gc, unfreeze_gc


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def restore_gc() -> Iterator[None]:
    yield
    unfreeze_gc()


def test_freezing_collects_existing_garbage_and_excludes_the_rest() -> None:
    garbage, kept = Cycle(), Cycle()
    garbage_ref = weakref.ref(garbage)
    del garbage
    freeze_gc()
    assert garbage_ref() is None
    assert gc.get_freeze_count() > 0 and gc.get_threshold() == THRESHOLDS
    kept_ref = weakref.ref(kept)
    del kept
    gc.collect()
    assert kept_ref() is not None, "a frozen object was collected"


def test_unfrozen_garbage_is_collected() -> None:
    cycle = Cycle()
    freeze_gc()
    cycle_ref = weakref.ref(cycle)
    del cycle
    unfreeze_gc()
    gc.collect()
    assert cycle_ref() is None
    assert gc.get_threshold() == DEFAULT_THRESHOLDS
