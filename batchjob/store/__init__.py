"""The output directory: finished rows go into logs, whole chunks into immutable parts, each row once."""

from __future__ import annotations

from batchjob.store.chunk import OpenChunk
from batchjob.store.commit import Committed
from batchjob.store.counts import RowCounts
from batchjob.store.fsops import FsOps
from batchjob.store.manifest import Manifest
from batchjob.store.merge import merge
from batchjob.store.schema import check_column_names
from batchjob.store.status import Status, job_status
from batchjob.store.store import Store

__all__ = [
    "Committed",
    "FsOps",
    "Manifest",
    "OpenChunk",
    "RowCounts",
    "Status",
    "Store",
    "check_column_names",
    "job_status",
    "merge",
]
