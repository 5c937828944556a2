#include "decode/prompt_chunk.h"

#include <vector>

namespace pass {

PromptChunk next_chunk(const Capabilities& sizes, std::int64_t cached, std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> most) {
    const std::vector<int> offered = sizes.chunks(cached, capacity);
    std::vector<int> widths;
    for (int width : offered) {
        if (!most.has_value() || width <= *most) widths.push_back(width);
    }
    if (widths.empty()) widths.push_back(offered.back());
    int filled = 0, holding = 0;
    for (int width : widths) {
        if (width >= remaining) holding = width;
        if (width <= remaining && filled == 0) filled = width;
    }
    if (holding > 0 && (4 * remaining >= std::int64_t{3} * holding || filled == 1)) return {remaining, holding};
    return {filled, filled};
}

}  // namespace pass
