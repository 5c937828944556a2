// For tests/cpp: plays scenes on `--device cuda` over fakes, and writes a report as JSON.
//
//     fake_ort BUNDLE SCENES   every scene twice, each time in a new thread, on a session that
//                              captures; without "results", those of a session that does not
//     ... refused NAME         the same, while captures of files with NAME in their names fail
//     ... lost CODE            the first scene, on a device that the first run loses with CODE
#include <iostream>
#include <sstream>
#include <thread>
#include <utility>

#include "api/core.h"
#include "backends/ort/backend.h"
#include "errors.h"
#include "fake_ort.h"
#include "scenes.h"

using namespace pass;
using namespace pass::test;

namespace {

constexpr int ordinal = 1;  // the GPU, of two, on which sessions are opened

struct Machine {
    FakeCuda cuda;
    FakeOrt ort{cuda};

    Machine() {
        cuda.devices = ordinal + 1;
        cuda.ordinal = ordinal;
    }

    Session open(const std::string& bundle, const Json& scene) {
        LoadOptions options = options_of(scene);
        options.device = "cuda:" + std::to_string(ordinal);
        options.threads = 1;
        auto data = std::make_unique<Bundle::Data>(Bundle::Data{bundle, read_manifest(bundle)});
        std::shared_ptr<const OrtLibrary> library = ort.library();
        Device device = choose_device(*library, options.device);
        OrtBackend::Engine engine{std::move(library), std::move(device),
                                  std::make_unique<Cuda>(cuda.api(), ordinal)};
        auto backend =
            std::make_unique<OrtBackend>(bundle, data->manifest, options, std::move(engine));
        return Session(
            std::make_shared<Core>(Bundle(std::move(data)), std::move(backend), options));
    }

    bool all_freed() const { return cuda.all_freed() && FakeCuda::current == 0; }
};

Json play_twice(const std::string& bundle, Json scene, const std::string& refused) {
    if (!scene.contains("results")) {
        Machine machine;
        machine.ort.captures = false;
        Session session = machine.open(bundle, scene);
        scene["results"] = play(scene, session);
    }
    Messages messages;
    Machine machine;
    machine.ort.refused = refused;
    Json report{{"name", scene["name"]}, {"captured", Json::array()}, {"runs", Json::array()}};
    std::ostringstream differences;
    {
        Session session = machine.open(bundle, scene);
        for (int repeat = 0; repeat < 2; ++repeat) {
            std::thread([&] { compare(scene, play(scene, session), differences); }).join();
            report["captured"].push_back(machine.ort.captured.size());
            report["runs"].push_back(std::exchange(machine.ort.runs, 0));
        }
        report["uncaptured"] = session.uncaptured();
    }
    report["differences"] = differences.str();
    report["files"] = machine.ort.captured_files();
    report["threads"] = machine.ort.threads();
    report["replays"] = machine.ort.replays;
    report["eager"] = machine.ort.eager;
    report["logged"] = messages.take();
    report["all_freed"] = machine.all_freed();
    return report;
}

Json lose(const std::string& bundle, const Json& scene, int code) {
    Machine machine;
    Json errors = Json::array();
    {
        Session session = machine.open(bundle, scene);
        machine.ort.lost = code;
        for (int repeat = 0; repeat < 2; ++repeat) {
            try {
                play(scene, session);
            } catch (const Error& error) {
                errors.push_back(error.what());
            }
        }
        machine.cuda.sticky = 0;
    }
    return {{"errors", errors}, {"all_freed", machine.all_freed()}};
}

Json report_of(const std::vector<std::string>& arguments) {
    const std::string& bundle = arguments.at(0);
    const std::vector<Json> scenes = read_scenes(arguments.at(1));
    const std::string what = arguments.size() > 3 ? arguments[2] : "";
    if (what == "lost") return lose(bundle, scenes.at(0), std::stoi(arguments[3]));
    Json report = Json::array();
    for (const Json& scene : scenes)
        report.push_back(play_twice(bundle, scene, what == "refused" ? arguments[3] : ""));
    return report;
}

}  // namespace

int main(int count, char** arguments) {
    std::cout << report_of({arguments + 1, arguments + count}).dump(1) << std::endl;
    return 0;
}
