"""Puts the kernels for CPUs into the wheel: the wheel is then for one platform, but for every Python.

Without a compiler the wheel is for any platform and has none of them; torch's products answer then.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        script = runpy.run_path(str(Path(self.root) / "legato" / "cpu" / "build.py"))
        self.app.display_info(script["build"]())
        library: Path = script["LIBRARY"]
        if version != "editable" and script["is_current"]():
            build_data["artifacts"].append(str(library.relative_to(self.root)))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
