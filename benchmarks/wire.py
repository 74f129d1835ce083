"""A slow network between namespaces where the kernel has no netem: Ethernet frames wait here, or are lost.

    python -m benchmarks.wire --delay 0.005 --loss 0.01 NAMESPACE NAMESPACE …

Makes an interface `eth0` in every namespace and passes frames from each to all others, after the delay, until it is
killed. TCP at both ends is the kernel's own, with its retransmissions.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import time

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST_FRAME = 1 << 16


def open_interface(namespace: str, name: str = "eth0") -> int:
    """A descriptor that reads and writes the frames of a new interface there."""
    ours = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(theirs)
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        return tap
    finally:
        _enter(ours)
        os.close(ours)
        os.close(theirs)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def pass_on(taps: list[int], delay: float, loss: float) -> None:
    """For ever."""
    rng, waiting, number = random.Random(0), [], 0
    poll = select.epoll()
    for tap in taps:
        poll.register(tap, select.EPOLLIN)
    while True:
        wait = max(waiting[0][0] - time.monotonic(), 0) if waiting else -1
        for tap, _ in poll.poll(wait):
            try:
                while True:
                    frame = os.read(tap, LONGEST_FRAME)
                    if rng.random() < loss:
                        continue
                    due = time.monotonic() + delay
                    for other in taps:
                        if other != tap:
                            number += 1
                            heapq.heappush(waiting, (due, number, other, frame))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            try:
                os.write(target, frame)
            except OSError:  # the interface is down, or its queue is full: frames are lost, as on any wire
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the frames that are lost")
    parser.add_argument("namespaces", nargs="+")
    options = parser.parse_args()
    taps = [open_interface(namespace) for namespace in options.namespaces]
    print("ready", flush=True)
    pass_on(taps, options.delay, options.loss)


if __name__ == "__main__":
    main()
