// pass::Error for what the caller can mend, and DeviceLost, which ends a session.
#pragma once

#include "pass/error.hpp"

namespace pass {

// The device is lost for this process (CUDA's sticky errors): every later call fails, too.
class DeviceLost : public Error {
   public:
    using Error::Error;
};

}  // namespace pass
