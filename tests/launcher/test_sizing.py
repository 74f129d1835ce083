"""Numbers of shards and devices, addresses, and limits that contradict each other."""

from __future__ import annotations

import pytest

from legato.common.errors import OptionError
from legato.common.options import LauncherOptions
from legato.launcher.sizing import check_limits, listen_address, num_devices, num_shards


@pytest.mark.parametrize(
    ("sharded", "num_shard", "devices", "expected"),
    [
        (True, None, 4, 4),
        (True, 2, 4, 2),
        (True, 2, None, 2),
        (False, None, 4, 1),
        (False, 2, 4, 1),
        (None, None, 4, 4),
        (None, None, 0, 1),
        (None, None, None, 1),
        (None, 2, None, 2),
        (None, 1, 4, 1),
    ],
)
def test_num_shards(sharded: bool | None, num_shard: int | None, devices: int | None, expected: int) -> None:
    assert num_shards(sharded, num_shard, devices) == expected


@pytest.mark.parametrize(("num_shard", "devices"), [(None, None), (None, 1), (1, 4)])
def test_sharded_needs_two_devices(num_shard: int | None, devices: int | None) -> None:
    with pytest.raises(OptionError, match="--sharded true needs at least two devices"):
        num_shards(True, num_shard, devices)


def test_no_shard_at_all_is_refused() -> None:
    with pytest.raises(OptionError, match="--num-shard"):
        num_shards(None, 0, 4)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1b2c"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 8),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1"}, None),  # no device that Legato runs on
    ],
)
def test_num_devices(environ: dict[str, str], expected: int | None) -> None:
    assert num_devices(environ, lambda: 8) == expected


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::", "::1"])
def test_an_ip_address_is_kept(address: str) -> None:
    assert listen_address(address) == address


def test_localhost_stays_local() -> None:
    assert listen_address("localhost") == "127.0.0.1"


def test_a_container_name_is_not_an_address(caplog: pytest.LogCaptureFixture) -> None:
    assert listen_address("3f2a9c1d0b7e") == "0.0.0.0"
    assert "'3f2a9c1d0b7e' is not an IP address" in caplog.text


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"validation_workers": 0}, "--validation-workers must be at least 1"),
        (
            {"max_input_tokens": 8, "max_total_tokens": 8},
            r"--max-input-tokens \(8\) must be less than --max-total-tokens \(8\)",
        ),
        (
            {"max_total_tokens": 9, "max_batch_total_tokens": 8},
            r"--max-total-tokens \(9\) must be at most --max-batch-total-tokens \(8\)",
        ),
        (
            {"max_batch_prefill_tokens": 9, "max_batch_total_tokens": 8},
            r"--max-batch-prefill-tokens \(9\) must be at most --max-batch-total-tokens \(8\)",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_limits(LauncherOptions(**limits))


def test_limits_may_be_equal_or_missing() -> None:
    check_limits(LauncherOptions(max_input_tokens=7, max_total_tokens=8, max_batch_total_tokens=8))
    check_limits(LauncherOptions(max_input_tokens=7))
