// Prints a generation: its tokens as they come, coloured by their source with --show-drafts, and a
// summary.
#pragma once

#include "pass/pass.hpp"

namespace pass::cli {

// Print the text of an event, or its token ids, on standard output and flush it.
void print(const Event& event, bool text, bool show_drafts);

// Print a summary on stderr if that is a terminal. With `show_drafts`, print first, in any case,
// how many tokens came from which source.
void print_summary(const Generation& generation, bool show_drafts);

}  // namespace pass::cli
