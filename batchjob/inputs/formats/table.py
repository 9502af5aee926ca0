"""The input formats, by the names that plans keep."""

from __future__ import annotations

from batchjob.errors import StorageError
from batchjob.inputs.formats.base import Format
from batchjob.inputs.formats.jsonl import Jsonl
from batchjob.inputs.formats.parquet import Parquet
from batchjob.inputs.names import base_name
from batchjob.plan import InputFile

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Jsonl(),
        Parquet(),
    )
}
DEFAULT = FORMATS["jsonl"]  # of files that no format claims
ENDINGS = tuple(ending for format in FORMATS.values() for ending in format.endings)


def format_of(file: InputFile) -> Format:
    """The format of a planned file. Raises StorageError for one that this version does not read."""
    try:
        return FORMATS[file.format]
    except KeyError:
        raise StorageError(
            f"the job's plan says that {file.path} is of the format {file.format!r}, which this version of batchjob "
            "does not read: the plan is damaged, or of a later version"
        ) from None


def is_data(name: str) -> bool:
    """True for a file in a directory that is taken for input by its name. A compressed Parquet file is, and is then
    refused."""
    return base_name(name).endswith(ENDINGS)
