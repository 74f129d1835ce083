"""Nothing here runs by itself: `make test-agents` installs the programs, and says where they are."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "LEGATO_AGENTS" in os.environ else ["*"]
