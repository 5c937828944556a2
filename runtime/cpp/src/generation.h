// What stands behind a generation.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core.h"
#include "pass/session.hpp"
#include "sequence.h"

namespace pass {

struct Generation::Data {
    Data(std::shared_ptr<Core> of, std::shared_ptr<Sequence> read) : core(std::move(of)), sequence(std::move(read)) {}

    std::shared_ptr<Core> core;
    std::shared_ptr<Sequence> sequence;
    std::vector<Token> tokens;
    std::string text;
    std::optional<End> end;
};

}  // namespace pass
