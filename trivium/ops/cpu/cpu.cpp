// Which library this is, and which one this machine should load.
#include "kernel.h"

// The best instruction set that this CPU has and a library is built for. What avx512 and avx2 ask for is all of
// x86-64-v4 and v3, since the compiler may use any of it.
TRIVIUM_KERNEL const char* trivium_best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt");
    bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl");
    return v4 ? "avx512" : v3 ? "avx2" : "plain";
#else
    return "plain";
#endif
}

TRIVIUM_KERNEL const char* trivium_fingerprint() { return TRIVIUM_FINGERPRINT; }

static thread_local int64_t no_memory = 0;
void trivium::report_no_memory() { no_memory = 1; }

// Whether the kernel that this thread called last found no memory; asking forgets it.
TRIVIUM_KERNEL int64_t trivium_took_no_memory() { return std::exchange(no_memory, 0); }
