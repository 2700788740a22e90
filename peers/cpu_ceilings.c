/* Ceilings of a CPU, by other code than kernelgate's: memory passes and f32 multiply-adds.
 *
 * usage: cpu_ceilings THREADS (READ:WRITE | flops)...
 *
 * READ:WRITE is a number of bytes read and written by a launch with caches as it left them; the
 * line printed is the nanoseconds of the fastest pass and its name. `flops` prints f32 operations a
 * second. Threads are POSIX threads that spin between passes; vectors are the compiler's, stores
 * also non-temporal. Build: cc -O3 -march=native -pthread cpu_ceilings.c
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef float vector __attribute__((vector_size(WIDTH)));
typedef int64_t words __attribute__((vector_size(WIDTH)));

enum { TOUCH, STREAM, COPY, LIBRARY, STRING, WAYS };
static const char *const NAMES[WAYS] = {
    "reads, then writes", "reads, then writes past the caches", "copy by vectors",
    "memcpy", "rep movsb",
};

struct slice {
    char *source, *target;
    size_t reads, writes;
};

static size_t round_up(size_t bytes) { return (bytes + WIDTH - 1) / WIDTH * WIDTH; }

static volatile int64_t guard;

static void read_all(const char *at, size_t bytes)
{
    words sums[8] = {{0}};
    size_t count = bytes / WIDTH, i = 0;
    const words *from = (const words *)at;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; lane++)
            sums[lane] ^= from[i + lane];
    for (; i < count; i++)
        sums[0] ^= from[i];
    for (int lane = 1; lane < 8; lane++)
        sums[0] ^= sums[lane];
    guard = sums[0][0];
}

static void write_all(char *at, size_t bytes, int past_caches)
{
    static volatile int64_t seed = 7;
    words value = {0};
    value += seed;
    words *to = (words *)at;
    size_t count = bytes / WIDTH;
#if defined(__clang__) || !defined(__SSE2__)
    past_caches = 0;
#endif
    if (!past_caches) {
        for (size_t i = 0; i < count; i++) {
            to[i] = value;
            __asm__ volatile("" ::: "memory");
        }
        return;
    }
#if defined(__AVX512F__)
    for (size_t i = 0; i < count; i++)
        __asm__ volatile("vmovntdq %1, %0" : "=m"(to[i]) : "v"(value));
#elif defined(__AVX__)
    for (size_t i = 0; i < count; i++)
        __asm__ volatile("vmovntdq %1, %0" : "=m"(to[i]) : "x"(value));
#elif defined(__SSE2__)
    for (size_t i = 0; i < count; i++)
        __asm__ volatile("movntdq %1, %0" : "=m"(to[i]) : "x"(value));
#endif
#if defined(__SSE2__)
    __asm__ volatile("sfence" ::: "memory");
#endif
}

static void copy_all(char *to, const char *from, size_t bytes)
{
    const words *source = (const words *)from;
    words *target = (words *)to;
    for (size_t i = 0; i < bytes / WIDTH; i++) {
        target[i] = source[i];
        __asm__ volatile("" ::: "memory");
    }
}

static void string_copy(char *to, const char *from, size_t bytes)
{
#if defined(__x86_64__)
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
#else
    memcpy(to, from, bytes);
#endif
}

static void move(struct slice *it, int way)
{
    size_t both = it->reads < it->writes ? it->reads : it->writes;
    if (way == TOUCH || way == STREAM)
        both = 0;
    if (way == COPY)
        copy_all(it->target, it->source, both);
    if (way == LIBRARY)
        memcpy(it->target, it->source, both);
    if (way == STRING)
        string_copy(it->target, it->source, both);
    read_all(it->source + both, it->reads - both);
    if (way == LIBRARY || way == STRING)
        memset(it->target + both, 3, it->writes - both);
    else
        write_all(it->target + both, it->writes - both, way == STREAM);
    __asm__ volatile("" ::"r"(it->target) : "memory");
}

#define ROUNDS (1 << 13)
#define SUMS 14
static void multiply(void)
{
    static volatile float factor_of = 0.999f, term_of = 0.001f;
    vector sums[SUMS], factor = {0}, term = {0};
    factor += factor_of;
    term += term_of;
    for (int i = 0; i < SUMS; i++)
        sums[i] = term + (float)i;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < SUMS; i++)
            sums[i] = sums[i] * factor + term;
    float all = 0;
    for (int i = 0; i < SUMS; i++)
        all += sums[i][0];
    guard = (int64_t)all;
}

/* The threads: each does the passes of the newest ticket, then counts itself. */
static int threads;
static struct slice *slices;
static atomic_int ticket, done;
static int way, passes;

static void work(int thread)
{
    for (int pass = 0; pass < passes; pass++)
        if (way == WAYS)
            multiply();
        else
            move(&slices[thread], way);
}

static void *helper(void *number)
{
    int seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&ticket, memory_order_acquire) == seen; spins++)
            if (spins > 10000)
                sched_yield();
        seen++;
        work((int)(intptr_t)number);
        atomic_fetch_add_explicit(&done, 1, memory_order_release);
    }
    return NULL;
}

static void on_all(void)
{
    atomic_store_explicit(&done, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&ticket, 1, memory_order_release);
    work(0);
    for (int spins = 0; atomic_load_explicit(&done, memory_order_acquire) < threads - 1; spins++)
        if (spins > 10000)
            sched_yield();
}

static void on_one(void)
{
    for (int thread = 0; thread < (way == WAYS ? 1 : threads); thread++)
        work(thread);
}

static double now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

/* The fastest of windows of about 0.1 ms, for half a second and five windows at least. */
static double fastest_ns(void (*run)(void))
{
    double fastest = 1e300, begun = now_ns();
    passes = 1;
    run();
    for (int windows = 0; windows < 5 || now_ns() - begun < 5e8; windows++) {
        double start = now_ns();
        run();
        double mean = (now_ns() - start) / passes;
        fastest = mean < fastest ? mean : fastest;
        int enough = (int)(1e5 / fastest) + 1;
        passes = enough > passes ? enough : passes;
    }
    return fastest;
}

static char *fresh(size_t bytes)
{
    char *memory = aligned_alloc(4096, (bytes + 8191) / 4096 * 4096);
    if (!memory) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(2);
    }
    memset(memory, 1, bytes);
    return memory;
}

static void measure(size_t reads, size_t writes)
{
    for (int i = 0; i < threads; i++) {
        struct slice *it = &slices[i];
        it->reads = round_up(reads / threads);
        it->writes = round_up(writes / threads);
        it->source = fresh(it->reads);
        it->target = fresh(it->writes);
    }
    double best = 1e300;
    int best_way = 0, best_threads = 1;
    for (way = 0; way < WAYS; way++)
        for (int all = 0; all < (threads > 1 ? 2 : 1); all++) {
            double time = fastest_ns(all ? on_all : on_one);
            if (time < best) {
                best = time;
                best_way = way;
                best_threads = all ? threads : 1;
            }
        }
    printf("%zu:%zu %.1f %d threads, %s\n", reads, writes, best, best_threads, NAMES[best_way]);
    for (int i = 0; i < threads; i++) {
        free(slices[i].source);
        free(slices[i].target);
    }
}

int main(int count, char **arguments)
{
    threads = count > 1 ? atoi(arguments[1]) : 0;
    if (threads < 1 || count < 3) {
        fprintf(stderr, "usage: cpu_ceilings THREADS (READ:WRITE | flops)...\n");
        return 2;
    }
    slices = calloc((size_t)threads, sizeof *slices);
    for (intptr_t thread = 1; thread < threads; thread++) {
        pthread_t started;
        if (pthread_create(&started, NULL, helper, (void *)thread))
            return 2;
    }
    for (int i = 2; i < count; i++) {
        size_t reads, writes;
        if (!strcmp(arguments[i], "flops")) {
            way = WAYS;
            double time = fastest_ns(on_all);
            double operations = 2.0 * (WIDTH / sizeof(float)) * SUMS * ROUNDS * threads;
            printf("flops %.1f %d threads\n", operations / time * 1e9, threads);
        } else if (sscanf(arguments[i], "%zu:%zu", &reads, &writes) == 2) {
            measure(reads, writes);
        } else {
            fprintf(stderr, "neither READ:WRITE nor flops: %s\n", arguments[i]);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
