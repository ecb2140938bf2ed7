// The pause of a spinning thread between two reads.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

inline void pause_a_little() {
#ifdef __x86_64__
  _mm_pause();
#else
  __asm__ volatile("isb");  // `yield` is over at once on processors without threads that share a core
#endif
}
