// The command `generate`.
#pragma once

#include <CLI/CLI.hpp>

namespace pass::cli {

void add_generate(CLI::App& app);

}  // namespace pass::cli
