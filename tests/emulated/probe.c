/* Prints what AVX-512 instructions compute, to prove that the emulated machine (processor model, kernel, boot)
 * runs them before any kernel of ours does. Expected values are by hand: see the checks. */
#include <immintrin.h>
#include <stdio.h>

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))) static int run(void) {
  int failed = 0;
  float fma[16];
  _mm512_storeu_ps(fma, _mm512_fmadd_ps(_mm512_set1_ps(2.0f), _mm512_set1_ps(3.0f), _mm512_set1_ps(0.5f)));
  printf("vfmadd231ps zmm: 2 * 3 + 0.5 = %g\n", (double)fma[15]);
  failed |= fma[15] != 6.5f;

  int dot[16]; /* u8 250 * s8 -100, four times, on top of 7: no saturation on the way */
  _mm512_storeu_si512(
      dot, _mm512_dpbusd_epi32(_mm512_set1_epi32(7), _mm512_set1_epi8((char)250), _mm512_set1_epi8(-100)));
  printf("vpdpbusd zmm: 7 + 4 * (250 * -100) = %d\n", dot[15]);
  failed |= dot[15] != -99993;

  float tail[16] = {0}; /* a masked load of 5 lanes reads nothing past them */
  _mm512_storeu_ps(tail, _mm512_maskz_loadu_ps(0x1f, fma));
  printf("masked load: lane 4 = %g, lane 5 = %g\n", (double)tail[4], (double)tail[5]);
  failed |= tail[4] != 6.5f || tail[5] != 0.0f;

  short widened[32]; /* byte -> word, a BW instruction */
  _mm512_storeu_si512(widened, _mm512_cvtepi8_epi16(_mm256_set1_epi8(-3)));
  printf("vpmovsxbw zmm: %d\n", widened[31]);
  failed |= widened[31] != -3;
  return failed;
}

int main(void) {
  const int has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
  printf("AVX-512 F, BW, VL, DQ, VNNI: %s\n", has ? "yes" : "no");
  return has ? run() : 2;
}
