// Names of devices, and which of several GPUs a name is about: `cuda:1` is `cuda` on GPU 1, `cuda` is on GPU 0.
#pragma once

#include <string>

namespace pass {

struct DeviceName {
    std::string kind;  // the name without a number, or auto
    int ordinal = 0;   // the number of the GPU among those that this process sees
};

// Throws Error where `name` is no device, or has a number that is none or that its device does not take.
DeviceName split_device(const std::string& name);

}  // namespace pass
