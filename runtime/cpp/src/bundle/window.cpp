#include "bundle/window.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>

#include "errors.h"

namespace pass {

namespace {

std::string numbered(const std::string& kind, int lookahead) {
    if (lookahead < 1 || lookahead > max_lookahead) {
        throw Error("look-ahead must be 1 to " + std::to_string(max_lookahead) + ", not " +
                    std::to_string(lookahead));
    }
    return kind + "-" + std::to_string(lookahead);
}

// The sizes in "fused:4,3,2,2,1".
std::vector<int> parse_sizes(const std::string& plan) {
    std::string_view rest = std::string_view(plan).substr(plan.find(':') + 1);
    std::vector<int> sizes;
    while (true) {
        int size = 0;
        const auto [stop, error] = std::from_chars(rest.data(), rest.data() + rest.size(), size);
        const auto length = static_cast<std::size_t>(stop - rest.data());
        if (error != std::errc() || (length < rest.size() && *stop != ','))
            throw Error(plan + " must list group sizes, as in fused:4,3,2,2,1");
        sizes.push_back(size);
        if (length == rest.size()) return sizes;
        rest.remove_prefix(length + 1);
    }
}

}  // namespace

int Window::lookahead_rows() const { return std::accumulate(groups.begin(), groups.end(), 0); }

Window Window::next() const {
    if (is_fused() || width() == 1) return *this;
    if (!groups.empty()) return verify_window(groups.front());
    return name.starts_with("copy-") ? ar_window() : draft_window(drafts);
}

Window ar_window() { return {"ar", 0, {}}; }

Window draft_window(int lookahead) { return {numbered("draft", lookahead), 0, {lookahead}}; }

Window verify_window(int lookahead) { return {numbered("verify", lookahead), lookahead, {}}; }

Window copy_window(int drafts) { return {numbered("copy", drafts), drafts, {}}; }

Window prefill_window(int width) { return {"prefill-" + std::to_string(width), width - 1, {}}; }

Window fused_window(const std::vector<int>& groups) {
    const int drafts = static_cast<int>(groups.size()) - 1;
    std::string full_name = numbered("fused", drafts), name = "fused:";
    for (const int size : groups) name += (name.back() == ':' ? "" : ",") + std::to_string(size);
    const auto [smallest, largest] = std::minmax_element(groups.begin(), groups.end());
    if (*smallest < 0 || *largest > drafts || groups.front() == 0) {
        const std::string limit = std::to_string(drafts);
        throw Error(name + " has " + limit + " draft rows, so the first group must have 1 to " +
                    limit + " rows and the others 0 to " + limit);
    }
    return {*smallest == drafts ? full_name : name, drafts, groups};
}

WindowConstants constants_of(const Window& window, std::int64_t vocab_size) {
    const int width = window.width();
    WindowConstants result;
    result.window_mask.assign(static_cast<std::size_t>(width) * static_cast<std::size_t>(width), 0);
    int row = 0;
    // Adds a row that follows the first `chain` rows and `own` rows of its group.
    const auto add = [&](int chain, int own) {
        result.row_position.push_back(chain + own);
        result.logit_rows.push_back(row);
        const auto seen = result.window_mask.begin() + static_cast<std::ptrdiff_t>(row) * width;
        std::fill_n(seen, chain, 1);
        std::fill_n(seen + row - own, own + 1, 1);
        ++row;
    };
    for (int i = 0; i <= window.drafts; ++i) add(i, 0);
    for (std::size_t group = 0; group < window.groups.size(); ++group) {
        const int first = row, size = window.groups[group];
        for (int i = 0; i < size; ++i) {
            result.lookahead_rows.push_back(row);
            result.lookahead_ids.push_back(vocab_size + i);
            add(static_cast<int>(group) + 1, i);
        }
        for (int i = 0; i < window.drafts; ++i)
            result.draft_rows.push_back(i < size ? first + i : 0);
    }
    return result;
}

int Plan::drafts() const {
    int most = 0;
    for (const Window& window : windows) most = std::max(most, window.drafts);
    return most;
}

bool Plan::contains(const Window& window) const {
    return std::find(windows.begin(), windows.end(), window) != windows.end();
}

int Plan::reach(const Window& first) const {
    int end = 0, root = 0;  // each pass moves the root by one entry
    for (auto window = std::find(windows.begin(), windows.end(), first); window != windows.end();
         ++window)
        end = std::max(end, root++ + window->width());
    return end;
}

Plan Plan::narrower() const {
    const int fewer = drafts() - 1;
    if (fewer < 1 || !name.starts_with("fused:")) return make_plan(name, std::max(fewer, 0));
    std::vector<int> sizes(windows.front().groups.begin(), windows.front().groups.end() - 1);
    for (int& size : sizes) size = std::min(size, fewer);
    return fused_plan(sizes);
}

Plan make_plan(const std::string& name, int lookahead) {
    const bool has_sizes = name.starts_with("fused:");
    if (!has_sizes && name != "ar" && name != "two-pass" && name != "fused") {
        throw Error("unknown plan '" + name +
                    "': choose one of ar, two-pass, fused, auto, or group sizes as in "
                    "fused:4,3,2,2,1");
    }
    if (name == "ar" || lookahead == 0) return {"ar", {ar_window()}};
    if (has_sizes) return fused_plan(parse_sizes(name));
    if (name == "fused")
        return fused_plan(std::vector<int>(static_cast<std::size_t>(lookahead) + 1, lookahead));
    return {name, {draft_window(lookahead), verify_window(lookahead)}};
}

Plan fused_plan(const std::vector<int>& groups) {
    Window window = fused_window(groups);
    std::string name = window.name == window.tail() ? "fused" : window.name;
    return {std::move(name), {std::move(window)}};
}

}  // namespace pass
