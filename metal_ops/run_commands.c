/* Runs a list of kernels as one of several threads that keep in step.
 *
 * A command is 16 words: the address of a kernel and its arguments; or the address 0, where every thread waits until all
 * have come so far. Each thread has a list of its own, with as many waits as the others'.
 *
 * flags holds one count of waits a thread, a cache line apart. A thread that waits long gives its processor away: the one
 * it waits for may need it.
 */
typedef unsigned long long word;
typedef void kernel(word, word, word, word, word, word, word, word, word, word, word, word, word, word, word);
typedef int yield_processor(void);

enum { WORDS = 16, LINE = 8, PATIENCE = 2000 };

void run_commands(const word *commands, word count, word *flags, word me, word num_threads, yield_processor *yield) {
    for (const word *c = commands; c < commands + count * WORDS; c += WORDS) {
        if (c[0]) {
            ((kernel *)c[0])(c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11], c[12], c[13], c[14], c[15]);
            continue;
        }
        word wait = flags[me * LINE] + 1;
        __atomic_store_n(&flags[me * LINE], wait, __ATOMIC_RELEASE);
        for (word other = 0; other < num_threads; other++)
            for (int spins = 0; __atomic_load_n(&flags[other * LINE], __ATOMIC_ACQUIRE) < wait; spins++)
                if (spins > PATIENCE) yield();
    }
}
