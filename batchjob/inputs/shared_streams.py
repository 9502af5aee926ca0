"""What a number of shards means for the inputs of a job."""

from __future__ import annotations

from batchjob.plan import JobPlan


def shared_streams(plan: JobPlan, num_shards: int) -> list[str]:
    """Warnings about compressed files that several shards read: such a file cannot be entered in the middle."""
    readers: dict[int, set[int]] = {}
    for chunk in plan.chunks:
        for segment in chunk.segments:
            if plan.files[segment.file_index].compression:
                readers.setdefault(segment.file_index, set()).add(chunk.index % num_shards)
    shared = [(plan.files[index].path, len(shards)) for index, shards in readers.items() if len(shards) > 1]
    if not shared:
        return []
    path, num_readers = shared[0]
    more = f" (and {len(shared) - 1:,} more files like it)" if len(shared) > 1 else ""
    return [
        f"{path}{more} is compressed, so each of the {num_readers:,} shards that read it decompresses it from its "
        "start: store it uncompressed, as Parquet, or as many smaller files"
    ]
