"""Names of files: how a file is compressed, and whether it belongs to a tool."""

from __future__ import annotations

import os

PACKED_NAMES = (".gz", ".zst", ".zstd", ".xz", ".bz2")


def base_name(path: str) -> str:
    """The name in small letters, without the endings of compressions."""
    name = os.path.basename(path).lower()
    while name.endswith(PACKED_NAMES):
        name = name.rpartition(".")[0]
    return name


def is_hidden(name: str) -> bool:
    """Such names belong to tools: _SUCCESS, _temporary, checksums, caches."""
    return name[:1] in (".", "_")
