// pass-cpp generate.
#include <cctype>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>

#include "generate.h"
#include "utf8.h"

namespace {

int report(const std::string& problem) {
    std::cout.flush();
    std::cerr << "error: " << pass::one_line(problem) << std::endl;
    return 2;
}

// Report wrong flags in one line that names the command. first: the first argument, or "".
int report_usage(const CLI::App& app, const CLI::ParseError& error, const std::string& first) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::string text = error.what(), command = "pass-cpp";
    for (const CLI::App* subcommand : app.get_subcommands())
        command += " " + subcommand->get_name();
    if (app.get_subcommands().empty())
        text = first.empty() ? "missing command" : "no such command or option: " + first;
    // CLI11 writes a sentence; after "error: ", drop its full stop and capital (not an acronym's).
    if (!text.empty() && text.back() == '.') text.pop_back();
    if (text.size() > 1 && std::islower(static_cast<unsigned char>(text[1])) != 0)
        text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
    return report(text + "; see " + command + " --help");
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_DFL);  // end quietly when a pipe such as `| head` closes
    CLI::App app{"Run a PaSS bundle. Plans change the speed and not the text.", "pass-cpp"};
    app.require_subcommand(1);
    pass::cli::add_generate(app);
    try {
        app.parse(argc, argv);
        return 0;
    } catch (const CLI::RuntimeError& error) {
        return error.get_exit_code();
    } catch (const CLI::ParseError& error) {
        return report_usage(app, error, argc > 1 ? argv[1] : "");
    } catch (const std::bad_alloc&) {
        return report("there is no memory: use a smaller --capacity, or shorter prompts");
    } catch (const std::exception& error) {
        return report(error.what());
    }
}
