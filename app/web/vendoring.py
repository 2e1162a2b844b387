"""Vendored files of the dashboard, built from pinned npm packages: `make vendor`.

Neither the service nor its users need this module, npm or Node: the files are part of the package.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STATIC = HERE / "static"
VERSIONS = STATIC / "vendor" / "versions.json"
PACKAGES = (
    "preact",
    "@preact/signals",
    "@preact/signals-core",
    "htm",
    "uplot",
    "@fontsource-variable/inter",
    "@fontsource-variable/jetbrains-mono",
)
_COPIED = {
    "uplot/dist/uPlot.min.css": "vendor/uplot.css",
    "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2": "fonts/inter.woff2",
    "@fontsource-variable/jetbrains-mono/files/jetbrains-mono-latin-wght-normal.woff2": "fonts/mono.woff2",
}
_BUILT = {"vendor_entry.js": "vendor/preact.js", "node_modules/uplot/dist/uPlot.esm.js": "vendor/uplot.js"}


def build_vendored(target: Path) -> None:
    """Write the vendored files, their licenses and their versions below `target`, as they are in `static`."""
    with tempfile.TemporaryDirectory(prefix="anneal-vendor-") as name:
        work = Path(name)
        for file in ("package.json", "package-lock.json", "vendor_entry.js"):
            shutil.copy(HERE / file, work)
        subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=work, check=True)
        for folder in ("vendor", "fonts"):
            (target / folder).mkdir(parents=True, exist_ok=True)
        esbuild = work / "node_modules" / ".bin" / "esbuild"
        for source, output in _BUILT.items():
            command = [str(esbuild), source, "--bundle", "--minify", "--format=esm", "--log-level=warning"]
            subprocess.run([*command, f"--outfile={target / output}"], cwd=work, check=True)
        packages = work / "node_modules"
        for source, output in _COPIED.items():
            shutil.copy(packages / source, target / output)
        (target / "vendor" / "LICENSES.txt").write_text("\n\n".join(_read_license(packages, name) for name in PACKAGES))
        packages_read = {name: _read_package(packages, name) for name in PACKAGES}
    files = sorted([*_BUILT.values(), *_COPIED.values()])
    hashes = {file: hashlib.sha256((target / file).read_bytes()).hexdigest() for file in files}
    document = {"packages": packages_read, "files": hashes}
    (target / "vendor" / "versions.json").write_text(json.dumps(document, indent=2) + "\n")


def _read_package(packages: Path, name: str) -> dict[str, str]:
    manifest = json.loads((packages / name / "package.json").read_text())
    return {"version": manifest["version"], "license": manifest["license"]}


def _read_license(packages: Path, name: str) -> str:
    folder = packages / name
    texts = [path for path in sorted(folder.iterdir()) if path.name.upper().startswith("LICENSE")]
    about = _read_package(packages, name)
    head = f"{name} {about['version']} ({about['license']})"
    return "\n".join([head, "=" * len(head), "", *(path.read_text().strip() for path in texts)]) + "\n"


if __name__ == "__main__":
    build_vendored(Path(sys.argv[1]) if len(sys.argv) > 1 else STATIC)
