"""An operator's own package, with a plugin of each kind, and how tests install it without pip."""

import shutil
import tomllib
from pathlib import Path

_HERE = Path(__file__).parent


def install(site: Path) -> Path:
    """Put the package into a folder as pip would: its module, and what its metadata says of entry points."""
    project = tomllib.loads((_HERE / "pyproject.toml").read_text())["project"]
    metadata = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(_HERE / "example_plugin.py", site)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in project["entry-points"].items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return site
