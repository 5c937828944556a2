// A fake of TensorRT, which refuses what TensorRT would refuse, or what would corrupt memory. An
// engine file is JSON from tests/runtime/fake_tensorrt.py; its graph runs in ONNX Runtime.
#pragma once

#include <nlohmann/json.hpp>

#include "backends/ort/bound_graph.h"
#include "backends/ort/devices.h"
#include "backends/trt/api.h"
#include "fake_cuda.h"

namespace pass::test {

struct FakeTrtCounts {
    int fail_run = 0;  // the execution or capture that counts it down to 0 fails
    int contexts = 0, shapes_set = 0;
    std::string refused;                 // the function of TensorRT that fails
    std::string errors;                  // for `take_errors`
    std::set<const std::byte*> scratch;  // blocks that contexts were given

    bool refuses(const std::string& function) {
        if (refused == function) errors = "[" + function + ".cpp::7] Error Code 3: a fake error";
        return refused == function;
    }
};

class FakeTrtContext : public TrtContext {
   public:
    FakeTrtContext(FakeCuda& cuda, FakeTrtCounts& counts, const nlohmann::json& description,
                   const OrtGraph& graph)
        : cuda_(cuda), counts_(counts), description_(description), graph_(graph) {}

    void set_scratch(std::byte* address, std::int64_t size) override {
        require(cuda_.on_device(address, static_cast<std::size_t>(size)),
                "scratch memory elsewhere");
        counts_.scratch.insert(address);
        scratch_ = true;
        *binding_changes_ += 1;
    }

    bool set_profile(int index, void* stream) override {
        require(cuda_.has_stream(stream), "no such stream");
        profile_ = static_cast<std::size_t>(index);
        *binding_changes_ += 1;
        return !counts_.refuses("setOptimizationProfileAsync") &&
               profile_ < description_["profiles"].size();
    }

    bool set_shape(const std::string& input, const Shape& shape) override {
        if (counts_.refuses("setInputShape") || !description_["inputs"].contains(input))
            return false;
        const auto& described = description_["inputs"][input]["shape"];
        if (described.size() != shape.size()) return false;
        for (std::size_t i = 0; i < shape.size(); ++i) {
            if (described[i].is_number()) {
                if (described[i] != shape[i]) return false;
                continue;
            }
            const auto& range = description_["profiles"][profile_][described[i].get<std::string>()];
            if (shape[i] < range[0] || shape[i] > range[2]) return false;
        }
        counts_.shapes_set += 1;
        *binding_changes_ += 1;
        shapes_[input] = shape;
        return true;
    }

    bool set_address(const std::string& tensor, std::byte* address) override {
        if (counts_.refuses("setTensorAddress")) return false;
        if (!description_["inputs"].contains(tensor) && !description_["outputs"].contains(tensor))
            return false;
        require(reinterpret_cast<std::uintptr_t>(address) % cuda_alignment == 0,
                tensor + " is not aligned");
        for (const auto& [output, source] : description_["aliases"].items()) {
            const std::string input = source;
            if (tensor != output && tensor != input) continue;
            const auto other = addresses_.find(tensor == output ? input : output);
            require(other == addresses_.end() || other->second == address,
                    "an aliased output has another address than its input");
        }
        addresses_[tensor] = address;
        *binding_changes_ += 1;
        return true;
    }

    bool enqueue(void* stream) override {
        require(cuda_.has_stream(stream) && scratch_, "no stream, or no scratch memory");
        if (--counts_.fail_run == 0 || cuda_.sticky != 0 || counts_.refuses("enqueueV3"))
            return false;
        require(cuda_.error == 0, "an earlier CUDA error was not cleared before this launch");
        require(shapes_.size() == description_["inputs"].size(), "an input has no shape");
        require(addresses_.size() == description_["inputs"].size() + description_["outputs"].size(),
                "a tensor has no address");
        if (!cuda_.capturing) ran_ = shapes_;
        require(ran_ == shapes_, "captured with shapes that it has not run with");
        if (cuda_.capturing) {
            cuda_.submit([this, changes = std::weak_ptr<int>(binding_changes_),
                          changes_at_capture = *binding_changes_] {
                require(!changes.expired(), "a graph is launched whose context is gone");
                require(*changes.lock() == changes_at_capture,
                        "a graph is launched whose context was bound anew");
                run(shapes_, addresses_);
            });
        } else {
            cuda_.submit(
                [this, shapes = shapes_, addresses = addresses_] { run(shapes, addresses); });
        }
        return true;
    }

   private:
    using Shapes = std::map<std::string, Shape>;
    using Addresses = std::map<std::string, std::byte*>;

    static std::size_t bytes_of(const std::string& dtype, const Shape& shape) {
        std::size_t size = item_size(dtype);
        for (std::int64_t length : shape) size *= static_cast<std::size_t>(length);
        return size;
    }

    // On copies, so that all inputs are read before any output is written.
    void run(const Shapes& shapes, const Addresses& addresses) const {
        for (const auto& [output, source] : description_["aliases"].items()) {
            require(addresses.at(output) == addresses.at(source),
                    "the cache is not updated in place");
        }
        std::vector<std::vector<std::byte>> copies;
        std::vector<BoundTensor> inputs, outputs;
        std::map<std::string, std::int64_t> sizes;
        const auto bind_copy = [&](const std::string& name, const nlohmann::json& described,
                                   const Shape& shape, std::vector<BoundTensor>& tensors,
                                   bool is_input) {
            const std::string dtype = described["dtype"];
            const std::size_t size = bytes_of(dtype, shape);
            require(cuda_.on_device(addresses.at(name), size),
                    name + " is not in the device's memory");
            copies.emplace_back(std::max<std::size_t>(size, 1));
            if (is_input) std::memcpy(copies.back().data(), addresses.at(name), size);
            tensors.push_back({name, dtype, shape, copies.back().data()});
        };
        for (const auto& [name, described] : description_["inputs"].items()) {
            for (std::size_t i = 0; i < shapes.at(name).size(); ++i) {
                const auto& listed = described["shape"][i];
                if (listed.is_string()) sizes[listed.get<std::string>()] = shapes.at(name)[i];
            }
            bind_copy(name, described, shapes.at(name), inputs, true);
        }
        for (const auto& [name, described] : description_["outputs"].items()) {
            Shape shape;
            for (const auto& listed : described["shape"]) {
                shape.push_back(listed.is_string() ? sizes.at(listed.get<std::string>())
                                                   : listed.get<std::int64_t>());
            }
            bind_copy(name, described, shape, outputs, false);
        }
        BoundGraph(graph_, inputs, outputs).run();
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const std::vector<std::byte>& written = copies[inputs.size() + i];
            std::memcpy(addresses.at(outputs[i].name), written.data(),
                        bytes_of(outputs[i].dtype, outputs[i].shape));
        }
    }

    FakeCuda& cuda_;
    FakeTrtCounts& counts_;
    const nlohmann::json& description_;
    const OrtGraph& graph_;
    std::size_t profile_ = 0;
    bool scratch_ = false;
    std::shared_ptr<int> binding_changes_ = std::make_shared<int>(0);  // how many there were
    Shapes shapes_, ran_;  // ran_: the shapes of the last run outside a capture
    Addresses addresses_;
};

class FakeTrtCudaEngine : public TrtCudaEngine {
   public:
    FakeTrtCudaEngine(FakeCuda& cuda, FakeTrtCounts& counts, nlohmann::json description,
                      const std::shared_ptr<const OrtLibrary>& library)
        : cuda_(cuda),
          counts_(counts),
          description_(std::move(description)),
          files_(with_data(description_["onnx"].get<std::string>())),
          graph_(library, choose_device(*library, "cpu"), files_, file_of(description_), 1) {}

    std::int64_t scratch_size() const override { return 4096; }
    std::unique_ptr<TrtContext> create_context() override {
        if (counts_.refuses("createExecutionContext")) return nullptr;
        counts_.contexts += 1;
        return std::make_unique<FakeTrtContext>(cuda_, counts_, description_, graph_);
    }

   private:
    static std::string file_of(const nlohmann::json& description) {
        return std::filesystem::path(description["onnx"].get<std::string>()).filename().string();
    }
    static OpenFiles with_data(const std::filesystem::path& graph) {
        std::set<std::string> names{graph.filename().string()};
        for (const auto& file : std::filesystem::directory_iterator(graph.parent_path()))
            if (file.path().extension() == ".data") names.insert(file.path().filename().string());
        return {graph.parent_path(), names};
    }

    FakeCuda& cuda_;
    FakeTrtCounts& counts_;
    nlohmann::json description_;
    OpenFiles files_;
    OrtGraph graph_;
};

class FakeTrt : public TrtApi {
   public:
    FakeTrt(FakeCuda& cuda, FakeTrtCounts& counts) : cuda_(cuda), counts_(counts) {}

    std::string version() const override { return "10.15.1.fake"; }
    std::unique_ptr<TrtCudaEngine> deserialize(std::span<const std::byte> engine) override {
        const auto* text = reinterpret_cast<const char*>(engine.data());
        nlohmann::json plan = nlohmann::json::parse(text, text + engine.size(), nullptr, false);
        if (!plan.is_object() || counts_.refuses("deserializeCudaEngine")) return nullptr;
        return std::make_unique<FakeTrtCudaEngine>(cuda_, counts_, std::move(plan), library_);
    }
    std::string take_errors() override { return std::exchange(counts_.errors, ""); }

   private:
    FakeCuda& cuda_;
    FakeTrtCounts& counts_;
    std::shared_ptr<const OrtLibrary> library_ = OrtLibrary::open({});
};

}  // namespace pass::test
