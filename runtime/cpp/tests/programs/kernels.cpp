// For tests/cpp and tests/cpus: kernels BUNDLE... writes a line for each bundle, which describes
// the kernels that compute the bundle's matrix products on this CPU.

#include "backends/ort/kernels.h"

#include <iostream>

#include "errors.h"

int main(int count, char** arguments) {
    try {
        const auto library = pass::OrtLibrary::open({});
        for (int i = 1; i < count; ++i) {
            const pass::Manifest manifest = pass::read_manifest(arguments[i]);
            std::cout << pass::find_kernels(*library, manifest).text() << '\n';
        }
    } catch (const pass::Error& error) {
        std::cerr << "error: " << error.what() << '\n';
        return 2;
    }
}
