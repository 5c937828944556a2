// Prints the tokens of a request as they are written, with * after those that were drafts.
// Arguments: BUNDLE ID... (the token ids of a prompt, as `pass-run generate --json` prints them).
#include <pass/pass.hpp>

#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
    if (argc < 3) {
        std::cerr << "usage: " << argv[0] << " BUNDLE ID...\n";
        return 2;
    }
    try {
        pass::Session session = pass::Session::load(argv[1]);

        pass::Request request;
        for (int i = 2; i < argc; ++i)
            request.prompt_ids.push_back(std::strtoll(argv[i], nullptr, 10));
        request.options.max_new_tokens = 32;
        request.options.sampling.temperature = 0.8;
        request.options.sampling.seed = 7;

        pass::Generation generation = session.submit(request);
        while (const auto event = generation.next()) {
            for (const pass::Token& token : event->tokens) {
                std::cout << token.id << (token.source == pass::TokenSource::model ? " " : "* ")
                          << std::flush;
            }
        }
        const pass::Stats stats = generation.stats();
        std::cout << "\nfinished by " << pass::name_of(*generation.finish_reason()) << ", "
                  << stats.tau() << " tokens per pass (* were drafts)\n";
    } catch (const pass::Error& error) {
        std::cerr << "error: " << error.what() << "\n";
        return 2;
    }
}
