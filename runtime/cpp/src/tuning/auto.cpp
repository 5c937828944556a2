#include "tuning/auto.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <set>

namespace pass {

namespace {

constexpr double averaged_passes = 200.0;  // of an acceptance rate
// A pass is timed until its two shortest times differ by at most this factor.
constexpr double agreement_ratio = 1.1;
// Of a pass, and of one over wide_window_rows, which is slow and seldom fastest.
constexpr int timed_runs = 4, timed_wide_runs = 2, wide_window_rows = 8;
constexpr int max_timed_rows = 64;  // passes with more were fastest on no machine
// The passes that the moving averages of the slowness and of a shape's ratio span.
constexpr int slowness_passes = 4, ratio_passes = 32;
// A pass counts as at most so much slower or faster than expected, as pauses do not repeat.
constexpr double max_ratio = 1.2;
constexpr double min_pass_seconds = 1e-9;

bool times_agree(const std::vector<PassSeconds>& passes) {
    std::multiset<double> sums;
    for (const PassSeconds& pass : passes) sums.insert(pass.trunk + pass.tail);
    return sums.size() > 1 && *std::next(sums.begin()) <= agreement_ratio * *sums.begin();
}

// Times each window several times, in turn. Returns the shortest times, because disturbances only
// make passes slower.
TimedPasses measure(const std::vector<Window>& windows, int batch, const Auto::TimePass& time) {
    std::vector<std::vector<PassSeconds>> seconds(windows.size());
    for (int number = 0; number < timed_runs; ++number) {
        for (std::size_t i = 0; i < windows.size(); ++i) {
            const int runs = windows[i].width() > wide_window_rows ? timed_wide_runs : timed_runs;
            if (number < runs && !times_agree(seconds[i]))
                seconds[i].push_back(time(windows[i], batch));
        }
    }
    TimedPasses result;
    for (std::size_t i = 0; i < windows.size(); ++i) {
        PassSeconds& least = result[shape_of(windows[i], batch)] = seconds[i].front();
        for (const PassSeconds& pass : seconds[i])
            least = {std::min(least.trunk, pass.trunk), std::min(least.tail, pass.tail)};
    }
    return result;
}

// Fused windows with 8 and 16 rows: processors multiply matrices in tiles of so many rows.
const std::vector<std::vector<int>> tile_groups{{2, 2, 1}, {3, 3, 3, 3}};
// The drafts of plans that `auto` chooses from, beside L.
constexpr std::array<int, 5> draft_counts{1, 2, 3, 4, 6};
constexpr int num_squarings = 9;  // after 2^9 windows the distribution is stationary

// A plan is left only for one whose expected rate is at least this many times its own.
constexpr double switch_margin = 1.03;
constexpr std::int64_t decision_interval_passes = 12;  // the fewest passes between two decisions
constexpr double decision_time_share = 0.005;          // the most of the decoding time for them
// A plan that did not run in the last idle_passes is tried for trial_passes if it is expected to be
// at least as fast as the chosen one; plain decoding whatever its rate, after plain_idle_passes,
// because all plans are compared with it.
constexpr std::int64_t idle_passes = 2000, plain_idle_passes = 128, trial_passes = 4;
// Drafts must gain this much over plain decoding: their passes take the host about 0.1 ms more.
constexpr double draft_margin = 1.06;
constexpr double default_acceptance = 0.1;  // of look-ahead drafts, if the bundle states none
// Of sampled drafts relative to greedy ones, if a bundle states only the latter.
constexpr double sampled_acceptance_ratio = 0.6;
// By confidence, the initial rate of the first n-gram draft and of the others.
constexpr std::array<std::pair<double, double>, 6> ngram_priors{
    {{0.3, 0.8}, {0.55, 0.75}, {0.7, 0.8}, {0.83, 0.83}, {0.9, 0.9}, {0.98, 0.97}}};
// What the rates of all sequences weigh in a new one: little, because n-gram drafts that fail in
// one text must be given up soon.
constexpr double ngram_prior_passes = 1.0;

using Matrix = std::vector<std::vector<double>>;

Matrix squared(const Matrix& matrix) {
    const std::size_t size = matrix.size();
    Matrix result(size, std::vector<double>(size, 0.0));
    for (std::size_t i = 0; i < size; ++i) {
        for (std::size_t k = 0; k < size; ++k) {
            for (std::size_t j = 0; j < size; ++j) result[i][j] += matrix[i][k] * matrix[k][j];
        }
    }
    return result;
}

// Lower points are raised. It is constant before the first point. Beyond the last it is constant if
// `flat`; else it rises like the last piece, or like the line through the first and the last point
// if that is steeper.
Line line(std::map<int, double> points, bool flat = false) {
    double highest = points.begin()->second, rise_beyond = 0;
    for (auto& [x, y] : points) y = highest = std::max(highest, y);
    if (!flat && points.size() > 1) {
        const auto [end, last] = *points.rbegin();
        for (const auto& [x, y] : {*points.begin(), *std::next(points.rbegin())})
            rise_beyond = std::max(rise_beyond, (last - y) / (end - x));
    }
    return [points = std::move(points), rise_beyond](int x) {
        const auto above = points.lower_bound(x);
        if (above == points.begin()) return above->second;
        const auto& [from, low] = *std::prev(above);
        const double rise =
            above == points.end() ? rise_beyond : (above->second - low) / (above->first - from);
        return low + rise * (x - from);
    };
}

// [L] conditional rates from cumulative `acceptance`; default_acceptance beyond its end.
std::vector<double> conditional_rates(const std::vector<double>& acceptance, int lookahead) {
    std::vector<double> rates;
    double before = 1.0;
    for (const double share : acceptance) {
        rates.push_back(before != 0 ? share / before : 0.0);
        before = share;
    }
    rates.resize(static_cast<std::size_t>(lookahead), default_acceptance);
    return rates;
}

// Cumulative, or an estimate.
std::vector<double> stated_acceptance(const LookaheadInfo& lookahead, Sampler sampler) {
    if (sampler == Sampler::greedy) return lookahead.acceptance_per_position;
    if (!lookahead.acceptance_per_position_sampled.empty())
        return lookahead.acceptance_per_position_sampled;
    std::vector<double> shares = lookahead.acceptance_per_position;
    double ratio = 1.0;
    for (double& share : shares) share *= ratio *= sampled_acceptance_ratio;
    return shares;
}

}  // namespace

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

Acceptance::Acceptance(std::vector<double> prior, double weight)
    : prior_(std::move(prior)), trials_(prior_.size(), weight) {
    for (double rate : prior_) hits_.push_back(rate * weight);
}

std::vector<double> Acceptance::rates() const {
    std::vector<double> result;
    for (std::size_t i = 0; i < hits_.size(); ++i) result.push_back(hits_[i] / trials_[i]);
    return result;
}

void Acceptance::record(int drafted, int accepted) {
    drafted = std::min(drafted, static_cast<int>(prior_.size()));
    for (int i = 0; i < std::min(accepted + 1, drafted); ++i) {
        const auto at = static_cast<std::size_t>(i);
        hits_[at] = (hits_[at] + (i < accepted ? 1 : 0)) * (1 - 1 / averaged_passes);
        trials_[at] = (trials_[at] + 1) * (1 - 1 / averaged_passes);
    }
    // All drafts were accepted: one more would probably be accepted about as often as the last.
    const auto next = static_cast<std::size_t>(drafted);
    if (drafted > 0 && drafted == accepted && next < prior_.size())
        move_towards(next, hits_[next - 1] / trials_[next - 1], 1 / averaged_passes);
}

void Acceptance::forget() {
    for (std::size_t i = 0; i < prior_.size(); ++i)
        move_towards(i, prior_[i], 1 / (8 * averaged_passes));
}

void Acceptance::move_towards(std::size_t i, double rate, double share) {
    hits_[i] += (rate * trials_[i] - hits_[i]) * share;
}

std::vector<double> Acceptance::cumulative() const {
    std::vector<double> result{1.0};
    for (const double rate : rates()) result.push_back(result.back() * rate);
    return result;
}

std::vector<double> Acceptance::expected() const {
    std::vector<double> result = cumulative();
    std::partial_sum(result.begin(), result.end(), result.begin());
    return result;
}

Acceptance& Rates::of(std::optional<int> confidence) {
    if (!confidence) return lookahead_;
    const auto found = by_confidence_.find(*confidence);
    if (found != by_confidence_.end()) return found->second;
    const auto [first, others] = ngram_priors.at(static_cast<std::size_t>(*confidence));
    std::vector<double> prior(max_lookahead, others);
    prior.front() = first;
    return by_confidence_
        .emplace(*confidence, all_ == nullptr
                                  ? Acceptance(prior)
                                  : Acceptance(all_->of(confidence).rates(), ngram_prior_passes))
        .first->second;
}

PassTimes::PassTimes(const TimedPasses& timed, const PassTimes* other_sampler) {
    TimedPasses plain = timed, drafting = timed;
    std::erase_if(plain, [](const auto& pass) { return pass.first.drafts > 0; });
    std::erase_if(drafting, [](const auto& pass) { return pass.first.drafts == 0; });
    if (other_sampler != nullptr) {
        *this = *other_sampler;
        passes_.clear();
        double measured = 0, expected = 0;
        for (const auto& [shape, seconds] : timed) {
            measured += seconds.trunk;
            expected += trunk_seconds(shape);
        }
        slowness_ = measured / expected;
    } else {
        max_rows_ = timed.rbegin()->first.rows;
        std::map<int, double> trunk, extra;
        for (const auto& [shape, seconds] : plain) trunk[shape.rows] = seconds.trunk;
        for (const auto& [shape, seconds] : drafting) {
            if (trunk.contains(shape.rows))
                extra[shape.rows] = std::max(seconds.trunk - trunk[shape.rows], 0.0);
        }
        adapter_ = line(extra.empty() ? std::map<int, double>{{0, 0.0}} : extra, true);
        std::map<int, double> without_extra;  // of drafting passes
        for (const auto& [shape, seconds] : drafting)
            without_extra[shape.rows] = seconds.trunk - adapter_(shape.rows);
        trunk.merge(without_extra);
        // Half of the only time counts as due to its rows: more rows must not look free.
        if (trunk.size() == 1) trunk.emplace(0, trunk.begin()->second / 2);
        trunk_ = line(trunk);
    }
    std::map<int, double> tail, drafts{{0, 0.0}};
    for (const auto& [shape, seconds] : plain) tail[shape.sampled] = seconds.tail / slowness_;
    tail_ = line(tail);
    for (const auto& [shape, seconds] : drafting)
        drafts[shape.drafts] = seconds.tail / slowness_ - tail_(shape.sampled);
    drafts_ = line(drafts);
}

double PassTimes::trunk_seconds(const PassShape& shape) const {
    return trunk_(shape.rows) + (shape.drafts > 0 ? adapter_(shape.rows) : 0.0);
}

double PassTimes::seconds(const PassShape& shape) const {
    const double expected = trunk_seconds(shape) + (tail_(shape.sampled) + drafts_(shape.drafts));
    const auto ratio = ratios_.find(shape);
    return std::max(expected, min_pass_seconds) * (ratio == ratios_.end() ? 1.0 : ratio->second) *
           slowness_;
}

void PassTimes::record(const PassShape& shape, double seconds) {
    const double deviation =
        std::clamp(seconds / this->seconds(shape), 1 / max_ratio, max_ratio) - 1;
    const double change =
        1 + deviation / std::min(++passes_[shape] + slowness_passes - 1, ratio_passes);
    ratios_.try_emplace(shape, 1.0).first->second *= change;
    // The product of all ratios is kept at 1: what they have in common belongs to the slowness.
    const double mean = std::pow(change, 1.0 / static_cast<double>(ratios_.size()));
    for (auto& [other, ratio] : ratios_) ratio /= mean;
    // With its ratio, the estimate of this shape changes by 1 / slowness_passes of the deviation.
    slowness_ *= (1 + deviation / slowness_passes) / change * mean;
}

std::vector<Window> probe_windows(int lookahead, int batch, const std::vector<Window>& verifying) {
    std::vector<Window> result;
    const auto add = [&](const Window& window) {
        const bool may_be_timed = window.width() * batch <= max_timed_rows || window.width() == 1;
        if (may_be_timed && std::find(result.begin(), result.end(), window) == result.end())
            result.push_back(window);
    };
    add(ar_window());
    // With many widths, one more length replaces the fused window with 8 rows.
    for (const int length : lookahead > 5 ? std::set{1, 4, lookahead} : std::set{1, lookahead})
        add(verify_window(length));
    for (const int length : {1, lookahead}) add(draft_window(length));
    for (const std::vector<int>& groups : tile_groups) {
        const bool skipped = lookahead > 5 && groups != tile_groups.back();
        if (!skipped && static_cast<int>(groups.size()) <= lookahead + 1) add(fused_window(groups));
    }
    for (int length = lookahead; length > 0; --length) {
        const Window widest = make_plan("fused", length).windows.front();
        if (widest.width() * batch > max_timed_rows) continue;
        add(widest);
        break;
    }
    for (auto window = verifying.rbegin(); window != verifying.rend(); ++window) {
        if (window->width() * batch > std::max(max_timed_rows, batch)) continue;
        add(*window);
        break;
    }
    return result;
}

std::vector<Plan> plans_up_to(int lookahead, const std::optional<Capabilities>& capabilities) {
    if (capabilities)
        lookahead = std::min(lookahead, capabilities->fixed_lookahead.value_or(lookahead));
    std::set<int> counts(draft_counts.begin(), draft_counts.end());
    counts.insert(lookahead);
    std::erase_if(counts, [&](int count) { return count < 1 || count > lookahead; });
    std::vector<Plan> result{make_plan("ar", 0)};
    const auto add = [&](Plan plan) {
        if (std::find(result.begin(), result.end(), plan) == result.end())
            result.push_back(std::move(plan));
    };
    for (const int count : counts) add(make_plan("two-pass", count));
    for (const int count : counts) {
        std::vector<int> shrinking(static_cast<std::size_t>(count) + 1, 1);
        std::iota(shrinking.rbegin() + 1, shrinking.rend(), 1);
        add(fused_plan(shrinking));
        add(make_plan("fused", count));
    }
    for (const std::vector<int>& groups : tile_groups) {
        if (static_cast<int>(groups.size()) <= lookahead + 1) add(fused_plan(groups));
    }
    std::erase_if(result, [&](const Plan& plan) {
        return capabilities && !capabilities->allows(plan.windows);
    });
    return result;
}

double expected_tokens(const Plan& plan, const std::vector<double>& cumulative) {
    const Window& window = plan.windows.front();
    if (!window.is_fused()) {  // of the two passes of two-pass, one verifies drafts
        const auto first = cumulative.begin() + 1;
        return 1 + std::accumulate(first, first + plan.drafts(), 0.0) / 2;
    }
    // The number of a window's drafts is the state of a Markov chain: if `row` is accepted last,
    // the next window has groups[row] drafts. Half of the chain's steps keep the state: that
    // excludes periods without changing the stationary distribution.
    const auto states = static_cast<std::size_t>(window.drafts) + 1;
    Matrix transitions(states, std::vector<double>(states, 0.0));
    std::vector<double> accepted(states, 0.0);  // the expected number, by state
    for (std::size_t state = 0; state < states; ++state) {
        for (std::size_t row = 0; row <= state; ++row) {
            if (row > 0) accepted[state] += cumulative[row];
            const double last = cumulative[row] - (row < state ? cumulative[row + 1] : 0.0);
            transitions[state][static_cast<std::size_t>(window.groups[row])] +=
                std::max(last, 0.0) / 2;
        }
        transitions[state][state] += 0.5;
    }
    for (int i = 0; i < num_squarings; ++i) transitions = squared(transitions);
    return 1 + std::inner_product(accepted.begin(), accepted.end(), transitions[0].begin(), 0.0);
}

Tuner::Tuner(PassTimes times, int lookahead, const std::vector<double>& acceptance,
             std::optional<Capabilities> capabilities)
    : by_batch_{{1, std::move(times)}},
      capabilities_(std::move(capabilities)),
      rates_(Acceptance(conditional_rates(acceptance, lookahead))),
      decided_(choices(0, 1, {1.0}).front()) {}  // plain decoding

void Tuner::observe(const Window& window, int batch, double seconds,
                    const std::vector<Verified>& verified) {
    passes_ += 1;
    pass_seconds_ += seconds;
    last_ran_[{window.name, batch}] = passes_;
    by_batch_.at(timed_batch(batch)).record(shape_of(window, batch), seconds);
    bool any_drafted = false;
    for (const auto& [drafted, accepted, confidence, own] : verified) {
        if (drafted == 0) continue;
        any_drafted = true;
        if (own != nullptr) own->of(confidence).record(drafted, accepted);
        rates_.of(confidence).record(drafted, accepted);
    }
    if (!window.groups.empty() || any_drafted || verified.empty()) return;
    // After many plain passes, the rates of look-ahead drafts are out of date.
    rates_.of().forget();
    for (const Verified& each : verified) {
        if (each.rates != nullptr) each.rates->of().forget();
    }
}

std::vector<Choice> Tuner::choices(int lookahead, int batch,
                                   const std::vector<double>& cumulative) const {
    std::vector<Choice> result;
    for (const Plan& plan : plans_up_to(lookahead, capabilities_)) {
        if (plan.windows.front().width() > by_batch_.at(1).max_rows()) continue;
        double sum = 0;
        for (const Window& window : plan.windows) sum += seconds(window, batch);
        result.push_back({plan, expected_tokens(plan, cumulative),
                          sum / static_cast<double>(plan.windows.size())});
    }
    std::stable_sort(result.begin(), result.end(),
                     [](const Choice& a, const Choice& b) { return a.rate() > b.rate(); });
    return result;
}

Choice Tuner::choose(int lookahead, int batch, const std::vector<DraftState>& states) {
    const double started = now();
    const std::pair key(lookahead, batch);
    if (!decisions_.contains(key) ||
        (passes_ - decided_at_ >= decision_interval_passes && pass_seconds_ >= due_seconds_)) {
        decide(lookahead, batch, states);
        decided_at_ = passes_;
        due_seconds_ =
            std::max(due_seconds_, pass_seconds_) + (now() - started) / decision_time_share;
    }
    const Decision& decision = decisions_.at(key);
    decided_ = decision.decided;
    return passes_ < decision.trial_end ? decision.trial : decided_;
}

// The fastest plan if it is switch_margin times as fast as the last decided one, else that one;
// plain decoding if this is not draft_margin times as fast.
void Tuner::decide(int lookahead, int batch, const std::vector<DraftState>& states) {
    std::vector<double> cumulative = rates_.of().cumulative();
    if (!states.empty()) std::fill(cumulative.begin(), cumulative.end(), 0.0);
    for (const DraftState& state : states) {  // `cumulative` is the mean of all sequences
        const std::vector<double> own = state.rates->of().cumulative();
        for (std::size_t i = 0; i < cumulative.size(); ++i)
            cumulative[i] += own[i] / static_cast<double>(states.size());
    }
    const std::vector<Choice> ranked = choices(lookahead, batch, cumulative);
    const auto matching = [&](const auto& test) {
        return std::find_if(ranked.begin(), ranked.end(), test);
    };
    const auto before = decisions_.find({lookahead, batch});
    const Plan& present_plan =
        before == decisions_.end() ? decided_.plan : before->second.decided.plan;
    const auto plain = matching([](const Choice& each) { return each.plan.drafts() == 0; });
    auto present = matching([&](const Choice& each) { return each.plan == present_plan; });
    if (present == ranked.end()) present = plain;
    if (ranked.front().rate() >= switch_margin * present->rate()) present = ranked.begin();
    const Choice& decided = present->rate() < draft_margin * plain->rate() ? *plain : *present;
    const auto trial = matching([&](const Choice& each) {
        const auto ran = last_ran_.find({each.plan.windows.front().name, batch});
        const bool is_plain = each.plan.drafts() == 0;
        const bool idle = ran == last_ran_.end() ||
                          passes_ - ran->second >= (is_plain ? plain_idle_passes : idle_passes);
        return idle && passes_ > 0 && (is_plain || each.rate() >= decided.rate());
    });
    const Choice& tried = trial == ranked.end() ? decided : *trial;
    // The trial counts as run, even if a pass runs the plan that a request names instead.
    last_ran_[{tried.plan.windows.front().name, batch}] = passes_;
    decisions_[{lookahead, batch}] = {decided, tried, passes_ + trial_passes};
}

bool Tuner::prefers_ngrams(const DraftState& state, const Window& window) {
    const std::size_t count =
        std::min(state.ngram.tokens.size(), static_cast<std::size_t>(window.drafts));
    return state.rates->of(state.ngram.confidence).expected()[count] >
           rates_.of().expected().at(static_cast<std::size_t>(state.num_drafts));
}

const Window* Tuner::verifying(const Choice& choice, int batch,
                               const std::vector<DraftState>& states, const Window& next_of_plan,
                               const std::vector<Window>& windows) {
    std::vector<std::pair<std::size_t, std::vector<double>>> drafting;  // drafts, expected tokens
    for (const DraftState& state : states) {
        if (state.ngram.tokens.empty()) continue;
        drafting.emplace_back(state.ngram.tokens.size(),
                              state.rates->of(state.ngram.confidence).expected());
    }
    const auto others = static_cast<double>(states.size() - drafting.size());
    const double lost_tokens = next_of_plan.is_fused() ? choice.tokens - 1 : 0.0;
    const auto tokens_per_second = [&](const Window& window) {
        double tokens = others * (1 - lost_tokens);
        for (const auto& [length, expected] : drafting) {
            const std::size_t count = std::min(length, static_cast<std::size_t>(window.drafts));
            const double all_accepted = expected[count] - expected[count - 1];
            tokens += expected[count] - (1 - all_accepted) * lost_tokens;
        }
        return tokens / seconds(window, batch);
    };
    double plan_rate = choice.rate() * static_cast<double>(states.size());
    if (next_of_plan.drafts > 0) {
        // Two-pass accepts drafts in every second pass.
        const double own = next_of_plan.is_fused() ? choice.tokens : 2 * choice.tokens - 1;
        double tokens = others * own;
        for (const auto& [length, expected] : drafting) {
            const auto rows = static_cast<std::size_t>(next_of_plan.drafts);
            tokens += std::max(own, expected[std::min(length, rows)]);
        }
        plan_rate = tokens / seconds(next_of_plan, batch);
    }
    const Window* best = nullptr;
    double best_rate = 0;
    for (const Window& window : windows) {
        if (window.width() > by_batch_.at(1).max_rows()) continue;
        const double rate = tokens_per_second(window);
        if (best != nullptr && rate <= best_rate) continue;
        best = &window;
        best_rate = rate;
    }
    return best != nullptr && best_rate >= switch_margin * plan_rate ? best : nullptr;
}

void Tuner::forget_unverified(const DraftState& state) {
    state.rates->of(state.ngram.confidence).forget();
    rates_.of(state.ngram.confidence).forget();
}

Auto::Auto(const LookaheadInfo& lookahead, Capabilities capabilities)
    : lookahead_(lookahead), capabilities_(std::move(capabilities)) {
    std::set<int> batches(capabilities_.batch_sizes.begin(), capabilities_.batch_sizes.end());
    batches.insert(1);
    for (const int batch : batches) {
        std::vector<Window>& windows = windows_[batch];
        windows =
            probe_windows(static_cast<int>(lookahead_.length), batch, capabilities_.verifying);
        // Windows take at most half the capacity, so that texts have the other half.
        std::erase_if(windows, [&](const Window& window) {
            return !capabilities_.allows({window}) ||
                   capabilities_.padded_width(window.width()) > capabilities_.max_capacity() / 2;
        });
        std::set<int> widths;
        for (const Window& window : windows) widths.insert(window.width());
        if (widths.size() == 1) windows.clear();
    }
}

bool Auto::is_timed(Sampler sampler, int batch) const {
    const auto tuner = tuners_.find(sampler);
    return tuner != tuners_.end() &&
           (windows_.at(batch).empty() || tuner->second.by_batch().contains(batch));
}

Tuner* Auto::tuner(Sampler sampler, int batch, std::int64_t room, const TimePass& time) {
    if (!is_timed(sampler, batch)) {
        int widest = 0;
        for (const int size : {1, batch}) {
            for (const Window& window : windows_.at(size))
                widest = std::max(widest, window.width());
        }
        if (windows_.at(1).empty() || capabilities_.padded_width(widest) > room) return nullptr;
        for (const int size : {1, batch}) {
            if (!is_timed(sampler, size)) time_passes(sampler, size, time);
        }
    }
    return &tuners_.at(sampler);
}

void Auto::time_passes(Sampler sampler, int batch, const TimePass& time) {
    std::vector<Window> windows = windows_.at(batch);
    const PassTimes* other_sampler = nullptr;
    for (const auto& [other, tuner] : tuners_) {
        if (other_sampler == nullptr && tuner.by_batch().contains(batch))
            other_sampler = &tuner.by_batch().at(batch);
    }
    if (other_sampler != nullptr) {
        int max_drafts = 0;  // of the windows that only verify
        for (const Window& window : windows) {
            if (window.groups.empty()) max_drafts = std::max(max_drafts, window.drafts);
        }
        // Tails differ by sampled rows and drafts: plain decoding, the widest window that only
        // verifies, and the windows that only draft show both.
        std::erase_if(windows, [&](const Window& window) {
            return window.drafts > 0 && (window.drafts < max_drafts || !window.groups.empty());
        });
    }
    const PassTimes times(measure(windows, batch, time), other_sampler);
    const auto lookahead = static_cast<int>(lookahead_.length);
    // If the sampler has a tuner, that stays.
    tuners_
        .try_emplace(sampler, times, lookahead, stated_acceptance(lookahead_, sampler),
                     capabilities_)
        .first->second.add_batch(batch, times);
}

}  // namespace pass
