"""Licence that an installed distribution declares, and a check that it is permissive."""

import re
from email.message import Message
from importlib.metadata import PackageMetadata

PERMISSIVE = frozenset(
    "0BSD Apache-2.0 BSD BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 MIT-CMU PSF-2.0 "
    "Python-2.0 Unlicense Zlib".split()
)

CLASSIFIED = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}

PLAIN_NAMES = {
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause",
    "modified bsd": "BSD-3-Clause",
    "psf": "PSF-2.0",
    "python software foundation": "PSF-2.0",
}


def declared_licence(metadata: Message | PackageMetadata) -> str | None:
    """Read a distribution's licence as an SPDX expression; None if it declares none.

    `License-Expression` goes before the `License ::` classifiers (they all hold together), these before the free text.
    """
    expression, text = (next(iter(metadata.get_all(name, [])), "") for name in ("License-Expression", "License"))
    classifiers = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License")]
    named = [CLASSIFIED.get(name, name) for name in classifiers if name != "OSI Approved"]
    return expression or " AND ".join(named) or _plainly_named(text)


def _plainly_named(text: str) -> str | None:
    first_line = text.strip().split("\n")[0]
    plain = re.sub(r",|\bthe\b|\bversion\b|\blicen[cs]e$", "", first_line.lower())
    return PLAIN_NAMES.get(" ".join(plain.split()), first_line.removesuffix(" License")) or None


def is_permissive(expression: str | None) -> bool:
    """Check that every AND-part of an SPDX expression offers a choice that is known to be permissive."""
    plain = re.sub(r"[()]| WITH [\w.-]+", "", expression or "")
    return all(any(name.strip() in PERMISSIVE for name in part.split(" OR ")) for part in plain.split(" AND "))
