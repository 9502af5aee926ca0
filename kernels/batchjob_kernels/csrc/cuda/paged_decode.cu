// Attention of one new token per sequence over a paged cache, its keys and values split over several blocks of threads.
//
// A block takes one KV head of one sequence and a run of tiles, a tile being 8 KiB of keys and as much of values. All
// query heads of the group use what it reads. Copies run two tiles ahead, in three stages of shared memory. A lane
// holds eight dimensions of a key, so that a key takes head_dim / 8 lanes, a *set*. A set scores a batch of keys for
// all of its heads, adds up the lanes' parts such that each lane ends with one of the scores, and turns that one into a
// weight. It keeps a softmax of its own over its keys (Milakov and Gimelshein, 2018). All softmaxes are merged at the
// end: sets by shuffles, warps in shared memory, splits by a second kernel (as in Flash-Decoding, Dao et al., 2023).
#include "numbers.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32, kStages = 3;
constexpr int kHalfStage = 8192, kStage = 2 * kHalfStage, kSharedBytes = kStages * kStage;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMinTiles = 4;  // of a split: fewer do not pay for the merge

struct DecodeParams {
    const void* q;           // [num_seqs, num_kv_heads * group, head_dim], sequences q_stride apart
    const void* cache;       // [num_blocks, 2, num_kv_heads, block_size, head_dim]
    const int* block_table;  // rows table_stride apart
    const int* table_rows;   // [num_seqs], or null: row i is of sequence i
    const int* kv_lens;      // [num_seqs]
    const float* sinks;      // [num_kv_heads * group], or null
    void* out;               // [num_seqs, num_kv_heads * group, head_dim]
    float* partial;          // [num_seqs, num_kv_heads * group, num_splits, head_dim]: weighted sums, not yet divided
    float* partial_stats;    // [num_seqs, num_kv_heads * group, num_splits, 2]: largest score, sum of weights
    long long q_stride, table_stride;
    int num_kv_heads, group, block_shift, num_splits, window;  // no window: 0
    float scale, softcap;                                      // no cap: 0
};

// How the keys of a sequence are cut. It depends on the sequence's length alone and on num_splits of the launch.
struct Cut {
    int first_key, end_key, first_tile, end_tile, tiles_per_split, used;
};

__device__ __forceinline__ Cut cut_keys(int kv_len, int window, int tile, int num_splits) {
    Cut cut;
    cut.end_key = kv_len;
    cut.first_key = window > 0 && window < kv_len ? kv_len - window : 0;
    cut.first_tile = cut.first_key / tile;
    cut.end_tile = (kv_len + tile - 1) / tile;
    const int tiles = cut.end_tile - cut.first_tile, even = (tiles + num_splits - 1) / num_splits;
    cut.tiles_per_split = even < kMinTiles ? kMinTiles : even;
    cut.used = (tiles + cut.tiles_per_split - 1) / cut.tiles_per_split;
    return cut;
}

// A softmax over some keys, in base 2: largest score, sum of weights relative to it.
struct Stats {
    float largest, sum;
};

// Factor by which what belongs to `largest` counts when the largest score is `overall`. Both may be minus infinity.
// A NaN stays one: a broken row must be seen to be broken.
__device__ __forceinline__ float factor(float largest, float overall) {
    return largest == minus_infinity() ? 0.0f : exp2_fast(largest - overall);
}

// What the weighted sum of all keys is multiplied by: one over the sum of weights, in which a sink takes part.
__device__ __forceinline__ float final_factor(Stats stats, const float* sinks, int head) {
    if (sinks == nullptr) return stats.sum > 0.0f ? 1.0f / stats.sum : 0.0f;
    const float sink = sinks[head] * kLog2e, overall = fmaxf(stats.largest, sink);
    const float own = factor(stats.largest, overall);
    return own / (stats.sum * own + factor(sink, overall));
}

// Sums each of the first kCount numbers over the lanes of a set, 2 * kFar of them, and leaves each lane its share of
// the sums: lane by lane in order, one sum for several lanes if there are fewer of them than lanes.
template <int kCount, int kFar, int kNumbers>
__device__ __forceinline__ void reduce_scatter(float (&numbers)[kNumbers], int lane) {
    if constexpr (kFar > 0 && kCount > 1) {
        const bool upper = (lane & kFar) != 0;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const float low = numbers[i], high = numbers[i + kCount / 2];
            numbers[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, kFar);
        }
        reduce_scatter<kCount / 2, kFar / 2>(numbers, lane);
    } else if constexpr (kFar > 0) {
        numbers[0] += __shfl_xor_sync(kAllLanes, numbers[0], kFar);
        reduce_scatter<1, kFar / 2>(numbers, lane);
    }
}

template <typename KV, int kHeadDim>
constexpr int kTileKeys = kHalfStage / (kHeadDim * static_cast<int>(sizeof(KV)));

// kGroup: query heads per KV head rounded up to a power of two; heads past p.group are computed and thrown away.
template <typename Q, typename KV, int kHeadDim, int kGroup>
__device__ __forceinline__ void decode(const DecodeParams& p) {
    constexpr int kTile = kTileKeys<KV, kHeadDim>;
    constexpr int kHeads = kGroup < 4 ? kGroup : 4, kHeadGroups = kGroup / kHeads;  // per warp; warps beside each other
    constexpr int kKeyGroups = kWarps / kHeadGroups;                               // warps that share out the keys
    constexpr int kLanes = kHeadDim / 8, kKeysPerWarp = 32 / kLanes;               // per key; at once
    constexpr int kSteps = kTile / (kKeyGroups * kKeysPerWarp);                    // keys of a lane in a tile
    constexpr int kBatch = kSteps < 4 ? kSteps : 4;                                // keys scored at a time
    constexpr int kScores = kBatch * kHeads;                                       // of a batch
    constexpr int kOwn = kScores > kLanes ? kScores / kLanes : 1;                  // scores that end in one lane
    constexpr int kSame = kScores < kLanes ? kLanes / kScores : 1;                 // lanes that end with one score
    constexpr int kCopy = 16 / static_cast<int>(sizeof(KV)), kCopiesPerKey = kHeadDim / kCopy;
    constexpr int kKeysPerPass = kThreads / kCopiesPerKey, kPasses = kTile / kKeysPerPass;
    static_assert(kPasses * kKeysPerPass == kTile && kSteps % kBatch == 0 && kSteps > 0, "tile and threads fit");
    DYNAMIC_SHARED(shared);

    const int kv_head = blockIdx.x, split = blockIdx.y, seq = blockIdx.z;
    const Cut cut = cut_keys(p.kv_lens[seq], p.window, kTile, p.num_splits);
    if (split >= cut.used) return;
    const int first_tile = cut.first_tile + split * cut.tiles_per_split;
    const int end_tile = min(first_tile + cut.tiles_per_split, cut.end_tile);
    const int* table = p.block_table + (p.table_rows == nullptr ? seq : p.table_rows[seq]) * p.table_stride;
    const int num_heads = p.num_kv_heads * p.group;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head_group = warp % kHeadGroups, key_group = warp / kHeadGroups;
    const int key_of_warp = lane / kLanes, dim = lane % kLanes * 8;
    const int first_lane = lane - lane % kLanes, first_score = lane % kLanes / kSame * kOwn;
    const auto place_in_tile = [&](int step) { return (step * kKeyGroups + key_group) * kKeysPerWarp + key_of_warp; };
    // What the lane with score number `score` has in its kOwn numbers.
    const auto of_score = [&](const float (&own)[kOwn], int score) {
        return __shfl_sync(kAllLanes, own[score % kOwn], first_lane + score / kOwn * kSame);
    };

    float q[kHeads][8], sums[kHeads][8];
    float largest[kOwn], total[kOwn];  // of the lane's own scores: largest of the head; sum of the lane's weights
#pragma unroll
    for (int r = 0; r < kOwn; ++r) largest[r] = minus_infinity(), total[r] = 0.0f;
    const float q_scale = p.softcap > 0.0f ? p.scale / p.softcap : p.scale * kLog2e;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const int head = head_group * kHeads + h;
#pragma unroll
        for (int i = 0; i < 8; ++i) q[h][i] = sums[h][i] = 0.0f;
        if (head < p.group) {
            load8(static_cast<const Q*>(p.q) + seq * p.q_stride + (kv_head * p.group + head) * kHeadDim + dim, q[h]);
#pragma unroll
            for (int i = 0; i < 8; ++i) q[h][i] *= q_scale;
        }
    }

    // Block numbers are looked up one tile before they are needed: the look-up must not hold up the copies.
    const int copy_key = threadIdx.x / kCopiesPerKey, copy_dim = threadIdx.x % kCopiesPerKey * kCopy;
    const int block_size = 1 << p.block_shift;
    const long long to_values = static_cast<long long>(p.num_kv_heads) * block_size * kHeadDim;
    int blocks[kPasses];
    const auto look_up = [&](int tile) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int key = tile * kTile + i * kKeysPerPass + copy_key;
            blocks[i] = key >= cut.first_key && key < cut.end_key ? table[key >> p.block_shift] : -1;
        }
    };
    const auto fetch = [&](int tile, int stage) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            const int key_of_tile = i * kKeysPerPass + copy_key, key = tile * kTile + key_of_tile;
            const bool live = blocks[i] >= 0;
            const long long tile_row = (2ll * (live ? blocks[i] : 0) * p.num_kv_heads + kv_head) << p.block_shift;
            const long long row = tile_row + (key & (block_size - 1));
            const KV* from = static_cast<const KV*>(p.cache) + row * kHeadDim + copy_dim;
            KV* to = reinterpret_cast<KV*>(shared + stage * kStage) + key_of_tile * kHeadDim + copy_dim;
            async_copy_16(to, from, live);
            async_copy_16(to + kTile * kHeadDim, from + to_values, live);
        }
    };

#pragma unroll
    for (int ahead = 0; ahead < kStages - 1; ++ahead) {
        if (first_tile + ahead < end_tile) {
            look_up(first_tile + ahead);
            fetch(first_tile + ahead, ahead);
        }
        async_commit();
    }
    look_up(first_tile + kStages - 1);

    int stage = 0;
    for (int tile = first_tile; tile < end_tile; ++tile) {
        async_wait<kStages - 2>();
        // Every thread's copies of this tile are there, and every thread is done with the stage that is filled next.
        __syncthreads();
        if (tile + kStages - 1 < end_tile) {
            fetch(tile + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
            look_up(tile + kStages);
        }
        async_commit();
        const KV* keys = reinterpret_cast<const KV*>(shared + stage * kStage);
        const KV* values = keys + kTile * kHeadDim;
        stage = stage + 1 == kStages ? 0 : stage + 1;

#pragma unroll 1
        for (int step = 0; step < kSteps; step += kBatch) {
            float scores[kScores];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                float k[8];
                load8(keys + place_in_tile(step + b) * kHeadDim + dim, k);
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    float& score = scores[b * kHeads + h] = 0.0f;
#pragma unroll
                    for (int i = 0; i < 8; ++i) score += q[h][i] * k[i];
                }
            }
            reduce_scatter<kScores, kLanes / 2>(scores, lane);

            float weights[kOwn], kept[kOwn];
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
                const int key = tile * kTile + place_in_tile(step + (first_score + r) / kHeads);
                const bool seen = key >= cut.first_key && key < cut.end_key;
                float score = scores[r];
                if (p.softcap > 0.0f) {  // tanh(x) = 1 - 2 / (exp(2x) + 1)
                    const float tanh_score = 1.0f - 2.0f * reciprocal_fast(exp2_fast(2.0f * kLog2e * score) + 1.0f);
                    score = p.softcap * kLog2e * tanh_score;
                }
                score = seen ? score : minus_infinity();
                float now = fmaxf(largest[r], score);
#pragma unroll
                for (int far = kLanes / kBatch; far < kLanes; far *= 2) {  // the lanes with the head's other keys
                    now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, far));
                }
                kept[r] = factor(largest[r], now);
                weights[r] = factor(score, now);
                total[r] = total[r] * kept[r] + weights[r];
                largest[r] = now;
            }
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const float kept_of_head = of_score(kept, h);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[h][i] *= kept_of_head;
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                float v[8];
                load8(values + place_in_tile(step + b) * kHeadDim + dim, v);
#pragma unroll
                for (int h = 0; h < kHeads; ++h) {
                    const float weight = of_score(weights, b * kHeads + h);
#pragma unroll
                    for (int i = 0; i < 8; ++i) sums[h][i] += weight * v[i];
                }
            }
        }
    }

    // Every lane learns the softmax of its set.
    Stats stats[kHeads];
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
        for (int far = kLanes / kBatch; far < kLanes; far *= 2) total[r] += __shfl_xor_sync(kAllLanes, total[r], far);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) stats[h] = Stats{of_score(largest, h), of_score(total, h)};

    // Merge the sets of a warp.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int far = kLanes; far < 32; far *= 2) {
            const float other = __shfl_xor_sync(kAllLanes, stats[h].largest, far);
            const float overall = fmaxf(stats[h].largest, other), kept = factor(stats[h].largest, overall);
            stats[h].largest = overall;
            stats[h].sum *= kept;
            stats[h].sum += __shfl_xor_sync(kAllLanes, stats[h].sum, far);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sums[h][i] *= kept;
                sums[h][i] += __shfl_xor_sync(kAllLanes, sums[h][i], far);
            }
        }
    }

    // Merge the warps, where the stages were.
    float* warp_sums = reinterpret_cast<float*>(shared);  // [kKeyGroups, kGroup, kHeadDim]
    Stats* warp_stats = reinterpret_cast<Stats*>(warp_sums + kKeyGroups * kGroup * kHeadDim);  // [kKeyGroups, kGroup]
    static_assert(kKeyGroups * kGroup * (kHeadDim * 4 + 8) <= kSharedBytes, "it fits");
    __syncthreads();
    if (key_of_warp == 0) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const int row = key_group * kGroup + head_group * kHeads + h;
            store8(warp_sums + row * kHeadDim + dim, sums[h]);
            if (dim == 0) warp_stats[row] = stats[h];
        }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < p.group * kHeadDim; index += kThreads) {
        const int head_of_group = index / kHeadDim, d = index % kHeadDim, head = kv_head * p.group + head_of_group;
        Stats all{minus_infinity(), 0.0f};
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
            all.largest = fmaxf(all.largest, warp_stats[g * kGroup + head_of_group].largest);
        }
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
            const Stats one = warp_stats[g * kGroup + head_of_group];
            const float kept = factor(one.largest, all.largest);
            all.sum += one.sum * kept;
            sum += warp_sums[(g * kGroup + head_of_group) * kHeadDim + d] * kept;
        }
        const long long row = static_cast<long long>(seq) * num_heads + head;
        if (cut.used == 1) {
            from_float(sum * final_factor(all, p.sinks, head), static_cast<Q*>(p.out)[row * kHeadDim + d]);
        } else {
            p.partial[(row * p.num_splits + split) * kHeadDim + d] = sum;
            if (d == 0) reinterpret_cast<Stats*>(p.partial_stats)[row * p.num_splits + split] = all;
        }
    }
}

// Puts the splits of one head of one sequence together; a thread for each dimension.
template <typename Q, typename KV, int kHeadDim>
__device__ __forceinline__ void merge(const DecodeParams& p) {
    const int head = blockIdx.x, seq = blockIdx.y, d = threadIdx.x;
    const Cut cut = cut_keys(p.kv_lens[seq], p.window, kTileKeys<KV, kHeadDim>, p.num_splits);
    if (cut.used == 1) return;  // already written
    const long long row = static_cast<long long>(seq) * p.num_kv_heads * p.group + head;
    const Stats* stats = reinterpret_cast<const Stats*>(p.partial_stats) + row * p.num_splits;
    Stats all{minus_infinity(), 0.0f};
    for (int split = 0; split < cut.used; ++split) all.largest = fmaxf(all.largest, stats[split].largest);
    float sum = 0.0f;
    for (int split = 0; split < cut.used; ++split) {
        const float kept = factor(stats[split].largest, all.largest);
        all.sum += stats[split].sum * kept;
        sum += p.partial[(row * p.num_splits + split) * kHeadDim + d] * kept;
    }
    from_float(sum * final_factor(all, p.sinks, head), static_cast<Q*>(p.out)[row * kHeadDim + d]);
}

#ifndef BATCHJOB_HOST
extern "C" __global__ void __launch_bounds__(kThreads, 4) batchjob_decode(const __grid_constant__ DecodeParams p) {
    decode<BATCHJOB_Q, BATCHJOB_CACHE, BATCHJOB_HEAD_DIM, BATCHJOB_GROUP>(p);
}

extern "C" __global__ void __launch_bounds__(BATCHJOB_HEAD_DIM) batchjob_merge(const __grid_constant__ DecodeParams p) {
    merge<BATCHJOB_Q, BATCHJOB_CACHE, BATCHJOB_HEAD_DIM>(p);
}
#endif
