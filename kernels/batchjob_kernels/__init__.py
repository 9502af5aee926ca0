"""Attention over a paged KV cache. A backend is a module in `attention` with the same names of the same meaning:

    write_kv(kv, cache, meta)
    paged_attention(q, kv, cache, meta, *, scale, window, softcap, sinks) -> out
    refusal(need) -> str | None      # why it cannot serve a need (`Requirements`), for a person
    USES_DEVICE_LENS                 # it finds lengths and block tables on the device, by slot; others get lists
    COMPILED_FOR_BLOCK_SIZE          # it is compiled for a block size or serves certain ones, so it is tested with the
                                     # job's own size at load; others are tested with small blocks

`reference` is the specification and the oracle; `gather` is the fast one in PyTorch. Imports torch only.
"""

from batchjob_kernels.attention.meta import AttnMeta, Context, DeviceLens, Requirements

__all__ = ["AttnMeta", "Context", "DeviceLens", "Requirements"]
