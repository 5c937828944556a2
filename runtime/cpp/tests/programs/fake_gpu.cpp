// For tests/cpp: plays scenes on the TensorRT backend over fakes, and writes a report as JSON.
//
//     fake_gpu BUNDLE SCENES   every scene five times, each scene on its own session
//     ... runs          the first scene with every execution in turn failing; then again on the
//                       same session, without failures
//     ... allocations   the same with every allocation of device memory, also while opening
//     ... sticky CODE   the first scene; then CUDA's calls fail with CODE while two requests run,
//                       and work again for a third one
//     ... captures NAME every scene, while captures fail (see FakeCuda::fail_capture)
//     ... refused NAME  the first scene, while TensorRT's function NAME fails
//     ... warm          every scene, after Session::warm_up
//     ... open [MAJOR MINOR [DEVICES [ORDINAL [DRIVER]]]]   opens the bundle on such a GPU
#include <iostream>
#include <sstream>
#include <utility>

#include "api/core.h"
#include "backends/trt/backend.h"
#include "errors.h"
#include "fake_trt.h"
#include "scenes.h"

using namespace pass;
using namespace pass::test;

namespace {

struct Machine {
    FakeCuda cuda;
    FakeTrtCounts counts;

    Session open(const std::string& bundle, const Json& scene) {
        LoadOptions options = options_of(scene);
        options.device =
            cuda.ordinal == 0 ? "tensorrt" : "tensorrt:" + std::to_string(cuda.ordinal);
        auto data = std::make_unique<Bundle::Data>(Bundle::Data{bundle, read_manifest(bundle)});
        auto backend = std::make_unique<TrtBackend>(
            bundle, data->manifest, options, std::make_unique<FakeTrt>(cuda, counts), cuda.api());
        return Session(
            std::make_shared<Core>(Bundle(std::move(data)), std::move(backend), options));
    }

    Json counters() const {
        return {{"mallocs", cuda.mallocs},     {"captures", cuda.captures},
                {"contexts", counts.contexts}, {"launches", cuda.launches},
                {"works", cuda.works},         {"shapes_set", counts.shapes_set},
                {"waits", cuda.waits},         {"scratch", counts.scratch.size()}};
    }
};

std::string differences_of(const Json& scene, Session& session) {
    std::ostringstream differences;
    compare(scene, play(scene, session), differences);
    return differences.str();
}

Json play_five_times(const std::string& bundle, const Json& scene) {
    Machine machine;
    machine.cuda.devices = 2;
    machine.cuda.ordinal = scene.value("ordinal", 0);
    Json report{{"name", scene["name"]}, {"counters", Json::array()}};
    {
        Session session = machine.open(bundle, scene);
        report["device"] = session.device();
        report["differences"] = differences_of(scene, session);
        for (int repeat = 0; repeat < 4; ++repeat) {
            play(scene, session);
            report["counters"].push_back(machine.counters());
        }
    }
    report["all_freed"] = machine.cuda.all_freed() && machine.cuda.current == 0;
    return report;
}

Json play_warm(const std::string& bundle, const Json& scene) {
    Machine machine;
    Json report;
    {
        Session session = machine.open(bundle, scene);
        session.warm_up();
        report["before"] = machine.counters();
        report["differences"] = differences_of(scene, session);
        report["after"] = machine.counters();
        report["uncaptured"] = session.uncaptured();
    }
    report["all_freed"] = machine.cuda.all_freed() && machine.cuda.current == 0;
    return report;
}

Json without_captures(const std::string& bundle, const Json& scene, const std::string& function) {
    Machine machine;
    Messages messages;
    machine.cuda.fail_capture = function;
    Json report;
    {
        Session session = machine.open(bundle, scene);
        report["differences"] = differences_of(scene, session) + differences_of(scene, session);
        report["uncaptured"] = session.uncaptured();
    }
    report["logged"] = messages.take();
    report["counters"] = machine.counters();
    report["all_freed"] = machine.cuda.all_freed();
    return report;
}

std::string refusal_of(const std::string& bundle, const Json& scene, const std::string& function) {
    Machine machine;
    machine.counts.refused = function;
    try {
        Session session = machine.open(bundle, scene);
        play(scene, session);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

// Plays the scene with the first operation failing, then the second, and so on until none fails.
// opening: whether those that open the session may fail, too. fail(machine, n): the nth from now on
// fails. left(machine): how many are left until that one.
template <class Fail, class Left>
Json fail_each(const std::string& bundle, const Json& scene, bool opening, const Fail& fail,
               const Left& left) {
    Json report{{"failures", 0},
                {"errors", Json::array()},
                {"logged", Json::array()},
                {"differences", ""},
                {"all_freed", true}};
    Messages messages;
    bool failed = true;
    for (int number = 1; failed; ++number) {
        Machine machine;
        {
            std::optional<Session> session;
            if (!opening) session.emplace(machine.open(bundle, scene));
            fail(machine, number);
            try {
                if (!session) session.emplace(machine.open(bundle, scene));
                play(scene, *session);
            } catch (const Error& error) {
                report["errors"].push_back(error.what());
            }
            failed = left(machine) <= 0;
            fail(machine, 0);
            if (!session) session.emplace(machine.open(bundle, scene));
            report["differences"] =
                report["differences"].get<std::string>() + differences_of(scene, *session);
        }
        for (const std::string& message : messages.take()) report["logged"].push_back(message);
        report["failures"] = report["failures"].get<int>() + (failed ? 1 : 0);
        report["all_freed"] = report["all_freed"].get<bool>() && machine.cuda.all_freed();
    }
    return report;
}

Json fail_with(const std::string& bundle, const Json& scene, int code) {
    Machine machine;
    Json errors = Json::array();
    {
        Session session = machine.open(bundle, scene);
        play(scene, session);
        const auto record_error = [&](const auto& work) {
            try {
                work();
                errors.push_back("");
            } catch (const Error& error) {
                errors.push_back(error.what());
            }
        };
        Request request;
        request.prompt_ids = scene["requests"][0]["prompt_ids"].get<std::vector<std::int64_t>>();
        request.options.max_new_tokens = 100;
        request.options.plan = "ar";
        request.options.ignore_eos = true;
        Generation first = session.submit(request), second = session.submit(request);
        first.next();
        machine.cuda.sticky = code;
        record_error([&] { first.run(); });
        record_error([&] { second.run(); });
        machine.cuda.sticky = 0;
        record_error([&] { session.submit(request).run(); });
    }
    return {{"errors", errors}};
}

Json open_on(const std::string& bundle, int major, int minor, int devices, int ordinal,
             int driver) {
    Machine machine;
    machine.cuda.driver = driver;
    machine.cuda.ordinal = ordinal;
    machine.cuda.major = major;
    machine.cuda.minor = minor;
    machine.cuda.devices = devices;
    std::string refusal;
    try {
        machine.open(bundle, Json::object());
    } catch (const Error& error) {
        refusal = error.what();
    }
    return {{"refusal", refusal},
            {"mallocs", machine.cuda.mallocs},
            {"all_freed", machine.cuda.all_freed()}};
}

Json report_of(const std::vector<std::string>& arguments) {
    const std::string& bundle = arguments.at(0);
    const std::vector<Json> scenes = read_scenes(arguments.at(1));
    const std::string what = arguments.size() > 2 ? arguments[2] : "";
    const auto number = [&](std::size_t i, int otherwise) {
        return i < arguments.size() ? std::stoi(arguments[i]) : otherwise;
    };
    if (what == "open")  // the default is one GPU of compute capability 9.0 with CUDA 13.4
        return open_on(bundle, number(3, 9), number(4, 0), number(5, 1), number(6, 0),
                       number(7, 13040));
    if (what == "sticky") return fail_with(bundle, scenes.at(0), number(3, 700));
    if (what == "refused") return {{"error", refusal_of(bundle, scenes.at(0), arguments.at(3))}};
    if (what == "runs") {
        return fail_each(
            bundle, scenes.at(0), false,
            [](Machine& machine, int n) { machine.counts.fail_run = n; },
            [](const Machine& machine) { return machine.counts.fail_run; });
    }
    if (what == "allocations") {
        return fail_each(
            bundle, scenes.at(0), true,
            [](Machine& machine, int n) { machine.cuda.fail_malloc = n; },
            [](const Machine& machine) { return machine.cuda.fail_malloc; });
    }
    Json report = Json::array();
    for (const Json& scene : scenes) {
        report.push_back(what == "warm"       ? play_warm(bundle, scene)
                         : what == "captures" ? without_captures(bundle, scene, arguments.at(3))
                                              : play_five_times(bundle, scene));
    }
    return report;
}

}  // namespace

int main(int count, char** arguments) {
    std::cout << report_of({arguments + 1, arguments + count}).dump(1) << std::endl;
    return 0;
}
