"""Installs the folder `cli` as the package `batchdecode`, so that users get no package named `cli`.

The pages of `docs` are put below it, where `batchdecode help` finds them.

Hatchling can rename a folder for a wheel but not for an editable install, so both are done here.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "batchdecode"


class RenamedFolder(BuildHookInterface):
    """Adds `cli` to a wheel as `batchdecode`, or to an editable install a package for it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Say in `build_data` what else goes into the wheel; `version` is its kind."""
        folder = Path(self.root, "cli")
        if version != "editable":
            build_data["force_include"][str(folder)] = _PACKAGE
            for page in Path(self.root, "docs").rglob("*.md"):
                build_data["force_include"][str(page)] = f"{_PACKAGE}/{page.relative_to(self.root)}"
            return
        self._generated = TemporaryDirectory()
        package = Path(self._generated.name, "__init__.py")
        code = (folder / "__init__.py").read_text("utf-8")
        package.write_text(f"{code}\n\n__path__ = [{str(folder)!r}]\n", encoding="utf-8")
        build_data["force_include_editable"][str(package)] = f"{_PACKAGE}/__init__.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling calls it so
        """Remove what was generated once the wheel holds it."""
        if version == "editable":
            self._generated.cleanup()
