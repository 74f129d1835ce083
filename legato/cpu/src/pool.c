// Threads that are good neighbours: they spin for some microseconds, then sleep, and take work one piece at a time.
// Each begins with pieces next to each other, since one brings in the weights of the next, and then helps others.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "legato.h"

// How long a thread spins before it sleeps. Between two products of a step there are a few microseconds; between two
// steps there are hundreds, in which the router and its clients want the core.
#define WORKER_SPIN_NS 60000
#define CALLER_SPIN_NS 20000

// Pieces of a job that nobody has taken: its number, the first piece and the end. One word: who takes a piece knows
// that function and context are those of the job.
#define WORD(job, first, end) ((uint64_t)(job) << 36 | (uint64_t)(first) << 18 | (uint64_t)(end))
#define FIRST(word) ((word) >> 18 & MOST_PIECES)
#define END(word) ((word)&MOST_PIECES)
#define MOST_PIECES 0x3ffff

struct queue { _Alignas(64) _Atomic(uint64_t) word; };

static struct {
    int num_threads;  // with the caller, which is the first
    struct queue *queues;  // one for each
    pthread_mutex_t caller, mutex;  // the first is held by the one thread that hands out work
    pthread_cond_t work_there, all_done;
    _Alignas(64) _Atomic(uint64_t) job;
    _Alignas(64) atomic_int_fast64_t unfinished;
    atomic_int sleepers, caller_sleeps;
    // Of the newest job. Who reads them while it is replaced gets no piece of the old one, because that has none left.
    _Atomic(work *) function;
    _Atomic(void *) context;
} pool = {1, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER,
          PTHREAD_COND_INITIALIZER, 0, 0, 0, 0, 0, 0};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Of one queue: our own from the front, those of others from behind.
static void take_pieces_of(struct queue *queue, int is_ours) {
    uint64_t word = atomic_load(&queue->word);
    while (FIRST(word) < END(word)) {
        work *function = atomic_load_explicit(&pool.function, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool.context, memory_order_relaxed);
        int64_t piece = is_ours ? FIRST(word) : END(word) - 1;
        if (!atomic_compare_exchange_weak(&queue->word, &word, is_ours ? word + WORD(0, 1, 0) : word - 1)) continue;
        function(context, piece);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.all_done);
            pthread_mutex_unlock(&pool.mutex);
        }
        word = atomic_load(&queue->word);
    }
}

static void take_pieces(int64_t own) {
    for (int i = 0; i < pool.num_threads; i++) take_pieces_of(&pool.queues[(own + i) % pool.num_threads], !i);
}

static void *worker(void *number) {
    uint64_t seen = 0;
    for (;;) {
        int64_t until = now_ns() + WORKER_SPIN_NS;
        while (atomic_load_explicit(&pool.job, memory_order_relaxed) == seen) {
            for (int i = 0; i < 32 && atomic_load_explicit(&pool.job, memory_order_relaxed) == seen; i++) relax();
            if (now_ns() < until) continue;
            pthread_mutex_lock(&pool.mutex);
            atomic_fetch_add(&pool.sleepers, 1);
            while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.work_there, &pool.mutex);
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.mutex);
        }
        seen = atomic_load(&pool.job);
        take_pieces((intptr_t)number);
    }
    return 0;
}

static void wait_for_all(void) {
    int64_t until = now_ns() + CALLER_SPIN_NS;
    while (atomic_load(&pool.unfinished)) {
        for (int i = 0; i < 32 && atomic_load_explicit(&pool.unfinished, memory_order_relaxed); i++) relax();
        if (now_ns() < until) continue;
        // Who holds the last piece has lost its core, maybe: asleep we leave it ours.
        pthread_mutex_lock(&pool.mutex);
        atomic_store(&pool.caller_sleeps, 1);
        while (atomic_load(&pool.unfinished)) pthread_cond_wait(&pool.all_done, &pool.mutex);
        atomic_store(&pool.caller_sleeps, 0);
        pthread_mutex_unlock(&pool.mutex);
    }
}

void pool_run(work *function, void *context, int64_t count) {
    if (count <= 1 || count > MOST_PIECES || pool.num_threads == 1 || pthread_mutex_trylock(&pool.caller)) {
        for (int64_t piece = 0; piece < count; piece++) function(context, piece);
        return;
    }
    atomic_store_explicit(&pool.function, function, memory_order_relaxed);
    atomic_store_explicit(&pool.context, context, memory_order_relaxed);
    atomic_store(&pool.unfinished, count);
    const uint64_t job = atomic_load(&pool.job) + 1;
    for (int64_t t = 0; t < pool.num_threads; t++)
        atomic_store(&pool.queues[t].word, WORD(job, count * t / pool.num_threads, count * (t + 1) / pool.num_threads));
    atomic_store(&pool.job, job);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.work_there);
        pthread_mutex_unlock(&pool.mutex);
    }
    take_pieces(0);
    wait_for_all();
    pthread_mutex_unlock(&pool.caller);
}

int pool_threads(void) { return pool.num_threads; }

// A process that is forked has none of the threads, and the locks as whoever held them left them: it computes alone.
static void in_child(void) {
    pool.num_threads = 1;
    pthread_mutex_init(&pool.caller, 0);  // which may be another thread's, who is not here to give it back
}

// Threads that compute, with the caller: only the first call counts. Returns how many there are.
EXPORT int legato_start_threads(int count) {
    static int started;
    pthread_mutex_lock(&pool.caller);
    if (!started && (pool.queues = aligned_alloc(64, (size_t)MAX(count, 1) * sizeof *pool.queues))) {
        started = 1;
        memset(pool.queues, 0, (size_t)MAX(count, 1) * sizeof *pool.queues);
        pthread_atfork(0, 0, in_child);
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, 4 << 20);
        while (pool.num_threads < count) {
            pthread_t thread;
            if (pthread_create(&thread, &attributes, worker, (void *)(intptr_t)pool.num_threads)) break;
            pool.num_threads++;
        }
    }
    pthread_mutex_unlock(&pool.caller);
    return pool.num_threads;
}
