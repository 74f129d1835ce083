from tests.models.conftest import shards

__all__ = ["shards"]
