"""Manifest of the corpus: selected files, rules and hashes; and the differences of another selection."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

from specsim.maintain.training.corpus import RESEMBLANCE, Corpus, Document, Source


def make_manifest(corpus: Corpus, heldout_one_in: int) -> dict:
    """Describe a corpus so that the same selection can be made, and checked, elsewhere."""
    return {
        "rules": {
            "heldout": f"SHA-256 of the UTF-8 text is a multiple of {heldout_one_in}",
            "near_duplicate": f"estimated Jaccard index of 32-byte shingles with a held-out file >= {RESEMBLANCE}",
        },
        "train": _totals(corpus.train),
        "heldout": _totals(corpus.heldout),
        "removed": corpus.removed,
        "distributions": _distributions([*corpus.train, *corpus.heldout]),
        "heldout_files": {document.sha256: document.source for document in corpus.heldout},
    }


def _totals(documents: list[Document]) -> dict:
    digests = "\n".join(sorted(document.sha256 for document in documents))
    total_bytes = sum(len(document.text.encode()) for document in documents)
    return {"files": len(documents), "bytes": total_bytes, "sha256": hashlib.sha256(digests.encode()).hexdigest()}


def _distributions(documents: Iterable[Document]) -> list[dict]:
    groups = defaultdict(list)
    for document in documents:
        groups[document.distribution, document.version, document.licence].append(len(document.text.encode()))
    return [
        {"name": name, "version": version, "licence": licence, "files": len(sizes), "bytes": sum(sizes)}
        for (name, version, licence), sizes in sorted(groups.items())
    ]


def follow_manifest(sources: list[Source], manifest: dict) -> tuple[list[Source], list[str]]:
    """Choose the manifest's distributions among `sources`; with those missing or of another version."""
    available = {source.name: source for source in sources}
    chosen = []
    differences = []
    for wanted in manifest["distributions"]:
        source = available.get(wanted["name"])
        if source is None:
            differences.append(f"{wanted['name']} {wanted['version']} is missing")
            continue
        chosen.append(source)
        if source.version != wanted["version"]:
            differences.append(f"{source.name} is {source.version}, the manifest has {wanted['version']}")
    return chosen, differences


def compare_selection(manifest: dict, wanted: dict) -> list[str]:
    """List the parts of a new selection whose hash is not the wanted manifest's."""
    return [
        f"{part}: {manifest[part]['files']} files, the manifest has {wanted[part]['files']} and another hash"
        for part in ("train", "heldout")
        if manifest[part]["sha256"] != wanted[part]["sha256"]
    ]
