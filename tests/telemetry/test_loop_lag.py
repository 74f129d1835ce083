from __future__ import annotations

import asyncio
import time

from legato.telemetry.loop_lag import INTERVAL, LoopLag


def test_a_loop_that_is_held_up_is_late_by_that_much() -> None:
    async def main() -> list[float]:
        seen: list[float] = []
        lag = LoopLag(seen.append)
        await asyncio.sleep(0)
        time.sleep(INTERVAL + 0.2)
        while not seen:
            await asyncio.sleep(0)
        lag.stop()
        return seen

    assert asyncio.run(main())[0] >= 0.19
