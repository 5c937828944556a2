// Text split at digits, as tokenizers' pre-tokenizer Digits does.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pass {

// Pieces of digits, and of what is between them. `text` must be UTF-8.
std::vector<std::string> split_digits(std::string_view text, bool one_by_one);

}  // namespace pass
