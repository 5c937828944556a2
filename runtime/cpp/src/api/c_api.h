// The structs behind the C API's opaque types.
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
    std::deque<pass::Token> unread;     // tokens for which the caller's array had no room yet
    std::vector<pass::Token> returned;  // the tokens of the last `pass_next` or `pass_poll`
};
