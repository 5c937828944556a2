// pass::Error, the one exception for what the caller can mend.
#pragma once

#include "pass/error.hpp"
