#include "backends/chunks.h"

#include "backends/memory.h"

namespace pass {

std::int64_t activation_bytes(const ModelInfo& model, std::int64_t rows, std::int64_t columns) {
    const auto element = static_cast<std::int64_t>(item_size(model.dtype));
    const std::int64_t logits = model.vocab_size * 2 * 4;                         // of one row, twice, in fp32
    const std::int64_t layer = rows * (4 + 3 * 4) * model.hidden_size * element;  // hidden states and MLP
    const std::int64_t scores = rows * model.heads * columns * (element + 1);
    return logits + layer + scores;
}

std::map<int, std::int64_t> wide_chunks(const ModelInfo& model, const std::vector<std::int64_t>& capacities) {
    std::map<int, std::int64_t> found;
    for (const int rows : {2048, 1024}) {
        for (const std::int64_t capacity : capacities) {
            if (rows <= capacity && activation_bytes(model, rows, capacity) <= most_chunk_bytes) found[rows] = capacity;
        }
    }
    return found;
}

}  // namespace pass
