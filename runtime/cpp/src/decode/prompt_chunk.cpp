#include "decode/prompt_chunk.h"

#include <vector>

namespace pass {

PromptChunk next_chunk(const Capabilities& sizes, std::int64_t cached, std::int64_t remaining,
                       std::optional<std::int64_t> most) {
    std::vector<int> offered, widths;
    for (int width : sizes.prefill_widths) {
        if (cached + sizes.padded_width(width) > sizes.max_capacity()) continue;
        offered.push_back(width);
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
