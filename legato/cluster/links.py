"""Links between shards: tensors as bytes, in order. A thread for each link reads them, so that nobody who sends waits
for a shard that computes, and the end of a link is noticed at once."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from legato.cluster.frames import HEADER_SIZE, BrokenLink, FrameKind, header, parse_header

# Messages that were read and not taken yet; more stay with the sender.
MAX_WAITING = 64
LONGEST = 1 << 33


class TensorLink:
    def __init__(self, connection: socket.socket, rank: int, on_lost: Callable[[str], None] = lambda _: None) -> None:
        """`rank` is that of the other end; `on_lost` is called, on a thread, when the link ends by itself."""
        connection.setblocking(True)
        self.rank = rank
        self._connection = connection
        self._on_lost = on_lost
        self._num_sent = self._num_received = 0
        self._inbox: queue.Queue[bytearray | None] = queue.Queue(MAX_WAITING)
        self._is_closed = False
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"link-{rank}", daemon=True)
        self._reader.start()

    def send(self, data: memoryview | bytes) -> None:
        try:
            with self._lock:
                self._connection.sendall(header(FrameKind.TENSOR, self._num_sent, len(data)))
                self._connection.sendall(data)
                self._num_sent += 1
        except OSError as error:
            raise BrokenLink(f"lost the link to rank {self.rank}: {error.strerror}") from None

    def receive(self, length: int, timeout: float | None = None) -> bytearray:
        """The next message, which has so many bytes. BrokenLink."""
        try:
            data = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise BrokenLink(f"nothing arrived from rank {self.rank} for {timeout:g} s") from None
        if data is None:
            self._inbox.put(None)  # for whoever asks again
            raise BrokenLink(f"lost the link to rank {self.rank}")
        if len(data) != length:
            raise BrokenLink(f"{len(data)} bytes arrived from rank {self.rank}, {length} were expected")
        return data

    def has_arrived(self) -> bool:
        return not self._inbox.empty()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=1.0)
        self._connection.close()

    def _read(self) -> None:
        reason = "the other end closed the link"
        try:
            while True:
                head = self._exactly(HEADER_SIZE)
                kind, length = parse_header(head, self._num_received, LONGEST)
                if kind != FrameKind.TENSOR:
                    raise BrokenLink(f"a message of kind {kind.name} arrived")
                self._num_received += 1
                self._put(self._exactly(length))
        except (BrokenLink, OSError) as error:
            reason = str(error)
        self._put(None)
        if not self._is_closed:
            self._on_lost(f"lost the link to rank {self.rank}: {reason}")

    def _put(self, data: bytearray | None) -> None:
        while not self._is_closed:
            try:
                self._inbox.put(data, timeout=0.5)
                return
            except queue.Full:
                time.sleep(0)

    def _exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            num = self._connection.recv_into(view[filled:])
            if num == 0:
                raise BrokenLink("the other end closed the link")
            filled += num
        return buffer
