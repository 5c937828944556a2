// Splits text at digits, as the pre-tokenizer Digits of `tokenizers` does.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pass {

// The runs of digits (one_by_one: the single digits) and the text between them. `text` must be UTF-8.
std::vector<std::string> split_digits(std::string_view text, bool one_by_one);

}  // namespace pass
