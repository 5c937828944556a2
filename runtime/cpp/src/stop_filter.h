// Holds back the end of a text while it may still grow into a stop string. As pass_runtime.text.stream.StopFilter.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pass {

class StopFilter {
   public:
    explicit StopFilter(std::vector<std::string> stops);

    // Text to show. `stop` is set to the stop string that ended it: the one complete first wins, and is not shown.
    std::string push(std::string_view text, std::optional<std::string>& stop);
    // What was held back, once no more text comes.
    std::string flush();

   private:
    std::vector<std::string> stops_;
    std::string held_;
};

}  // namespace pass
