// What people see of a generation: tokens as they stream, with --show-drafts in the colours of where they came from,
// and a line about it in the end.
#pragma once

#include "pass/pass.hpp"

namespace pass::cli {

// The text of an event, or its token ids, on standard output at once.
void print(const Event& event, bool text, bool show_drafts);

// On stderr, where somebody may be looking: always with `show_drafts`, else in a terminal.
void print_summary(const Generation& generation, bool show_drafts);

}  // namespace pass::cli
