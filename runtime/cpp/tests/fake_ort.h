// A fake of ONNX Runtime with a CUDA provider, as tests/runtime/fake_ort_cuda.py: graphs run on the
// CPU, as often as `enable_cuda_graph` would run them. The first run with a graph number in a
// thread executes the graph twice, captures it, and launches the captured graph. Captured graphs
// belong to the thread. A run with the number -1 executes the graph once.
#pragma once

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "backends/ort/library.h"
#include "fake_cuda.h"

namespace pass::test {

// One object at a time, because the functions of a C API have no `this`.
class FakeOrt {
   public:
    explicit FakeOrt(FakeCuda& cuda)
        : cuda_(cuda), real_(OrtLibrary::open({})->api()), table_(real_) {
        require(living_ == nullptr, "two FakeOrt live");
        living_ = this;
        replace();
    }
    ~FakeOrt() { living_ = nullptr; }
    FakeOrt(const FakeOrt&) = delete;
    FakeOrt& operator=(const FakeOrt&) = delete;

    std::shared_ptr<const OrtLibrary> library() const {
        return std::make_shared<OrtLibrary>(&table_);
    }

    bool captures = true;  // whether `enable_cuda_graph` is accepted
    std::string refused;   // captures of files with it in their names fail
    int lost = 0;          // if not 0, the next run loses the device with this error
    int runs = 0;
    int replays = 0;  // runs that launched a captured graph
    int eager = 0;    // runs without captures
    std::set<std::tuple<const OrtSession*, int, int>> captured;  // session, thread and number

    std::set<std::string> captured_files() const {
        std::set<std::string> result;
        for (const auto& key : captured) result.insert(files_.at(std::get<0>(key)));
        return result;
    }
    std::size_t threads() const {
        std::set<int> result;
        for (const auto& key : captured) result.insert(std::get<1>(key));
        return result.size();
    }

   private:
    static constexpr int runs_before_capture = 2;
    using Options = OrtCUDAProviderOptionsV2*;

    static int this_thread() {
        static std::atomic<int> threads = 0;
        thread_local const int number = ++threads;
        return number;
    }

    OrtStatus* failure(const std::string& message) const {
        return real_.CreateStatus(ORT_FAIL, message.c_str());
    }

    OrtStatus* open(const OrtEnv* environment, const void* model, std::size_t size,
                    const OrtSessionOptions* options, OrtSession** session) {
        const bool capturing = capturing_.erase(options) == 1;
        if (capturing && !captures) return failure("a node is on the CPU");
        OrtStatus* status =
            real_.CreateSessionFromArray(environment, model, size, options, session);
        if (status == nullptr && capturing) files_[*session] = names_.at(options);
        return status;
    }

    OrtStatus* run(OrtSession* session, const OrtRunOptions* options, const OrtIoBinding* binding) {
        runs += 1;
        require(cuda_.current == cuda_.ordinal, "a session runs on another device");
        if (lost != 0) {
            cuda_.sticky = lost;
            return failure("CUDA failure " + std::to_string(lost));
        }
        const int number = numbers_.at(options);
        const auto file = files_.find(session);
        const auto execute = [&] { return real_.RunWithBinding(session, options, binding); };
        if (number == -1 || file == files_.end()) {
            eager += 1;
            return execute();
        }
        const std::tuple key(session, this_thread(), number);
        if (captured.contains(key)) {
            replays += 1;
            return execute();
        }
        for (int i = 0; i < runs_before_capture; ++i) {
            if (OrtStatus* status = execute(); status != nullptr) return status;
        }
        if (!refused.empty() && file->second.find(refused) != std::string::npos) {
            return failure(
                "CUDA failure 901: operation failed due to a previous error during capture");
        }
        captured.insert(key);
        return execute();
    }

    void replace() {
        table_.GetAvailableProviders = [](char*** names, int* count) noexcept -> OrtStatus* {
            static char cuda[] = "CUDAExecutionProvider", cpu[] = "CPUExecutionProvider";
            static char* providers[] = {cuda, cpu};
            *names = providers;
            *count = 2;
            return nullptr;
        };
        table_.ReleaseAvailableProviders = [](char**, int) noexcept -> OrtStatus* {
            return nullptr;
        };
        table_.CreateCUDAProviderOptions = [](Options* made) noexcept -> OrtStatus* {
            *made = reinterpret_cast<Options>(new bool(false));  // whether graphs are captured
            return nullptr;
        };
        table_.ReleaseCUDAProviderOptions = [](Options options) {
            delete reinterpret_cast<bool*>(options);
        };
        table_.UpdateCUDAProviderOptions = [](Options options, const char* const* keys,
                                              const char* const* values,
                                              std::size_t count) noexcept -> OrtStatus* {
            for (std::size_t i = 0; i < count; ++i) {
                if (std::string(keys[i]) == "enable_cuda_graph")
                    *reinterpret_cast<bool*>(options) = *values[i] == '1';
                if (std::string(keys[i]) == "device_id") {
                    require(std::stoi(values[i]) == living_->cuda_.ordinal,
                            "a session is opened on another device");
                }
            }
            return nullptr;
        };
        table_.SessionOptionsAppendExecutionProvider_CUDA_V2 =
            [](OrtSessionOptions* session,
               const OrtCUDAProviderOptionsV2* options) noexcept -> OrtStatus* {
            if (*reinterpret_cast<const bool*>(options)) living_->capturing_.insert(session);
            return nullptr;
        };
        table_.SetSessionLogId = [](OrtSessionOptions* options, const char* name) noexcept {
            living_->names_[options] = name;
            return living_->real_.SetSessionLogId(options, name);
        };
        table_.CreateSessionFromArray = [](const OrtEnv* environment, const void* model,
                                           std::size_t size, const OrtSessionOptions* options,
                                           OrtSession** session) noexcept -> OrtStatus* {
            return living_->open(environment, model, size, options, session);
        };
        table_.CreateMemoryInfo = [](const char* name, OrtAllocatorType type, int, OrtMemType kind,
                                     OrtMemoryInfo** made) noexcept -> OrtStatus* {
            require(std::string(name) == "Cuda", "tensors elsewhere");
            return living_->real_.CreateMemoryInfo("Cpu", type, 0, kind, made);
        };
        table_.AddRunConfigEntry = [](OrtRunOptions* options, const char* key,
                                      const char* value) noexcept {
            if (std::string(key) == "gpu_graph_id") living_->numbers_[options] = std::stoi(value);
            return living_->real_.AddRunConfigEntry(options, key, value);
        };
        table_.RunWithBinding = [](OrtSession* session, const OrtRunOptions* options,
                                   const OrtIoBinding* binding) noexcept -> OrtStatus* {
            return living_->run(session, options, binding);
        };
    }

    static inline FakeOrt* living_ = nullptr;

    FakeCuda& cuda_;
    const OrtApi& real_;
    OrtApi table_;
    std::set<const OrtSessionOptions*> capturing_;
    std::map<const OrtSessionOptions*, std::string> names_;  // of the graphs' files
    std::map<const OrtRunOptions*, int> numbers_;            // of graphs (`gpu_graph_id`)
    std::map<const OrtSession*, std::string> files_;         // of sessions that capture
};

}  // namespace pass::test
