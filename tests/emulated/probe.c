/* Prints what instructions of AVX-512 and AMX compute, to prove that the emulated machine (processor model,
 * kernel, boot) runs them rightly before any kernel of ours does. Expected values are by hand: see the
 * checks. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int failed;

static void check(const char* what, int right) {
    printf("%s: %s\n", what, right ? "right" : "WRONG");
    failed |= !right;
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))) static void avx512(void) {
    float fma[16];
    _mm512_storeu_ps(fma, _mm512_fmadd_ps(_mm512_set1_ps(2.0f), _mm512_set1_ps(3.0f), _mm512_set1_ps(0.5f)));
    check("vfmadd231ps zmm: 2 * 3 + 0.5 = 6.5", fma[15] == 6.5f);

    int dot[16]; /* no saturation on the way */
    _mm512_storeu_si512(
        dot, _mm512_dpbusd_epi32(_mm512_set1_epi32(7), _mm512_set1_epi8((char)250), _mm512_set1_epi8(-100)));
    check("vpdpbusd zmm: 7 + 4 * (250 * -100) = -99993", dot[15] == -99993);

    float tail[16] = {0};
    _mm512_storeu_ps(tail, _mm512_maskz_loadu_ps(0x1f, fma));
    check("masked load of 5 lanes: lane 4 is read, lane 5 is not", tail[4] == 6.5f && tail[5] == 0.0f);

    short widened[32];
    _mm512_storeu_si512(widened, _mm512_cvtepi8_epi16(_mm256_set1_epi8(-3)));
    check("vpmovsxbw zmm: -3 stays", widened[31] == -3);
}

/* bf16 is the upper half of a float32: 1 is 0x3f80, a step there is 2^-7 */
enum { kTwo = 0x4000, kThree = 0x4040, kMinusFour = 0xc080, kFive = 0x40a0 };

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static void bf16(void) {
    uint16_t rounded[32];
    const __m256bh down = _mm512_cvtneps_pbh(_mm512_set1_ps(1.0f + 0x1p-8f)),
                   up = _mm512_cvtneps_pbh(_mm512_set1_ps(1.0f + 3 * 0x1p-8f));
    memcpy(rounded, &down, 32);
    memcpy(rounded + 16, &up, 32);
    check("vcvtneps2bf16 zmm: ties go to even, 1 + 2^-8 down and 1 + 3 * 2^-8 up",
          rounded[15] == 0x3f80 && rounded[31] == 0x3f82);

    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_set1_ps(3.0f), _mm512_set1_ps(2.0f));
    memcpy(rounded, &both, 64);
    check("vcvtne2ps2bf16 zmm: the second operand below, the first above",
          rounded[0] == kTwo && rounded[15] == kTwo && rounded[16] == kThree && rounded[31] == kThree);
    const __m256bh half = _mm256_cvtne2ps_pbh(_mm256_set1_ps(3.0f), _mm256_set1_ps(2.0f));
    memcpy(rounded, &half, 32);
    check("vcvtne2ps2bf16 ymm: the same",
          rounded[7] == kTwo && rounded[8] == kThree && rounded[15] == kThree);

    float sums[16]; /* lower bf16 of a pair, then the upper one */
    const __m512i left = _mm512_set1_epi32(kMinusFour << 16 | kTwo),
                  right = _mm512_set1_epi32(kFive << 16 | kThree);
    _mm512_storeu_ps(sums, _mm512_dpbf16_ps(_mm512_set1_ps(0.5f), (__m512bh)left, (__m512bh)right));
    check("vdpbf16ps zmm: 0.5 + 2 * 3 + -4 * 5 = -13.5", sums[0] == -13.5f && sums[15] == -13.5f);
}

/* Tiles of 16 rows of 64 bytes: 0 sums, 1 rows, 2 columns (four bytes of a column side by side). */
__attribute__((target("amx-tile"))) static void load_tiles(const void *sums, const void *rows,
                                                           const void *columns) {
    static struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1, .row_bytes = {64, 64, 64}, .rows = {16, 16, 16}};
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, rows, 64);
    _tile_loadd(2, columns, 64);
}

__attribute__((target("amx-tile"))) static void store_sums(void *sums) {
    _tile_stored(0, sums, 64);
    _tile_release();
}

__attribute__((target("amx-tile,amx-bf16"))) static void tiles_of_bf16(void) {
    static float sums[16][16];
    static uint32_t rows[16][16], columns[16][16]; /* pairs of bf16 */
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) {
            const float row = (float)(i + 1), column = (float)j;
            uint32_t above_row, above_column;
            memcpy(&above_row, &row, 4);
            memcpy(&above_column, &column, 4);
            rows[i][j] = above_row | kTwo;         /* 2 and i + 1 */
            columns[i][j] = above_column | kThree; /* 3 and j */
            sums[i][j] = 0.5f;
        }
    }
    load_tiles(sums, rows, columns);
    _tile_dpbf16ps(0, 1, 2);
    store_sums(sums);
    int right = 1;
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) right &= sums[i][j] == 0.5f + 16.0f * (float)(2 * 3 + (i + 1) * j);
    }
    check("tdpbf16ps: 0.5 + 16 * (2 * 3 + (i + 1) * j) at row i, column j", right);
}

__attribute__((target("amx-tile,amx-int8"))) static void tiles_of_int8(void) {
    static int32_t sums[16][16];
    static int8_t rows[16][64], columns[16][64];
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 64; ++j) {
            rows[i][j] = (int8_t)(j % 4 == 1 ? -(i + 1) : 3);
            columns[i][j] = (int8_t)(j % 4 == 1 ? j / 4 - 8 : -128);
        }
        for (int j = 0; j < 16; ++j) sums[i][j] = -7;
    }
    load_tiles(sums, rows, columns);
    _tile_dpbssd(0, 1, 2);
    store_sums(sums);
    int right = 1;
    for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) right &= sums[i][j] == -7 + 16 * (3 * 3 * -128 - (i + 1) * (j - 8));
    }
    check("tdpbssd: -7 + 16 * (3 * 3 * -128 + -(i + 1) * (j - 8)) at row i, column j", right);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was printed before an illegal instruction shows */
    avx512();
    bf16();
    const int allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    check("Linux allows tiles", allowed);
    if (allowed) {
        tiles_of_bf16();
        tiles_of_int8();
    }
    return failed;
}
