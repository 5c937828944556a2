/* Prints the tokens of a request as they are written. Arguments: BUNDLE ID... (the token ids of a
 * prompt, as `pass-run generate --json` prints them). */
#include <pass/pass.h>

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
    char error[512];
    int64_t prompt[64], tokens[32];
    size_t prompt_length = 0;
    int count;
    pass_generate_options options = pass_default_generate_options();

    for (int i = 2; i < argc && prompt_length < 64; ++i)
        prompt[prompt_length++] = strtoll(argv[i], NULL, 10);
    if (prompt_length == 0) {
        fprintf(stderr, "usage: %s BUNDLE ID...\n", argv[0]);
        return 2;
    }
    pass_session* session = pass_open(argv[1], NULL, error, sizeof error);
    if (session == NULL) {
        fprintf(stderr, "error: %s\n", error);
        return 2;
    }
    options.max_new_tokens = 32;
    pass_generation* generation =
        pass_submit(session, prompt, prompt_length, &options, error, sizeof error);
    if (generation == NULL) {
        fprintf(stderr, "error: %s\n", error);
        pass_close(session);
        return 2;
    }
    while ((count = pass_next(generation, tokens, 32, error, sizeof error)) > 0) {
        for (int i = 0; i < count; ++i) printf("%lld ", (long long)tokens[i]);
        fflush(stdout);
    }
    if (count < 0)
        fprintf(stderr, "error: %s\n", error);
    else
        printf("\nfinished by %s, %lld passes\n", pass_finish_reason(generation),
               (long long)pass_get_stats(generation).passes);
    pass_free(generation);
    pass_close(session);
    return count < 0 ? 2 : 0;
}
