/* Loaded into a process, it hides AVX-512, VNNI and AMX from what asks the processor: ONNX Runtime then takes the
   kernels of AVX2, whose sums of two products have 16 bits. Linux only, on processors that let CPUID fault. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static void answer(int sig, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)registers[REG_RIP];
  uint32_t a = (uint32_t)registers[REG_RAX], b = 0, c = (uint32_t)registers[REG_RCX], d = 0;
  const uint32_t leaf = a, part = c;
  if (code[0] != 0x0f || code[1] != 0xa2) { /* another fault */
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  if (leaf == 7 && part == 0) {
    b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
    c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
    d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
  } else if (leaf == 7 && part == 1) {
    a = b = c = d = 0; /* VNNI with the registers of AVX2 */
  }
  registers[REG_RAX] = a;
  registers[REG_RBX] = b;
  registers[REG_RCX] = c;
  registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
  struct sigaction action = {0};
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, 0);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) exit(97);
}
