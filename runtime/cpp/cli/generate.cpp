// pass-cpp generate: continue a prompt.
#include <atomic>
#include <csignal>
#include <iostream>
#include <memory>

#include "json.h"
#include "options.h"

namespace pass::cli {

namespace {

struct Flags {
    EngineFlags engine;
    SamplingFlags sampling;
    GenerateOptions options;
    std::optional<std::string> prompt, prompt_ids;
    bool as_json = false;
};

std::atomic<bool> interrupted = false;

void interrupt(int) { interrupted = true; }

Request request_of(const Flags& flags) {
    Request request;
    if (flags.prompt.has_value() == flags.prompt_ids.has_value()) {
        throw Error("give the prompt with -p or with --prompt-ids, one of them");
    }
    if (flags.prompt_ids) request.prompt_ids = parse_ids("--prompt-ids", *flags.prompt_ids);
    request.options = flags.options;
    request.options.sampling = flags.sampling.params();
    request.options.check();
    if (request.options.logprobs && !flags.as_json) throw Error("--logprobs are part of the JSON object: add --json");
    if (flags.prompt_ids && !request.options.stop.empty()) {
        throw Error("stop strings need text: use -p, or --stop-token-id");
    }
    return request;
}

void print(const Event& event, bool text) {
    if (text) {
        std::cout << event.text;
    } else {
        for (const Token& token : event.tokens) std::cout << token.id << ' ';
    }
    std::cout.flush();
}

void generate(const Flags& flags) {
    Request request = request_of(flags);
    Session session = flags.engine.open();
    std::optional<Tokenizer> tokenizer;
    if (flags.prompt) {
        tokenizer.emplace(flags.engine.bundle, "", flags.engine.options.onnxruntime);
        request.prompt_ids = encode(*tokenizer, session.bundle(), *flags.prompt);
    }
    Generation generation = session.submit(std::move(request), tokenizer ? &*tokenizer : nullptr);
    std::signal(SIGINT, interrupt);
    std::signal(SIGTERM, interrupt);
    while (const std::optional<Event> event = generation.next()) {
        if (!flags.as_json) print(*event, flags.prompt.has_value());
        if (interrupted) generation.cancel();
    }
    if (interrupted) {
        std::cerr << (flags.as_json ? "" : "\n") << "interrupted" << std::endl;
        throw CLI::RuntimeError(130);
    }
    std::cout << (flags.as_json ? to_json(generation).dump() : "") << std::endl;
}

}  // namespace

void add_generate(CLI::App& app) {
    CLI::App* command = app.add_subcommand("generate", "Continue a prompt.");
    const auto flags = std::make_shared<Flags>();
    flags->engine.add_to(*command);
    flags->sampling.add_to(*command);
    GenerateOptions& options = flags->options;
    command->add_option("-p,--prompt", flags->prompt, "The prompt.");
    command->add_option("--prompt-ids", flags->prompt_ids,
                        "The prompt's token ids, as 1,2,3; tokens are printed, not text.");
    command->add_option("--max-new-tokens", options.max_new_tokens)->capture_default_str();
    command->add_option("--plan", options.plan, "ar, two-pass, fused, fused:G0,G1,..., auto: how, never what.")
        ->capture_default_str();
    command->add_option("--draft", options.draft, "lookahead, ngram or both. Default: both for auto, else lookahead.");
    command->add_option("--lookahead", options.lookahead, "Drafts per round; 0 is plain decoding.");
    command->add_option("--stop", options.stop, "End before this text. May be given several times.")->take_all();
    command->add_option("--stop-token-id", options.stop_token_ids,
                        "End at this token, too. May be given several times.");
    command->add_flag("--ignore-eos", options.ignore_eos, "Go on after an end-of-sequence token.");
    command->add_option("--logprobs", options.logprobs, "Every token's log-probability, and of so many likely ones.");
    command->add_flag("--json", flags->as_json, "One JSON object instead of tokens.");
    command->callback([flags] { generate(*flags); });
}

}  // namespace pass::cli
