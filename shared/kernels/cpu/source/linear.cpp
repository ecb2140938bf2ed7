// y = x w^T + bias for few rows of x: every weight is read once, from memory, in its own dtype, and used for all rows.
#include "simd.h"

namespace {

// Even and odd elements of x are kept apart: a vector of 32 bf16 weights then widens by one shift and one mask.
struct SplitRows {
  const float* even;
  const float* odd;
  int64_t stride;
};

template <int M, int R>
void tile(const bf16* w, int64_t k_size, SplitRows x, float (&sums)[M][R]) {
  __m512 acc[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) acc[m][r] = _mm512_setzero_ps();
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  for (int64_t k = 0; k < k_size; k += 32) {
    __m512 we[R], wo[R];
    for (int r = 0; r < R; r++) {
      __m512i v = _mm512_loadu_si512(w + r * k_size + k);
      we[r] = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
      wo[r] = _mm512_castsi512_ps(_mm512_and_si512(v, high));
    }
    for (int m = 0; m < M; m++) {
      __m512 xe = _mm512_loadu_ps(x.even + m * x.stride + k / 2);
      __m512 xo = _mm512_loadu_ps(x.odd + m * x.stride + k / 2);
      for (int r = 0; r < R; r++) {
        acc[m][r] = _mm512_fmadd_ps(xe, we[r], acc[m][r]);
        acc[m][r] = _mm512_fmadd_ps(xo, wo[r], acc[m][r]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = _mm512_reduce_add_ps(acc[m][r]);
}

template <int M, int R>
void tile(const float* w, int64_t k_size, SplitRows x, float (&sums)[M][R]) {
  __m512 acc[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) acc[m][r] = _mm512_setzero_ps();
  for (int64_t k = 0; k < k_size; k += 16) {
    __m512 wv[R];
    for (int r = 0; r < R; r++) wv[r] = _mm512_loadu_ps(w + r * k_size + k);
    for (int m = 0; m < M; m++) {
      __m512 xv = _mm512_loadu_ps(x.even + m * x.stride + k);
      for (int r = 0; r < R; r++) acc[m][r] = _mm512_fmadd_ps(xv, wv[r], acc[m][r]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = _mm512_reduce_add_ps(acc[m][r]);
}

void put(float* y, float x) { *y = x; }
void put(bf16* y, float x) {
  bf16 lane[16];
  store16(lane, _mm512_set1_ps(x));
  *y = lane[0];
}

template <int M, int R, typename W, typename T>
void rows(const W* w, int64_t k_size, SplitRows x, const T* bias, T* y, int64_t n_size) {
  float sums[M][R];
  tile<M, R>(w, k_size, x, sums);
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) put(y + m * n_size + r, sums[m][r] + (bias ? to_float(bias[r]) : 0.0f));
}

template <int R, typename W, typename T>
void panel(const W* w, int64_t m_size, int64_t k_size, SplitRows x, const T* bias, T* y, int64_t n_size) {
  auto at = [&](int64_t m) { return SplitRows{x.even + m * x.stride, x.odd + m * x.stride, x.stride}; };
  int64_t m = 0;
  for (; m + 4 <= m_size; m += 4) rows<4, R>(w, k_size, at(m), bias, y + m * n_size, n_size);
  for (; m + 2 <= m_size; m += 2) rows<2, R>(w, k_size, at(m), bias, y + m * n_size, n_size);
  for (; m < m_size; m++) rows<1, R>(w, k_size, at(m), bias, y + m * n_size, n_size);
}

SplitRows split(const float*, const float* x, float*, int64_t, int64_t k_size) { return {x, x, k_size}; }
SplitRows split(const bf16*, const float* x, float* scratch, int64_t m_size, int64_t k_size) {
  float *even = scratch, *odd = scratch + m_size * k_size / 2;
  for (int64_t i = 0; i < m_size * k_size / 2; i++) {
    even[i] = x[2 * i];
    odd[i] = x[2 * i + 1];
  }
  return {even, odd, k_size / 2};
}

template <typename W, typename T>
void linear(const T* x, const W* w, const T* bias, T* y, float* scratch, int64_t m_size, int64_t k_size, int64_t n_size) {
  float* wide = scratch + m_size * k_size;
  for (int64_t i = 0; i < m_size * k_size; i += 16) _mm512_storeu_ps(wide + i, load16(x + i));
  SplitRows parts = split(w, wide, scratch, m_size, k_size);
#pragma omp parallel for schedule(static)
  for (int64_t n4 = 0; n4 < n_size / 4; n4++) {
    int64_t n = 4 * n4;
    panel<4>(w + n * k_size, m_size, k_size, parts, bias ? bias + n : nullptr, y + n, n_size);
  }
  for (int64_t n = n_size / 4 * 4; n < n_size; n++)
    panel<1>(w + n * k_size, m_size, k_size, parts, bias ? bias + n : nullptr, y + n, n_size);
}

}  // namespace

// x [m, k], w [n, k], bias [n] or null, y [m, n], all contiguous; scratch of 2 m k floats; k a multiple of 32.
extern "C" void tandem_linear(
    const void* x, const void* w, const void* bias, void* y, float* scratch, int64_t m, int64_t k, int64_t n, int is_bf16) {
  if (is_bf16)
    linear((const bf16*)x, (const bf16*)w, (const bf16*)bias, (bf16*)y, scratch, m, k, n);
  else
    linear((const float*)x, (const float*)w, (const float*)bias, (float*)y, scratch, m, k, n);
}
