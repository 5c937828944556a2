// Runs passes before requests need them, on engines that repeat a pass as a captured CUDA graph: running it for the
// first time and capturing it take far longer than repeating it.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/runner.h"

namespace pass {

// Run the passes of every mode over `batch` slots with a KV capacity of so many tokens, every slot masked, and the
// chunks of prompts of the slots that no smaller batch has. It does nothing while a sequence runs, and leaves out what
// has no room after the tokens that free slots keep.
void rehearse(Runner& runner, std::int64_t capacity, int batch, const std::vector<Sampler>& samplers);

}  // namespace pass
