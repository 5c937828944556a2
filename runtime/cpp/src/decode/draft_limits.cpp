#include "decode/draft_limits.h"

#include <algorithm>

namespace pass {

bool DraftLimits::allow(const std::vector<Sequence*>& sequences) const {
    const auto count = static_cast<std::int64_t>(sequences.size());
    if (concurrency_ && count > *concurrency_) return false;
    if (acceptance_ <= 0.0) return true;
    double sum = 0.0;
    for (Sequence* sequence : sequences) sum += own(*sequence).rates()[0];
    return sum >= acceptance_ * static_cast<double>(count);
}

void DraftLimits::record(Sequence& sequence, int accepted) {
    if (acceptance_ <= 0.0) return;
    own(sequence).record(1, std::min(accepted, 1));
    all_.record(1, std::min(accepted, 1));
}

Acceptance& DraftLimits::own(Sequence& sequence) const {
    if (!sequence.first_drafts) sequence.first_drafts.emplace(all_.rates());
    return *sequence.first_drafts;
}

}  // namespace pass
