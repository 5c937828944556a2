// pass-cpp generate: continue a prompt.
#include <atomic>
#include <csignal>
#include <iostream>
#include <memory>

#include "json.h"
#include "options.h"
#include "output.h"
#include "prompts.h"

namespace pass::cli {

namespace {

struct GenerateFlags {
    EngineFlags engine;
    SamplingFlags sampling;
    PromptFlags prompt;
    GenerateOptions options;
    std::vector<std::string> bad_words;
    bool as_json = false, show_drafts = false;
};

std::atomic<bool> interrupted = false;  // by Ctrl-C or SIGTERM

void interrupt(int) { interrupted = true; }

GenerateOptions options_of(const GenerateFlags& flags) {
    GenerateOptions options = flags.options;
    options.sampling = flags.sampling.params();
    for (const std::string& word : flags.bad_words)
        options.bad_words.push_back(parse_ids("--bad-word-ids", word));
    options.check();
    if (options.logprobs && !flags.as_json)
        throw Error("--logprobs are part of the JSON object: add --json");
    if (flags.prompt.ids && !options.stop.empty())
        throw Error("stop strings need text: use -p, or --stop-token-id");
    return options;
}

void generate(const GenerateFlags& flags) {
    Request request{{}, options_of(flags)};
    const std::optional<std::string> text = flags.prompt.read();
    if (!text) request.prompt_ids = parse_ids("--prompt-ids", *flags.prompt.ids);
    Session session = flags.engine.open();
    std::optional<Tokenizer> tokenizer;
    if (text) {
        tokenizer.emplace(flags.engine.bundle, "", flags.engine.options.onnxruntime);
        request.prompt_ids = encode(*tokenizer, session.bundle(), *text);
    }
    Generation generation = session.submit(std::move(request), tokenizer ? &*tokenizer : nullptr);
    std::signal(SIGINT, interrupt);
    std::signal(SIGTERM, interrupt);
    while (const std::optional<Event> event = generation.next()) {
        if (!flags.as_json) print(*event, text.has_value(), flags.show_drafts);
        if (interrupted) generation.cancel();
    }
    if (flags.as_json) std::cout << to_json(generation).dump() << std::endl;
    if (interrupted) {
        std::cerr << (flags.as_json ? "" : "\n") << "interrupted" << std::endl;
        throw CLI::RuntimeError(130);  // the exit status of shells after Ctrl-C: 128 + SIGINT
    }
    if (!flags.as_json) std::cout << std::endl;
    if (!flags.as_json) print_summary(generation, flags.show_drafts);
}

}  // namespace

void add_generate(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "generate",
        "Continue a prompt, given with -p, --prompt-file, --prompt-ids, or on standard input.");
    const auto flags = std::make_shared<GenerateFlags>();
    flags->engine.add_to(*command);
    flags->sampling.add_to(*command);
    GenerateOptions& options = flags->options;
    flags->prompt.add_to(*command);
    command->add_option("--max-new-tokens", options.max_new_tokens)->capture_default_str();
    command
        ->add_option("--plan", options.plan,
                     "ar, two-pass, fused, fused:G0,G1,..., tree-N, tree:G0,G1,..., auto. It "
                     "changes the speed and not the text.")
        ->capture_default_str();
    command->add_option("--draft", options.draft,
                        "Where drafts come from: lookahead, ngram or both. Default: both for auto, "
                        "else lookahead.");
    command->add_option("--lookahead", options.lookahead,
                        "The most look-ahead drafts of a pass; 0 is plain decoding.");
    command->add_option("--stop", options.stop, "End before this text. May be given several times.")
        ->take_all();
    command->add_option("--stop-token-id", options.stop_token_ids,
                        "End at this token. May be given several times.");
    command->add_option("--min-tokens", options.min_tokens,
                        "Do not end before this many tokens are generated.");
    command->add_option("--allowed-token-id", options.allowed_token_ids,
                        "Generate only these tokens. May be given several times.");
    command
        ->add_option(
            "--bad-word-ids", flags->bad_words,
            "Never generate this sequence of token ids, as 1,2,3. May be given several times.")
        ->take_all();
    command->add_flag("--ignore-eos", options.ignore_eos, "Go on after an end-of-sequence token.");
    command->add_option(
        "--logprobs", options.logprobs,
        "With --json: log-probabilities of every token and of this many most likely ones.");
    command->add_flag("--json", flags->as_json, "Print one JSON object instead of text.");
    command->add_flag("--show-drafts", flags->show_drafts,
                      "Colour tokens by their source: the model, look-ahead or n-gram drafts.");
    check_values(*command);
    command->callback([flags] { generate(*flags); });
}

}  // namespace pass::cli
