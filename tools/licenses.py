"""List the licenses of what mjax depends on, as docs/develop/dependencies.md; refuse bad ones.

    python -m tools.licenses > docs/develop/dependencies.md

It reads the metadata of installed packages: those that pyproject.toml names, and theirs in turn.
"""

import re
import sys
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHECKS_ONLY = {"test", "clients", "frameworks", "oracle"}  # extras that no user needs

# Words of a license's text or name -> how it is listed; the first that fits.
KINDS = {
    r"NVIDIA|Proprietary": "NVIDIA's own terms",
    r"\bMPL|Mozilla": "MPL-2.0",
    r"\bA?GPL|GNU (Affero|General)|SSPL": "GPL",
    r"\bLGPL|Lesser": "LGPL",
    r"Apache": "Apache-2.0",
    r"BSD|ISC\b": "BSD",
    r"\bMIT\b|Expat|HPND": "MIT",
    r"PSF|Python Software Foundation": "PSF",
    r"Unlicense|CC0|Public Domain|Zlib": "public domain or zlib",
}
REFUSED = {"GPL", "LGPL", "unknown"}
HEAD = """# Dependencies and their licenses

mjax is Apache-2.0. `python -m tools.licenses` writes this page from the metadata of installed
packages. A test refuses a license that does not go with Apache-2.0.

- Wheels of NVIDIA come with the extra `cuda13` alone and have NVIDIA's own terms. mjax does not
  ship them.
- MPL-2.0 covers the files of such a package, not what uses it.
- Wheels of `av` and `soundfile` contain FFmpeg and libsndfile, which are LGPL and loaded as shared
  libraries.

| license | packages |
|---|---|
"""


def direct() -> dict[str, set[str]]:
    """The packages that pyproject.toml names, and the extras that they are for ("" is none)."""
    found = defaultdict(set)
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for extra, lines in groups.items():
        for line in lines:
            name = canonical(Requirement(line).name)
            if name != "mjax":
                found[name].add(extra)
    return dict(found)


def installed_closure(names: set[str]) -> dict[str, metadata.Distribution]:
    """Those of `names` that are installed, what they depend on, and so on."""
    found, pending = {}, [(name, frozenset()) for name in names]
    extras = {r.name: r.extras for r in map(Requirement, _all_lines()) if r.extras}
    pending += [(canonical(name), frozenset(wanted)) for name, wanted in extras.items()]
    seen = set()
    while pending:
        name, wanted = pending.pop()
        if (name, wanted) in seen or name == "mjax":
            continue
        seen.add((name, wanted))
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or ():
            needed = Requirement(line)
            places = [{"extra": extra} for extra in ("", *wanted)]
            if needed.marker is None or any(map(needed.marker.evaluate, places)):
                pending.append((canonical(needed.name), frozenset(needed.extras)))
    return found


def _all_lines() -> list[str]:
    groups = PROJECT["optional-dependencies"]
    return PROJECT["dependencies"] + [line for lines in groups.values() for line in lines]


def license_of(package: metadata.Distribution) -> str:
    """The kind of a package's license; "unknown" if nothing says it."""
    said = package.metadata
    classifiers = [c for c in said.get_all("Classifier", []) if c.startswith("License ::")]
    for text in (said.get("License-Expression"), " ".join(classifiers), said.get("License")):
        for words, kind in KINDS.items():
            if text and re.search(words, text[:400]):
                return kind
    for file in package.files or ():
        if re.search(r"LICEN[SC]E|COPYING", file.name) and file.locate().is_file():
            text = file.locate().read_text(errors="replace")[:2000]
            for words, kind in KINDS.items():
                if re.search(words, text):
                    return kind
            if "Permission is hereby granted, free of charge" in text:
                return "MIT"
            if "Redistribution and use in source and binary forms" in text:
                return "BSD"
    return "unknown"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def by_license() -> dict[str, list[str]]:
    """Names of the packages that users may install, by the kind of their license."""
    users = {name for name, extras in direct().items() if extras - CHECKS_ONLY}
    found = defaultdict(list)
    for name, package in sorted(installed_closure(users).items()):
        found[license_of(package)].append(name)
    return dict(sorted(found.items()))


def main() -> int:
    found = by_license()
    refused = {kind: names for kind, names in found.items() if kind in REFUSED}
    print(HEAD + "\n".join(f"| {kind} | {', '.join(names)} |" for kind, names in found.items()))
    if refused:
        print(f"not with Apache-2.0: {refused}", file=sys.stderr)
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
