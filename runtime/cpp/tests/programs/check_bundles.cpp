// For tests/cpp: writes the error of opening each bundle, or null. After "\tno hashes", hashes are
// not compared.

#include <iostream>
#include <nlohmann/json.hpp>

#include "bundle/integrity.h"
#include "bundle/manifest.h"
#include "errors.h"

namespace {

nlohmann::json error_of(const std::string& path, bool hashes) {
    try {
        pass::verify_files(path, pass::read_manifest(path), hashes);
        return nullptr;
    } catch (const pass::Error& error) {
        return error.what();
    }
}

}  // namespace

int main() {
    const std::string no_hashes = "\tno hashes";
    for (std::string line; std::getline(std::cin, line);) {
        const bool hashes = !line.ends_with(no_hashes);
        if (!hashes) line.resize(line.size() - no_hashes.size());
        std::cout << error_of(line, hashes).dump(-1, ' ', true) << '\n';
    }
}
