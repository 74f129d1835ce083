"""What is here to stay is not searched for garbage; what goes is found again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from legato.common.garbage import PYTHONS_OWN, THRESHOLDS, freeze_gc, unfreeze_gc


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    unfreeze_gc()


def test_what_is_there_is_not_searched_again_and_what_was_garbage_is_gone() -> None:
    gone, stays = Circle(), Circle()
    gone_too = weakref.ref(gone)
    del gone
    freeze_gc()
    assert gone_too() is None
    assert gc.get_freeze_count() > 0 and gc.get_threshold() == THRESHOLDS
    found = weakref.ref(stays)
    del stays
    gc.collect()
    assert found() is not None, "it was searched"


def test_what_goes_later_is_found_again() -> None:
    circle = Circle()
    freeze_gc()
    found = weakref.ref(circle)
    del circle
    unfreeze_gc()
    gc.collect()
    assert found() is None
    assert gc.get_threshold() == PYTHONS_OWN
