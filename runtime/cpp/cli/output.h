// Prints what `generate` writes: tokens, coloured by source with --show-drafts, and a summary.
#pragma once

#include "pass/pass.hpp"

namespace pass::cli {

// Print the text of an event, or its token ids, on standard output, and flush it.
void print(const Event& event, bool as_text, bool show_drafts);

// With `show_drafts`, print on standard error how many tokens came from each source. Then print a
// summary there if it is a terminal.
void print_summary(const Generation& generation, bool show_drafts);

}  // namespace pass::cli
