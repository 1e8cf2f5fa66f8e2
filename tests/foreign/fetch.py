"""The tests of a project's source distribution.

python tests/foreign/fetch.py lmcache 0.5.6      unpack them; prints the directory
python tests/foreign/fetch.py --files lmcache    those that are run, from suites.toml
"""

import hashlib
import io
import os
import re
import sys
import tarfile
import tomllib
from pathlib import Path
from urllib.parse import urldefrag, urljoin
from urllib.request import urlopen

HERE = Path(__file__).resolve()
PLACE = HERE.parents[2] / ".venv-foreign"
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
SECONDS = 300


def distribution(project: str, version: str) -> bytes:
    """A source distribution, whose digest is what the index says it is."""
    page = f"{INDEX.rstrip('/')}/{project}/"
    with urlopen(page, timeout=SECONDS) as answer:
        links = re.findall(r'href="([^"]+)"', answer.read().decode())
    name = f"/{project}-{version}.tar.gz"
    url, digest = next(urldefrag(urljoin(page, each)) for each in links if name in each)
    with urlopen(url, timeout=SECONDS) as answer:
        data: bytes = answer.read()
    if f"sha256={hashlib.sha256(data).hexdigest()}" != digest:
        raise SystemExit(f"{url}: not the file of the index")
    return data


def tests_of(project: str, version: str) -> Path:
    """The directory that has its `tests`, and nothing else: its package is the installed one."""
    place = PLACE / f"{project}-{version}"
    if not place.is_dir():
        print(f"fetching the tests of {project} {version}", file=sys.stderr)
        with tarfile.open(fileobj=io.BytesIO(distribution(project, version))) as archive:
            tests = [each for each in archive if each.name.startswith(f"{place.name}/tests/")]
            archive.extractall(PLACE, tests, filter="data")
    return place


if __name__ == "__main__":
    if sys.argv[1] == "--files":
        suites = tomllib.loads(HERE.with_name("suites.toml").read_text(encoding="utf-8"))
        print("\n".join(suites[sys.argv[2]]["tests"]))
    else:
        print(tests_of(*sys.argv[1:]))
