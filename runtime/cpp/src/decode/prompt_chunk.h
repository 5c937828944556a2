// In which windows a prompt is read.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/capabilities.h"

namespace pass {

// The next tokens of a prompt, and the rows of the window that reads them.
struct PromptChunk {
    std::int64_t tokens = 0;
    int width = 0;
};

// The next chunk of a prompt of which `remaining` tokens are left, after `cached` tokens, in a window of at most `most`
// rows. capacity: the KV capacity as it is now. It is the narrowest window that holds all that is left, if that fills
// three quarters of it or fills no other; else the widest that is filled.
PromptChunk next_chunk(const Capabilities& sizes, std::int64_t cached, std::int64_t remaining, std::int64_t capacity,
                       std::optional<std::int64_t> most);

}  // namespace pass
