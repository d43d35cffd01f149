/* Waiting for words by itself, compiled and run by test_rank_words.py: prints one line for each promise that it keeps,
 * and ends with 1 at the first that it does not. What is learned is nobody else's to see. */
#include "rank_words.c"

#include <stdio.h>
#include <stdlib.h>

#define PATIENCE_NS 1000000L

static void promise(int kept, const char *what) {
    printf("%s%s\n", kept ? "" : "broken: ", what);
    if (!kept) exit(1);
}

int main(void) {
    rank_word word = {0}, alarm = {0};
    enum rank_outcome found = await_word(&word, 1, &alarm, 0, 1 << 20, PATIENCE_NS);
    promise(found == RANK_LATE && spin_now == FIRST_SPIN_NS / 2, "learns");
    atomic_store(&spin_now, FIRST_SPIN_NS);
    found = await_word(&word, 1, &alarm, 0, 0, PATIENCE_NS);
    promise(found == RANK_LATE && spin_now == FIRST_SPIN_NS, "slept");
    found = await_word(&word, 1, &alarm, 0, 0, 0);
    promise(found == RANK_LATE && spin_now == FIRST_SPIN_NS, "looked");
    post_word(&word, 1);
    found = await_word(&word, 1, &alarm, 0, 0, 0);
    promise(found == RANK_REACHED && spin_now == FIRST_SPIN_NS, "reached");
    return 0;
}
