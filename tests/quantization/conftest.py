"""Shards, and tiny models that are quantized as large ones are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models.conftest import shards
from tests.quantization.kept import no_product_is_small

__all__ = ["shards"]


@pytest.fixture(autouse=True)
def _all_products_are_large() -> Iterator[None]:
    """Tiny models have no others than those that fp8 and tables leave to int8."""
    with no_product_is_small():
        yield
