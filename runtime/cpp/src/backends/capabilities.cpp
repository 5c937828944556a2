#include "backends/capabilities.h"

#include <algorithm>
#include <stdexcept>

#include "backends/memory.h"
#include "errors.h"

namespace pass {

namespace {

const std::vector<std::string> gpu_devices{"cuda", "tensorrt"};
constexpr std::size_t max_ordinal_digits = 4;

// `first`, twice that, and so on, up to and including `maximum`.
template <class Size>
std::vector<Size> doublings(Size first, Size maximum) {
    std::vector<Size> sizes;
    for (; first < maximum; first *= 2) sizes.push_back(first);
    sizes.push_back(maximum);
    return sizes;
}

}  // namespace

int Capabilities::batch_size(int slots) const {
    return *std::lower_bound(batch_sizes.begin(), batch_sizes.end(), slots);
}

std::int64_t Capabilities::capacity(std::int64_t tokens) const {
    const auto smallest = std::lower_bound(capacities.begin(), capacities.end(), tokens);
    if (smallest != capacities.end()) return *smallest;
    throw std::logic_error(std::to_string(tokens) + " tokens do not fit a KV capacity of " +
                           std::to_string(max_capacity()));
}

std::vector<int> Capabilities::chunks(std::int64_t start, std::int64_t present) const {
    std::vector<int> result;
    for (const int width : prefill_widths) {
        const std::int64_t end = start + padded_width(width);
        if (end > max_capacity()) continue;
        const auto limit = chunk_capacities.find(width);
        if (limit != chunk_capacities.end() && std::max(present, capacity(end)) > limit->second)
            continue;
        result.push_back(width);
    }
    return result;
}

std::vector<Window> Capabilities::plan_windows(int lookahead) const {
    std::vector<Window> result;
    for (const char* plan : {"ar", "two-pass", "fused"}) {
        for (const Window& window : make_plan(plan, lookahead).windows) {
            const bool is_new = std::find(result.begin(), result.end(), window) == result.end();
            if (is_new && allows({window})) result.push_back(window);
        }
    }
    for (const Window& window : verifying) {
        if (window.drafts > lookahead) result.push_back(window);
    }
    return result;
}

bool Capabilities::allows(const std::vector<Window>& windows) const {
    if (!fixed_lookahead) return true;
    const std::string length = std::to_string(*fixed_lookahead);
    std::vector<std::string> names{"ar", "draft-" + length, "fused-" + length};
    for (const Window& window : verifying) names.push_back(window.name);
    return std::all_of(windows.begin(), windows.end(), [&](const Window& window) {
        return std::find(names.begin(), names.end(), window.name) != names.end();
    });
}

std::vector<Window> verifying_windows(const Manifest& manifest, int fewest) {
    std::vector<Window> windows;
    for (int drafts = fewest; drafts <= max_lookahead; ++drafts) {
        for (const Window& window : {verify_window(drafts), copy_window(drafts)}) {
            if (manifest.windows.contains(window.name)) windows.push_back(window);
        }
    }
    return windows;
}

std::vector<int> batch_sizes_up_to(int maximum) { return doublings(1, maximum); }

std::vector<std::int64_t> stepped_capacities(std::int64_t maximum) {
    constexpr std::int64_t capacity_step = 64;
    std::vector<std::int64_t> sizes;
    for (std::int64_t size = capacity_step; size < maximum;
         size += std::max(capacity_step, size / 8 / capacity_step * capacity_step)) {
        sizes.push_back(size);
    }
    sizes.push_back(maximum);
    return sizes;
}

std::vector<std::int64_t> doubling_capacities(std::int64_t maximum) {
    return doublings(std::int64_t{256}, maximum);
}

std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns) {
    const auto element = static_cast<std::int64_t>(item_size(model.dtype));
    const std::int64_t logits = model.vocab_size * 2 * 4;  // two copies of one row, in fp32
    // 4 tensors of the hidden size, and 3 in the MLP, which is 4 times as wide.
    const std::int64_t layer = rows * (4 + 3 * 4) * model.hidden_size * element;
    const std::int64_t scores = rows * model.heads * columns * (element + 1);  // 1: for a mask
    return logits + layer + scores;
}

std::map<int, std::int64_t> wide_chunks(const ModelInfo& model,
                                        const std::vector<std::int64_t>& capacities) {
    std::map<int, std::int64_t> result;
    for (const int rows : {2048, 1024}) {
        for (const std::int64_t capacity : capacities) {
            if (rows <= capacity && activation_bytes(model, rows, capacity) <= max_chunk_bytes)
                result[rows] = capacity;
        }
    }
    return result;
}

std::string comma_list(const std::vector<std::string>& items) {
    std::string text;
    for (const std::string& item : items) text += (text.empty() ? "" : ", ") + item;
    return text;
}

DeviceName split_device(const std::string& name) {
    const std::size_t colon = name.find(':');
    const std::string kind = name.substr(0, colon);
    const bool gpu = std::find(gpu_devices.begin(), gpu_devices.end(), kind) != gpu_devices.end();
    if (!gpu && kind != "auto" && kind != "cpu") {
        throw Error("unknown device '" + name + "': choose one of auto, cpu, " +
                    comma_list(gpu_devices));
    }
    if (colon == std::string::npos) return {kind, 0};
    if (!gpu) {
        throw Error("device '" + name + "': " + kind + " takes no number; only " +
                    comma_list(gpu_devices) + " do, as in cuda:1");
    }
    const std::string number = name.substr(colon + 1);
    if (number.empty() || number.size() > max_ordinal_digits ||
        number.find_first_not_of("0123456789") != std::string::npos) {
        throw Error("device '" + name + "': a GPU's number must follow the colon, as in " + kind +
                    ":1");
    }
    return {kind, std::stoi(number)};
}

}  // namespace pass
