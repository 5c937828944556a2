// Holds back the end of a text while it may still become a stop string. As pass_runtime.text.stream.StopFilter.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pass {

class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Add `text`; returns the text that is final. `stop` is set to the stop string that is complete first, which is
    // left out.
    std::string push(std::string_view text, std::optional<std::string>& stop);
    // The text that was held back, to be called after the last `push`.
    std::string flush();

   private:
    std::vector<std::string> stops_;
    std::string held_;
};

}  // namespace pass
