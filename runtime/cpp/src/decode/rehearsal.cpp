#include "decode/rehearsal.h"

#include <algorithm>

#include "errors.h"
#include "log.h"

namespace pass {

namespace {

constexpr int rehearsal_runs = 2;  // after so many an engine has captured a pass

// The passes over all slots of the batch, and then the chunks of prompts, that leave room for the
// `kept` tokens.
void run_everything(Runner& runner, std::int64_t kept, std::int64_t capacity, int batch,
                    const std::vector<Sampler>& samplers) {
    const Capabilities& limits = runner.backend().capabilities();
    const auto fits = [&](int width) { return kept + limits.padded_width(width) <= capacity; };
    for (const Plan& plan : limits.mode_plans(static_cast<int>(runner.backend().manifest().lookahead.length))) {
        if (!fits(plan.width())) continue;
        for (Sampler sampler : samplers) runner.rehearse({plan, batch, sampler, false}, rehearsal_runs);
    }
    int first = 0;
    for (int size : limits.batch_sizes) first = size < batch ? size : first;
    for (int slot = first; slot < batch; ++slot) {
        for (int width : limits.chunks(kept, capacity)) {
            if (fits(width)) runner.rehearse_prefill(slot, width, rehearsal_runs);
        }
    }
}

}  // namespace

void rehearse(Runner& runner, std::int64_t capacity, int batch, const std::vector<Sampler>& samplers) {
    Slots& slots = runner.slots();
    const std::int64_t before = runner.backend().capacity();
    std::int64_t kept = 0;
    for (const Slot& slot : slots.all()) kept = std::max(kept, slot.cached());
    if (!slots.busy().empty() || kept >= capacity) return;
    try {
        slots.resize(capacity);
        run_everything(runner, kept, capacity, batch, samplers);
    } catch (const DeviceLost&) {
        throw;
    } catch (const Error& error) {  // a request that needs such a pass meets the same error, and reports it
        log(LogLevel::warning, "passes over " + std::to_string(batch) +
                                   " slots were not all run before requests need them: " + error.what());
    }
    if (before > 0) slots.resize(before);
}

}  // namespace pass
