// When nothing drafts, whatever plans requests name: many sequences at a time, or drafts that are seldom accepted.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "decode/sequence.h"
#include "tuning/acceptance.h"

namespace pass {

// A sequence's rate of accepted first drafts is a running average that starts from that of all sequences. While nothing
// drafts for its sake, that one rises slowly, and sequences that come later try again.
class DraftLimits {
   public:
    // concurrency: with more sequences than that decoding, none has drafts; none is without limit. acceptance: the
    // least mean, over the sequences that decode, of the rate at which a pass's first draft is accepted; 0 is no limit.
    explicit DraftLimits(std::optional<std::int64_t> concurrency = std::nullopt, double acceptance = 0.0)
        : concurrency_(concurrency), acceptance_(acceptance) {}

    // Whether the next pass over these sequences may have drafts.
    bool allow(const std::vector<Sequence*>& sequences) const;
    // Note that a pass verified drafts of `sequence`, and accepted the first `accepted` of them.
    void record(Sequence& sequence, int accepted);
    // Note a pass that was allowed no drafts.
    void forget() { all_.forget(); }

   private:
    Acceptance& own(Sequence& sequence) const;

    std::optional<std::int64_t> concurrency_;
    double acceptance_;
    Acceptance all_{{1.0}};  // at first drafts are taken to be accepted, so that they are tried
};

}  // namespace pass
