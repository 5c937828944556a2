#include "backends/capabilities.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pass {

namespace {

// Every plan of the modes that draft chains, once.
std::vector<Plan> chain_plans(int lookahead) {
    std::vector<Plan> found;
    for (const char* mode : {"ar", "two-pass", "fused"}) {
        for (Plan& plan : make_cycle(mode, lookahead).plans) {
            if (std::find(found.begin(), found.end(), plan) == found.end()) found.push_back(std::move(plan));
        }
    }
    return found;
}

}  // namespace

int Capabilities::batch_size(int wanted) const {
    return *std::lower_bound(batch_sizes.begin(), batch_sizes.end(), wanted);
}

std::int64_t Capabilities::capacity(std::int64_t tokens) const {
    const auto found = std::lower_bound(capacities.begin(), capacities.end(), tokens);
    if (found != capacities.end()) return *found;
    throw std::logic_error(std::to_string(tokens) + " tokens do not fit a KV capacity of " +
                           std::to_string(max_capacity()));
}

std::vector<int> Capabilities::chunks(std::int64_t start, std::int64_t now) const {
    std::vector<int> found;
    for (const int width : prefill_widths) {
        const std::int64_t end = start + padded_width(width);
        if (end > max_capacity()) continue;
        const auto limit = chunk_capacities.find(width);
        if (limit != chunk_capacities.end() && std::max(now, capacity(end)) > limit->second) continue;
        found.push_back(width);
    }
    return found;
}

bool Capabilities::allows(const std::vector<Plan>& plans) const {
    if (!lookahead) return true;
    std::vector<Plan> built = chain_plans(*lookahead);
    for (int size : trees) built.push_back(full_tree(size, *lookahead));
    return std::all_of(plans.begin(), plans.end(),
                       [&](const Plan& plan) { return std::find(built.begin(), built.end(), plan) != built.end(); });
}

std::vector<Plan> Capabilities::mode_plans(int drafts) const {
    std::vector<Plan> found = chain_plans(drafts);
    std::erase_if(found, [&](const Plan& plan) { return !allows({plan}); });
    return found;
}

std::vector<int> batch_sizes_up_to(int maximum) {
    std::vector<int> sizes;
    for (int size = 1; size < maximum; size *= 2) sizes.push_back(size);
    sizes.push_back(maximum);
    return sizes;
}

std::vector<std::int64_t> following_capacities(std::int64_t maximum) {
    constexpr std::int64_t unit = 64;
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = unit; size < maximum; size += std::max(unit, size / 8 / unit * unit)) {
        sizes.push_back(size);
    }
    sizes.push_back(maximum);
    return sizes;
}

std::vector<std::int64_t> doubling_capacities(std::int64_t maximum) {
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = 256; size < maximum; size *= 2) sizes.push_back(size);
    sizes.push_back(maximum);
    return sizes;
}

}  // namespace pass
