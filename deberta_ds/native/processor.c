/* What the kernels may use of this processor. */
#define _GNU_SOURCE /* syscall */
#include <sys/syscall.h>
#include <unistd.h>

int has_amx(void) { /* and the system lets this process use it */
#if defined(__AMX_BF16__) && defined(__AVX512F__)
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* AMX's tiles */);
#else
    return 0;
#endif
}

int has_avx512_bf16(void) { /* and not AMX, which the kernels are made with wherever it is */
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    return 1;
#else
    return 0;
#endif
}

int has_avx512(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

int has_avx2(void) {
#if defined(__AVX2__) && defined(__FMA__)
    return 1;
#else
    return 0;
#endif
}
