// libpass: decode bundles of the PaSS toolkit.
#pragma once

#include "pass/error.hpp"
#include "pass/event.hpp"
#include "pass/log.hpp"
#include "pass/options.hpp"
#include "pass/session.hpp"
#include "pass/text.hpp"
