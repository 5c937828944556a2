#include "backends/device_name.h"

#include <algorithm>
#include <vector>

#include "errors.h"

namespace pass {

namespace {

const std::vector<std::string> gpu_devices{"cuda", "tensorrt", "tensorrt-rtx", "tensorrt-rtx-ep"};
constexpr std::size_t most_digits = 4;

std::string gpu_list() {
    std::string text;
    for (const std::string& name : gpu_devices) text += (text.empty() ? "" : ", ") + name;
    return text;
}

bool is_gpu(const std::string& kind) {
    return std::find(gpu_devices.begin(), gpu_devices.end(), kind) != gpu_devices.end();
}

}  // namespace

DeviceName split_device(const std::string& name) {
    const std::size_t colon = name.find(':');
    const std::string kind = name.substr(0, colon);
    const bool gpu = is_gpu(kind);
    if (!gpu && kind != "auto" && kind != "cpu") {
        throw Error("unknown device '" + name + "': choose one of auto, cpu, " + gpu_list());
    }
    if (colon == std::string::npos) return {kind, 0};
    if (!gpu) {
        throw Error("device '" + name + "': " + kind + " takes no number; only " + gpu_list() + " do, as cuda:1");
    }
    const std::string number = name.substr(colon + 1);
    if (number.empty() || number.size() > most_digits || number.find_first_not_of("0123456789") != std::string::npos) {
        throw Error("device '" + name + "': a GPU's number must follow the colon, as in " + kind + ":1");
    }
    return {kind, std::stoi(number)};
}

}  // namespace pass
