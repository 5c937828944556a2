// The exceptions of the sources: those of pass/error.hpp, and DeviceLost, which ends a session.
#pragma once

#include "pass/error.hpp"

namespace pass {

// The device is lost for this process (a sticky error of CUDA): every later call will fail, too.
class DeviceLost : public Error {
   public:
    using Error::Error;
};

}  // namespace pass
