"""The examples are scripts, not a package: Python finds them, and what they import, in their own folders."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "route_guide")]
