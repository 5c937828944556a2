#include "options.h"

#include <algorithm>
#include <charconv>
#include <iostream>
#include <string_view>

namespace pass::cli {

void EngineFlags::add_to(CLI::App& command) {
    command.add_option("bundle", bundle, "A directory that pass-export wrote.")
        ->type_name("BUNDLE")
        ->required();
    command
        .add_option("--device", options.device,
                    "auto, cpu, cuda, tensorrt, tensorrt-rtx, tensorrt-rtx-ep; add a GPU's number, "
                    "as in cuda:1.")
        ->capture_default_str();
    command.add_option("--threads", options.threads, "CPU threads; 0 is ONNX Runtime's choice.");
    command.add_option("--capacity", options.capacity, "KV capacity of a sequence, in tokens.");
    command.add_flag("--trust-bundle", trust_bundle, "Skip the hash check of the bundle's files.");
    command.add_flag("--no-prefix-cache", no_prefix_cache,
                     "Compute the K/V of every prompt. Otherwise prompts share the K/V of a common "
                     "prefix, on the CPU.");
    command.add_option("--speculative-max-concurrency", options.speculative_max_concurrency,
                       "If more sequences than this are decoded together, decode all without "
                       "drafts. Default: no limit.");
    command.add_flag("--verbose", verbose,
                     "Write to standard error what is chosen, such as the CPU's kernels.");
    command.add_option("--onnxruntime", options.onnxruntime,
                       "libonnxruntime.so to use, in place of $PASS_ONNXRUNTIME.");
    command.add_option("--tensorrt", options.tensorrt,
                       "libnvinfer.so or libtensorrt_rtx.so to use, in place of $PASS_TENSORRT or "
                       "$PASS_TENSORRT_RTX.");
    command.add_option(
        "--plugin", options.plugin,
        "ONNX Runtime's plugin for tensorrt-rtx-ep, in place of $PASS_TENSORRT_RTX_PLUGIN.");
    command.add_option(
        "--plugin-library", options.plugin_libraries,
        "A library that the plugin needs and does not find. May be given several times.");
}

Session EngineFlags::open(int slots) const {
    set_log(
        [](LogLevel level, const std::string& message) {
            // ONNX Runtime warns of much that users cannot change.
            if (level == LogLevel::error || !message.starts_with("onnxruntime: "))
                std::cerr << "pass: " << message << std::endl;
        },
        verbose ? LogLevel::info : LogLevel::warning);
    LoadOptions load_options = options;
    load_options.max_batch_size = slots;
    load_options.verify = !trust_bundle;
    load_options.prefix_cache = !no_prefix_cache;
    return Session::load(bundle, load_options);
}

void SamplingFlags::add_to(CLI::App& command) {
    command.add_option("--temperature", sampling.temperature, "0 is greedy.")
        ->capture_default_str();
    command.add_option("--top-k", sampling.top_k, "0 and -1 are off; at most 1024.")
        ->capture_default_str();
    command.add_option("--top-p", sampling.top_p, "1 is off, 0 is greedy.")->capture_default_str();
    command.add_option("--min-p", sampling.min_p, "0 is off.")->capture_default_str();
    command
        .add_option("--seed", seed,
                    "The same seed gives the same text, whatever the plan. Default: random.")
        ->type_name("NUMBER");
    command.add_option("--presence-penalty", sampling.presence_penalty,
                       "Subtracted from the logit of every token already generated; 0 is off.");
    command.add_option(
        "--frequency-penalty", sampling.frequency_penalty,
        "Subtracted from a token's logit once for each time it was generated; 0 is off.");
    command.add_option("--repetition-penalty", sampling.repetition_penalty,
                       "Divides positive and multiplies negative logits of tokens in the prompt or "
                       "the output; 1 is off.");
    command
        .add_option("--logit-bias", biases,
                    "Added to the logit of a token, as TOKEN=BIAS. May be given several times.")
        ->type_name("TOKEN=BIAS")
        ->take_all();
}

namespace {

// The number that `text` is; none if it is something else, or the number is out of range.
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

}  // namespace

SamplingParams SamplingFlags::params() const {
    SamplingParams result = sampling;
    for (const std::string& text : biases) {
        const std::size_t equals = std::min(text.find('='), text.size());
        const auto token = number_of<std::int64_t>(text.substr(0, equals));
        const auto bias = number_of<double>(text.substr(std::min(equals + 1, text.size())));
        if (!token || !bias) {
            throw Error("--logit-bias must be a token id and a number, as 50=-100, not '" + text +
                        "'");
        }
        result.logit_bias[*token] = *bias;  // The last bias of a token counts, as in Python.
    }
    if (seed) {
        result.seed = number_of<std::uint64_t>(*seed);
        if (!result.seed) throw Error("seed must be 0 to 2^64-1, not " + *seed);
    }
    return result;
}

void check_values(CLI::App& command) {
    for (CLI::Option* option : command.get_options()) {
        const std::string type = option->get_type_name();
        const bool is_flag = option->get_items_expected_max() == 0,
                   is_prompt = option->check_name("--prompt");
        if (is_flag || is_prompt) continue;  // a prompt may be empty
        option->transform(CLI::Validator(
            [type](std::string& value) {
                return value.empty() ? "the value is empty" : problem(value, type);
            },
            ""));
    }
}

}  // namespace pass::cli
