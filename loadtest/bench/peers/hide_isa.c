// Preloaded into an engine's process: hides instruction sets from everything in it, so that libraries which choose their
// kernels by CPUID choose those of a smaller processor. TANDEM_HIDE_ISA is what is left: avx2, avx512 (without BF16 and
// AMX) or avx512-bf16 (without AMX).
//
// Linux can make CPUID fault for a thread and for the threads that it starts (arch_prctl, ARCH_SET_CPUID). The fault's
// handler runs the instruction itself, clears bits in its answer and continues after it. Handlers that others install for
// SIGSEGV are kept behind it, for all other faults. What was chosen before this library's constructor keeps its choice:
// glibc's string functions.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_SET_CPUID = 0x1012 };

// Bits of the registers of CPUID's leaves, by Intel's manual (volume 2, CPUID).
enum {
    LEAF7_EBX_AVX512 = 1u << 16 | 1u << 17 | 1u << 21 | 3u << 26 | 1u << 28 | 3u << 30,
    LEAF7_ECX_AVX512 = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14,
    LEAF7_EDX_AVX512 = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 23,
    LEAF7_EDX_AMX = 1u << 22 | 1u << 24 | 1u << 25,
    LEAF7_1_EAX_BF16 = 1u << 5,
    LEAF7_1_EAX_AVX_VNNI_IFMA = 1u << 4 | 1u << 23,
    LEAF7_1_EAX_AMX_FP16 = 1u << 21,
    LEAF7_1_EDX_LATER = 1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19,
    LEAF13_AVX512 = 7u << 5,
    LEAF13_AMX = 3u << 17,
};

static int hides_avx512, hides_bf16, is_hiding;
static struct sigaction behind;  // what others want to be called for a fault

static int real_sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    static int (*next)(int, const struct sigaction *, struct sigaction *);
    if (next == NULL) next = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    return next(number, action, before);
}

int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    if (number != SIGSEGV || !is_hiding) return real_sigaction(number, action, before);
    if (before != NULL) *before = behind;
    if (action != NULL) behind = *action;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

static void narrow(unsigned leaf, unsigned subleaf, unsigned out[4]) {
    if (leaf == 7 && subleaf == 0) {
        out[3] &= ~LEAF7_EDX_AMX;
        if (hides_avx512) {
            out[1] &= ~LEAF7_EBX_AVX512;
            out[2] &= ~LEAF7_ECX_AVX512;
            out[3] &= ~LEAF7_EDX_AVX512;
        }
    } else if (leaf == 7 && subleaf == 1) {
        out[0] &= ~LEAF7_1_EAX_AMX_FP16;
        out[3] &= ~LEAF7_1_EDX_LATER;
        if (hides_bf16) out[0] &= ~LEAF7_1_EAX_BF16;
        if (hides_avx512) out[0] &= ~LEAF7_1_EAX_AVX_VNNI_IFMA;
    } else if (leaf == 13 && subleaf == 0) {
        out[0] &= ~(LEAF13_AMX | (hides_avx512 ? LEAF13_AVX512 : 0));
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (code == NULL || code[0] != 0x0f || code[1] != 0xa2) {
        if (behind.sa_flags & SA_SIGINFO) {
            behind.sa_sigaction(number, info, context);
        } else if (behind.sa_handler != SIG_DFL && behind.sa_handler != SIG_IGN) {
            behind.sa_handler(number);
        } else {
            struct sigaction none = {.sa_handler = SIG_DFL};
            real_sigaction(number, &none, NULL);  // the fault comes again, and ends the process
        }
        return;
    }
    unsigned leaf = registers[REG_RAX], subleaf = registers[REG_RCX], out[4];
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, subleaf, out[0], out[1], out[2], out[3]);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    narrow(leaf, subleaf, out);
    registers[REG_RAX] = out[0], registers[REG_RBX] = out[1], registers[REG_RCX] = out[2], registers[REG_RDX] = out[3];
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    const char *set = getenv("TANDEM_HIDE_ISA");
    if (set == NULL) return;
    hides_avx512 = strcmp(set, "avx2") == 0;
    hides_bf16 = strcmp(set, "avx512-bf16") != 0;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    real_sigaction(SIGSEGV, &action, &behind);
    is_hiding = 1;
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) _exit(70);
}
