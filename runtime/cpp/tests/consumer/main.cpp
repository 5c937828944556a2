#include <cstdio>
#include <pass/pass.hpp>

int main(int, char** arguments) {
    try {
        const pass::Bundle bundle(arguments[1]);
        std::printf("%s\n", bundle.name().c_str());
    } catch (const pass::Error& error) {
        std::printf("error: %s\n", error.what());
    }
}
