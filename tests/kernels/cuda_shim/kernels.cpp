// The kernels' sources, unchanged, with the variants that `variants.inc` lists.
#define BATCHJOB_HOST
#include "paged_decode.cu"
#include "write_kv.cu"

template <typename Q, typename KV, int kHeadDim, int kGroup>
void run_decode(const void* p) { decode<Q, KV, kHeadDim, kGroup>(*static_cast<const DecodeParams*>(p)); }
template <typename Q, typename KV, int kHeadDim>
void run_merge(const void* p) { merge<Q, KV, kHeadDim>(*static_cast<const DecodeParams*>(p)); }
template <typename In, typename Cache>
void run_write(const void* p) { write_kv<In, Cache>(*static_cast<const WriteParams*>(p)); }

#define DECODE(name, Q, KV, D, G) \
    {name ":batchjob_decode", run_decode<Q, KV, D, G>}, {name ":batchjob_merge", run_merge<Q, KV, D>},
#define WRITE(name, In, Cache) {name ":batchjob_write_kv", run_write<In, Cache>},

const shim::Entry shim::entries[] = {
#include "variants.inc"
    {nullptr, nullptr}};

extern "C" int shim_params_bytes(int of_write) { return of_write ? sizeof(WriteParams) : sizeof(DecodeParams); }
extern "C" int shim_shared_bytes() { return kSharedBytes; }
extern "C" int shim_threads(int of_write) { return of_write ? kWriteThreads : kThreads; }
