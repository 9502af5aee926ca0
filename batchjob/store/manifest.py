"""`Manifest`: job.json, the identity and the settings of a job. It is written once, when the output directory is
created; every later run is compared with it."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa

from batchjob import __version__
from batchjob.errors import ConfigMismatchError, StorageError
from batchjob.plan import JobPlan
from batchjob.store.checks import MAX_STATE_BYTES
from batchjob.store.columns import OutputColumns
from batchjob.store.schema import output_schema

FORMAT_VERSION = 1
LINK_METHODS = ("", "link", "rename_noreplace", "claim")
_ABSENT = "(not set)"
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Manifest:
    """`fingerprint` holds everything that changes results, as JSON values; the other settings are only for reference.

    `link_method` (how a part is published, see `publish`) and `plan_digest` are filled in when the directory is made.
    """

    job_id: str
    spec: Mapping[str, Any]  # as the user gave it
    resolved: Mapping[str, Any]  # the settings in effect: model revision, sampling defaults, ...
    fingerprint: Mapping[str, Any]
    schema: bytes  # of the parts, as a serialized Arrow schema
    num_samples: int  # output rows per input row, where the row's own params do not say otherwise
    output_token_ids: bool  # also by the schema, which alone says it for later columns
    writer: str  # version of batchjob that created the job
    link_method: str = ""
    plan_digest: str = ""
    format_version: int = FORMAT_VERSION

    @classmethod
    def new(
        cls,
        plan: JobPlan,
        *,
        spec: Mapping[str, Any],
        resolved: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        num_samples: int = 1,
        columns: OutputColumns | None = None,
    ) -> Manifest:
        """The manifest of a new job. Raises UsageError if a carried column has the name of one of ours."""
        columns = columns or OutputColumns()
        return cls(
            job_id=uuid.uuid4().hex,
            spec=_plain(spec),
            resolved=_plain(resolved),
            fingerprint=_plain(fingerprint),
            schema=output_schema(plan, columns).serialize().to_pybytes(),
            num_samples=num_samples,
            output_token_ids="output_token_ids" in columns.flags,
            writer=__version__,
        )

    @property
    def arrow_schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.BufferReader(self.schema))

    @property
    def output_columns(self) -> OutputColumns:
        return OutputColumns.of_schema(self.arrow_schema)

    @property
    def fingerprint_digest(self) -> str:
        """The digest of the fingerprint that the footers of parts hold."""
        return hashlib.sha256(_canonical(self.fingerprint).encode()).hexdigest()[:32]

    def diff(self, other: Manifest) -> list[str]:
        """The differences of `other`, the job asked for now, from this one, the job that is there: `name: old → new`
        lines.

        Empty if the two may share an output directory.
        """
        old, new = dict(_flatten(self.fingerprint)), dict(_flatten(other.fingerprint))
        lines = [
            f"{name}: {_show(old, name)} → {_show(new, name)}"
            for name in sorted(old.keys() | new.keys())
            if _canonical(old.get(name, _ABSENT)) != _canonical(new.get(name, _ABSENT))
        ]
        if self.num_samples != other.num_samples and "num_samples" not in old:
            lines.append(f"num_samples: {self.num_samples} → {other.num_samples}")
        return lines

    def with_setup(self, *, link_method: str, plan_digest: str) -> Manifest:
        return replace(self, link_method=link_method, plan_digest=plan_digest)

    def to_bytes(self) -> bytes:
        data = asdict(self)
        data["schema"] = base64.b64encode(self.schema).decode()
        # For the reader of job.json only; `schema` is what counts.
        data["columns"] = {field.name: str(field.type) for field in self.arrow_schema}
        return json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> Manifest:
        """Raises ConfigMismatchError for a newer format and StorageError for a damaged file."""
        try:
            if len(data) > MAX_STATE_BYTES:
                raise ValueError(f"it has {len(data):,} bytes")
            values = json.loads(data.decode("utf-8", "surrogatepass"))
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise ConfigMismatchError(
                    f"{source} was written in format {version}, by batchjob {values.get('writer') or '?'}; this one "
                    f"knows formats up to {FORMAT_VERSION}. Use a newer batchjob."
                )
            values.pop("columns", None)
            values["schema"] = base64.b64decode(values["schema"])
            manifest = cls(**values)
            manifest._check()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise StorageError(
                f"{source} is damaged ({error}). Restore it from a copy; without it the parts in data/ can be read but "
                "the job cannot continue."
            ) from error

    def _check(self) -> None:
        """Raises ValueError where a field is not of its type or out of range."""
        kinds = {"spec": dict, "resolved": dict, "fingerprint": dict, "num_samples": int, "output_token_ids": bool}
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds.get(field.name)
            if kind is None:
                kind = {"bytes": bytes, "int": int}.get(str(field.type), str)
            if type(value) is not kind:
                raise ValueError(f"{field.name} is no {kind.__name__}")
        if self.num_samples < 1 or self.link_method not in LINK_METHODS:
            raise ValueError("num_samples or link_method is none that batchjob writes")
        if self.output_token_ids != ("output_token_ids" in self.output_columns.flags):
            raise ValueError("output_token_ids is not what its schema says")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back, so that a tuple equals the list it becomes."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return plain


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _show(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return _ABSENT
    text = json.dumps(values[name], ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
