#include "pass/event.hpp"

namespace pass {

const char* name_of(FinishReason reason) {
    switch (reason) {
        case FinishReason::stop: return "stop";
        case FinishReason::length: return "length";
        case FinishReason::cancelled: return "cancelled";
        default: return "error";
    }
}

const char* name_of(Source source) {
    switch (source) {
        case Source::model: return "model";
        case Source::lookahead: return "lookahead";
        default: return "ngram";
    }
}

}  // namespace pass
