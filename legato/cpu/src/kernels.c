// The kernels, compiled once for each instruction set (build.py). No sum depends on which other rows there are.
#include "attention.h"
#include "products.h"

static void best(const float *logits, int64_t size, int64_t *id, float *logprob) {
    int64_t whole = size / LANES * LANES;
    vf top = vf_set1(-INFINITY), check = vf_set1(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) {
        vf v = vf_load(logits + i);
        top = vf_max(top, v);
        check = vf_fma(v, vf_set1(0.0f), check);
    }
    float most = vf_hmax(top), bad = vf_sum(check);
    for (int64_t i = whole; i < size; i++) {
        most = MAX(most, logits[i]);
        bad += logits[i] * 0.0f;
    }
    vf sums = vf_set1(0.0f);
    for (int64_t i = 0; i < whole; i += LANES)
        sums = vf_add(sums, vf_exp(vf_sub(vf_load(logits + i), vf_set1(most))));
    float sum = vf_sum(sums);
    for (int64_t i = whole; i < size; i++) sum += expf(logits[i] - most);
    *id = 0;
    for (int64_t i = 0; i < size; i++)
        if (logits[i] == most) {
            *id = i;
            break;
        }
    *logprob = bad == 0.0f ? -logf(sum) : NAN;
}

#define NAME_(suffix) kernels_##suffix
#define NAME(suffix) NAME_(suffix)
const struct kernels NAME(SUFFIX) = {ISA_NAME, ROWS_AT_ONCE, ROW_MULTIPLE, product, gated, head,
                                     norm,     quantize,     attend,       best};
