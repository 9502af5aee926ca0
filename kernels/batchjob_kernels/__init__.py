"""Attention over a paged KV cache. A backend is a module with the same two functions of the same meaning:

    write_kv(kv, cache, meta)
    paged_attention(q, kv, cache, meta, *, scale, window, softcap, sinks) -> out

`reference` is the specification and the oracle; `gather` is the fast one in PyTorch. Imports torch only.
"""

from batchjob_kernels.attention.meta import AttnMeta, Context, DeviceLens, Requirements

__all__ = ["AttnMeta", "Context", "DeviceLens", "Requirements"]
