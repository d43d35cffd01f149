// What CUDA sources share; each is compiled with this text before its own. No headers: NVRTC has none to find.
//
// HALF: numbers are float16; else bfloat16. They travel in pairs, two in a register.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef HALF
#define HALF 0
#endif

// A code in the lowest bits of RAISED adds itself: cheaper than a conversion. bfloat16: 128, float16: 1024.
#if HALF
#define RAISED 0x64006400u
#define MINUS_RAISED 0xE400E400u
#define ONES 0x3C003C00u
#define KIND "f16"
#else
#define RAISED 0x43004300u
#define MINUS_RAISED 0xC300C300u
#define ONES 0x3F803F80u
#define KIND "bf16"
#endif

// ---- numbers ----

__device__ __forceinline__ float float_of(u16 bits) {
#if HALF
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ float low_of(u32 pair) { return float_of((u16)pair); }
__device__ __forceinline__ float high_of(u32 pair) { return float_of((u16)(pair >> 16)); }

__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float rounded(float value) { return low_of(pair_of(value, 0.f)); }

__device__ __forceinline__ float float_of_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// a * b + c of both numbers of a pair, rounded once.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 found;
    asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 found;
    asm("fma.rn." KIND "x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(0x80008000u));
    return found;
}

// Two four-bit codes, those in the lowest bits of both halves of a word, as RAISED + code.
__device__ __forceinline__ u32 raised_codes(u32 word) {
    u32 pair;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(pair) : "r"(word), "n"(RAISED));
    return pair;
}

// Exact: both are small integers.
__device__ __forceinline__ u32 less(u32 pair, u32 minus) { return fma_pair(pair, ONES, minus); }

// ---- norms ----

// Two numbers over their row's root mean square (`factor` is one over it), times the norm's weights; rounded where the
// separate norm rounds.
__device__ __forceinline__ u32 normed_pair(u32 pair, float factor, u32 weight) {
    const u32 scaled = pair_of(low_of(pair) * factor, high_of(pair) * factor);
    return pair_of(low_of(scaled) * low_of(weight), high_of(scaled) * high_of(weight));
}

// ---- tensor cores ----

// FP8 codes are multiplied as float16, whatever numbers x has (row_product.cu).
#if FP8
#define MULTIPLIED "f16"
#else
#define MULTIPLIED KIND
#endif

// sums [16 x 8] += left [16 x 16] . right [16 x 8]. Of lane 4g+t: left rows g and g+8, right columns g, sums rows g (0, 1)
// and g+8 (2, 3) and columns 2t, 2t+1.
__device__ __forceinline__ void mma(float (&sums)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MULTIPLIED "." MULTIPLIED ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

#ifdef WGMMA
// The same of four warps together, each with 16 rows of the left side and of the sums, and 8 * PARTS columns of the right,
// which lie in shared memory in lines of 128 bytes. Until `await_products` neither left nor sums may be touched.
// `fresh`: sums begin with these products.

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most OPEN groups of this warpgroup's products are not done.
template <int OPEN = 0> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(OPEN) : "memory");
}

// 8 lines of 128 bytes after each other, pieces of 16 bytes swizzled by the number of the line.
__device__ __forceinline__ u64 lines_at(u32 place) {
    return (u64)((place & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Sums of a thread by the columns of the right side, and how an instruction calls them.
#define SUM4(s) "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
#define SUM16(i) SUM4(sums[4 * i]), SUM4(sums[4 * i + 1]), SUM4(sums[4 * i + 2]), SUM4(sums[4 * i + 3])
#define SUMS32 SUM16(0)
#define NAMES32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS64 SUMS32, SUM16(1)
#define NAMES64 NAMES32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS96 SUMS64, SUM16(2)
#define NAMES96 NAMES64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SUMS128 SUMS96, SUM16(3)
#define NAMES128 NAMES96 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS160 SUMS128, SUM16(4)
#define NAMES160 NAMES128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SUMS192 SUMS160, SUM16(5)
#define NAMES192 NAMES160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS224 SUMS192, SUM16(6)
#define NAMES224 NAMES192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SUMS256 SUMS224, SUM16(7)
#define NAMES256 NAMES224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// After the sums, the left side, RIGHT and FRESH are named.
#define PRODUCTS(COLUMNS, LEFT0, LEFT1, LEFT2, LEFT3, RIGHT, FRESH) \
    __device__ __forceinline__ void products(float (&sums)[COLUMNS / 8][4], const u32 (&left)[4], u64 right, int fresh) { \
        asm volatile("{.reg .pred p; setp.eq.s32 p, %" #FRESH ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." KIND "." KIND " {" NAMES##COLUMNS "}, " \
            "{%" #LEFT0 ",%" #LEFT1 ",%" #LEFT2 ",%" #LEFT3 "}, %" #RIGHT ", p, 1, 1, 0;}" \
            : SUMS##COLUMNS : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(fresh)); \
    }

PRODUCTS(32, 16, 17, 18, 19, 20, 21)
PRODUCTS(64, 32, 33, 34, 35, 36, 37)
PRODUCTS(96, 48, 49, 50, 51, 52, 53)
PRODUCTS(128, 64, 65, 66, 67, 68, 69)
PRODUCTS(160, 80, 81, 82, 83, 84, 85)
PRODUCTS(192, 96, 97, 98, 99, 100, 101)
PRODUCTS(224, 112, 113, 114, 115, 116, 117)
PRODUCTS(256, 128, 129, 130, 131, 132, 133)
#endif

// ---- memory ----

__device__ __forceinline__ u32 shared_address(const void *place) { return (u32)__cvta_generic_to_shared(place); }

// 16 bytes to shared memory, behind this thread's back; zeros where not `live`.
__device__ __forceinline__ void copy16(u32 target, const void *source, bool live = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
        :: "r"(target), "l"(source), "r"(live ? 16 : 0) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most OPEN groups of this thread's copies are still on their way.
template <int OPEN> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" :: "n"(OPEN) : "memory");
}

// Four 8 x 8 matrices of numbers; lane 8i + r says where row r of matrix i lies. Of lane 4g+t: row g, columns 2t, 2t+1.
__device__ __forceinline__ uint4 matrices_at(u32 place) {
    uint4 found;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(place));
    return found;
}

__device__ __forceinline__ uint4 shared16(u32 place) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w) : "r"(place));
    return found;
}

// Past the first level cache, which may have lines of the last product here.
__device__ __forceinline__ float4 sums_at(const float4 *place) {
    float4 found;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
        : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "l"(place) : "memory");
    return found;
}

// ---- copies that a barrier in shared memory counts (Hopper) ----

// CUtensorMap, as the driver encodes it.
struct alignas(64) TensorMap {
    u64 words[16];
};

#ifdef WGMMA
__device__ __forceinline__ void set_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// To copies too.
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives; the phase ends once so many bytes were copied as well.
__device__ __forceinline__ void await_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void await_phase(u32 barrier, int parity) {
    asm volatile("{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}

// Of each thread of a warpgroup, all of which call it: of what the others leave.
template <int COUNT> __device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// The box of `map` that begins at (column, row); zeros where there is nothing.
__device__ __forceinline__ void copy_box(u32 target, const TensorMap &map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(target), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_box(u32 target, const TensorMap &map, int column, int row, int half, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        :: "r"(target), "l"(&map), "r"(column), "r"(row), "r"(half), "r"(barrier) : "memory");
}

// The first copy would wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
#endif

// ---- the kernel before ----

// A kernel that was launched early (module.py) may read what the one before it wrote, and write at all, only after
// `await_kernel`; one that is launched early after this one may begin after `let_kernel_after`, of all blocks.
__device__ __forceinline__ void await_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_kernel_after() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_kernel_before() {
    await_kernel();
    let_kernel_after();
}

// ---- gates ----

// As layer.py numbers them: silu, gelu, gelu_tanh.
__device__ __forceinline__ float activated(float x, int kind) {
    if (kind == 0) return x / (1.f + __expf(-x));
    if (kind == 1) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

// ---- outputs ----

// Two outputs that lie side by side, of one row.
__device__ __forceinline__ void put(u16 *out, const u16 *bias, int output, float first, float second, bool add) {
    if (bias) {
        const u32 pair = *(const u32 *)(bias + output);
        first += low_of(pair), second += high_of(pair);
    }
    if (add) {
        const u32 pair = *(const u32 *)out;
        first += low_of(pair), second += high_of(pair);
    }
    *(u32 *)out = pair_of(first, second);
}

// Two outputs of a gate times what it gates, rounded where the separate product and gate would round.
__device__ __forceinline__ u32 gated_pair(const float (&gates)[2], const float (&ups)[2], int kind) {
    return pair_of(
        rounded(activated(rounded(gates[0]), kind)) * rounded(ups[0]),
        rounded(activated(rounded(gates[1]), kind)) * rounded(ups[1])
    );
}

// ---- sums of blocks that share a tile ----
//
// Work is cut into units, `units_in_tile` to a tile of outputs, and each block takes `units_of_block` in a row: of the
// first and last of its tiles perhaps not all. Its share of the first is 2 * block, that of another 2 * block + 1.

struct Cut {
    int units_in_tile, units_of_block;
    __device__ int first_block(int tile) const { return tile * units_in_tile / units_of_block; }
    __device__ int last_block(int tile) const { return ((tile + 1) * units_in_tile - 1) / units_of_block; }
    __device__ int share(int block, int tile) const {
        return 2 * block + (block * units_of_block < tile * units_in_tile);
    }
};

// All threads of a block, or the first THREADS of them.
template <int THREADS> __device__ __forceinline__ void meet() {
    if (THREADS) asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
    else __syncthreads();
}

// True in all threads of the block that is the last of `blocks` to arrive, with all shares to be read; the counter is zero
// again. `flag` is shared. THREADS: those that call it, if not all.
template <int THREADS = 0> __device__ __forceinline__ bool last_to_arrive(int *counter, int blocks, int *flag) {
    meet<THREADS>();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        if (before == blocks - 1) *counter = 0;
        *flag = before == blocks - 1;
    }
    meet<THREADS>();
    return *flag;
}
