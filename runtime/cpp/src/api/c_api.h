// What the handles of the C API refer to.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "pass/pass.h"
#include "pass/pass.hpp"

struct pass_session {
    pass::Session session;
    std::optional<pass::Tokenizer> tokenizer;
};

struct pass_generation {
    pass::Generation generation;
    std::deque<pass::Token> unread;     // for which the caller's array had no room
    std::vector<pass::Token> returned;  // by the last `pass_next` or `pass_poll`
};
