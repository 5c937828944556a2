#include "catch.hpp"

#include <algorithm>
#include <cmath>

#include "backends/capabilities.h"
#include "bundle/noise.h"
#include "bundle/window.h"
#include "decode/copies.h"
#include "errors.h"
#include "pass/event.hpp"
#include "tuning/auto.h"

using namespace pass;

TEST_CASE("philox computes the numbers of its paper", "[noise]") {
    CHECK(philox4x32({0, 0, 0, 0}, {0, 0}) ==
          Words4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    const std::uint32_t ones = 0xffffffff;
    CHECK(philox4x32({ones, ones, ones, ones}, {ones, ones}) ==
          Words4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
          Words4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("the layout of a pruned fused window", "[plan]") {
    const Window window = make_plan("fused:2,1,1", 4).windows.front();
    CHECK(window.width() == 7);
    CHECK(window.tail() == "fused-2");
    CHECK(window.next() == window);
    CHECK(window.next_drafts(1) == 1);
    const WindowConstants constants = constants_of(window, 100);
    CHECK(constants.row_position == std::vector<std::int64_t>{0, 1, 2, 1, 2, 2, 3});
    CHECK(constants.lookahead_rows == std::vector<std::int64_t>{3, 4, 5, 6});
    CHECK(constants.lookahead_ids == std::vector<std::int64_t>{100, 101, 100, 100});
    CHECK(constants.draft_rows == std::vector<std::int64_t>{3, 4, 5, 0, 6, 0});
    const std::vector<std::uint8_t> last(constants.window_mask.end() - 7,
                                         constants.window_mask.end());
    CHECK(last == std::vector<std::uint8_t>{1, 1, 1, 0, 0, 0, 1});
}

TEST_CASE("plans get narrower", "[plan]") {
    CHECK(make_plan("two-pass", 3).windows ==
          std::vector<Window>{draft_window(3), verify_window(3)});
    CHECK(make_plan("fused:2,2,2", 9).name == "fused");
    CHECK(make_plan("fused", 0).name == "ar");
    CHECK(make_plan("fused:3,2,1,1", 4).narrower().name == "fused:2,2,1");
    CHECK(make_plan("two-pass", 1).narrower().name == "ar");
    CHECK(make_plan("two-pass", 4).reach(draft_window(4)) == 6);
    CHECK_THROWS_WITH(make_plan("fused:1,x", 4),
                      "fused:1,x must list group sizes, as in fused:4,3,2,2,1");
    CHECK_THROWS_WITH(make_plan("fused:0,1", 4),
                      "fused:0,1 has 1 draft rows, so the first group must have 1 to 1 rows and "
                      "the others 0 to 1");
}

TEST_CASE("n-gram drafts are what followed the match, and repeat in loops", "[ngram]") {
    CopyIndex index;
    const auto extend = [&](const std::vector<std::int64_t>& tokens) { index.extend(tokens); };
    extend({1, 2, 3, 4, 9, 2, 3});
    CHECK(index.propose(3).tokens == std::vector<std::int64_t>{4, 9, 2});
    CHECK(index.propose(3).confidence == 1);
    CHECK(index.propose(0).tokens.empty());
    extend({5, 6, 5, 6});
    CHECK(index.propose(5).tokens == std::vector<std::int64_t>{5, 6, 5, 6, 5});
    extend({7});
    CHECK(index.propose(3).tokens.empty());
}

// As tests/runtime/test_copies.py.
TEST_CASE("long and unanimous matches are surer", "[ngram]") {
    using Tokens = std::vector<std::int64_t>;
    const std::vector<std::pair<Tokens, int>> cases{
        {{1, 2, 3, 9, 1, 2, 3}, 2},
        {{0, 1, 2, 3, 9, 0, 1, 2, 3}, 3},
        {{0, 1, 2, 3, 4, 5, 6, 7, 9, 0, 1, 2, 3, 4, 5, 6, 7}, 4},
        {{1, 2, 9, 1, 2, 9, 5, 1, 2}, 3},   // two matches agree
        {{1, 2, 9, 1, 2, 8, 5, 1, 2}, 0}};  // they do not
    for (const auto& [tokens, confidence] : cases) {
        CopyIndex index;
        index.extend(tokens);
        CHECK(index.propose(4).confidence == confidence);
    }
}

TEST_CASE("capacities rise in steps", "[capabilities]") {
    CHECK(stepped_capacities(256) == std::vector<std::int64_t>{64, 128, 192, 256});
    CHECK(stepped_capacities(40) == std::vector<std::int64_t>{40});
    const auto sizes = stepped_capacities(8192);
    CHECK(sizes[sizes.size() - 2] - sizes[sizes.size() - 3] == 768);
    CHECK(doubling_capacities(1000) == std::vector<std::int64_t>{256, 512, 1000});
    CHECK(batch_sizes_up_to(6) == std::vector<int>{1, 2, 4, 6});
    const Capabilities offered{"cpu", 50, stepped_capacities(256), {1}, {1}};
    CHECK(offered.capacity(256) == 256);
    CHECK_THROWS_AS(offered.capacity(257), std::logic_error);
}

// As in Python's tests of `auto`.
TEST_CASE("the plans of `auto` and their expected tokens are those of Python", "[tuning]") {
    Capabilities able{"cpu", 50, {256}, {1}, {1}};
    const std::vector<double> cumulative{1.0, 0.7, 0.45, 0.18, 0.054};
    const std::vector<std::pair<std::string, double>> expected{
        {"ar", 1.0},
        {"two-pass 1", 1.35},
        {"two-pass 2", 1.575},
        {"two-pass 3", 1.665},
        {"two-pass 4", 1.692},
        {"fused-1", 1.7},
        {"fused:2,1,1", 1.835},
        {"fused-2", 2.15},
        {"fused:3,2,1,1", 2.0643448276},
        {"fused-3", 2.33},
        {"fused:4,3,2,1,1", 2.2254491839},
        {"fused-4", 2.384},
        {"fused:2,2,1", 2.0103448276},
    };
    const std::vector<Plan> result = plans_up_to(4, able);
    REQUIRE(result.size() == expected.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
        const Plan& plan = result[i];
        const std::string two_pass = "two-pass " + std::to_string(plan.drafts());
        CHECK((plan.windows.size() == 2 ? two_pass : plan.windows.front().name) ==
              expected[i].first);
        CHECK(expected_tokens(plan, cumulative) == Approx(expected[i].second).epsilon(1e-9));
    }
    CHECK(plans_up_to(0).size() == 1);
    able.verifying = {verify_window(4)};
    able.fixed_lookahead = 4;  // engines have the plans of one look-ahead with full groups
    CHECK(plans_up_to(6, able).size() == 3);
}

// On a made-up machine.
PassSeconds seconds_of(const PassShape& shape) {
    const double drafting = shape.drafts > 0 ? 0.8 + 0.05 * (shape.rows - shape.sampled) : 0.0;
    return {1 + 0.25 * shape.rows + drafting, 0.1 + 0.05 * shape.sampled + 0.3 * shape.drafts};
}

TimedPasses timed_passes() {
    TimedPasses timed;
    for (const Window& window : probe_windows(4))
        timed[shape_of(window)] = seconds_of(shape_of(window));
    return timed;
}

TEST_CASE("pass times of other plans are estimated from timed passes", "[tuning]") {
    const PassTimes times(timed_passes());
    CHECK(times.max_rows() == 25);
    for (const Window& window : {ar_window(), verify_window(3), draft_window(2), draft_window(4),
                                 fused_window({4, 2, 1, 1, 0})}) {
        const PassSeconds expected = seconds_of(shape_of(window));
        CHECK(times.seconds(shape_of(window)) ==
              Approx(expected.trunk + expected.tail).epsilon(0.01));
    }
    // Two of its four rows are look-ahead rows, but the estimate is for three, as in timed passes.
    CHECK(times.seconds(shape_of(fused_window({1, 1}))) == Approx(3.45));
    const PassTimes one_width(TimedPasses{{{4, 4, 0}, {2.0, 0.2}}});
    CHECK(one_width.seconds({4, 4, 0}) == Approx(2.2).epsilon(0.01));
    CHECK(one_width.seconds({9, 9, 0}) > 3.0);  // more rows do not look free
    const PassTimes falling(TimedPasses{{{1, 1, 0}, {3.0, 0.1}}, {{5, 5, 0}, {2.0, 0.1}}});
    // Wider windows are never estimated as quicker.
    CHECK(falling.seconds({9, 9, 0}) >= falling.seconds({1, 1, 0}));
}

TEST_CASE("estimates of pass times follow the passes that run", "[tuning]") {
    PassTimes times(timed_passes());
    const PassShape plain{1, 1, 0}, fused = shape_of(fused_window({4, 4, 4, 4, 4}));
    const double before = times.seconds(plain), ratio = times.seconds(fused) / before;
    for (int i = 0; i < 40; ++i) times.record(plain, before);
    times.record(plain, 500 * before);
    CHECK(times.seconds(plain) < 1.07 * before);  // a single pause counts little
    for (int i = 0; i < 60; ++i) times.record(plain, 2 * before);
    CHECK(times.seconds(plain) == Approx(2 * before).epsilon(0.05));
    // Passes of other shapes count as slower, too.
    CHECK(times.seconds(fused) / times.seconds(plain) == Approx(ratio).epsilon(0.25));
    // Another sampler has a slower tail, and the machine is half as fast as it was.
    TimedPasses few;
    for (const Window& window : {ar_window(), verify_window(4), draft_window(1), draft_window(4)}) {
        const PassSeconds seconds = seconds_of(shape_of(window));
        few[shape_of(window)] = {4 * seconds.trunk, 3 * seconds.tail};
    }
    const PassTimes other_sampler(few, &times);
    const PassSeconds wide = seconds_of(fused);
    CHECK(other_sampler.seconds(fused) == Approx(4 * wide.trunk + 3 * wide.tail).epsilon(0.05));
}

TEST_CASE("every sequence has its own acceptance of n-gram drafts", "[tuning]") {
    // It starts with the rates of all sequences. tests/runtime/test_auto.py has the same figures.
    Tuner tuner(PassTimes(timed_passes()), 4, {0.7, 0.45, 0.2, 0.06});
    Rates& all = tuner.rates();
    Rates own(all);
    for (const auto& [drafted, accepted] : {std::pair(4, 3), {4, 4}, {2, 0}})
        all.of(3).record(drafted, accepted);
    for (const auto& [drafted, accepted] : {std::pair(4, 0), {3, 0}, {4, 1}})
        own.of(3).record(drafted, accepted);
    own.of(3).forget();
    const auto check = [](const Acceptance& actual, const std::vector<double>& rates) {
        for (std::size_t i = 0; i < rates.size(); ++i)
            CHECK(actual.rates()[i] == Approx(rates[i]).epsilon(1e-8));
    };
    check(all.of(3), {0.7917745256, 0.8583926329, 0.8583926329, 0.7750941817, 0.8297254709, 0.83});
    check(own.of(3), {0.4489827150, 0.4294645641, 0.8583926329, 0.7750941817, 0.8297254709, 0.83});
    check(own.of(2), {0.7, 0.8, 0.8, 0.8});
}

// As tests/runtime/test_auto.py.
TEST_CASE("windows for copies are those of Python", "[tuning]") {
    Tuner tuner(PassTimes(timed_passes()), 4, {0.7, 0.45, 0.2, 0.06});
    std::vector<Window> windows;
    for (int drafts = 1; drafts <= 4; ++drafts) windows.push_back(verify_window(drafts));
    for (const int drafts : {8, 16}) windows.push_back(copy_window(drafts));
    const Window ar = ar_window(), draft = draft_window(2), fused = fused_window({2, 2, 2});
    const std::vector<std::pair<Window, Window>> plans{
        {ar, ar}, {draft, draft}, {draft, verify_window(2)}, {fused, fused}};
    // The confidence and the number of each sequence's copied drafts.
    using Text = std::vector<std::pair<int, std::size_t>>;
    const std::vector<std::pair<Text, std::vector<std::string>>> expected{
        {{{5, 16}}, {"copy-8", "copy-8", "copy-8", "copy-8"}},
        {{{3, 16}}, {"verify-4", "verify-4", "verify-4", "verify-4"}},
        {{{1, 16}}, {"verify-3", "verify-3", "", "verify-2"}},
        {{{5, 3}}, {"verify-3", "verify-3", "verify-3", "verify-3"}},
        {{{4, 16}, {0, 0}}, {"", "verify-2", "", "verify-3"}},
        {{{1, 16}, {2, 16}}, {"", "verify-2", "", "verify-2"}},
    };
    const std::vector<Choice> choices = tuner.choices(4, 1, tuner.rates().of().cumulative());
    for (const auto& [text, names] : expected) {
        Rates own(tuner.rates());
        std::vector<DraftState> states;
        for (const auto& [confidence, drafts] : text)
            states.push_back({0, {Drafts(drafts), confidence}, &own});
        for (std::size_t i = 0; i < plans.size(); ++i) {
            const auto choice = std::find_if(choices.begin(), choices.end(), [&](const auto& each) {
                return each.plan.windows.front() == plans[i].first;
            });
            REQUIRE(choice != choices.end());
            const Window* window = tuner.verifying(*choice, static_cast<int>(text.size()), states,
                                                   plans[i].second, windows);
            CHECK((window == nullptr ? "" : window->name) == names[i]);
        }
    }
}

// As tests/runtime/test_pass_times.py.
TEST_CASE("pass times are those of Python", "[tuning]") {
    PassTimes times(timed_passes());
    const std::vector<Window> windows{ar_window(), verify_window(2), draft_window(4),
                                      fused_window({4, 4, 4, 4, 4}), fused_window({2, 1, 0})};
    const auto check = [&](const std::vector<double>& seconds, double slowness) {
        for (std::size_t i = 0; i < windows.size(); ++i)
            CHECK(times.seconds(shape_of(windows[i])) == Approx(seconds[i]).epsilon(1e-9));
        CHECK(times.slowness() == Approx(slowness).epsilon(1e-9));
    };
    check({1.4, 2.0, 4.6, 10.6, 4.3666666667}, 1.0);
    const std::vector<std::pair<Window, double>> passes{{windows[0], 1.2},
                                                        {windows[3], 2.0},
                                                        {windows[1], 30.0},
                                                        {windows[4], 0.5},
                                                        {windows[0], 1.0}};
    for (const auto& [window, factor] : passes) {
        const PassSeconds seconds = seconds_of(shape_of(window));
        times.record(shape_of(window), factor * (seconds.trunk + seconds.tail));
    }
    check({1.4525, 2.2540212673, 4.9533589956, 11.6584074519, 4.5652908333}, 1.0768171730);
}

TEST_CASE("a plan that did not run lately is tried for a few passes", "[tuning]") {
    // Rows are nearly free. Passes take so long that the time of decisions does not put them off.
    TimedPasses timed;
    for (const Window& window : probe_windows(4))
        timed[shape_of(window)] = {1e6 + window.width(), 1.0};
    Tuner tuner(PassTimes(timed), 4, {0.9, 0.8, 0.7, 0.6});
    const Plan decided = tuner.choose(4, 1, {}).plan;
    const Window window = decided.windows.front();
    CHECK(decided.name != "ar");
    for (int pass = 0; pass < 12; ++pass) tuner.observe(window, 1, tuner.seconds(window));
    // Plain decoding has not run yet, and all plans are compared with it, so it is on trial.
    CHECK(tuner.choose(4, 1, {}).plan.name == "ar");
    const Window plain = ar_window();
    for (int pass = 0; pass < 4; ++pass) tuner.observe(plain, 1, tuner.seconds(plain));
    CHECK(tuner.choose(4, 1, {}).plan == decided);
}

TEST_CASE("statistics of a generation", "[stats]") {
    Stats stats;
    stats.lookahead = 2;
    CHECK(stats.acceptance_histogram().empty());
    stats.record(0, 1);
    stats.record(2, 3);
    stats.record(2, 1);
    CHECK(stats.tau() == Approx(5.0 / 3));
    CHECK(stats.acceptance_histogram() == std::vector<std::int64_t>{1, 0, 1});
    CHECK(stats.acceptance_per_position() == std::vector<double>{0.5, 0.5});
    CHECK(stats.mean_acceptance_length() == Approx(2.0));
}
