// Prints a generation: its tokens, coloured by source with --show-drafts, and a summary.
#pragma once

#include "pass/pass.hpp"

namespace pass::cli {

// Print the text of an event, or its token ids, on standard output and flush it.
void print(const Event& event, bool text, bool show_drafts);

// Print a summary on standard error if it is a terminal. With `show_drafts`, first print how many
// tokens came from each source, in any case.
void print_summary(const Generation& generation, bool show_drafts);

}  // namespace pass::cli
