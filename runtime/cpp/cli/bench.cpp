// pass-cpp bench: times plans in turn, so that other load on the machine affects all of them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "json.h"
#include "options.h"
#include "prompts.h"

namespace pass::cli {

namespace {

using Ids = std::vector<std::int64_t>;

struct BenchFlags {
    EngineFlags engine;
    SamplingFlags sampling;
    std::vector<std::string> prompts, prompt_ids, plans, drafts;
    std::vector<int> lookaheads;
    std::optional<std::string> batches;
    std::int64_t max_new_tokens = 64;
    int repeat = 3;
    bool as_json = false;
    std::string output;
};

// The measurements of decoding all prompts once with one plan.
struct Round {
    Stats stats;                                  // the sum over all prompts
    double seconds = 0;                           // the time by which plans are compared
    double decode_seconds = 0, host_seconds = 0;  // sums of those in Stats
    std::vector<Ids> texts;                       // the tokens written for each prompt

    double rate() const { return static_cast<double>(stats.generated_tokens) / seconds; }
};

// A plan to compare. batch: how many sequences are decoded together; 0 decodes one after another,
// and compares plans by the time of decoding alone, without prefill.
struct Contender {
    std::string name;
    GenerateOptions options;
    int batch = 0;
    std::vector<Ids> texts;  // of the first round, which only warms up
    std::vector<Round> rounds{};
};

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Round run_round(Session& session, const Contender& contender, const std::vector<Ids>& prompts) {
    Round round;
    const auto at_a_time = static_cast<std::size_t>(std::max(contender.batch, 1));
    const double started = now();
    for (std::size_t first = 0; first < prompts.size(); first += at_a_time) {
        std::vector<Generation> running;
        for (std::size_t i = first; i < std::min(first + at_a_time, prompts.size()); ++i)
            running.push_back(session.submit({prompts[i], contender.options}));
        for (Generation& generation : running) {
            generation.run();
            const Stats stats = generation.stats();
            round.stats.plan = stats.plan;
            round.stats.lookahead = stats.lookahead;
            round.stats.add(stats);
            round.decode_seconds += stats.decode_seconds;
            round.host_seconds += stats.host_seconds();
            round.texts.push_back(generation.token_ids());
        }
    }
    round.seconds = contender.batch == 0 ? round.decode_seconds : now() - started;
    return round;
}

// The name of a plan in the report: `two-pass L=4`, `fused:4,2,1 +ngram`, `ngram L=4`.
std::string name_of(const Session& session, const GenerateOptions& options) {
    if (options.plan == "auto") {
        return !options.draft || *options.draft == "both" ? "auto"
                                                          : "auto (" + *options.draft + ")";
    }
    const auto [mode, drafts] = session.mode(options);  // the mode may be `fused+ngram`
    const std::size_t plus = mode.find('+');
    std::string name = mode.substr(0, plus);
    if (name.find(':') == std::string::npos && drafts > 0) name += " L=" + std::to_string(drafts);
    return plus == std::string::npos ? name : name + " " + mode.substr(plus);
}

// The numbers of --batch; {0} without --batch.
std::vector<int> batches_of(const BenchFlags& flags) {
    if (!flags.batches) return {0};
    std::vector<int> result;
    for (std::int64_t size : parse_numbers(*flags.batches).value_or(Ids{0})) {
        if (size < 1 || size > std::numeric_limits<int>::max()) {
            throw Error("--batch must list numbers of sequences, as in 1,2,4,8, not '" +
                        *flags.batches + "'");
        }
        result.push_back(static_cast<int>(size));
    }
    return result;
}

// All combinations of the flags' values, each name once.
std::vector<Contender> contenders_of(const Session& session, const BenchFlags& flags) {
    std::vector<std::string> plans = flags.plans, drafts = flags.drafts;
    std::vector<int> lookaheads = flags.lookaheads;
    if (plans.empty()) plans = {"ar", "two-pass", "fused", "auto"};
    if (drafts.empty()) drafts = {""};  // the plan's default
    if (lookaheads.empty()) lookaheads = {session.bundle().lookahead()};
    GenerateOptions options;
    options.max_new_tokens = flags.max_new_tokens;
    options.sampling = flags.sampling.params().resolved();  // the same seed for all
    options.ignore_eos = true;
    std::vector<Contender> result;
    const auto add = [&](int batch) {
        std::string name = name_of(session, options);
        if (batch > 0) name += " x" + std::to_string(batch);
        const auto has_name = [&](const Contender& other) { return other.name == name; };
        if (std::none_of(result.begin(), result.end(), has_name))
            result.push_back({name, options, batch, {}});
    };
    for (int batch : batches_of(flags)) {
        for (const std::string& plan : plans) {
            for (const std::string& draft : drafts) {
                for (int lookahead : lookaheads) {
                    options.plan = plan;
                    options.lookahead = lookahead;
                    options.draft.reset();
                    if (plan != "ar" && !draft.empty()) options.draft = draft;
                    add(batch);
                }
            }
        }
    }
    return result;
}

// The report's entry of a plan. Speeds are medians over the rounds.
Json report_of(const Contender& contender, const Contender& baseline) {
    std::vector<double> rates, ratios, sequence_rates, pass_milliseconds, host_milliseconds;
    Stats stats;  // the sum of all rounds, because `auto` runs other passes in each
    stats.plan = contender.rounds.front().stats.plan;
    stats.lookahead = contender.rounds.front().stats.lookahead;
    for (std::size_t i = 0; i < contender.rounds.size(); ++i) {
        const Round& round = contender.rounds[i];
        rates.push_back(round.rate());
        ratios.push_back(round.rate() / baseline.rounds[i].rate());
        const auto tokens = static_cast<double>(round.stats.generated_tokens),
                   passes = static_cast<double>(round.stats.passes);
        sequence_rates.push_back(tokens / round.decode_seconds);
        pass_milliseconds.push_back(1e3 * round.decode_seconds / passes);
        host_milliseconds.push_back(1e3 * round.host_seconds / passes);
        stats.add(round.stats);
    }
    return {{"plan", contender.name},
            {"batch", contender.batch == 0 ? Json() : Json(contender.batch)},
            {"tokens_per_second", median(rates)},
            {"tokens_per_second_each", median(sequence_rates)},
            {"ratio", median(ratios)},
            {"milliseconds_per_pass", median(pass_milliseconds)},
            {"host_milliseconds_per_pass", median(host_milliseconds)},
            {"tau", stats.tau()},
            {"mean_acceptance_length", stats.mean_acceptance_length()},
            {"draft_acceptance_rate", stats.draft_acceptance_rate()},
            {"acceptance_per_position", stats.acceptance_per_position()}};
}

// A line for each text that a plan wrote differently than the first plan, which only rounding can
// cause. Empty for sampling under the rejection rule, where texts may differ.
std::vector<std::string> differences(const Session& session,
                                     const std::vector<Contender>& contenders) {
    std::vector<std::string> result;
    const Contender& first = contenders.front();
    if (session.bundle().rule() == "rejection" && first.options.sampling.temperature > 0)
        return result;
    for (const Contender& other : contenders) {
        for (std::size_t i = 0; i < first.texts.size(); ++i) {
            const Ids &text = other.texts[i], &expected = first.texts[i];
            if (text == expected) continue;
            const auto differs =
                std::mismatch(text.begin(), text.end(), expected.begin(), expected.end()).first;
            result.push_back(other.name + ": prompt " + std::to_string(i) + " from token " +
                             std::to_string(differs - text.begin()));
        }
    }
    return result;
}

const char* text_of(const Json& value) { return value.get_ref<const std::string&>().c_str(); }

// Prints whether passes ran as CUDA graphs, and if not, why; nothing on the CPU, which has none.
void print_captures(const Json& report) {
    if (report["device"] == "cpu") return;
    if (report["uncaptured"].empty()) std::printf("passes were captured as CUDA graphs\n");
    for (const auto& [name, reason] : report["uncaptured"].items())
        std::printf("%s ran without a CUDA graph: %s\n", name.c_str(), text_of(reason));
}

void print_table(const Json& report) {
    std::printf("%s on %s: %s\n", text_of(report["bundle"]), text_of(report["device"]),
                text_of(report["machine"]));
    std::printf("%-22s %10s %7s %9s %7s %6s  %s\n", "plan", "tokens/s", "ratio", "ms/pass", "host",
                "tau", "acceptance by position");
    for (const Json& plan : report["plans"]) {
        std::string acceptance;
        char number[16];
        for (const Json& fraction : plan["acceptance_per_position"]) {
            std::snprintf(number, sizeof number, "%.2f ", fraction.get<double>());
            acceptance += number;
        }
        std::printf("%-22s %10.1f %7.2f %9.2f %7.3f %6.2f  %s\n", text_of(plan["plan"]),
                    plan["tokens_per_second"].get<double>(), plan["ratio"].get<double>(),
                    plan["milliseconds_per_pass"].get<double>(),
                    plan["host_milliseconds_per_pass"].get<double>(), plan["tau"].get<double>(),
                    acceptance.empty() ? "-" : acceptance.c_str());
    }
    for (const Json& difference : report["differing"])
        std::printf("another text, which only rounding may cause: %s\n", text_of(difference));
    print_captures(report);
    if (report["differing"].empty())
        std::printf("every plan wrote the same text, token for token\n");
}

std::vector<Ids> prompts_of(const Session& session, const BenchFlags& flags) {
    std::vector<Ids> result;
    for (const std::string& text : flags.prompt_ids)
        result.push_back(parse_ids("--prompt-ids", text));
    if (!result.empty() && flags.prompts.empty()) return result;
    const Tokenizer tokenizer(flags.engine.bundle, "", flags.engine.options.onnxruntime);
    const std::vector<std::string> default_prompts{
        "The history of the Roman Empire begins with", "def quicksort(items):\n    ",
        "To bake a loaf of bread, first", "Photosynthesis is the process by which"};
    for (const std::string& text : flags.prompts.empty() ? default_prompts : flags.prompts)
        result.push_back(encode(tokenizer, session.bundle(), text));
    return result;
}

void bench(const BenchFlags& flags) {
    if (flags.repeat < 1)
        throw Error("--repeat must be at least 1, not " + std::to_string(flags.repeat));
    const std::vector<int> batches = batches_of(flags);
    const int max_batch = *std::max_element(batches.begin(), batches.end());
    EngineFlags engine = flags.engine;
    engine.no_prefix_cache = true;  // so that every round reads its prompts anew
    Session session = engine.open(std::max(1, max_batch));
    std::vector<Ids> prompts = prompts_of(session, flags);
    // Repeat the prompts until the largest batch is full.
    for (std::size_t i = 0; prompts.size() < static_cast<std::size_t>(max_batch); ++i)
        prompts.push_back(Ids(prompts[i]));
    std::vector<Contender> contenders = contenders_of(session, flags);
    for (int number = 0; number <= flags.repeat; ++number) {  // round 0 warms up
        for (Contender& contender : contenders) {
            Round round = run_round(session, contender, prompts);
            if (number == 0)
                contender.texts = std::move(round.texts);
            else
                contender.rounds.push_back(std::move(round));
        }
    }
    Json report{
        {"bundle", session.bundle().name()},
        {"dtype", session.bundle().dtype()},
        {"weights", session.bundle().weights()},
        {"device", session.device()},
        {"uncaptured", session.uncaptured()},
        {"machine", std::to_string(std::thread::hardware_concurrency()) + " cores, pass-cpp"},
        {"lookahead_source", session.bundle().lookahead_source()},
        {"prompts", prompts.size()},
        {"max_new_tokens", flags.max_new_tokens},
        {"repeat", flags.repeat},
        {"rule", session.bundle().rule()},
        {"differing", differences(session, contenders)},
        {"plans", Json::array()}};
    for (const Contender& contender : contenders)
        report["plans"].push_back(report_of(contender, contenders.front()));
    if (!flags.output.empty()) {
        std::ofstream file(flags.output);
        file << report.dump(2) << "\n";
        if (!file.flush()) throw Error("cannot write " + flags.output);
    }
    if (flags.as_json)
        std::cout << report.dump(2) << std::endl;
    else
        print_table(report);
}

}  // namespace

void add_bench(CLI::App& app) {
    CLI::App* command =
        app.add_subcommand("bench",
                           "Time plans against each other, in alternation; medians over rounds. "
                           "host: the part of ms/pass outside the engine.");
    const auto flags = std::make_shared<BenchFlags>();
    flags->engine.add_to(*command);
    flags->sampling.add_to(*command);
    command->add_option("-p,--prompt", flags->prompts, "A prompt. May be given several times.")
        ->take_all();
    command
        ->add_option("--prompt-ids", flags->prompt_ids,
                     "A prompt's token ids, as 1,2,3. May be given several times.")
        ->take_all();
    command
        ->add_option("--plan", flags->plans,
                     "Plans to compare; ratios are to the first. Default: all but trees.")
        ->take_all();
    command->add_option("--draft", flags->drafts, "Draft sources to compare.")->take_all();
    command
        ->add_option("--lookahead", flags->lookaheads,
                     "The most look-ahead drafts of a pass. Default: the bundle's.")
        ->take_all();
    command->add_option("--batch", flags->batches,
                        "Numbers of sequences to run together, as 1,2,4,8. Default: one by one.");
    command->add_option("--max-new-tokens", flags->max_new_tokens)->capture_default_str();
    command->add_option("--repeat", flags->repeat, "Rounds; every round runs every plan once.")
        ->capture_default_str();
    command->add_flag("--json", flags->as_json, "Print JSON instead of a table.");
    command->add_option("-o,--output", flags->output, "Also write JSON to this file.");
    check_values(*command);
    command->callback([flags] { bench(*flags); });
}

}  // namespace pass::cli
