#include "generate.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string_view>

#include "json.h"
#include "prompts.h"

namespace pass::cli {

namespace {

struct GenerateFlags {
    std::string bundle;
    LoadOptions load;
    bool trust_bundle = false, verbose = false;
    PromptFlags prompt;
    GenerateOptions options;
    std::optional<std::string> seed;
    std::vector<std::string> biases, bad_words;  // TOKEN=BIAS; ids with commas
    bool as_json = false;
};

std::atomic<bool> interrupted = false;  // by Ctrl-C or SIGTERM

void interrupt(int) { interrupted = true; }

// None if `text` is no such number, or it is out of range.
template <class Number>
std::optional<Number> number_of(std::string_view text) {
    Number number{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// What is wrong with `value`, or "". type: CLI11's name of the option's type. Rewrites 010 as 10,
// because CLI11 would read it as octal.
std::string problem(std::string& value, const std::string& type) {
    if (value.empty()) return "the value is empty";
    const std::string is_not = "'" + value + "' is not ";
    const std::string_view digits = std::string_view(value).substr(value.starts_with('+') ? 1 : 0);
    if (type == "INT") {
        const auto number = number_of<std::int64_t>(digits);
        if (!number) return is_not + "a whole number that fits";
        value = std::to_string(*number);
    } else if (type == "FLOAT" && !number_of<double>(digits)) {
        return is_not + "a number that fits";
    }
    return "";
}

// Make `command` refuse empty values, which CLI11 takes for 0, and numbers out of range.
void check_values(CLI::App& command) {
    for (CLI::Option* option : command.get_options()) {
        const std::string type = option->get_type_name();
        const bool is_flag = option->get_items_expected_max() == 0,
                   is_prompt = option->check_name("--prompt");
        if (is_flag || is_prompt) continue;  // a prompt may be empty
        option->transform(
            CLI::Validator([type](std::string& value) { return problem(value, type); }, ""));
    }
}

GenerateOptions options_of(const GenerateFlags& flags) {
    GenerateOptions options = flags.options;
    for (const std::string& text : flags.biases) {
        const std::size_t equals = std::min(text.find('='), text.size());
        const auto token = number_of<std::int64_t>(text.substr(0, equals));
        const auto bias = number_of<double>(text.substr(std::min(equals + 1, text.size())));
        if (!token || !bias) {
            throw Error("--logit-bias must be a token id and a number, as 50=-100, not '" + text +
                        "'");
        }
        options.sampling.logit_bias[*token] = *bias;  // The last bias of a token counts.
    }
    if (flags.seed) {
        options.sampling.seed = number_of<std::uint64_t>(*flags.seed);
        if (!options.sampling.seed) throw Error("seed must be 0 to 2^64-1, not " + *flags.seed);
    }
    for (const std::string& word : flags.bad_words)
        options.bad_words.push_back(parse_ids("--bad-word-ids", word));
    options.check();
    if (options.logprobs && !flags.as_json)
        throw Error("--logprobs are part of the JSON object: add --json");
    if (flags.prompt.ids && !options.stop.empty())
        throw Error("stop strings need text: use -p, or --stop-token-id");
    return options;
}

// Writes warnings to standard error, and with --verbose what is chosen.
Session open(const GenerateFlags& flags) {
    set_log(
        [](LogLevel level, const std::string& message) {
            // ONNX Runtime warns of much that users cannot change.
            if (level == LogLevel::error || !message.starts_with("onnxruntime: "))
                std::cerr << "pass: " << message << std::endl;
        },
        flags.verbose ? LogLevel::info : LogLevel::warning);
    LoadOptions options = flags.load;
    options.verify = !flags.trust_bundle;
    return Session::load(flags.bundle, options);
}

void print(const Event& event, bool as_text) {
    std::string shown = event.text;
    for (const Token& token : event.tokens) {
        if (!as_text) shown += std::to_string(token.id) + " ";
    }
    std::cout << shown << std::flush;
}

std::string summary(const Generation& generation) {
    const Stats stats = generation.stats();
    std::array<char, 256> line{};
    std::snprintf(line.data(), line.size(),
                  "[%lld tokens, %.1f tokens/s, plan %s, tau %.2f, prefill %.0f ms of %lld tokens, "
                  "finished by %s]",
                  static_cast<long long>(stats.generated_tokens), stats.decode_tokens_per_second(),
                  stats.plan.c_str(), stats.tau(), 1e3 * stats.prefill_seconds,
                  static_cast<long long>(stats.prompt_tokens - stats.cached_tokens),
                  name_of(generation.finish_reason().value_or(FinishReason::error)));
    return line.data();
}

void generate(const GenerateFlags& flags) {
    Request request{{}, options_of(flags)};
    const std::optional<std::string> text = flags.prompt.read();
    if (!text) request.prompt_ids = parse_ids("--prompt-ids", *flags.prompt.ids);
    Session session = open(flags);
    std::optional<Tokenizer> tokenizer;
    if (text) {
        tokenizer.emplace(flags.bundle, "", flags.load.onnxruntime);
        request.prompt_ids = encode(*tokenizer, session.bundle(), *text);
    }
    Generation generation = session.submit(std::move(request), tokenizer ? &*tokenizer : nullptr);
    std::signal(SIGINT, interrupt);
    std::signal(SIGTERM, interrupt);
    // Step by step, because the first event comes after the whole prompt.
    while (!generation.finish_reason()) {
        if (interrupted) generation.cancel();
        session.step();
        while (const std::optional<Event> event = generation.poll()) {
            if (!flags.as_json) print(*event, text.has_value());
        }
    }
    if (flags.as_json) std::cout << to_json(generation).dump() << std::endl;
    if (interrupted) {
        std::cerr << (flags.as_json ? "" : "\n") << "interrupted" << std::endl;
        throw CLI::RuntimeError(130);  // the exit status of shells after Ctrl-C: 128 + SIGINT
    }
    if (flags.as_json) return;
    std::cout << std::endl;
    if (isatty(STDERR_FILENO) != 0) std::cerr << summary(generation) << std::endl;
}

void add_engine_flags(CLI::App& command, GenerateFlags& flags) {
    command.add_option("bundle", flags.bundle, "A directory that pass-export wrote.")
        ->type_name("BUNDLE")
        ->required();
    command
        .add_option("--device", flags.load.device,
                    "auto, cpu, cuda or tensorrt; add a GPU's number, as in cuda:1.")
        ->capture_default_str();
    command.add_option("--threads", flags.load.threads, "CPU threads; 0 is ONNX Runtime's choice.");
    command.add_option("--capacity", flags.load.capacity, "KV capacity of a sequence, in tokens.");
    command.add_flag("--trust-bundle", flags.trust_bundle,
                     "Skip the hash check of the bundle's files.");
    command.add_flag("--verbose", flags.verbose,
                     "Write to standard error what is chosen, such as the CPU's kernels.");
    command.add_option("--onnxruntime", flags.load.onnxruntime,
                       "libonnxruntime.so to use, in place of $PASS_ONNXRUNTIME.");
    command.add_option("--tensorrt", flags.load.tensorrt,
                       "libnvinfer.so to use, in place of $PASS_TENSORRT.");
}

void add_sampling_flags(CLI::App& command, GenerateFlags& flags) {
#define ADD(type, name, value, min, max, flag, allowed, help) \
    command.add_option(flag, flags.options.sampling.name, help)->capture_default_str();
    PASS_SAMPLING_FIELDS(ADD)
#undef ADD
#define ADD(type, name, value, min, max, flag, allowed, help)                     \
    command.add_option(flag, flags.seed, std::string(help) + " Default: random.") \
        ->type_name("NUMBER");
    PASS_SEED_FIELD(ADD)
#undef ADD
#define ADD(type, name, value, min, max, flag, allowed, help)                                  \
    command.add_option(flag, flags.biases, std::string(help) + " May be given several times.") \
        ->type_name("TOKEN=BIAS")                                                              \
        ->take_all();
    PASS_LOGIT_BIAS_FIELD(ADD)
#undef ADD
}

}  // namespace

void add_generate(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "generate",
        "Continue a prompt, given with -p, --prompt-file, --prompt-ids, or on standard input.");
    const auto flags = std::make_shared<GenerateFlags>();
    add_engine_flags(*command, *flags);
    add_sampling_flags(*command, *flags);
    flags->prompt.add_to(*command);
    GenerateOptions& options = flags->options;
    command->add_option("--max-new-tokens", options.max_new_tokens)->capture_default_str();
    command
        ->add_option("--plan", options.plan,
                     "ar, two-pass, fused, fused:G0,G1,..., auto. It changes the speed and not the "
                     "text.")
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
    check_values(*command);
    command->callback([flags] { generate(*flags); });
}

}  // namespace pass::cli
