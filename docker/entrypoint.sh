#!/bin/sh
# The container's arguments are the launcher's. `exec`, so that it gets the signals of `docker stop`.
# The container toolkit mounts the driver's libraries; the linker's cache does not know them yet.
ldconfig 2>/dev/null || true
exec text-generation-launcher "$@"
