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

const char* name_of(TokenSource source) {
    switch (source) {
        case TokenSource::model: return "model";
        case TokenSource::lookahead: return "lookahead";
        default: return "ngram";
    }
}

}  // namespace pass
