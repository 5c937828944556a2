// The data of a Generation.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/core.h"
#include "decode/sequence.h"
#include "pass/session.hpp"

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
