// Vectors of 16 lanes for each instruction set; kernels.c is written once in terms of them.
//
//   vf, vi   16 floats, 16 int32; vb  64 bytes: 4 consecutive inputs (bytes) for each of 16 outputs (lanes)
//   dot_u4   sums of 32 products of 4-bit weights (0..15) and int8 inputs, begun by u4_begin, read by u4_sum; where
//            inputs have a second part u4_times_256 comes between
//   dot_u8   the same for 8-bit weights, stored plus 128; u8_sum is given -128 times the sum of the inputs
//   vb_six   6-bit weights as those: 4 bits, and at 2 i of `high` 2 bits, of a number from -32 to 31 plus 32
//
// Sums of a group are integers and exact, and every instruction set does the same float operations in the same order.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#define PREFETCH(address) __builtin_prefetch(address, 0, 2)  // into the second level cache

INLINE int32_t load_i32(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#ifdef __AMX_INT8__
#define ISA_NAME "amx"
#else
#define ISA_NAME "avx512-vnni"
#endif
#define TILE_ROWS 6    // rows x blocks of a product at a time
#define TILE_BLOCKS 2
#define MIX_ROWS 6   // rows x vectors of an attention product at a time
#define MIX_VECS 4

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;
typedef __m512i u4_acc;
typedef __m512i u8_acc;

INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, 8); }
INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vf vf_from_i(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_from_f(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vi vi_load_i8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(vi_load_i8(p)); }
INLINE vf vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void vf_store_half(uint16_t *p, vf a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, 0)); }
INLINE vf vf_pow2(vf n, vf a) { return _mm512_scalef_ps(a, n); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE void vi_store_i8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }

INLINE vb vb_load(const uint8_t *p) { return _mm512_load_si512(p); }
INLINE vb vb_low(vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE vb vb_high(vb a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
INLINE vb vb_six(vb low, vb high, int i) {
    vb moved = i < 2 ? _mm512_slli_epi16(high, 4 - 2 * i) : _mm512_srli_epi16(high, 2 * i - 4);
    return _mm512_add_epi8(_mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(48))), _mm512_set1_epi8(96));
}
INLINE u4_acc u4_begin(void) { return _mm512_setzero_si512(); }
typedef __m512i inputs;
INLINE inputs inputs_at(const int8_t *x) { return _mm512_set1_epi32(load_i32(x)); }
INLINE u4_acc dot_u4(u4_acc acc, vb w, inputs x) { return _mm512_dpbusd_epi32(acc, w, x); }
INLINE u4_acc u4_times_256(u4_acc acc) { return _mm512_slli_epi32(acc, 8); }
INLINE vi u4_sum(u4_acc acc) { return acc; }
INLINE u8_acc u8_begin(void) { return _mm512_setzero_si512(); }
INLINE u8_acc u8_times_256(u8_acc acc) { return _mm512_slli_epi32(acc, 8); }
INLINE u8_acc dot_u8(u8_acc acc, vb w, inputs x) { return _mm512_dpbusd_epi32(acc, w, x); }
INLINE vi u8_sum(u8_acc acc, int32_t base) { return _mm512_add_epi32(acc, _mm512_set1_epi32(base)); }

#elif defined(__AVX2__)
#include <immintrin.h>
#define TILE_ROWS 4
#define TILE_BLOCKS 1
#define MIX_ROWS 6
#define MIX_VECS 1

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vb;
#ifdef __AVXVNNI__
typedef vi u4_acc;
#else
typedef struct { vi pairs, before; } u4_acc;  // in 16 bits, and in 32
#endif
typedef vi u8_acc;

#define EACH(type, f, ...) ((type){f(a.a, ##__VA_ARGS__), f(a.b, ##__VA_ARGS__)})
INLINE vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a.a), _mm256_storeu_ps(p + 8, a.b); }
INLINE vf vf_set1(float a) { return (vf){_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
INLINE vf vf_add(vf a, vf b) { return (vf){_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
INLINE vf vf_sub(vf a, vf b) { return (vf){_mm256_sub_ps(a.a, b.a), _mm256_sub_ps(a.b, b.b)}; }
INLINE vf vf_mul(vf a, vf b) { return (vf){_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
INLINE vf vf_div(vf a, vf b) { return (vf){_mm256_div_ps(a.a, b.a), _mm256_div_ps(a.b, b.b)}; }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf){_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
INLINE vf vf_max(vf a, vf b) { return (vf){_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
INLINE vf vf_min(vf a, vf b) { return (vf){_mm256_min_ps(a.a, b.a), _mm256_min_ps(a.b, b.b)}; }
INLINE vf vf_abs(vf a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, a.a), _mm256_andnot_ps(sign, a.b)};
}
INLINE vf vf_round(vf a) { return EACH(vf, _mm256_round_ps, 8); }
INLINE vf vf_from_i(vi a) { return EACH(vf, _mm256_cvtepi32_ps); }
INLINE vi vi_from_f(vf a) { return EACH(vi, _mm256_cvtps_epi32); }
INLINE vf vf_load_i8(const int8_t *p) {
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
}
INLINE vf vf_load_half(const uint16_t *p) {
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE void vf_store_half(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.a, 0));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.b, 0));
}
INLINE float half_sum(__m256 v) {  // in the order of _mm512_reduce_add_ps
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float vf_sum(vf a) { return half_sum(_mm256_add_ps(a.a, a.b)); }
INLINE float vf_hmax(vf a) {
    __m256 v = _mm256_max_ps(a.a, a.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
INLINE vi vi_add(vi a, vi b) { return (vi){_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
INLINE int32_t vi_sum(vi a) {
    int32_t lanes[8];
    int32_t sum = 0;
    _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi32(a.a, a.b));
    for (int i = 0; i < 8; i++) sum += lanes[i];
    return sum;
}
INLINE vf vf_pow2(vf n, vf a) {  // a * 2^n for n in the range of normal numbers
    vi e = vi_from_f(n);
    e = (vi){_mm256_slli_epi32(e.a, 23), _mm256_slli_epi32(e.b, 23)};
    return (vf){_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.a), e.a)),
                _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.b), e.b))};
}
INLINE void vi_store_i8(int8_t *p, vi a) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.a, a.b), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

INLINE vb vb_load(const uint8_t *p) {
    return (vb){_mm256_load_si256((const __m256i *)p), _mm256_load_si256((const __m256i *)(p + 32))};
}
INLINE vb vb_low(vb a) { return EACH(vb, _mm256_and_si256, _mm256_set1_epi8(15)); }
INLINE vb vb_high(vb a) {
    return (vb){_mm256_and_si256(_mm256_srli_epi16(a.a, 4), _mm256_set1_epi8(15)),
                _mm256_and_si256(_mm256_srli_epi16(a.b, 4), _mm256_set1_epi8(15))};
}
INLINE __m256i half_six(__m256i low, __m256i high, int i) {
    __m256i moved = i < 2 ? _mm256_slli_epi16(high, 4 - 2 * i) : _mm256_srli_epi16(high, 2 * i - 4);
    return _mm256_add_epi8(_mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(48))), _mm256_set1_epi8(96));
}
INLINE vb vb_six(vb low, vb high, int i) { return (vb){half_six(low.a, high.a, i), half_six(low.b, high.b, i)}; }
INLINE vi vi_times_256(vi a) { return EACH(vi, _mm256_slli_epi32, 8); }
typedef __m256i inputs;
INLINE inputs inputs_at(const int8_t *x) { return _mm256_set1_epi32(load_i32(x)); }
#ifdef __AVXVNNI__
#define ISA_NAME "avx-vnni"
INLINE vi vi_set1(int32_t v) { return (vi){_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INLINE vi dot4(vi acc, vb w, inputs x) {
    return (vi){_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
}
INLINE u4_acc u4_begin(void) { return vi_set1(0); }
INLINE u4_acc dot_u4(u4_acc acc, vb w, inputs x) { return dot4(acc, w, x); }
INLINE u4_acc u4_times_256(u4_acc acc) { return vi_times_256(acc); }
INLINE vi u4_sum(u4_acc acc) { return acc; }
INLINE u8_acc u8_begin(void) { return vi_set1(0); }
INLINE u8_acc u8_times_256(u8_acc acc) { return vi_times_256(acc); }
INLINE u8_acc dot_u8(u8_acc acc, vb w, inputs x) { return dot4(acc, w, x); }
INLINE vi u8_sum(u8_acc acc, int32_t base) { return vi_add(acc, vi_set1(base)); }
#else
#define ISA_NAME "avx2"
// Pairs are at most 2 * 15 * 127, so 8 of them fit into 16 bits: widened once a group.
INLINE vi vi_zero(void) { return (vi){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE vi widened(vi a) { return EACH(vi, _mm256_madd_epi16, _mm256_set1_epi16(1)); }
INLINE u4_acc u4_begin(void) { return (u4_acc){vi_zero(), vi_zero()}; }
INLINE u4_acc u4_times_256(u4_acc acc) { return (u4_acc){vi_zero(), vi_times_256(widened(acc.pairs))}; }
INLINE u4_acc dot_u4(u4_acc acc, vb w, inputs x) {
    acc.pairs = (vi){_mm256_add_epi16(acc.pairs.a, _mm256_maddubs_epi16(w.a, x)),
                     _mm256_add_epi16(acc.pairs.b, _mm256_maddubs_epi16(w.b, x))};
    return acc;
}
INLINE vi u4_sum(u4_acc acc) { return vi_add(acc.before, widened(acc.pairs)); }
// Signs move from the weights to the inputs: |w| <= 127, so that pairs fit into 16 bits.
INLINE u8_acc u8_begin(void) { return vi_zero(); }
INLINE u8_acc u8_times_256(u8_acc acc) { return vi_times_256(acc); }
INLINE __m256i signed_dot(__m256i acc, __m256i w, __m256i x) {
    __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x, s));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE u8_acc dot_u8(u8_acc acc, vb w, inputs x) {
    return (u8_acc){signed_dot(acc.a, w.a, x), signed_dot(acc.b, w.b, x)};
}
INLINE vi u8_sum(u8_acc acc, int32_t base) { return (void)base, acc; }
#endif

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define ISA_NAME "neon"
#define TILE_ROWS 2
#define TILE_BLOCKS 1
#define MIX_ROWS 6
#define MIX_VECS 1

typedef struct { float32x4_t v[4]; } vf;
typedef struct { int32x4_t v[4]; } vi;
typedef struct { uint8x16_t v[4]; } vb;
typedef vi u4_acc;
typedef vi u8_acc;

#define QUARTERS(type, expression) type r; for (int i = 0; i < 4; i++) r.v[i] = expression; return r
INLINE vf vf_load(const float *p) { QUARTERS(vf, vld1q_f32(p + 4 * i)); }
INLINE void vf_store(float *p, vf a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
INLINE vf vf_set1(float a) { QUARTERS(vf, vdupq_n_f32(a)); }
INLINE vf vf_add(vf a, vf b) { QUARTERS(vf, vaddq_f32(a.v[i], b.v[i])); }
INLINE vf vf_sub(vf a, vf b) { QUARTERS(vf, vsubq_f32(a.v[i], b.v[i])); }
INLINE vf vf_mul(vf a, vf b) { QUARTERS(vf, vmulq_f32(a.v[i], b.v[i])); }
INLINE vf vf_div(vf a, vf b) { QUARTERS(vf, vdivq_f32(a.v[i], b.v[i])); }
INLINE vf vf_fma(vf a, vf b, vf c) { QUARTERS(vf, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// Where one is NaN the second, as on other processors.
INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE vf vf_max(vf a, vf b) { QUARTERS(vf, larger(a.v[i], b.v[i])); }
INLINE vf vf_min(vf a, vf b) { QUARTERS(vf, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
INLINE vf vf_abs(vf a) { QUARTERS(vf, vabsq_f32(a.v[i])); }
INLINE vf vf_round(vf a) { QUARTERS(vf, vrndnq_f32(a.v[i])); }
INLINE vf vf_from_i(vi a) { QUARTERS(vf, vcvtq_f32_s32(a.v[i])); }
INLINE vi vi_from_f(vf a) { QUARTERS(vi, vcvtnq_s32_f32(a.v[i])); }
INLINE vf vf_load_i8(const int8_t *p) {
    QUARTERS(vf, ((float32x4_t){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]}));
}
INLINE vf vf_load_half(const uint16_t *p) { QUARTERS(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
INLINE void vf_store_half(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
INLINE float vf_sum(vf a) {  // in the order of _mm512_reduce_add_ps
    float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t pair = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
INLINE float vf_hmax(vf a) {
    float lanes[4], most;
    vst1q_f32(lanes, larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3])));
    most = lanes[0];
    for (int i = 1; i < 4; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}
INLINE vi vi_add(vi a, vi b) { QUARTERS(vi, vaddq_s32(a.v[i], b.v[i])); }
INLINE int32_t vi_sum(vi a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
INLINE vf vf_pow2(vf n, vf a) {  // a * 2^n for n in the range of normal numbers
    QUARTERS(vf, vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v[i]),
                                                 vshlq_n_s32(vcvtnq_s32_f32(n.v[i]), 23))));
}
INLINE void vi_store_i8(int8_t *p, vi a) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a.v[0]), vqmovn_s32(a.v[1]));
    int16x8_t high = vcombine_s16(vqmovn_s32(a.v[2]), vqmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}

INLINE vb vb_load(const uint8_t *p) { QUARTERS(vb, vld1q_u8(p + 16 * i)); }
INLINE vb vb_low(vb a) { QUARTERS(vb, vandq_u8(a.v[i], vdupq_n_u8(15))); }
INLINE vb vb_high(vb a) { QUARTERS(vb, vshrq_n_u8(a.v[i], 4)); }
INLINE vb vb_six(vb low, vb high, int q) {
    const uint8x16_t three = vdupq_n_u8(3), base = vdupq_n_u8(96);
    const int8x16_t down = vdupq_n_s8((int8_t)(-2 * q));
    QUARTERS(vb, vaddq_u8(vorrq_u8(low.v[i], vshlq_n_u8(vandq_u8(vshlq_u8(high.v[i], down), three), 4)), base));
}
typedef int8x16_t inputs;
INLINE inputs inputs_at(const int8_t *x) { return vreinterpretq_s8_s32(vdupq_n_s32(load_i32(x))); }
INLINE vi vi_set1(int32_t v) { QUARTERS(vi, vdupq_n_s32(v)); }
INLINE u4_acc u4_begin(void) { return vi_set1(0); }
INLINE u4_acc u4_times_256(u4_acc acc) { QUARTERS(u4_acc, vshlq_n_s32(acc.v[i], 8)); }
INLINE u4_acc dot_u4(u4_acc acc, vb w, inputs x) {
    QUARTERS(u4_acc, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), x));
}
INLINE vi u4_sum(u4_acc acc) { return acc; }
INLINE u8_acc u8_begin(void) { return vi_set1(0); }
INLINE u8_acc u8_times_256(u8_acc acc) { return u4_times_256(acc); }
INLINE u8_acc dot_u8(u8_acc acc, vb w, inputs x) {
    QUARTERS(u8_acc, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(veorq_u8(w.v[i], vdupq_n_u8(128))), x));
}
INLINE vi u8_sum(u8_acc acc, int32_t base) { return (void)base, acc; }  // products of signed bytes need no base

#else  // plain C: any other processor
#define ISA_NAME "plain"
#define TILE_ROWS 2
#define TILE_BLOCKS 1
#define MIX_ROWS 2
#define MIX_VECS 1

typedef struct { float v[LANES]; } vf;
typedef struct { int32_t v[LANES]; } vi;
typedef struct { uint8_t v[4 * LANES]; } vb;
typedef vi u4_acc;
typedef vi u8_acc;

#define LOOP(type, expression) type r; for (int i = 0; i < LANES; i++) r.v[i] = expression; return r
INLINE vf vf_load(const float *p) { LOOP(vf, p[i]); }
INLINE void vf_store(float *p, vf a) { memcpy(p, a.v, sizeof a.v); }
INLINE vf vf_set1(float a) { LOOP(vf, a); }
INLINE vf vf_add(vf a, vf b) { LOOP(vf, a.v[i] + b.v[i]); }
INLINE vf vf_sub(vf a, vf b) { LOOP(vf, a.v[i] - b.v[i]); }
INLINE vf vf_mul(vf a, vf b) { LOOP(vf, a.v[i] * b.v[i]); }
INLINE vf vf_div(vf a, vf b) { LOOP(vf, a.v[i] / b.v[i]); }
#ifdef FP_FAST_FMAF
INLINE vf vf_fma(vf a, vf b, vf c) { LOOP(vf, fmaf(a.v[i], b.v[i], c.v[i])); }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { LOOP(vf, a.v[i] * b.v[i] + c.v[i]); }
#endif
INLINE vf vf_max(vf a, vf b) { LOOP(vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE vf vf_min(vf a, vf b) { LOOP(vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE vf vf_abs(vf a) { LOOP(vf, fabsf(a.v[i])); }
INLINE vf vf_round(vf a) { LOOP(vf, rintf(a.v[i])); }
INLINE vf vf_from_i(vi a) { LOOP(vf, (float)a.v[i]); }
INLINE vi vi_from_f(vf a) { LOOP(vi, (int32_t)rintf(a.v[i])); }
INLINE float half_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f;  // the exponent's bias; also right for subnormal numbers
    if (value >= 65536.0f) value = h & 0x3ff ? NAN : INFINITY;
    return h & 0x8000 ? -value : value;
}
INLINE vf vf_load_i8(const int8_t *p) { LOOP(vf, (float)p[i]); }
INLINE vf vf_load_half(const uint16_t *p) { LOOP(vf, half_to_float(p[i])); }
INLINE uint16_t float_to_half(float value) {  // to nearest, ties to even, as the instructions do
    uint32_t bits, sign, low, half;
    float size = fabsf(value);
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    if (!(size < 65520.0f)) return (uint16_t)(sign | (size != size ? 0x7e00 : 0x7c00));
    size *= 0x1p-112f;  // now the half float is in the upper bits, subnormal ones too
    memcpy(&bits, &size, 4);
    half = bits >> 13, low = bits & 0x1fff;
    return (uint16_t)(sign | (half + (low > 0x1000 || (low == 0x1000 && half & 1))));
}
INLINE void vf_store_half(uint16_t *p, vf a) { for (int i = 0; i < LANES; i++) p[i] = float_to_half(a.v[i]); }
INLINE float vf_sum(vf a) {  // in the order of the vector instructions
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}
INLINE float vf_hmax(vf a) {
    float most = a.v[0];
    for (int i = 1; i < LANES; i++) most = a.v[i] > most ? a.v[i] : most;
    return most;
}
INLINE vi vi_add(vi a, vi b) { LOOP(vi, a.v[i] + b.v[i]); }
INLINE int32_t vi_sum(vi a) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += a.v[i];
    return sum;
}
INLINE vf vf_pow2(vf n, vf a) { LOOP(vf, ldexpf(a.v[i], (int)n.v[i])); }
INLINE void vi_store_i8(int8_t *p, vi a) { for (int i = 0; i < LANES; i++) p[i] = (int8_t)a.v[i]; }

INLINE vb vb_load(const uint8_t *p) { vb r; memcpy(r.v, p, sizeof r.v); return r; }
INLINE vb vb_low(vb a) { for (int i = 0; i < 4 * LANES; i++) a.v[i] &= 15; return a; }
INLINE vb vb_high(vb a) { for (int i = 0; i < 4 * LANES; i++) a.v[i] >>= 4; return a; }
INLINE vb vb_six(vb low, vb high, int i) {
    for (int at = 0; at < 4 * LANES; at++) low.v[at] = (uint8_t)((low.v[at] | (high.v[at] >> 2 * i & 3) << 4) + 96);
    return low;
}
typedef const int8_t *inputs;
INLINE inputs inputs_at(const int8_t *x) { return x; }
INLINE vi dot4(vi acc, vb w, inputs x) {
    for (int i = 0; i < LANES; i++)
        acc.v[i] += w.v[4 * i] * x[0] + w.v[4 * i + 1] * x[1] + w.v[4 * i + 2] * x[2] + w.v[4 * i + 3] * x[3];
    return acc;
}
INLINE u4_acc u4_begin(void) { LOOP(vi, 0); }
INLINE u4_acc u4_times_256(u4_acc acc) { LOOP(vi, acc.v[i] * 256); }
INLINE u4_acc dot_u4(u4_acc acc, vb w, inputs x) { return dot4(acc, w, x); }
INLINE vi u4_sum(u4_acc acc) { return acc; }
INLINE u8_acc u8_begin(void) { return u4_begin(); }
INLINE u8_acc u8_times_256(u8_acc acc) { return u4_times_256(acc); }
INLINE u8_acc dot_u8(u8_acc acc, vb w, inputs x) { return dot4(acc, w, x); }
INLINE vi u8_sum(u8_acc acc, int32_t base) { LOOP(vi, acc.v[i] + base); }
#endif

// exp for x <= about 80: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; below -87 about 1e-38.
INLINE vf vf_exp(vf x) {
    x = vf_max(x, vf_set1(-87.0f));
    vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    vf r = vf_fma(n, vf_set1(-0.693359375f), x);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_fma(vf_set1(1.9875691500e-4f), r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(vf_mul(p, r), r, vf_add(r, vf_set1(1.0f)));
    return vf_pow2(n, p);
}
