#include "bundle/plan.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <string_view>

#include "errors.h"

namespace pass {

namespace {

int checked_lookahead(int lookahead) {
    if (lookahead < 1 || lookahead > max_lookahead) {
        throw Error("look-ahead must be 1 to " + std::to_string(max_lookahead) + ", not " +
                    std::to_string(lookahead));
    }
    return lookahead;
}

std::string joined(const std::vector<int>& sizes) {
    std::string text;
    for (int size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
    return text;
}

// The name of a plan: `kind` and the number of drafts if all groups have `max_size` rows, else
// `kind` and the sizes of the groups. Throws Error, with `reason`, unless the first group has 1 to
// `max_size` rows and the others 0 to `max_size`.
std::string name_with_groups(const std::string& kind, const std::vector<int>& groups, int max_size,
                             const std::string& reason) {
    const auto [smallest, largest] = std::minmax_element(groups.begin(), groups.end());
    if (*smallest < 0 || *largest > max_size || groups.front() == 0) {
        const std::string limit = std::to_string(max_size);
        throw Error(kind + ":" + joined(groups) + reason + ", so the first group must have 1 to " +
                    limit + " rows and the others 0 to " + limit);
    }
    return *smallest == max_size ? kind + "-" + std::to_string(groups.size() - 1)
                                 : kind + ":" + joined(groups);
}

constexpr const char* known_plans =
    "choose one of ar, two-pass, fused, tree-3, tree-5, tree-8, tree-16, auto, or group sizes as "
    "in fused:4,3,2,2,1 and tree:2,2,1,0";

// The number that `text` is; none if it is something else.
std::optional<int> parse_number(std::string_view text) {
    int number = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// The sizes in "fused:4,3,2,2,1" or "tree:2,2,1,0".
std::vector<int> parse_sizes(const std::string& mode) {
    const std::string_view shape = std::string_view(mode).substr(mode.find(':') + 1);
    std::vector<int> sizes;
    for (std::size_t begin = 0; begin <= shape.size();) {
        const std::size_t end = std::min(shape.find(',', begin), shape.size());
        const std::optional<int> size = parse_number(shape.substr(begin, end - begin));
        if (!size)
            throw Error(mode + " must list group sizes, as in fused:4,3,2,2,1 and tree:2,2,1,0");
        sizes.push_back(*size);
        begin = end + 1;
    }
    return sizes;
}

// A row of a window: the row that it follows (-1 for the root), and its distance from the root.
struct Row {
    int parent;
    int depth;
};

std::vector<Row> rows_of(const Plan& plan) {
    std::vector<Row> rows{{-1, 0}};
    const auto add = [&](int parent) {
        rows.push_back({parent, rows[static_cast<std::size_t>(parent)].depth + 1});
    };
    for (int i = 0; i < plan.drafts; ++i)
        add(plan.is_tree() ? plan.parents[static_cast<std::size_t>(i)] : i);
    for (std::size_t group = 0; group < plan.groups.size(); ++group) {
        int parent = static_cast<int>(group);
        for (int i = 0; i < plan.groups[group]; ++i) {
            add(parent);
            parent = static_cast<int>(rows.size()) - 1;
        }
    }
    return rows;
}

// The tree with so many drafts. Throws Error if there is none, or it is deeper than `lookahead`.
const Tree& find_tree(const std::vector<Tree>& trees, int drafts, int lookahead) {
    for (const Tree& tree : trees) {
        if (static_cast<int>(tree.size()) != drafts) continue;
        if (const int depth = tree_depth(tree); depth > lookahead) {
            throw Error("a tree of " + std::to_string(drafts) + " drafts needs a look-ahead of " +
                        std::to_string(depth) + " or more, not " + std::to_string(lookahead));
        }
        return tree;
    }
    throw Error("there is no tree-" + std::to_string(drafts) +
                " here: trees of drafts need the exact-match rule, a draft head, a vocabulary that "
                "is a multiple of 8, and a bundle and engines of this version; use --plan fused");
}

}  // namespace

int Plan::lookahead_rows() const { return std::accumulate(groups.begin(), groups.end(), 0); }

int Plan::depth() const { return is_tree() ? tree_depth(parents) : drafts; }

int tree_depth(const Tree& tree) {
    std::vector<int> depths{0};
    for (const int parent : tree) depths.push_back(depths[static_cast<std::size_t>(parent)] + 1);
    return *std::max_element(depths.begin(), depths.end());
}

Plan Plan::next() const {
    if (is_fused() || width() == 1) return *this;
    return groups.empty() ? draft_plan(drafts) : verify_plan(groups.front());
}

Plan ar_plan() { return {"ar", 0, {}}; }

Plan draft_plan(int lookahead) {
    return {"draft-" + std::to_string(checked_lookahead(lookahead)), 0, {lookahead}};
}

Plan verify_plan(int lookahead) {
    return {"verify-" + std::to_string(checked_lookahead(lookahead)), lookahead, {}};
}

Plan prefill_plan(int width) { return {"prefill-" + std::to_string(width), width - 1, {}}; }

Plan fused_plan(const std::vector<int>& groups) {
    const int drafts = checked_lookahead(static_cast<int>(groups.size()) - 1);
    const std::string reason = " has " + std::to_string(drafts) + " draft rows";
    return {name_with_groups("fused", groups, drafts, reason), drafts, groups};
}

Plan tree_plan(const Tree& tree, const std::vector<int>& groups) {
    const int depth = tree_depth(tree);
    const std::string reason = " has drafts at most " + std::to_string(depth) + " deep";
    return {name_with_groups("tree", groups, depth, reason), static_cast<int>(tree.size()), groups,
            tree};
}

Plan full_tree(const Tree& tree) {
    return tree_plan(tree, std::vector<int>(tree.size() + 1, tree_depth(tree)));
}

PlanConstants constants_of(const Plan& plan, std::int64_t vocab_size) {
    const std::vector<Row> rows = rows_of(plan);
    const std::size_t width = rows.size();
    PlanConstants result;
    result.window_mask.assign(width * width, 0);
    for (std::size_t i = 0; i < width; ++i) {
        result.row_position.push_back(rows[i].depth);
        result.logit_rows.push_back(static_cast<std::int64_t>(i));
        std::uint8_t* seen = &result.window_mask[i * width];
        if (rows[i].parent >= 0) {  // a parent has a lower index than its children
            const std::uint8_t* seen_by_parent =
                &result.window_mask[static_cast<std::size_t>(rows[i].parent) * width];
            std::copy(seen_by_parent, seen_by_parent + width, seen);
        }
        seen[i] = 1;
    }
    for (int row = plan.width() - plan.lookahead_rows(); row < plan.width(); ++row)
        result.lookahead_rows.push_back(row);
    for (int size : plan.groups) {
        for (int i = 0; i < size; ++i) result.lookahead_ids.push_back(vocab_size + i);
    }
    if (plan.is_fused()) {
        std::int64_t first_row = 1 + plan.drafts;  // the group's
        for (int size : plan.groups) {
            for (int i = 0; i < plan.depth(); ++i)
                result.draft_rows.push_back(i < size ? first_row + i : 0);
            first_row += size;
        }
    }
    return result;
}

int Cycle::depth() const {
    int deepest = 0;
    for (const Plan& plan : plans) deepest = std::max(deepest, plan.depth());
    return deepest;
}

bool Cycle::contains(const Plan& plan) const {
    return std::find(plans.begin(), plans.end(), plan) != plans.end();
}

int Cycle::reach(const Plan& first) const {
    int end = 0, root = 0;  // each pass moves the root by one entry
    for (auto plan = std::find(plans.begin(), plans.end(), first); plan != plans.end(); ++plan)
        end = std::max(end, root++ + plan->width());
    return end;
}

Cycle Cycle::narrower() const {
    if (is_tree()) return make_cycle("fused", depth());
    const int drafts = depth() - 1;
    if (drafts < 1 || !name.starts_with("fused:")) return make_cycle(name, std::max(drafts, 0));
    std::vector<int> sizes(plans.front().groups.begin(), plans.front().groups.end() - 1);
    for (int& size : sizes) size = std::min(size, drafts);
    return fused_cycle(sizes);
}

Cycle make_cycle(const std::string& mode, int lookahead, const std::vector<Tree>& trees) {
    const bool fused = mode.starts_with("fused:"), tree = mode.starts_with("tree:");
    const std::optional<int> drafts =
        mode.starts_with("tree-") ? parse_number(std::string_view(mode).substr(5)) : std::nullopt;
    if (!fused && !tree && !drafts && mode != "ar" && mode != "two-pass" && mode != "fused")
        throw Error("unknown plan '" + mode + "': " + known_plans);
    if (mode == "ar" || lookahead == 0) return {"ar", {ar_plan()}};
    if (fused) return fused_cycle(parse_sizes(mode));
    if (tree) {
        const std::vector<int> groups = parse_sizes(mode);
        return tree_cycle(
            tree_plan(find_tree(trees, static_cast<int>(groups.size()) - 1, lookahead), groups));
    }
    if (drafts) return tree_cycle(full_tree(find_tree(trees, *drafts, lookahead)));
    if (mode == "fused")
        return fused_cycle(std::vector<int>(static_cast<std::size_t>(lookahead) + 1, lookahead));
    return {mode, {draft_plan(lookahead), verify_plan(lookahead)}};
}

Cycle fused_cycle(const std::vector<int>& groups) {
    Plan plan = fused_plan(groups);
    const bool full = plan.name == plan.tail();  // tails are named after plans with full groups
    std::string name = full ? "fused" : plan.name;
    return {std::move(name), {std::move(plan)}};
}

Cycle tree_cycle(Plan plan) {
    std::string name = plan.name;
    return {std::move(name), {std::move(plan)}};
}

}  // namespace pass
