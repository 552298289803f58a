"""Fetch the web page's libraries from npm into `penstock/server/playground/static/vendor`.

To update one, change its version here and in `static/vendor.js` (KaTeX's style sheet also in
`static/index.html`), then run `python .ci/vendor.py`. Each library is in a folder named after its
version, with its licence. The files are as published.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "penstock" / "server" / "playground" / "static" / "vendor"

# npm's name and version, the folder's name, and which files are taken.
LIBRARIES = [
    ("markdown-it@14.3.3", "markdown-it", ["dist/markdown-it.min.js", "LICENSE"]),
    ("dompurify@3.4.18", "dompurify", ["dist/purify.min.js", "LICENSE"]),
    ("@highlightjs/cdn-assets@11.12.0", "highlight.js", ["es/highlight.min.js", "LICENSE"]),
    (
        "katex@0.19.1",
        "katex",
        ["dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2", "LICENSE"],
    ),
]


def fetch(package: str, name: str, patterns: list[str]) -> None:
    target = FOLDER / f"{name}-{package.rpartition('@')[2]}"
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as files:
            for member in files:
                path = member.name.partition("/")[2]  # below "package/"
                if any(fnmatch(path, pattern) for pattern in patterns):
                    below = path.partition("/")[2] or path  # without "dist/"
                    destination = target / below
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    source = files.extractfile(member)
                    assert source is not None, path
                    destination.write_bytes(source.read())


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for library in LIBRARIES:
        fetch(*library)


if __name__ == "__main__":
    main()
